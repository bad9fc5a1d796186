"""An ASGI middleware that adds the author of every token to the responses of vLLM's OpenAI-compatible server.

``Authorship`` gives every request a seed, from which the worker derives its keys. It recomputes the authors of the
response from keys and tokens.

A request may have a field ``"tandem": {...}``. It holds ``{"solo": "senior"}`` or ``{"solo": "junior"}``, or any of
``strategy``, ``prob_senior``, ``max_gap_tokens``, ``chunk_size`` and ``first``, which then replace the server's values.
For a chat it may also hold ``conversation``, which continues a chat from request to request (see ``conversations``).

Every choice of a response, streamed or not, has ``authorship``, with one entry for each of its ``token_ids``: 1 for the
senior, 0 for the junior. The response has ``tandem``; in a stream, each chunk that ends a choice has it. It holds the
senior's share of the tokens, the seed that repeats the request, the strategy, our version and the id of the
conversation, if there is one.
"""

import asyncio
import importlib.metadata
import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

from tandemrl.asgi import LOOPBACK, Message, Receive, Send, limited, refused_host
from tandemrl.config import SelectionConfig
from tandemrl.config.strategies import KINDS
from tandemrl.rollout.engine import EngineError, replay_turns
from tandemrl.rollout.vllm.conversations import (
    NEW,
    Conversation,
    Conversations,
    Refused,
    StreamedTurn,
    eos_of,
    post,
    prompt_of,
)
from tandemrl.rollout.vllm.registry import Strategies
from tandemrl.rollout.vllm.settings import history_arguments
from tandemrl.selection import Strategy, Who, resumed
from tandemrl.selection.draws import mix64

CHAT = "/v1/chat/completions"
PATHS = ("/v1/completions", CHAT)
GENERATING = ("/v1/", "/v2/", "/inference/", "/cohere/", "/invocations", "/generative_scoring")
"""The beginnings of vLLM's POST paths that start a generation. Only ``PATHS`` have a place for seeds and authors."""
MAX_WHOLE = 2**31
"""The largest whole number that a request may contain, except for seeds."""
MAX_BODY = 1 << 24
"""The length in bytes of the longest request: a million tokens, and more."""
SEED_BITS = 53  # of a seed that we choose, so that JSON readers with doubles only can keep it
VERSION = importlib.metadata.version("tandemrl")


class ParsedRequest(NamedTuple):
    """The part of a request that its response depends on.

    selection: who writes. seed: the seed of its first sample. samples: how many completions each prompt gets (``n``).
    show_prompt: whether the client wants the prompt's token ids.
    """

    selection: SelectionConfig
    seed: int
    samples: int
    show_prompt: bool
    conversation: Conversation | None = None
    """The conversation before the request, or a new one; None if the request is not part of a conversation."""

    @property
    def history(self) -> tuple[tuple[int, ...], ...]:
        """The own tokens of each earlier turn."""
        return () if self.conversation is None else self.conversation.turns

    def key(self, index: int) -> int:
        """The key of the choice ``index``. vLLM gives sample i of every prompt the seed ``seed + i``."""
        return mix64(self.seed + index % self.samples)


# ------------------------------------------------------------------------------------------------------------- requests


