"""An ASGI middleware that adds the author of every token to the responses of an OpenAI-compatible server.

It gives every request a seed, from which its keys follow, and recomputes the authors of the response from keys and
tokens. The server behind it is vLLM's (``vllm_server``) or our own over any other engine (``engine_server``). Both take
a request in vLLM's form: ``vllm_xargs`` names the strategy and holds the turns before, and ``kv_transfer_params`` the
token ids of a conversation's prompt.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from tandemrl.apps.asgi import LOOPBACK, Message, Receive, Send, limited, refused_host
from tandemrl.apps.serve.conversations import NEW, Conversation, Conversations, Refused, post, prompt_of
from tandemrl.apps.serve.registry import Strategies
from tandemrl.apps.serve.requests import ParsedRequest, conversation_of, prepare
from tandemrl.apps.serve.responses import StreamAuthors, annotated, dumps
from tandemrl.rollout.vllm.rows import history_arguments

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TOKENIZE = "/tokenize"
PATHS = (COMPLETIONS, CHAT)
GENERATING = ("/v1/", "/v2/", "/inference/", "/cohere/", "/invocations", "/generative_scoring")
"""The beginnings of POST paths that start a generation. Only ``PATHS`` have a place for seeds and authors."""
MAX_BODY = 1 << 24
"""The length in bytes of the longest request: a million tokens, and more."""


class Backend(NamedTuple):
    """What the middleware needs of the server behind it.

    strategies: the strategies that the server knows. ends: the token ids that end a turn. hosts: the names under which
    the server is asked (see `apps.asgi.is_ours`). told: those of ``ends`` that the server itself does not know, so that
    each request has to name them. models: the names under which it answers, for the error of another one. chat: gives
    the token ids of a chat that the server must not render itself, else None (`asked.Reader.guarded_ids`). context: how
    many tokens a sequence may have.
    """

    strategies: Strategies
    ends: frozenset[int]
    hosts: Collection[str]
    told: frozenset[int] = frozenset()
    models: Collection[str] = ()
    chat: Callable[[Mapping[str, Any]], Sequence[int] | None] = lambda body: None
    context: int = 0


class Authorship:
    """The middleware around a server. The docstring of the module says what it adds.

    It rewrites the body of a request when the application reads it, so after authentication. A refusal is an
    ``HTTPException`` at that point, which the server renders like its own errors. Responses with an error status pass
    unchanged, as do requests on paths that start no generation. Paths that start one and are not in ``PATHS`` are
    refused, and so are requests to other hosts and bodies of more than ``MAX_BODY`` bytes.

    Args:
        app: the ASGI application of the server.
        backend_of: what the state of the application, once it has started, says of the server.
        error: the exception for a status and a message that the server renders.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        backend_of: Callable[[Any], Backend],
        error: Callable[[int, str], Exception] = HTTPException,
    ) -> None:
        self.app, self.error = app, error
        self.backend: Backend | None = None
        self.conversations = Conversations()
        self._backend_of = backend_of

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self.backend = self._backend_of(scope["app"].state)
            await self.app(scope, receive, send)
            return
        assert self.backend is not None
        if (host := refused_host(scope, self.backend.hosts)) is not None:
            reason = f"Host {host!r} is not answered; name it at the start of the server: --allowed-host NAME"
            await _refusal(reason)(scope, receive, send)
            return
        if scope["type"] == "http":
            receive = limited(receive, scope["headers"], MAX_BODY, self.error)
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "POST" or not path.startswith((TOKENIZE, *GENERATING)):
            await self.app(scope, receive, send)
        elif path == TOKENIZE:
            await self._tokenize(self.backend, scope, receive, send)
        elif path in PATHS:
            exchange = _Exchange(self, self.backend, dict(scope), receive, send)
            try:
                await self.app(scope, exchange.receive, exchange.send)
            finally:
                exchange.close()
        else:
            await _refusal(f"{path}: a tandem server answers {' and '.join(PATHS)} only")(scope, receive, send)

    async def _tokenize(self, backend: Backend, scope: Message, receive: Receive, send: Send) -> None:
        """Answer with the ids of a chat, or let the server answer."""
        read = [await receive()]  # the whole body: see `limited`
        try:
            body = json.loads(read[0].get("body", b""))
            ids = backend.chat(body) if isinstance(body, dict) and "messages" in body else None
        except Refused as error:
            await _refusal(str(error))(scope, receive, send)
            return
        except (ValueError, RecursionError):  # the server says what is wrong
            ids = None
        if ids is not None:
            answer = {"count": len(ids), "max_model_len": backend.context, "tokens": [*ids], "token_strs": None}
            await JSONResponse(answer)(scope, receive, send)
            return

        async def again() -> Message:
            return read.pop() if read else await receive()

        await self.app(scope, again, send)


