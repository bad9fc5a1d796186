"""Starts the OpenAI-compatible server over an engine of the library, after checking its options."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.config import Config, ConfigError, SelectionConfig
from tandemrl.config.compatibility import Facts, check
from tandemrl.config.schema import JuniorEndpointConfig
from tandemrl.data.templates import template_of, template_variables
from tandemrl.models.loading import (
    context_of,
    junior_tokenizer_of,
    load_model,
    load_tokenizer,
    resolve_device,
)
from tandemrl.rollout.call import CallEngine
from tandemrl.rollout.envs.parsing import call_format_of
from tandemrl.rollout.factory import ModelSource, ends_of, make_engine
from tandemrl.rollout.gateway.address import API_KEY, hosts_of, listen, run, url_of
from tandemrl.rollout.gateway.engine_app import Server, application
from tandemrl.rollout.gateway.engine_thread import EngineThread
from tandemrl.rollout.gateway.requests import SAMPLED, OtherReader, Reader
from tandemrl.rollout.gateway.sessions import NamedSessions
from tandemrl.rollout.gateway.texts import Speaker
from tandemrl.rollout.schedule import schedule_of
from tandemrl.rollout.vllm import require_vllm
from tandemrl.selection import Strategy

MAX_SELECTIONS = 32
"""How many selections a server remembers the strategies of, with their token tables."""


class Pair(NamedTuple):
    """What senior and junior write with, for a server or the page of ``play``.

    other: the tokenizer of a junior with a vocabulary of its own. ends: the ids that end a text. load_junior: loads the
    junior, once.
    """

    engine: CallEngine
    tokenizer: PreTrainedTokenizerBase
    other: PreTrainedTokenizerBase | None
    ends: tuple[int, ...]
    load_junior: Callable[[], PreTrainedModel]


def open_pair(config: Config, longest: int | None) -> Pair:
    """Load the models of a config into its engine. What does not go together is refused before.

    Args:
        longest: how many tokens prompt and response may have together. None means as many as the models allow.

    Raises:
        ConfigError: the chat template does not read one of ``data.template_arguments``, the config does not suit models
            of two vocabularies, or a value of the selection is out of range.
        EngineError: the engine does not start.
        ModelError: a model cannot be loaded.
    """
    if config.rollout.engine == "vllm":  # before the hub is asked for models
        require_vllm("rollout.engine=vllm")
    model, junior = config.model, config.model.junior or config.model.senior
    tokenizer, endpoint = load_tokenizer(model.senior), endpoint_of(config)
    other = junior_tokenizer_of(model.senior, junior, endpoint=endpoint is not None)
    template_variables(tokenizer, config.data.template_arguments)
    try:
        _strategy(config, config.selection, tokenizer, len(tokenizer), apart=other is not None)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    dtype, device = model.dtype, str(resolve_device(model.device))
    own, load = (cache(partial(load_model, path, dtype=dtype, device=device)) for path in (model.senior, junior))
    sources = ModelSource(model.senior, own), ModelSource(junior, load, None, None, other, endpoint)
    ends = ends_of(*sources, tokenizer)
    made = dict[str, Any](dtype=dtype, device=device, longest=longest, ends=ends)
    engine = make_engine(config.rollout, *sources, tokenizer, **made)
    if not isinstance(engine, CallEngine):
        raise ConfigError(f"rollout.engine={config.rollout.engine}: it has no open calls; use torch or vllm")
    return Pair(engine, tokenizer, other, ends, load)


def endpoint_of(config: Config) -> JuniorEndpointConfig | None:
    """Where the junior is served, if it is not in this process."""
    return None if config.model.junior_endpoint.url is None else config.model.junior_endpoint


def serve(
    config: Config,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    allowed_hosts: Sequence[str] = (),
    api_key: str | None = None,
    context: int | None = None,
) -> None:
    """Run the server until it is interrupted.

    Args:
        config: the models, the engine, the variables of the chat template (for requests that send no others as
            ``chat_template_kwargs``), and the selection for requests that name none, without annealing.
        host: the host name or address to listen at.
        port: the port to listen at.
        allowed_hosts: further names under which clients know this machine (see ``hosts_of``).
        api_key: the key that clients have to send. None means that of the environment, and if it has none, no key.
        context: how many tokens prompt and response may have together. None means as many as the models allow.

    Raises:
        ConfigError, EngineError, ModelError: the port is in use; see also `open_pair`.
    """
    listen(host, port).close()  # before models are loaded
    engine, tokenizer, other, ends, _ = open_pair(config, context)
    senior, junior, endpoint = config.model.senior, config.model.junior or config.model.senior, endpoint_of(config)
    calls = call_format_of(template_of(tokenizer))

    @lru_cache(MAX_SELECTIONS)
    def strategy_of(selection: SelectionConfig) -> Strategy:
        return _strategy(config, selection, tokenizer, engine.vocabulary, apart=other is not None)

    key = api_key or os.environ.get(API_KEY)
    reader = Reader(
        tokenizer,
        min(engine.context, context or engine.context),
        strategy_of=strategy_of,
        selection=config.selection,
        defaults=sampling_defaults(senior),
        template_arguments=template_variables(tokenizer, config.data.template_arguments),
        calls=calls is not None,
        ends=frozenset(ends),
        junior=None if other is None else other_reader(other, junior, endpoint),
    )
    speaker = Speaker(tokenizer, calls or "hermes", ends)
    server = Server(EngineThread(engine), reader, speaker, senior, NamedSessions(reader))
    app = application(server, hosts=hosts_of(host, allowed_hosts), api_key=key)
    dtype = (config.rollout.engine == "vllm" and config.rollout.vllm.junior_dtype) or config.model.dtype
    where = dtype if endpoint is None else f"at {endpoint.url}"
    models = f"{senior} ({config.model.dtype}) and its junior {junior} ({where})"
    with listen(host, port) as listening, suppress(KeyboardInterrupt):
        locked = "without" if key is None else "with"
        print(f"serving {models} at {url_of(host, listening)}/v1, {locked} an API key", flush=True)
        run(app, listening)
    engine.close()


def _strategy(
    config: Config, selection: SelectionConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int, *, apart: bool
) -> Strategy:
    """The strategy of a selection.

    Args:
        apart: whether the junior has a vocabulary of its own.

    Raises:
        ConfigError: it does not suit two vocabularies, or cannot be made. ValueError: a value is out of range.
    """
    check(replace(config, selection=selection), Facts(apart=apart, asked=True, drops=selection.kind.drops))
    return schedule_of(selection, tokenizer, vocabulary, by_text=apart).strategy(1)


def other_reader(tokenizer: PreTrainedTokenizerBase, path: str, endpoint: JuniorEndpointConfig | None) -> OtherReader:
    """How to prompt a junior with a vocabulary of its own.

    Args:
        path: the folder or hub id of the junior.
        endpoint: where it is served, if it is not in this process.
    """
    context = int(tokenizer.model_max_length)  # what an endpoint can read, the engine asks it
    if endpoint is None:
        context = context_of(AutoConfig.from_pretrained(path, trust_remote_code=False))
    takes_tools = call_format_of(template_of(tokenizer, [{}])) is not None
    return OtherReader(tokenizer, context, takes_tools, endpoint)


def sampling_defaults(path: str) -> Mapping[str, float]:
    """The sampling that a model's generation config asks for, as vLLM's server takes it."""
    try:
        stated = GenerationConfig.from_pretrained(path).to_diff_dict()
    except OSError:  # it has none
        return {}
    return {name: stated[name] for name in SAMPLED if stated.get(name) is not None}
