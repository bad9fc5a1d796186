"""vLLM's OpenAI-compatible server with a junior beside the senior, and with the author of every token in the response.

``serve`` starts the stock server with the tandem worker and ``Authorship`` around it. This ASGI middleware gives every
request a seed, from which the worker derives its keys, and recomputes the authors of the response from keys and tokens.

A request may hold ``"tandem": {...}``: ``{"solo": "senior"}`` or ``{"solo": "junior"}``, or any of ``strategy``,
``prob_senior``, ``max_gap_tokens``, ``chunk_size`` and ``first`` in place of the server's. Every choice of a response,
streamed or not, has ``authorship``, one entry per ``token_ids``: 1 senior, 0 junior. The response (a stream: each chunk
that ends a choice) has ``tandem``: the senior's share, the seed that repeats the request, the strategy, our version.
"""

import asyncio
import errno
import importlib.metadata
import json
import os
import secrets
import socket
from argparse import Namespace
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any, NamedTuple, get_args

import cloudpickle
import torch
from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

from tandemrl.config import SelectionConfig, StrategyName
from tandemrl.models.loading import load_tokenizer, vocabulary_check
from tandemrl.rollout.engine import EngineError
from tandemrl.rollout.schedule import schedule_of
from tandemrl.rollout.vllm.planner import Mode
from tandemrl.selection import Strategy, Who, replay
from tandemrl.selection.draws import mix64

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PATHS = ("/v1/completions", "/v1/chat/completions")
GENERATING = ("/v1/", "/v2/", "/inference/", "/cohere/", "/invocations", "/generative_scoring")
"""Where vLLM's POST paths begin that start a generation; only ``PATHS`` have a place for seeds and authors."""
MAX_SELECTIONS = 32
"""Selections a server knows at once, its own included: the workers keep token tables for each."""
DEFAULT_SEQUENCES = 8
"""On a CPU, sequences of full length that the KV cache has room for, unless an option says how large it is."""
MAX_WHOLE = 2**31
"""The largest whole number of a request, but for seeds."""
SEED_BITS = 53  # of a seed that we choose: JSON readers that know doubles only keep it
VERSION = importlib.metadata.version("tandemrl")


class Refused(ValueError):
    """A request asks for what tandem decoding cannot do; the message is the client's."""


class Order(NamedTuple):
    """What a request asked for, as far as its response depends on it."""

    selection: SelectionConfig
    seed: int
    samples: int
    show_prompt: bool

    def key(self, index: int) -> int:
        """The key of a choice: vLLM gives sample i of every prompt the seed ``seed + i``."""
        return mix64(self.seed + index % self.samples)


# ------------------------------------------------------------------------------------------------------------- requests


def prepare(body: Mapping[str, Any], default: SelectionConfig) -> tuple[dict[str, Any], Order]:
    """The body for vLLM, with a seed and a wish for token ids, and the order that its response belongs to.

    Raises:
        Refused: names the field and what it should be.
    """
    given = body.get
    rules: list[tuple[bool, str]] = [
        (not given("use_beam_search"), "use_beam_search: beams have no single author per token"),
        (not given("echo"), "echo: send the prompt along yourself; only generated tokens have authors"),
        (given("prompt_logprobs") is None, "prompt_logprobs: a prompt has no author"),
        (not given("prompt_embeds"), "prompt_embeds: the two models have different embeddings; send text or token ids"),
        (given("include_reasoning", True) is True, "include_reasoning=false: it hides token ids, so authors, too"),
        (
            given("structured_outputs") is None and _object(given("response_format")).get("type", "text") == "text",
            "response_format, structured_outputs: grammars are not applied",
        ),
        (
            given("tool_choice") in (None, "none", "auto"),
            "tool_choice: only none and auto; a forced call needs a grammar, and these are not applied",
        ),
        (
            not any(name.startswith("tandem") for name in _object(given("vllm_xargs"))),
            "vllm_xargs: names that start with tandem are the server's; send `tandem` instead",
        ),
    ]
    for ok, reason in rules:
        if not ok:
            raise Refused(f"not possible in tandem decoding: {reason}")

    samples = _whole(body, "n", 1, 1, MAX_WHOLE)
    seed = None if given("seed") == -1 else _whole(body, "seed", None, 0, 2**63 - samples)
    if seed is None:
        if _prompts(given("prompt")) > 1:
            raise Refused(
                "prompt: several prompts in one request share its seed, so equal prompts would get equal completions; "
                "send `seed` if you want that, else one request per prompt"
            )
        seed = secrets.randbits(SEED_BITS)
    tandem = {} if given("tandem") is None else given("tandem")
    order = Order(selection_of(tandem, default), seed, samples, bool(given("return_token_ids")))
    rest = {name: value for name, value in body.items() if name != "tandem"}
    return rest | {"seed": seed, "n": samples, "return_token_ids": True}, order