def hosts_of(host: str, allowed: Collection[str]) -> Collection[str]:
    """The names under which a server is asked: this machine's, that which it listens at, and those that it was given.

    Args:
        host: the name or address that it listens at.
        allowed: further names.
    """
    return {*LOOPBACK, socket.gethostname(), socket.getfqdn(), host, *allowed}


def _refusal(reason: str) -> JSONResponse:
    return JSONResponse(error_body(reason), 400)


def error_body(message: str, status: int = 400, *, kind: str = "Bad Request", param: str | None = None) -> Any:
    """The body of an error, as OpenAI's and vLLM's servers write it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


_RENDERED = ("model", "tools", "chat_template", "chat_template_kwargs")
"""The fields of a request that determine how its messages are rendered."""


class _Exchange:
    """One request and its response."""

    def __init__(self, server: Authorship, backend: Backend, scope: Message, receive: Receive, send: Send) -> None:
        self._server, self._scope, self._strategies, self._ends = server, scope, backend.strategies, backend.ends
        self._told, self._models, self._chat = backend.told, backend.models, backend.chat
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
        """The request for the application, with the prepared body."""
        if self._read:
            return await self._receive()
        self._read = True
        message = await self._receive()  # the whole body: see `limited`
        if message["type"] != "http.request":
            return message
        try:
            request = json.loads(message["body"])
        except (ValueError, RecursionError):  # the server says what is wrong
            return message
        if isinstance(request, dict):
            if self._models and isinstance(name := request.get("model"), str) and name not in self._models:
                has = ", ".join(f"`{model}`" for model in self._models)
                raise self._server.error(404, f"The model `{name}` does not exist. This server has {has}.")
            try:
                request = await self._prepared(request)
            except Refused as error:
                raise self._server.error(400, str(error)) from None
            message = {**message, "body": dumps(request)}
        return message

    async def _prepared(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The prepared body, with the prompt of the conversation, if there is one, and the name of the strategy.

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
            prompt = await prompt_of(known, known.further(request), partial(self._render, request), self._ends)
            body["kv_transfer_params"] = {"prompt_token_ids": prompt}  # vLLM's way of taking ids instead of messages
        elif self._scope["path"].endswith(CHAT) and (ids := self._chat(request)) is not None:
            body["kv_transfer_params"] = {"prompt_token_ids": [*ids]}
        stops = body.get("stop_token_ids") or []
        if self._told and not body.get("ignore_eos") and isinstance(stops, list):
            body["stop_token_ids"] = [*stops, *sorted(self._told)]
        name = await self._strategies.acquire(parsed.selection)
        self._parsed, self._conversation = parsed, parsed.conversation
        self._messages = request.get("messages") or []
        if isinstance(extra, dict):
            body["vllm_xargs"] = extra | {"tandem_strategy": name, **history_arguments(parsed.history)}
        return body

    async def _render(self, request: Mapping[str, Any], messages: Sequence[Any], to_write: bool) -> list[int]:
        """Render messages with the server's route ``/tokenize``.

        Args:
            request: the body of the request, of which the fields in ``_RENDERED`` are used.
            messages: the messages to render.
            to_write: whether the prompt of a turn of the assistant follows them.

        Returns:
            The token ids.

        Raises:
            Refused: the server cannot render the messages.
        """
        asked = {name: request[name] for name in _RENDERED if name in request}
        asked |= {"messages": messages, "add_generation_prompt": to_write}
        if (ids := self._chat(asked)) is not None:
            return [*ids]
        status, answer = await post(self._server.app, self._scope, TOKENIZE, asked)
        if status != 200:
            raise Refused(f"messages: the chat template cannot render them: {json.dumps(answer)}")
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
        if response is None:  # the answer to a client that is gone
            return self._body
        prompt = response.get("prompt_token_ids")
        whole = annotated(response, self._parsed, self._strategies[self._parsed.selection])
        if self._conversation is not None:
            [choice] = whole["choices"]
            self._go_on(choice["message"], prompt, choice["token_ids"])
        return dumps(whole)

    def _go_on(self, message: Mapping[str, Any], prompt: Sequence[int], turn: Sequence[int]) -> None:
        """Add a turn to the conversation, if there is one and the turn is not empty.

        Args:
            message: the message of the turn, as the client knows it.
            prompt: the token ids of the turn's prompt.
            turn: the own tokens of the turn.
        """
        if self._conversation is not None and turn:
            self._conversation = self._conversation.after([*self._messages, message], prompt, turn)