def prepare(
    body: Mapping[str, Any], default: SelectionConfig, known: Conversation | None = None
) -> tuple[dict[str, Any], ParsedRequest]:
    """Check a request and prepare it for vLLM.

    Args:
        body: the JSON body of the request.
        default: the server's selection.
        known: the conversation that the request continues.

    Returns:
        The body for vLLM, which has a seed and asks for token ids, and the part of the request that its response
        depends on.

    Raises:
        Refused: a field is not possible in tandem decoding. The message names it and what it should be.
    """
    field = body.get
    rules: list[tuple[bool, str]] = [
        (not field("use_beam_search"), "use_beam_search: beams have no single author per token"),
        (not field("echo"), "echo: send the prompt along yourself; only generated tokens have authors"),
        (field("prompt_logprobs") is None, "prompt_logprobs: a prompt has no author"),
        (not field("prompt_embeds"), "prompt_embeds: the two models have different embeddings; send text or token ids"),
        (field("kv_transfer_params") is None, "kv_transfer_params: there is no other server to take KV from"),
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

    tandem = {} if field("tandem") is None else field("tandem")
    selection = selection_of(tandem, default if known is None else known.selection)
    samples = _whole(body, "n", 1, 1, MAX_WHOLE)
    seed = None if field("seed") == -1 else _whole(body, "seed", None, 0, 2**63 - samples)
    conversation = known
    if known is not None:
        seed = known.seed if seed is None else seed
        if (seed, selection) != (known.seed, known.selection):
            raise Refused("seed, tandem: a conversation keeps those of its first request; leave them out")
    if seed is None:
        if _prompts(field("prompt")) > 1:
            raise Refused(
                "prompt: several prompts in one request share its seed, so equal prompts would get equal completions; "
                "send `seed` if you want that, else one request per prompt"
            )
        seed = secrets.randbits(SEED_BITS)
    if conversation_of(body) == NEW:
        conversation = Conversation.begin(seed, selection, body)
    if conversation is not None:
        for name, usual in {"n": 1, "add_generation_prompt": True, "continue_final_message": False}.items():
            if field(name) not in (None, usual):
                raise Refused(f"{name}: only {json.dumps(usual)} is possible in a conversation")
    parsed = ParsedRequest(selection, seed, samples, bool(field("return_token_ids")), conversation)
    rest = {name: value for name, value in body.items() if name != "tandem"}
    return rest | {"seed": seed, "n": samples, "return_token_ids": True}, parsed


_FIELDS: dict[str, tuple[type, ...]] = {
    "strategy": (str,),
    "prob_senior": (int, float),
    "max_gap_tokens": (int,),
    "chunk_size": (int,),
    "first": (str,),
    "solo": (str,),
    "conversation": (str,),
}


def selection_of(overrides: Any, default: SelectionConfig) -> SelectionConfig:
    """The selection of a request: the server's, with the values that the request gives.

    The strategies themselves check whether values are in range.

    Args:
        overrides: the field ``tandem`` of the request.
        default: the server's selection.

    Raises:
        Refused: a field is unknown, has the wrong type, or names an unknown strategy or author.
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
    for name, allowed in {"strategy": (*KINDS,), "first": get_args(Who), "solo": get_args(Who)}.items():
        if overrides.get(name, allowed[0]) not in allowed:
            raise Refused(f"tandem.{name}: {overrides[name]!r} is none of {', '.join(allowed)}")
    overrides = {name: value for name, value in overrides.items() if name != "conversation"}
    if "solo" in overrides:
        if len(overrides) > 1:
            raise Refused("tandem.solo: one author writes everything; leave the other fields out")
        overrides = {"strategy": "solo", "first": overrides["solo"]}
    return replace(default, **overrides)


def conversation_of(body: Mapping[str, Any]) -> str | None:
    """``NEW`` or the id of the conversation that a request names; None if it names none."""
    tandem = body.get("tandem")
    id = tandem.get("conversation") if isinstance(tandem, dict) else None
    return id if isinstance(id, str) else None


def _whole(body: Mapping[str, Any], name: str, default: Any, low: int, high: int) -> Any:
    """A whole number of a request, or ``default`` if it has none.

    vLLM also reads "3" and true as numbers. These are refused, since the authors depend on the exact number.

    Args:
        body: the JSON body of the request.
        name: the field.
        default: the value if the field is missing or null.
        low: the smallest possible number.
        high: the largest possible number.

    Raises:
        Refused: the value is not a whole number from ``low`` to ``high``.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise Refused(f"{name}: expected a whole number from {low} to {high}, got {json.dumps(value)}")
    return value


def _object(value: Any) -> dict[str, Any]:
    """``value`` if it is a JSON object, else an empty one. vLLM itself refuses other values."""
    return value if isinstance(value, dict) else {}


def _prompts(prompt: Any) -> int:
    """How many prompts a completion request has. A list of numbers is one tokenised prompt."""
    return len(prompt) if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt) else 1


# ------------------------------------------------------------------------------------------------------------ responses


def annotated(response: dict[str, Any], parsed: ParsedRequest, strategy: Strategy) -> dict[str, Any]:
    """A whole response with its authors and the summary ``tandem``.

    Args:
        response: vLLM's response, whose choices are changed.
        parsed: the request.
        strategy: the strategy of the request's selection.

    Raises:
        EngineError: vLLM returned a choice without token ids.
    """
    choices = response["choices"]
    if any(choice.get("token_ids") is None for choice in choices):
        raise EngineError("vLLM returned a choice without token ids: its authors cannot be told")
    turns = [[np.array(turn) for turn in (*parsed.history, choice["token_ids"])] for choice in choices]
    replayed = replay_turns(strategy, [parsed.key(choice["index"]) for choice in choices], turns)
    before, senior, total = sum(map(len, parsed.history)), 0, 0
    for row, choice in zip(replayed.author.tolist(), choices, strict=True):
        choice["authorship"] = row[before : before + len(choice["token_ids"])]
        senior, total = senior + sum(choice["authorship"]), total + len(choice["authorship"])
    _hide_prompts(response, parsed)
    return response | {"tandem": _summary(parsed, senior, total)}


