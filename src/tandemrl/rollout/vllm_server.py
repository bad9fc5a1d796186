"""vLLM's OpenAI-compatible server with a junior beside the senior, and with the author of every token in the response.

``serve`` starts the stock server with the tandem worker and ``Authorship`` around it. This ASGI middleware gives every
request a seed, from which the worker derives its keys, and recomputes the authors of the response from keys and tokens.

A request may hold ``"tandem": {...}``: ``{"solo": "senior"}`` or ``{"solo": "junior"}``, or any of ``strategy``,
``prob_senior``, ``max_gap_tokens``, ``chunk_size`` and ``first`` in place of the server's. Every choice of a response,
streamed or not, has ``authorship``, one entry per ``token_ids``: 1 senior, 0 junior. The response (a stream: each chunk
that ends a choice) has ``tandem``: the senior's share, the seed that repeats the request, the strategy, our version.
"""

import asyncio
import importlib.metadata
import json
import os
import secrets
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, get_args

import cloudpickle
import torch
from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

from tandemrl.config import SelectionConfig, StrategyName
from tandemrl.model import load_tokenizer, vocabulary_check
from tandemrl.rollout.engine import EngineError
from tandemrl.rollout.vllm_planner import Mode
from tandemrl.schedule import schedule_of
from tandemrl.selection import Strategy, Who, replay
from tandemrl.selection.draws import mix64

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PATHS = ("/v1/completions", "/v1/chat/completions")
GENERATING = ("/v1/", "/v2/", "/inference/", "/cohere/", "/invocations", "/generative_scoring")
"""Where vLLM's POST paths begin that start a generation; only ``PATHS`` have a place for seeds and authors."""
MAX_SELECTIONS = 32
"""Selections a server takes on, its own included: the workers keep token tables for each."""
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
    """The strategies of a server, by selection. The workers know each under a name before a request uses it."""

    def __init__(
        self,
        default: SelectionConfig,
        build: Callable[[SelectionConfig], Strategy],
        register: Callable[[dict[str, Strategy]], Awaitable[Any]],
    ) -> None:
        self.default, self._build, self._register = default, build, register
        self._known = {default: build(default)}
        self._names = {default: "default"}
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

    async def name(self, selection: SelectionConfig) -> str:
        """What the workers call it; a new one is announced to them first.

        Raises:
            Refused: a value is out of range, or the server has taken on too many selections.
        """
        async with self._lock:
            if selection not in self._names:
                if len(self._names) >= MAX_SELECTIONS:
                    raise Refused(
                        f"tandem: this server has met {MAX_SELECTIONS} different selections and takes no more; "
                        "use one of those, or another server"
                    )
                try:
                    self._known[selection] = self._build(selection)
                except ValueError as error:
                    raise Refused(f"tandem: {error}") from None
                names = self._names | {selection: str(len(self._names))}
                await self._register({name: self._known[one] for one, name in names.items()})
                self._names = names
            return self._names[selection]


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
            await self.app(scope, exchange.receive, exchange.send)
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
                name = await self._strategies.name(order.selection)
            except Refused as error:
                raise HTTPException(400, str(error)) from None
            extra = request.get("vllm_xargs") or {}
            if isinstance(extra, dict):
                request["vllm_xargs"] = extra | {"tandem_strategy": name}
            body, self._order = _dumps(request), order
        return {"type": "http.request", "body": body, "more_body": False}

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
    host: str | None = None,
    port: int = 8000,
    junior_dtype: str | None = None,
    junior_quantization: str | None = None,
    junior_device: str | None = None,
    vllm_args: Sequence[str] = (),
) -> None:
    """Run vLLM's server until it is interrupted.

    Args:
        selection: who writes, unless a request says otherwise; nothing is annealed.
        vllm_args: further options of ``vllm serve``, as on its command line.

    Raises:
        EngineError, ModelError: the models do not share a vocabulary, or an option is not possible in tandem decoding.
    """
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.logger import configure_logging_from_args

    from tandemrl.rollout.vllm_worker import check_config

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
    options = {
        "junior": junior,
        "mode": mode,
        "junior_dtype": junior_dtype,
        "junior_quantization": junior_quantization,
        "junior_device": junior_device,
        "selection": asdict(selection),
    }
    args = server_arguments(senior, options, host=host, port=port, vllm_args=vllm_args)
    configure_logging_from_args(args)
    try:
        ServeSubcommand().validate(args)
        check_config(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    except (ValueError, TypeError) as error:
        raise EngineError(str(error)) from None
    ServeSubcommand.cmd(args)


def server_arguments(
    senior: str, options: Mapping[str, Any], *, host: str | None, port: int, vllm_args: Sequence[str]
) -> Namespace:
    """What vLLM's own parser makes of ``vllm_args``, and what a tandem server needs on top of it.

    Raises:
        EngineError: ``vllm_args`` sets one of the latter.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tandemrl.rollout.vllm_guard import Guard
    from tandemrl.rollout.vllm_worker import TandemScheduler, worker_class

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
