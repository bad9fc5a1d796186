"""The authors of every token in the responses of vLLM's OpenAI-compatible server: an ASGI middleware.

``Authorship`` gives every request a seed, from which the worker derives its keys, and recomputes the authors of the
response from keys and tokens.

A request may hold ``"tandem": {...}``: ``{"solo": "senior"}`` or ``{"solo": "junior"}``, or any of ``strategy``,
``prob_senior``, ``max_gap_tokens``, ``chunk_size`` and ``first`` in place of the server's. Every choice of a response,
streamed or not, has ``authorship``, one entry per ``token_ids``: 1 senior, 0 junior. The response (a stream: each chunk
that ends a choice) has ``tandem``: the senior's share, the seed that repeats the request, the strategy, our version.
"""

import asyncio
import importlib.metadata
import json
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple, get_args

import cloudpickle
import torch
from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

from tandemrl.config import SelectionConfig, StrategyName
from tandemrl.models.loading import load_tokenizer
from tandemrl.rollout.engine import EngineError
from tandemrl.rollout.schedule import schedule_of
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
MAX_WHOLE = 2**31
"""The largest whole number of a request, but for seeds."""
SEED_BITS = 53  # of a seed that we choose: JSON readers that know doubles only keep it
VERSION = importlib.metadata.version("tandemrl")


class Refused(ValueError):
    """A request asks for what tandem decoding cannot do; the message is the client's."""


class ParsedRequest(NamedTuple):
    """What a request asked for, as far as its response depends on it."""

    selection: SelectionConfig
    seed: int
    samples: int
    show_prompt: bool

    def key(self, index: int) -> int:
        """The key of a choice: vLLM gives sample i of every prompt the seed ``seed + i``."""
        return mix64(self.seed + index % self.samples)


# ------------------------------------------------------------------------------------------------------------- requests


def prepare(body: Mapping[str, Any], default: SelectionConfig) -> tuple[dict[str, Any], ParsedRequest]:
    """The body for vLLM, with a seed and a wish for token ids, and what its response depends on.

    Raises:
        Refused: names the field and what it should be.
    """
    field = body.get
    rules: list[tuple[bool, str]] = [
        (not field("use_beam_search"), "use_beam_search: beams have no single author per token"),
        (not field("echo"), "echo: send the prompt along yourself; only generated tokens have authors"),
        (field("prompt_logprobs") is None, "prompt_logprobs: a prompt has no author"),
        (not field("prompt_embeds"), "prompt_embeds: the two models have different embeddings; send text or token ids"),
        (field("include_reasoning", True) is True, "include_reasoning=false: it hides token ids, so authors, too"),
        (
            field("structured_outputs") is None and _object(field("response_format")).get("type", "text") == "text",
            "response_format, structured_outputs: grammars are not applied",
        ),
        (
            field("tool_choice") in (None, "none", "auto"),
            "tool_choice: only none and auto; a forced call needs a grammar, and these are not applied",
        ),
        (
            not any(name.startswith("tandem") for name in _object(field("vllm_xargs"))),
            "vllm_xargs: names that start with tandem are the server's; send `tandem` instead",
        ),
    ]
    for ok, reason in rules:
        if not ok:
            raise Refused(f"not possible in tandem decoding: {reason}")

    samples = _whole(body, "n", 1, 1, MAX_WHOLE)
    seed = None if field("seed") == -1 else _whole(body, "seed", None, 0, 2**63 - samples)
    if seed is None:
        if _prompts(field("prompt")) > 1:
            raise Refused(
                "prompt: several prompts in one request share its seed, so equal prompts would get equal completions; "
                "send `seed` if you want that, else one request per prompt"
            )
        seed = secrets.randbits(SEED_BITS)
    tandem = {} if field("tandem") is None else field("tandem")
    parsed = ParsedRequest(selection_of(tandem, default), seed, samples, bool(field("return_token_ids")))
    rest = {name: value for name, value in body.items() if name != "tandem"}
    return rest | {"seed": seed, "n": samples, "return_token_ids": True}, parsed


_FIELDS: dict[str, tuple[type, ...]] = {
    "strategy": (str,),
    "prob_senior": (int, float),
    "max_gap_tokens": (int,),
    "chunk_size": (int,),
    "first": (str,),
    "solo": (str,),
}


