"""Starts vLLM's OpenAI-compatible server with a junior beside the senior, after checking and setting its options."""

import os
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import cloudpickle
from fastapi import HTTPException

from tandemrl.apps.serve.address import API_KEY, announce, check_port
from tandemrl.apps.serve.asked import Reader
from tandemrl.apps.serve.authorship import Authorship, Backend, hosts_of
from tandemrl.apps.serve.registry import Strategies
from tandemrl.apps.serve.tool_calls import tool_call_parser_of
from tandemrl.config import SelectionConfig
from tandemrl.data.templates import DEFAULT_ARGUMENTS, template_variables
from tandemrl.models.loading import load_tokenizer, stored_eos_token_ids, vocabulary_check
from tandemrl.rollout.engine import EngineError
from tandemrl.rollout.schedule import schedule_of
from tandemrl.rollout.vllm.settings import TandemOptions, check_config, junior_config
from tandemrl.selection import Strategy

DEFAULT_SEQUENCES = 8
"""For how many sequences of full length the KV cache has room on a CPU, unless an option says how large it is."""


def serve(
    senior: str,
    options: TandemOptions,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    allowed_hosts: Sequence[str] = (),
    api_key: str | None = None,
    tool_call_parser: str | None = None,
    template_arguments: Mapping[str, Any] = DEFAULT_ARGUMENTS,
    vllm_args: Sequence[str] = (),
) -> None:
    """Run vLLM's server until it is interrupted.

    Args:
        senior: model folder or hub id of the senior.
        options: the options of tandem decoding: the junior, and the selection for requests that name none, without
            annealing.
        host: the host name or address to listen at.
        port: the port to listen at.
        allowed_hosts: further names under which clients know this machine (see ``hosts_of``).
        api_key: the key that clients have to send. None leaves it to vLLM, which takes its VLLM_API_KEY or asks for
            none.
        tool_call_parser: vLLM's name of the parser of tool calls. None means the one of the chat template
            (`tool_call_parser_of`) if ``vllm_args`` names no parser.
        template_arguments: further variables of the chat template (``data.template_arguments``), for requests that do
            not send others as ``chat_template_kwargs``.
        vllm_args: further options of ``vllm serve``, as on its command line.

    Raises:
        EngineError: an option is not possible in tandem decoding, the port is in use, or there is not enough memory for
            the KV cache.
        ConfigError: the chat template does not read one of the template arguments.
        ModelError: the models do not share a vocabulary.
    """
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    from tandemrl.rollout.vllm.versions import configure_logging

    assert options.junior is not None
    assert options.selection is not None
    tokenizer = load_tokenizer(senior)
    vocabulary_check(tokenizer, load_tokenizer(options.junior))
    variables = template_variables(tokenizer, template_arguments)
    try:
        _strategy(SelectionConfig(**options.selection), tokenizer, len(tokenizer))
    except ValueError as error:
        raise EngineError(str(error)) from None
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # vLLM reads this choice from the environment only
    cli_env_setup()
    args = server_arguments(
        senior,
        options,
        host=host,
        port=port,
        allowed_hosts=allowed_hosts,
        api_key=api_key,
        tool_call_parser=tool_call_parser_of(tool_call_parser, str(tokenizer.chat_template), vllm_args),
        template_arguments=variables,
        vllm_args=vllm_args,
    )
    configure_logging(args)
    try:
        ServeSubcommand().validate(args)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        check_config(config)
        partner = junior_config(config, options)
    except (ValueError, TypeError) as error:
        raise EngineError(str(error)) from None
    check_port(host, port)
    if kv_cache_is_open(args):
        args.kv_cache_memory_bytes = kv_cache_bytes([config, partner], free=free_memory())
    dtypes = [str(each.model_config.dtype).removeprefix("torch.") for each in (config, partner)]
    locked = bool(args.api_key or os.environ.get(API_KEY))
    announce(f"{senior} ({dtypes[0]}) and its junior {options.junior} ({dtypes[1]})", host, port, locked=locked)
    ServeSubcommand.cmd(args)