class StreamAuthors:
    """Adds the authors to a streamed response, chunk by chunk.

    Args:
        parsed: the request.
        strategy: the strategy of the request's selection.
    """

    def __init__(self, parsed: ParsedRequest, strategy: Strategy) -> None:
        self._parsed, self._strategy = parsed, strategy
        self._states: dict[int, tuple[torch.Tensor, Any]] = {}
        if parsed.history:
            self._states[0] = resumed(strategy, torch.tensor([parsed.key(0)]), [parsed.history])
        self._senior = self._total = 0
        self._rest = b""
        self.written = StreamedTurn()
        """What was written so far. It stays empty if the request is not part of a conversation."""

    def events(self, data: bytes, *, last: bool = False) -> bytes:
        """The complete server-sent events so far, with authors. An incomplete event is kept until the rest of it comes.

        Args:
            data: the next bytes of the stream.
            last: whether the stream ends here. Then an incomplete event is returned as it is.
        """
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
        if self._parsed.conversation is not None:
            self.written.add(chunk)
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
    """The field ``tandem`` of a response with ``total`` tokens, of which the senior wrote ``senior``."""
    return {
        "senior_frac": senior / total if total else None,
        "seed": parsed.seed,
        "strategy": parsed.selection.strategy,
        "version": VERSION,
    } | ({} if parsed.conversation is None else {"conversation": parsed.conversation.id})


def _hide_prompts(response: dict[str, Any], parsed: ParsedRequest) -> None:
    """Remove the prompt's token ids if the client did not ask for them. vLLM sends them with the token ids."""
    if not parsed.show_prompt:
        for place in (response, *(response.get("choices") or ())):
            place.pop("prompt_token_ids", None)


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


# ----------------------------------------------------------------------------------------------------------- middleware