_FIELDS: dict[str, tuple[type, ...]] = {
    "strategy": (str,),
    "prob_senior": (int, float),
    "max_gap_tokens": (int,),
    "chunk_size": (int,),
    "first": (str,),
    "solo": (str,),
}


def selection_of(given: Any, default: SelectionConfig) -> SelectionConfig:
    """The server's selection with what a request says otherwise. Ranges are the strategies' own business.

    Raises:
        Refused: unknown field, wrong type or unknown strategy.
    """
    if not isinstance(given, dict):
        raise Refused(f"tandem: expected an object with any of {', '.join(_FIELDS)}")
    for name, value in given.items():
        if name not in _FIELDS:
            raise Refused(f"tandem: unknown field {name!r}; known: {', '.join(_FIELDS)}")
        if not isinstance(value, _FIELDS[name]) or isinstance(value, bool):
            raise Refused(f"tandem.{name}: expected {_FIELDS[name][-1].__name__}, got {json.dumps(value)}")
        if isinstance(value, int) and abs(value) > MAX_WHOLE:  # the workers compute with 64 bits and die of more
            raise Refused(f"tandem.{name}: expected at most {MAX_WHOLE}, got {value}")
    for name, allowed in {"strategy": get_args(StrategyName), "first": get_args(Who), "solo": get_args(Who)}.items():
        if given.get(name, allowed[0]) not in allowed:
            raise Refused(f"tandem.{name}: {given[name]!r} is none of {', '.join(allowed)}")
    if "solo" in given:
        if len(given) > 1:
            raise Refused("tandem.solo: one author writes everything; leave the other fields out")
        given = {"strategy": "solo", "first": given["solo"]}
    return replace(default, **given)


def _whole(body: Mapping[str, Any], name: str, default: Any, low: int, high: int) -> Any:
    """A whole number as JSON has it: vLLM also reads "3" and true, but which one would decide over the authors."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise Refused(f"{name}: expected a whole number from {low} to {high}, got {json.dumps(value)}")
    return value


def _object(value: Any) -> dict[str, Any]:
    """A JSON object; what is none is left for vLLM to complain about."""
    return value if isinstance(value, dict) else {}


def _prompts(prompt: Any) -> int:
    """How many prompts a completion request has; a list of numbers is one tokenised prompt."""
    return len(prompt) if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt) else 1


class Strategies:
    """The strategies of a server, by selection. The workers know each under a name before a request uses it; the least
    recently used one that no request uses makes room for a new one."""

    def __init__(
        self,
        default: SelectionConfig,
        build: Callable[[SelectionConfig], Strategy],
        register: Callable[[dict[str, Strategy]], Awaitable[Any]],
    ) -> None:
        self.default, self._build, self._register = default, build, register
        self._known = {default: build(default)}
        self._names = {default: "default"}  # the least recently used first
        self._users = Counter[SelectionConfig]()
        self._numbers = count(1)  # a name never comes again: the workers may still know the old one
        self._lock = asyncio.Lock()

    @classmethod
    def of(cls, state: Any) -> "Strategies":
        """Those of a vLLM server, from its application's state: the worker builds the default from the same options."""
        config, client = state.vllm_config, state.engine_client
        tokenizer = load_tokenizer(config.model_config.tokenizer)
        vocabulary = config.model_config.get_vocab_size()

        def build(selection: SelectionConfig) -> Strategy:
            return schedule_of(selection, tokenizer, vocabulary).strategy(1)

        async def register(strategies: dict[str, Strategy]) -> None:
            await client.collective_rpc("tandem_register", args=(cloudpickle.dumps(strategies),))

        return cls(SelectionConfig(**config.additional_config["tandem"]["selection"]), build, register)

    def __getitem__(self, selection: SelectionConfig) -> Strategy:
        return self._known[selection]

    async def acquire(self, selection: SelectionConfig) -> str:
        """What the workers call it; a new one is announced to them first. It is kept until as many `release`.

        Raises:
            Refused: a value is out of range, or too many other selections are in use.
        """
        async with self._lock:
            names, known = dict(self._names), dict(self._known)
            if selection not in names:
                if len(names) >= MAX_SELECTIONS:
                    idle = [one for one in names if one != self.default and not self._users[one]]
                    if not idle:
                        raise Refused(
                            f"tandem: {MAX_SELECTIONS} different selections are in use at this moment, and no more are "
                            "possible; try again when a request has ended"
                        )
                    del names[idle[0]], known[idle[0]]
                try:
                    known[selection] = self._build(selection)
                except ValueError as error:
                    raise Refused(f"tandem: {error}") from None
                names[selection] = str(next(self._numbers))
                await self._register({name: known[one] for one, name in names.items()})
            self._names = {one: name for one, name in names.items() if one != selection} | {selection: names[selection]}
            self._known = known
            self._users[selection] += 1
            return names[selection]

    def release(self, selection: SelectionConfig) -> None:
        """A request that used it has ended."""
        self._users[selection] -= 1
        if not self._users[selection]:
            del self._users[selection]


