"""The OpenAI-compatible application over any engine with open calls. Bodies and errors are those of vLLM's server."""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from tandemrl.rollout.engine import Completion, EngineError, Request
from tandemrl.rollout.gateway.asgi import Door, json_object
from tandemrl.rollout.gateway.engine_thread import EngineThread
from tandemrl.rollout.gateway.fields import Refused
from tandemrl.rollout.gateway.requests import Asked, Form, Reader
from tandemrl.rollout.gateway.sessions import ROLES, Asking, NamedSessions, Session
from tandemrl.rollout.gateway.texts import VERSION, Chunks, Speaker, summary

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
FORMS: dict[str, Form] = {COMPLETIONS: "text", CHAT: "chat", GENERATE: "ids"}
MAX_BODY = 1 << 24
"""The length in bytes of the longest request: a million tokens, and more."""


def application(server: "Server", *, hosts: Collection[str], api_key: str | None = None) -> Starlette:
    """The application.

    Args:
        hosts: the names under which the server is asked.
        api_key: the key that clients have to send where models are asked; None: none.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(server.thread.close)

    locked = ("/v1", "/inference", *["/sessions"] * isinstance(server.sessions, NamedSessions))

    def admits(scope: Scope) -> bool:
        sent, wanted = dict(scope["headers"]).get(b"authorization", b""), f"Bearer {api_key}".encode()
        open_to_all = api_key is None or not scope["path"].startswith(locked)
        return open_to_all or hmac.compare_digest(sent, wanted)

    hint = "name it at the start of the server: --allowed-host NAME"
    asked = [
        *(Route(path, partial(server.write, form=form), methods=["POST"]) for path, form in FORMS.items()),
        Route("/v1/models", server.models),
    ]
    return Starlette(
        routes=[
            *asked,
            Mount("/sessions/{session}", routes=asked),
            Route("/tokenize", server.tokenize, methods=["POST"]),
            Route("/detokenize", server.detokenize, methods=["POST"]),
            Route("/health", server.health),
            Route("/version", server.version),
        ],
        middleware=[Middleware(Door, hosts=hosts, limit=MAX_BODY, hint=hint, refusal=_error, admits=admits)],
        exception_handlers={HTTPException: _http_error, EngineError: _failed, Exception: _failed},
        lifespan=lifespan,
    )


def error_body(message: str, status: int = 400, *, kind: str = "", param: str | None = None) -> Any:
    """The body of an error, as OpenAI's and vLLM's servers write it."""
    kind = kind or HTTPStatus(status).phrase
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def _error(status: int, message: str, **more: str) -> Response:
    return JSONResponse(error_body(message, status, **more), status)


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    unknown = f"{request.url.path}: a tandem server answers {COMPLETIONS}, {CHAT} and {GENERATE} only"
    return _error(error.status_code, unknown if error.status_code == 404 else error.detail)


async def _failed(request: HttpRequest, error: Exception) -> Response:
    return _error(500, str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Server:
    """The endpoints."""

    thread: EngineThread
    """The engine. It is closed with the application."""
    reader: Reader
    speaker: Speaker
    model: str
    """The name of the model in requests."""
    sessions: dict[str, Session] = field(default_factory=dict)
    """By name: those that are open. Unless they are `NamedSessions`, a name is a secret: whoever knows it may ask."""
    began: float = field(default_factory=time.time)

    async def health(self, request: HttpRequest) -> Response:
        return Response()

    async def version(self, request: HttpRequest) -> Response:
        return JSONResponse({"version": VERSION})

    async def models(self, request: HttpRequest) -> Response:
        session = self._session(request)
        context = self.reader.context if session is None else session.limits.context
        card = {"object": "model", "created": int(self.began), "owned_by": "tandemrl", "root": self.model}
        names = (self.model, *(() if session is None else ROLES))
        return JSONResponse({"object": "list", "data": [{"id": id, **card, "max_model_len": context} for id in names]})

    def _session(self, request: HttpRequest) -> Session | None:
        """The session of a request.

        Raises:
            HTTPException: it is not open.
        """
        name = request.path_params.get("session")
        try:
            return None if name is None else self.sessions[name]
        except KeyError:
            raise HTTPException(410, "this session is closed, or was never open") from None

    async def tokenize(self, request: HttpRequest) -> Response:
        body = await json_object(request)
        with _refusals():
            ids = self.reader.tokens(body)
        return JSONResponse({"count": len(ids), "max_model_len": self.reader.context, "tokens": ids})

    async def detokenize(self, request: HttpRequest) -> Response:
        body = await json_object(request)
        with _refusals():
            ids = self.reader.tokens({"prompt": body.get("tokens")})
            if max(ids) >= self.thread.engine.vocabulary or min(ids) < 0:
                raise Refused(f"tokens: expected ids below {self.thread.engine.vocabulary}")
        return JSONResponse({"prompt": self.reader.tokenizer.decode(ids)})

    async def write(self, request: HttpRequest, form: Form) -> Response:
        body, session = await json_object(request), self._session(request)
        if session is None and body.get("model") not in (None, self.model):
            message = f"The model `{body['model']}` does not exist. This server has `{self.model}`."
            return _error(404, message, kind="NotFoundError", param="model")
        with _refusals():
            if session is None:
                exchange = _Exchange(self, self.reader.read(body, form, session=request.headers.get("x-session-id")))
            else:
                again = request.headers.get("x-stainless-retry-count", "0") != "0"  # as OpenAI's clients say it
                begun = session.begin(body, form, retry=again)
                while isinstance(begun, Future):  # until others of the session have ended
                    await asyncio.wrap_future(begun)
                    begun = session.begin(body, form)
                try:
                    exchange = _Exchange(self, *begun, session)
                except EngineError:
                    session.drop(begun[1])
                    raise
        if exchange.asked.wants("stream"):
            return _Stream(exchange)
        gone = asyncio.create_task(_left(request))
        try:
            either: list[asyncio.Future[Any]] = [gone, exchange.written]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(None if gone.done() else await asyncio.to_thread(exchange.whole))
        finally:
            gone.cancel()
            exchange.close()


class _Exchange:
    """One request, which is being written from the beginning on, and its response."""

    def __init__(
        self, server: Server, asked: Asked, asking: Asking | None = None, session: Session | None = None
    ) -> None:
        self._server, self.asked, self._asking, self._session = server, asked, asking, session
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self._job = server.thread.submit(asked.requests, self._hear if asked.wants("stream") else None)
        if asking is not None:
            asking.cancel = partial(server.thread.cancel, self._job)
        self.written: asyncio.Future[list[Completion]] = asyncio.wrap_future(self._job.done)
        self.written.add_done_callback(self._end)
        self._about: dict[str, Any] = {"request_id": secrets.token_hex(16)}
        if asked.form != "ids":
            begin, kind = ("chatcmpl", "chat.completion") if asked.form == "chat" else ("cmpl", "text_completion")
            kind += ".chunk" * (asked.form == "chat" and asked.wants("stream"))
            id = f"{begin}-{secrets.token_hex(16)}"
            self._about = {"id": id, "object": kind, "created": int(time.time()), "model": server.model}

    def _hear(self, *tokens: Any) -> None:
        """Hear of tokens, in the thread of the engine."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits for them
            self._loop.call_soon_threadsafe(self._events.put_nowait, tokens)

    def _end(self, written: "asyncio.Future[list[Completion]]") -> None:
        if not written.cancelled():
            written.exception()  # else asyncio complains if nobody asks for it, being gone
        self._events.put_nowait(None)

    def close(self) -> None:
        """Hear that the request has ended, in whatever way."""
        self._server.thread.cancel(self._job)
        if self._session is not None and self._asking is not None:
            self._session.drop(self._asking)

    def whole(self) -> dict[str, Any]:
        """The whole response, once all is written.

        Raises:
            EngineError: the engine failed.
        """
        told = self._told()
        if self.asked.wants("return_token_ids"):
            prompts = [{"prompt_token_ids": [*request.prompt]} for request, _ in self._keys]
            if self.asked.form == "chat":
                told |= prompts[0]
            else:
                told["choices"] = [choice | prompt for choice, prompt in zip(told["choices"], prompts, strict=True)]
        self._go_on(told["choices"][0])
        return self._about | told

    @property
    def _keys(self) -> list[tuple[Request, int]]:
        """The request and the key of each choice."""
        return [(request, key) for request in self.asked.requests for key in request.keys]

    def _told(self) -> dict[str, Any]:
        """What was written.

        Raises:
            EngineError: the engine failed, or the request was given up.
        """
        if self.written.cancelled():
            raise EngineError("this request was given up: its session is closed, or it was sent again")
        asked, completions = self.asked, self.written.result()
        choices = [self._server.speaker.choice(asked, index, one) for index, one in enumerate(completions)]
        read = sum(len(request.prompt) for request in asked.requests)
        written = sum(len(one.tokens) for one in completions)
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return {"choices": choices, "usage": usage, "tandem": summary(asked, completions)}

    def _go_on(self, choice: Mapping[str, Any]) -> None:
        """Add the turn to the session, if there is one."""
        if self._session is not None and self._asking is not None:
            self._session.record(self._asking, self.written.result()[0], self.asked.body, choice.get("message"))

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events of a stream, to the end."""
        try:
            async for chunk in self._chunks():
                yield _event(self._about | chunk)
        except EngineError as error:
            yield _event(error_body(str(error), 500))
        self.close()  # before the client can go on
        yield b"data: [DONE]\n\n"

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        asked, speaker = self.asked, self._server.speaker
        streams = [Chunks(speaker, asked, index, *each) for index, each in enumerate(self._keys)]
        for stream in streams if asked.form == "chat" else ():
            yield stream.begin()
        while (event := await self._events.get()) is not None:
            index, tokens, logprobs = event
            yield streams[index].further(tokens, logprobs)
        told = self._told()
        self._go_on(told["choices"][0])  # before the client can go on
        for stream, choice in zip(streams, told["choices"], strict=True):
            yield stream.last(choice) | {"tandem": told["tandem"]}
        if (asked.body.get("stream_options") or {}).get("include_usage"):
            yield {"choices": [], "usage": told["usage"]}


class _Stream(StreamingResponse):
    """The stream of an exchange, which is closed in whatever way it ends."""

    def __init__(self, exchange: _Exchange) -> None:
        super().__init__(exchange.events(), media_type="text/event-stream")
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.close()


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns what is wrong with a request into an answer of status 400."""
    try:
        yield
    except (ValueError, EngineError) as error:  # bad keys and rows are ValueErrors
        raise HTTPException(400, str(error)) from None


async def _left(request: HttpRequest) -> None:
    """Wait until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