def selection_of(overrides: Any, default: SelectionConfig) -> SelectionConfig:
    """The server's selection with what a request says otherwise. Ranges are the strategies' own business.

    Raises:
        Refused: unknown field, wrong type or unknown strategy.
    """
    if not isinstance(overrides, dict):
        raise Refused(f"tandem: expected an object with any of {', '.join(_FIELDS)}")
    for name, value in overrides.items():
        if name not in _FIELDS:
            raise Refused(f"tandem: unknown field {name!r}; known: {', '.join(_FIELDS)}")
        if not isinstance(value, _FIELDS[name]) or isinstance(value, bool):
            raise Refused(f"tandem.{name}: expected {_FIELDS[name][-1].__name__}, got {json.dumps(value)}")
        if isinstance(value, int) and abs(value) > MAX_WHOLE:  # the workers compute with 64 bits and die of more
            raise Refused(f"tandem.{name}: expected at most {MAX_WHOLE}, got {value}")
    for name, allowed in {"strategy": get_args(StrategyName), "first": get_args(Who), "solo": get_args(Who)}.items():
        if overrides.get(name, allowed[0]) not in allowed:
            raise Refused(f"tandem.{name}: {overrides[name]!r} is none of {', '.join(allowed)}")
    if "solo" in overrides:
        if len(overrides) > 1:
            raise Refused("tandem.solo: one author writes everything; leave the other fields out")
        overrides = {"strategy": "solo", "first": overrides["solo"]}
    return replace(default, **overrides)


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


def annotated(response: dict[str, Any], parsed: ParsedRequest, strategy: Strategy) -> dict[str, Any]:
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
    keys = torch.tensor([parsed.key(choice["index"]) for choice in choices], dtype=torch.int64)
    author = replay(strategy, keys, tokens, lengths).author
    for row, length, choice in zip(author.tolist(), lengths.tolist(), choices, strict=True):
        choice["authorship"] = row[:length]
    _hide_prompts(response, parsed)
    return response | {"tandem": _summary(parsed, int((author == 1).sum()), int(lengths.sum()))}


class StreamAuthors:
    """The authors of a streamed response, chunk by chunk."""

    def __init__(self, parsed: ParsedRequest, strategy: Strategy) -> None:
        self._parsed, self._strategy = parsed, strategy
        self._states: dict[int, tuple[torch.Tensor, Any]] = {}
        self._senior = self._total = 0
        self._rest = b""

    def events(self, data: bytes, *, last: bool = False) -> bytes:
        """Server-sent events, those that are complete; the beginning of another one waits for its end."""
        *complete, self._rest = (self._rest + data).split(b"\n\n")
        out = b"".join(self._event(event) + b"\n\n" for event in complete)
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
        _hide_prompts(chunk, self._parsed)
        if any(choice.get("finish_reason") is not None for choice in choices):
            chunk["tandem"] = _summary(self._parsed, self._senior, self._total)
        return chunk

    def _write(self, index: int, tokens: Iterable[int]) -> list[int]:
        if index not in self._states:
            self._states[index] = self._strategy.init(torch.tensor([self._parsed.key(index)]))
        authors = []
        for token in tokens:
            senior, state = self._states[index]
            authors.append(int(senior))
            self._states[index] = self._strategy.step(state, torch.tensor([token]))
        self._senior += sum(authors)
        self._total += len(authors)
        return authors


def _summary(parsed: ParsedRequest, senior: int, total: int) -> dict[str, Any]:
    return {
        "senior_frac": senior / total if total else None,
        "seed": parsed.seed,
        "strategy": parsed.selection.strategy,
        "version": VERSION,
    }


def _hide_prompts(response: dict[str, Any], parsed: ParsedRequest) -> None:
    """Prompt ids come with token ids; a client that asked for neither is spared their bulk."""
    if not parsed.show_prompt:
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
        self._parsed: ParsedRequest | None = None
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
                request, parsed = prepare(request, self._strategies.default)
                name = await self._strategies.acquire(parsed.selection)
            except Refused as error:
                raise HTTPException(400, str(error)) from None
            self._parsed = parsed
            extra = request.get("vllm_xargs") or {}
            if isinstance(extra, dict):
                request["vllm_xargs"] = extra | {"tandem_strategy": name}
            body = _dumps(request)
        return {"type": "http.request", "body": body, "more_body": False}

    def close(self) -> None:
        """The request has ended, however it did."""
        if self._parsed is not None:
            self._strategies.release(self._parsed.selection)

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200 and self._parsed is not None:
            kind = Headers(raw=message["headers"]).get("content-type", "")
            if kind.startswith("text/event-stream"):
                self._stream = StreamAuthors(self._parsed, self._strategies[self._parsed.selection])
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
        assert self._parsed is not None
        response = json.loads(self._body)
        if response is None:  # what vLLM answers to a client that is gone
            return self._body
        return _dumps(annotated(response, self._parsed, self._strategies[self._parsed.selection]))