# ------------------------------------------------------------------------------------------------------------ responses


def annotated(response: dict[str, Any], order: Order, strategy: Strategy) -> dict[str, Any]:
    """A whole response with its authors.

    Raises:
        EngineError: vLLM left token ids out.
    """
    choices = response["choices"]
    if any(choice.get("token_ids") is None for choice in choices):
        raise EngineError("vLLM returned a choice without token ids: its authors cannot be told")
    lengths = torch.tensor([len(choice["token_ids"]) for choice in choices], dtype=torch.int64)
    tokens = torch.zeros(len(choices), max(lengths.tolist(), default=0), dtype=torch.int64)
    for row, choice in zip(tokens, choices, strict=True):
        row[: len(choice["token_ids"])] = torch.tensor(choice["token_ids"])
    keys = torch.tensor([order.key(choice["index"]) for choice in choices], dtype=torch.int64)
    author = replay(strategy, keys, tokens, lengths).author
    for row, length, choice in zip(author.tolist(), lengths.tolist(), choices, strict=True):
        choice["authorship"] = row[:length]
    _hide_prompts(response, order)
    return response | {"tandem": _summary(order, int((author == 1).sum()), int(lengths.sum()))}


class StreamAuthors:
    """The authors of a streamed response, chunk by chunk."""

    def __init__(self, order: Order, strategy: Strategy) -> None:
        self._order, self._strategy = order, strategy
        self._states: dict[int, tuple[torch.Tensor, Any]] = {}
        self._senior = self._total = 0
        self._rest = b""

    def events(self, data: bytes, *, last: bool = False) -> bytes:
        """Server-sent events, those that are complete; the beginning of another one waits for its end."""
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        out = b"".join(self._event(event) + b"\n\n" for event in whole)
        return out + self._rest if last else out

    def _event(self, event: bytes) -> bytes:
        prefix = b"data: "
        if not event.startswith(prefix + b"{"):  # a comment, or [DONE]
            return event
        return prefix + _dumps(self._annotated(json.loads(event[len(prefix) :])))

    def _annotated(self, chunk: dict[str, Any]) -> dict[str, Any]:
        choices = chunk.get("choices") or ()
        for choice in choices:
            if choice.get("token_ids") is not None:
                choice["authorship"] = self._write(choice["index"], choice["token_ids"])
        _hide_prompts(chunk, self._order)
        if any(choice.get("finish_reason") is not None for choice in choices):
            chunk["tandem"] = _summary(self._order, self._senior, self._total)
        return chunk

    def _write(self, index: int, tokens: Iterable[int]) -> list[int]:
        if index not in self._states:
            self._states[index] = self._strategy.init(torch.tensor([self._order.key(index)]))
        authors = []
        for token in tokens:
            senior, state = self._states[index]
            authors.append(int(senior))
            self._states[index] = self._strategy.step(state, torch.tensor([token]))
        self._senior += sum(authors)
        self._total += len(authors)
        return authors


def _summary(order: Order, senior: int, total: int) -> dict[str, Any]:
    return {
        "senior_frac": senior / total if total else None,
        "seed": order.seed,
        "strategy": order.selection.strategy,
        "version": VERSION,
    }


def _hide_prompts(response: dict[str, Any], order: Order) -> None:
    """Prompt ids come with token ids; a client that asked for neither is spared their bulk."""
    if not order.show_prompt:
        for place in (response, *(response.get("choices") or ())):
            place.pop("prompt_token_ids", None)


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