class VllmAuthorship(Authorship):
    """The middleware around vLLM's server, which names it by its path.

    Args:
        app: vLLM's ASGI application.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        super().__init__(app, backend_of, HTTPException)


def backend_of(state: Any) -> Backend:
    """What the middleware needs of a vLLM server. The worker builds the default strategy from the same options.

    Args:
        state: the state of the server's application.
    """
    from tandemrl.rollout.vllm.versions import load_chat_template

    config, client, args = state.vllm_config, state.engine_client, state.args
    tokenizer, context = load_tokenizer(config.model_config.tokenizer), config.model_config.max_model_len
    tokenizer.chat_template = load_chat_template(args.chat_template) or tokenizer.chat_template
    arguments = args.default_chat_template_kwargs or {}
    reader = Reader(tokenizer, context, defaults={}, template_arguments=arguments, calls=True)
    vocabulary = config.model_config.get_vocab_size()

    def build(selection: SelectionConfig) -> Strategy:
        return _strategy(selection, tokenizer, vocabulary)

    async def register(strategies: dict[str, Strategy]) -> None:
        await client.collective_rpc("tandem_register", args=(cloudpickle.dumps(strategies),))

    default = SelectionConfig(**config.additional_config["tandem"]["selection"])
    configured = config.model_config.try_get_generation_config().get("eos_token_id")
    named = configured if isinstance(configured, list) else [configured]
    known = frozenset({*named, tokenizer.eos_token_id} - {None})
    junior = config.additional_config["tandem"]["junior"]
    told = frozenset(stored_eos_token_ids(config.model_config.model, tokenizer, junior)) - known
    models = [*(args.served_model_name or [args.model]), *(each.name for each in args.lora_modules or ())]
    hosts = hosts_of(args.host, args.allowed_hosts)
    strategies = Strategies(default, build, register)
    return Backend(strategies, known | told, hosts, told, models, reader.guarded_ids, context)


def kv_cache_is_open(args: Namespace) -> bool:
    """Whether we are on a CPU and nobody has set the size of the KV cache.

    vLLM would then claim 92 % of the machine's memory.
    """
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    default = AsyncEngineArgs.gpu_memory_utilization
    chosen = args.kv_cache_memory_bytes is not None or args.gpu_memory_utilization != default
    return current_platform.device_type == "cpu" and not chosen and not os.environ.get("VLLM_CPU_KVCACHE_SPACE")


def kv_cache_bytes(configs: Sequence[Any], *, free: int) -> int:
    """The size of the KV cache in bytes: room for ``DEFAULT_SEQUENCES`` sequences of full length in all models.

    It takes at most half of the free memory, unless a single sequence needs more.

    Args:
        configs: a ``VllmConfig`` for each model.
        free: free memory in bytes.

    Raises:
        EngineError: not even a single sequence fits into the free memory.
    """
    length = max(config.model_config.max_model_len for config in configs)
    token = 0
    for config in configs:
        model, parallel = config.model_config, config.parallel_config
        heads = model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
        token += 2 * heads * model.dtype.itemsize  # a key and a value
    # A block more than the sequence needs, since vLLM keeps one for itself.
    sequence = token * (length + 2 * (configs[0].cache_config.block_size or 128))
    if sequence > free:
        raise EngineError(
            f"a sequence of {length} tokens takes {sequence / 2**30:.2f} GiB of KV cache, and {free / 2**30:.2f} GiB "
            "of memory are free: set a shorter context with -- --max-model-len N"
        )
    return max(sequence, min(DEFAULT_SEQUENCES * sequence, free // 2))


def free_memory() -> int:
    """How many bytes of memory vLLM may take on this CPU."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    return get_memory_node_info(get_allowed_cpu_list()[0].numa_node).available_memory


def server_arguments(
    senior: str,
    options: TandemOptions,
    *,
    host: str,
    port: int,
    allowed_hosts: Sequence[str] = (),
    api_key: str | None = None,
    tool_call_parser: str | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    vllm_args: Sequence[str],
) -> Namespace:
    """The arguments of ``vllm serve``: those in ``vllm_args``, and those that a tandem server sets itself.

    See ``serve`` for the arguments of this function. Here ``tool_call_parser`` None means none of ours.
    template_arguments: those that are not None.

    Raises:
        EngineError: ``vllm_args`` sets an argument that a tandem server sets itself or cannot have, or vLLM does not
            know the parser of tool calls.
    """
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tandemrl.apps.serve.vllm_guard import Guard
    from tandemrl.rollout.vllm.versions import make_arg_parser
    from tandemrl.rollout.vllm.worker import tandem_arguments

    parser = make_arg_parser()(FlexibleArgumentParser(prog="tandemrl serve … --"))
    parser.set_defaults(allowed_origins=[])  # older versions answer the pages of every web site
    args = parser.parse_args(list(vllm_args))
    ours = {
        "model_tag": senior,
        "model": senior,
        "host": host,
        "port": port,
        "api_server_count": 1,
        **tandem_arguments(options),
        **({} if api_key is None else {"api_key": [api_key]}),
        **({} if not template_arguments else {"default_chat_template_kwargs": dict(template_arguments)}),
        **({} if not tool_call_parser else {"tool_call_parser": tool_call_parser, "enable_auto_tool_choice": True}),
    }
    for name, value in ours.items():
        if getattr(args, name) not in (parser.get_default(name), value):
            flag = "the model" if name == "model_tag" else f"--{name.replace('_', '-')}"
            before = "; give --template-arguments before it" if name == "default_chat_template_kwargs" else ""
            raise EngineError(f"{flag} is set by tandemrl serve; leave it out after `--`{before}")
        setattr(args, name, value)
    parsers = ToolParserManager.list_registered()
    if args.tool_call_parser not in (None, *parsers) and not args.tool_parser_plugin:
        raise EngineError(f"--tool-call-parser: {args.tool_call_parser!r} is none of {', '.join(parsers)}")
    for name in ("headless", "grpc"):
        if getattr(args, name):
            raise EngineError(f"--{name} has no place for authors; leave it out")
    if args.logits_processors:
        raise EngineError("--logits-processors would act on the senior's tokens only; leave it out")
    args.middleware = [*args.middleware, f"{VllmAuthorship.__module__}.{VllmAuthorship.__qualname__}"]
    args.allowed_hosts = [*allowed_hosts]
    args.logits_processors = [f"{Guard.__module__}:{Guard.__qualname__}"]
    return args


def _strategy(selection: SelectionConfig, tokenizer: Any, vocabulary: int) -> Strategy:
    """The strategy of a selection.

    Raises:
        ValueError: there is none, or this server cannot decode with it.
    """
    if selection.kind.drops:
        raise ValueError(
            f"selection.strategy={selection.strategy} may drop what an author proposes, which vLLM's server cannot do; "
            "serve with --engine torch, or use word"
        )
    return schedule_of(selection, tokenizer, vocabulary).strategy(1)