class Authorship:
    """The ASGI middleware around vLLM's server. The docstring of the module says what it adds.

    It rewrites the body of a request when the application reads it, so after authentication. A refusal is an
    ``HTTPException`` at that point, which vLLM renders like its own errors. Responses with an error status pass
    unchanged, as do requests on paths that start no generation. Paths that start one and are not in ``PATHS`` are
    refused, and so are requests to other hosts (see ``hosts_of``) and bodies of more than ``MAX_BODY`` bytes.

    Args:
        app: vLLM's ASGI application.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.hosts: Collection[str] = LOOPBACK
        self.strategies: Strategies | None = None
        self.conversations = Conversations()
        self.ends = frozenset[int]()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            state = scope["app"].state
            self.strategies, self.ends = Strategies.of(state), eos_of(state.vllm_config.model_config)
            self.hosts = hosts_of(state.args)
            await self.app(scope, receive, send)
            return
        if (host := refused_host(scope, self.hosts)) is not None:
            reason = f"Host {host!r} is not answered; name it at the start of the server: --allowed-host NAME"
            await _refusal(reason)(scope, receive, send)
            return
        if scope["type"] == "http":
            receive = limited(receive, scope["headers"], MAX_BODY, HTTPException)
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or not path.startswith(GENERATING):
            await self.app(scope, receive, send)
        elif path in PATHS:
            assert self.strategies is not None
            exchange = _Exchange(self, dict(scope), receive, send)
            try:
                await self.app(scope, exchange.receive, exchange.send)
            finally:
                exchange.close()
        else:
            await _refusal(f"{path}: a tandem server answers {' and '.join(PATHS)} only")(scope, receive, send)


def hosts_of(args: Any) -> Collection[str]:
    """The names under which a server is asked: this machine's, that which it listens at, and those that it was given.

    Args:
        args: the arguments of ``server.server_arguments``.
    """
    return {*LOOPBACK, socket.gethostname(), socket.getfqdn(), args.host, *args.allowed_hosts}


def _refusal(reason: str) -> JSONResponse:
    return JSONResponse({"error": {"message": reason, "type": "Bad Request", "param": None, "code": 400}}, 400)


_RENDERED = ("model", "tools", "chat_template", "chat_template_kwargs")
"""The fields of a request that determine how its messages are rendered."""


class _Exchange:
    """One request and its response."""

    def __init__(self, server: Authorship, scope: Message, receive: Receive, send: Send) -> None:
        assert server.strategies is not None
        self._server, self._scope, self._strategies = server, scope, server.strategies
        self._receive, self._send = receive, send
        self._read = False
        self._parsed: ParsedRequest | None = None
        self._messages: list[Any] = []
        self._conversation: Conversation | None = None
        """The conversation as it will be given back."""
        self._start: Message | None = None  # of a whole response, until its body is there
        self._body = b""
        self._stream: StreamAuthors | None = None

    async def receive(self) -> Message:
        """The request for the application, with the body that is prepared for vLLM."""
        if self._read:
            return await self._receive()
        self._read = True
        message = await self._receive()  # the whole body: see `limited`
        if message["type"] != "http.request":
            return message
        try:
            request = json.loads(message["body"])
        except (ValueError, RecursionError):  # vLLM says what is wrong
            return message
        if isinstance(request, dict):
            try:
                request = await self._prepared(request)
            except Refused as error:
                raise HTTPException(400, str(error)) from None
            message = {**message, "body": _dumps(request)}
        return message

    async def _prepared(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The body for vLLM, with the prompt of the conversation, if there is one, and the name of the strategy.

        Raises:
            Refused: the request asks for something that tandem decoding cannot do.
        """
        id = conversation_of(request)
        if id is not None and not self._scope["path"].endswith(CHAT):
            raise Refused(f"tandem.conversation: only {CHAT} has messages to go on from")
        if id not in (None, NEW):
            self._conversation = self._server.conversations.take(id)
        known = self._conversation
        body, parsed = prepare(request, self._strategies.default, known)
        extra = body.get("vllm_xargs") or {}
        if known is not None:
            prompt = await prompt_of(known, known.further(request), partial(self._render, request), self._server.ends)
            body["kv_transfer_params"] = {"prompt_token_ids": prompt}  # vLLM's way of taking ids instead of messages
        name = await self._strategies.acquire(parsed.selection)
        self._parsed, self._conversation = parsed, parsed.conversation
        self._messages = request.get("messages") or []
        if isinstance(extra, dict):
            body["vllm_xargs"] = extra | {"tandem_strategy": name, **history_arguments(parsed.history)}
        return body

    async def _render(self, request: Mapping[str, Any], messages: Sequence[Any], to_write: bool) -> list[int]:
        """Render messages with vLLM's route ``/tokenize``.

        Args:
            request: the body of the request, of which the fields in ``_RENDERED`` are used.
            messages: the messages to render.
            to_write: whether the prompt of a turn of the assistant follows them.

        Returns:
            The token ids.

        Raises:
            Refused: vLLM cannot render the messages.
        """
        asked = {name: request[name] for name in _RENDERED if name in request}
        asked |= {"messages": messages, "add_generation_prompt": to_write}
        status, answer = await post(self._server.app, self._scope, "/tokenize", asked)
        if status != 200:
            raise Refused(f"messages: vLLM cannot render them: {json.dumps(answer)}")
        return answer["tokens"]

    def close(self) -> None:
        """Release the strategy and the conversation, since the request has ended in whatever way."""
        if self._parsed is not None:
            self._strategies.release(self._parsed.selection)
        if self._conversation is not None:
            self._server.conversations.give_back(self._conversation)

    async def send(self, message: Message) -> None:
        """Send a part of the response to the client, with authors. Without streaming, wait until it is complete."""
        if message["type"] == "http.response.start" and message["status"] == 200 and self._parsed is not None:
            kind = Headers(raw=message["headers"]).get("content-type", "")
            if kind.startswith("text/event-stream"):
                # A replay of thousands of tokens takes a while, here and below.
                strategy = self._strategies[self._parsed.selection]
                self._stream = await asyncio.to_thread(StreamAuthors, self._parsed, strategy)
            else:
                self._start = message
                return
        elif message["type"] == "http.response.body" and self._stream is not None:
            body, more = message.get("body", b""), message.get("more_body", False)
            message = {**message, "body": self._stream.events(body, last=not more)}
            if not more and self._stream.written.ended:
                self._go_on(self._stream.written.message, self._stream.written.prompt, self._stream.written.tokens)
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body", False):
                return
            body = await asyncio.to_thread(self._annotated)
            MutableHeaders(raw=self._start["headers"])["content-length"] = str(len(body))
            await self._send(self._start)
            message = {"type": "http.response.body", "body": body}
        await self._send(message)

    def _annotated(self) -> bytes:
        assert self._parsed is not None
        response = json.loads(self._body)
        if response is None:  # what vLLM answers to a client that is gone
            return self._body
        prompt = response.get("prompt_token_ids")
        whole = annotated(response, self._parsed, self._strategies[self._parsed.selection])
        if self._conversation is not None:
            [choice] = whole["choices"]
            self._go_on(choice["message"], prompt, choice["token_ids"])
        return _dumps(whole)

    def _go_on(self, message: Mapping[str, Any], prompt: Sequence[int], turn: Sequence[int]) -> None:
        """Add a turn to the conversation, if there is one and the turn is not empty.

        Args:
            message: the message of the turn, as the client knows it.
            prompt: the token ids of the turn's prompt.
            turn: the own tokens of the turn.
        """
        if self._conversation is not None and turn:
            self._conversation = self._conversation.after([*self._messages, message], prompt, turn)