# ----------------------------------------------------------------------------------------------------------- middleware


class Authorship:
    """ASGI middleware around vLLM's server; the module says what it adds.

    It rewrites the body when the application reads it, hence after authentication, and a refusal is an HTTPException
    there: vLLM renders it like its own errors. These, and everything that is no completion, pass as they are.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.strategies: Strategies | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self.strategies = Strategies.of(scope["app"].state)
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or not path.startswith(GENERATING):
            await self.app(scope, receive, send)
        elif path in PATHS:
            assert self.strategies is not None
            exchange = _Exchange(self.strategies, receive, send)
            try:
                await self.app(scope, exchange.receive, exchange.send)
            finally:
                exchange.close()
        else:
            reason = f"{path}: a tandem server answers {' and '.join(PATHS)} only"
            error = {"message": reason, "type": "Bad Request", "param": None, "code": 400}
            await JSONResponse({"error": error}, 400)(scope, receive, send)


class _Exchange:
    """One request and its response."""

    def __init__(self, strategies: Strategies, receive: Receive, send: Send) -> None:
        self._strategies, self._receive, self._send = strategies, receive, send
        self._read = False
        self._order: Order | None = None
        self._start: Message | None = None  # of a whole response, until its body is there
        self._body = b""
        self._stream: StreamAuthors | None = None

    async def receive(self) -> Message:
        if self._read:
            return await self._receive()
        self._read, body, more = True, b"", True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            request = json.loads(body)
        except ValueError:
            request = None
        if isinstance(request, dict):
            try:
                request, order = prepare(request, self._strategies.default)
                name = await self._strategies.acquire(order.selection)
            except Refused as error:
                raise HTTPException(400, str(error)) from None
            self._order = order
            extra = request.get("vllm_xargs") or {}
            if isinstance(extra, dict):
                request["vllm_xargs"] = extra | {"tandem_strategy": name}
            body = _dumps(request)
        return {"type": "http.request", "body": body, "more_body": False}

    def close(self) -> None:
        """The request has ended, however it did."""
        if self._order is not None:
            self._strategies.release(self._order.selection)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200 and self._order is not None:
            kind = Headers(raw=message["headers"]).get("content-type", "")
            if kind.startswith("text/event-stream"):
                self._stream = StreamAuthors(self._order, self._strategies[self._order.selection])
            else:
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._stream is not None:
            body, more = message.get("body", b""), message.get("more_body", False)
            message = {**message, "body": self._stream.events(body, last=not more)}
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body", False):
                return
            body = await asyncio.to_thread(self._annotated)  # a replay of thousands of tokens takes a while
            MutableHeaders(raw=self._start["headers"])["content-length"] = str(len(body))
            await self._send(self._start)
            message = {"type": "http.response.body", "body": body}
        await self._send(message)

    def _annotated(self) -> bytes:
        assert self._order is not None
        response = json.loads(self._body)
        if response is None:  # what vLLM answers to a client that is gone
            return self._body
        return _dumps(annotated(response, self._order, self._strategies[self._order.selection]))


# --------------------------------------------------------------------------------------------------------------- server


def serve(
    senior: str,
    junior: str,
    selection: SelectionConfig,
    *,
    mode: str = "lazy",
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    junior_dtype: str | None = None,
    junior_quantization: str | None = None,
    junior_device: str | None = None,
    vllm_args: Sequence[str] = (),
) -> None:
    """Run vLLM's server until it is interrupted.

    Args:
        selection: who writes, unless a request says otherwise; nothing is annealed.
        api_key: what a client has to send; None: vLLM's choice, which is its VLLM_API_KEY or nothing.
        vllm_args: further options of ``vllm serve``, as on its command line.

    Raises:
        EngineError, ModelError: the models do not share a vocabulary, an option is not possible in tandem decoding, the
            port is in use, or there is no memory for the KV cache.
    """
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    from tandemrl.rollout.vllm.worker import TandemOptions, check_config, junior_config

    if mode not in get_args(Mode):
        raise EngineError(f"mode={mode}: must be one of {', '.join(get_args(Mode))}")
    tokenizer = load_tokenizer(senior)
    vocabulary_check(tokenizer, load_tokenizer(junior))
    try:
        schedule_of(selection, tokenizer, len(tokenizer))
    except ValueError as error:
        raise EngineError(str(error)) from None
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # vLLM reads this choice from the environment only
    cli_env_setup()
    options: dict[str, Any] = {
        "junior": junior,
        "mode": mode,
        "junior_dtype": junior_dtype,
        "junior_quantization": junior_quantization,
        "junior_device": junior_device,
        "selection": asdict(selection),
    }
    args = server_arguments(senior, options, host=host, port=port, api_key=api_key, vllm_args=vllm_args)
    configure_logging_from_args(args)
    try:
        ServeSubcommand().validate(args)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        check_config(config)
        partner = junior_config(config, TandemOptions(**options))
    except (ValueError, TypeError) as error:
        raise EngineError(str(error)) from None
    check_port(host, port)
    if kv_cache_is_open(args):
        args.kv_cache_memory_bytes = kv_cache_bytes([config, partner], free=free_memory())
    dtypes = [str(each.model_config.dtype).removeprefix("torch.") for each in (config, partner)]
    locked = "with an API key" if args.api_key or os.environ.get("VLLM_API_KEY") else "without an API key"
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    print(f"serving {senior} ({dtypes[0]}) and its junior {junior} ({dtypes[1]}) at {url}, {locked}", flush=True)
    ServeSubcommand.cmd(args)


def check_port(host: str, port: int) -> None:
    """Raises `EngineError` if nothing can listen there: models are loaded only for a server that can start."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
            trial.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise EngineError(f"port {port} of {host} is in use; choose another one with --port") from None
        raise EngineError(f"--host {host} --port {port}: {error.strerror or error}") from None


def kv_cache_is_open(args: Namespace) -> bool:
    """Whether nobody said how large the KV cache is, on a CPU: vLLM would claim 92 % of the machine's memory."""
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    default = AsyncEngineArgs.gpu_memory_utilization
    chosen = args.kv_cache_memory_bytes is not None or args.gpu_memory_utilization != default
    return current_platform.device_type == "cpu" and not chosen and not os.environ.get("VLLM_CPU_KVCACHE_SPACE")


def kv_cache_bytes(configs: Sequence[Any], *, free: int) -> int:
    """Room for `DEFAULT_SEQUENCES` sequences of full length in all models, within half of the ``free`` bytes.

    Args:
        configs: a ``VllmConfig`` for each model.

    Raises:
        EngineError: there is no room for a single one.
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
    """Bytes that vLLM may take on this CPU."""
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_memory_node_info

    return get_memory_node_info(get_allowed_cpu_list()[0].numa_node).available_memory


def server_arguments(
    senior: str,
    options: Mapping[str, Any],
    *,
    host: str,
    port: int,
    api_key: str | None = None,
    vllm_args: Sequence[str],
) -> Namespace:
    """What vLLM's own parser makes of ``vllm_args``, and what a tandem server needs on top of it.

    Raises:
        EngineError: ``vllm_args`` sets one of the latter.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tandemrl.rollout.vllm.guard import Guard
    from tandemrl.rollout.vllm.worker import TandemScheduler, worker_class

    parser = make_arg_parser(FlexibleArgumentParser(prog="tandemrl serve … --"))
    args = parser.parse_args(list(vllm_args))
    ours = {
        "model_tag": senior,
        "model": senior,
        "host": host,
        "port": port,
        "worker_cls": worker_class(),
        "scheduler_cls": f"{TandemScheduler.__module__}.{TandemScheduler.__qualname__}",
        "additional_config": {"tandem": dict(options)},
        "async_scheduling": False,
        "logprobs_mode": "processed_logprobs",
        "api_server_count": 1,
        **({} if api_key is None else {"api_key": [api_key]}),
    }
    for name, value in ours.items():
        if getattr(args, name) not in (parser.get_default(name), value):
            flag = "the model" if name == "model_tag" else f"--{name.replace('_', '-')}"
            raise EngineError(f"{flag} is set by tandemrl serve; leave it out after `--`")
        setattr(args, name, value)
    for name in ("headless", "grpc"):
        if getattr(args, name):
            raise EngineError(f"--{name} has no place for authors; leave it out")
    if args.logits_processors:
        raise EngineError("--logits-processors would act on the senior's tokens only; leave it out")
    args.middleware = [*args.middleware, f"{Authorship.__module__}.{Authorship.__qualname__}"]
    args.logits_processors = [f"{Guard.__module__}:{Guard.__qualname__}"]
    return args
