"""The OpenAI-compatible application over any engine with open calls. Bodies and errors are those of vLLM's server."""

import asyncio
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tandemrl.apps.asgi import Door, json_object
from tandemrl.apps.fields import Refused
from tandemrl.apps.serve.conversations import NEW, Conversations
from tandemrl.apps.serve.engine_thread import EngineThread
from tandemrl.apps.serve.requests import Asked, Reader
from tandemrl.apps.serve.texts import VERSION, Authors, Speaker, TextStream, dumps, summary
from tandemrl.rollout.engine import Completion, EngineError

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MAX_BODY = 1 << 24
"""The length in bytes of the longest request: a million tokens, and more."""


def application(
    thread: EngineThread,
    reader: Reader,
    speaker: Speaker,
    *,
    model: str,
    hosts: Collection[str],
    api_key: str | None = None,
) -> Starlette:
    """The application.

    Args:
        thread: the engine. It is closed with the application.
        model: the name of the model in requests.
        hosts: the names under which the server is asked.
        api_key: the key that clients have to send where models are asked; None: none.
    """
    routes = _Routes(thread, reader, speaker, model)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(thread.close)

    def admits(scope: Scope) -> bool:
        sent, wanted = dict(scope["headers"]).get(b"authorization", b""), f"Bearer {api_key}".encode()
        return not scope["path"].startswith(("/v1", "/inference")) or hmac.compare_digest(sent, wanted)

    door: dict[str, Any] = {"hosts": hosts, "limit": MAX_BODY, "refusal": _error}
    door["hint"] = "name it at the start of the server: --allowed-host NAME"
    if api_key is not None:
        door["admits"] = admits
    return Starlette(
        routes=[
            Route(COMPLETIONS, routes.completions, methods=["POST"]),
            Route(CHAT, routes.chat, methods=["POST"]),
            Route(GENERATE, routes.generate, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/health", routes.health),
            Route("/version", routes.version),
        ],
        middleware=[Middleware(Door, **door)],
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


class _Routes:
    """The endpoints."""

    def __init__(self, thread: EngineThread, reader: Reader, speaker: Speaker, model: str) -> None:
        self.thread, self.reader, self.speaker, self.model = thread, reader, speaker, model
        self.conversations, self._began = Conversations(), int(time.time())

    async def health(self, request: HttpRequest) -> Response:
        return Response()

    async def version(self, request: HttpRequest) -> Response:
        return JSONResponse({"version": VERSION})

    async def models(self, request: HttpRequest) -> Response:
        card = {"id": self.model, "object": "model", "created": self._began, "owned_by": "tandemrl"}
        card |= {"root": self.model, "max_model_len": self.reader.context}
        return JSONResponse({"object": "list", "data": [card]})

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

    async def completions(self, request: HttpRequest) -> Response:
        return await self._write(request, await json_object(request), chat=False)

    async def chat(self, request: HttpRequest) -> Response:
        return await self._write(request, await json_object(request), chat=True)

    async def generate(self, request: HttpRequest) -> Response:
        body = await json_object(request)
        with _refusals():
            body = self.reader.of_tokens(body)
        return await self._write(request, body, chat=False, raw=True)

    async def _write(self, request: HttpRequest, body: Mapping[str, Any], **how: bool) -> Response:
        if body.get("model") not in (None, self.model):
            message = f"The model `{body['model']}` does not exist. This server has `{self.model}`."
            return _error(404, message, kind="NotFoundError", param="model")
        with _refusals():
            exchange = self._begin(body, session=request.headers.get("x-session-id"), **how)
        if exchange.asked.stream:
            return _Stream(exchange)
        gone = asyncio.create_task(_left(request))
        try:
            either: list[asyncio.Future[Any]] = [gone, exchange.written]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(await asyncio.to_thread(exchange.whole) if exchange.written.done() else None)
        finally:
            gone.cancel()
            exchange.close()

    def _begin(self, body: Mapping[str, Any], *, chat: bool, **how: Any) -> "_Exchange":
        """Read a request and begin to write. The conversation that it continues is taken from then on."""
        tandem = body.get("tandem")
        id, known = tandem.get("conversation") if isinstance(tandem, dict) else None, None
        if id is not None and not chat:
            raise Refused(f"tandem.conversation: only {CHAT} has messages to go on from")
        if id not in (None, NEW):
            known = self.conversations.take(str(id))
        try:
            return _Exchange(self, body, self.reader.read(body, chat=chat, known=known, **how))
        except BaseException:
            if known is not None:
                self.conversations.give_back(known)
            raise


class _Exchange:
    """One request, which is being written from the beginning on, and its response."""

    def __init__(self, routes: _Routes, body: Mapping[str, Any], asked: Asked) -> None:
        self._routes, self._body, self.asked = routes, body, asked
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[Any]()
        self._job = routes.thread.submit(asked.requests, self._hear if asked.stream else None)
        self.written: asyncio.Future[list[Completion]] = asyncio.wrap_future(self._job.done)
        self.written.add_done_callback(self._end)
        self._conversation, self._closed = asked.conversation, False
        self._choices = [(request, key) for request in asked.requests for key in request.keys]
        kind = ("chat.completion" if asked.chat else "text_completion") + (".chunk" * (asked.chat and asked.stream))
        id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{secrets.token_hex(16)}"
        self._about = {"id": id, "object": kind, "created": int(time.time()), "model": routes.model}
        if asked.raw:
            self._about = {"request_id": secrets.token_hex(16)}

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
        if not self._closed:
            self._closed = True
            self._routes.thread.cancel(self._job)
            if self._conversation is not None:
                self._routes.conversations.give_back(self._conversation)

    def whole(self) -> dict[str, Any]:
        """The whole response, once all is written.

        Raises:
            EngineError: the engine failed.
        """
        asked, completions = self.asked, self.written.result()
        choices = self._chosen(completions)
        prompt = {"prompt_token_ids": [*asked.requests[0].prompt]} if asked.chat and asked.show_prompt else {}
        self._go_on(choices)
        tandem = summary(asked, completions)
        return {**self._about, "choices": choices, "usage": self._usage(completions), "tandem": tandem} | prompt

    def _chosen(self, completions: list[Completion]) -> list[dict[str, Any]]:
        choices = []
        for index, ((request, _), one) in enumerate(zip(self._choices, completions, strict=True)):
            choice = self._routes.speaker.choice(self.asked, index, one) | {"authorship": one.author.tolist()}
            if self.asked.show_prompt and not self.asked.chat:
                choice["prompt_token_ids"] = [*request.prompt]
            choices.append(choice)
        return choices

    def _go_on(self, choices: list[dict[str, Any]]) -> None:
        """Add the turn to the conversation, if there is one and the turn is not empty."""
        if self._conversation is not None and (turn := choices[0]["token_ids"]):
            messages = [*self._body["messages"], choices[0]["message"]]
            self._conversation = self._conversation.after(messages, self.asked.requests[0].prompt, turn)

    async def events(self) -> AsyncIterator[bytes]:
        """The server-sent events of a stream, to the end."""
        try:
            async for chunk in self._chunks():
                yield chunk
        except EngineError as error:
            yield _event(error_body(str(error), 500))
        self.close()  # before the client can go on
        yield b"data: [DONE]\n\n"

    async def _chunks(self) -> AsyncIterator[bytes]:
        asked, speaker = self.asked, self._routes.speaker
        streams = [TextStream(speaker.tokenizer, asked.style, self._routes.reader.ends) for _ in self._choices]
        authors = [Authors(request.strategy, key, request.history) for request, key in self._choices]
        prompts = [{"prompt_token_ids": [*each.prompt]} if asked.show_prompt else {} for each, _ in self._choices]

        def chunk(index: int, said: Mapping[str, Any], **more: Any) -> bytes:
            choice = {"index": index, **said, "authorship": authors[index].of(said.get("token_ids", ()))}
            if not asked.chat:  # with the first chunk of a choice
                choice, prompts[index] = choice | prompts[index], {}
            return _event({**self._about, "choices": [choice]} | more)

        for index in range(len(streams)) if asked.chat else ():
            said = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            yield chunk(index, said, **prompts[index])
        while (event := await self._events.get()) is not None:
            index, tokens, logprobs = event
            yield chunk(index, speaker.piece(asked, streams[index], tokens, logprobs))
        completions = self.written.result()
        choices, tandem = self._chosen(completions), summary(asked, completions)
        for index, (stream, choice, one) in enumerate(zip(streams, choices, completions, strict=True)):
            yield chunk(index, speaker.last(asked, stream, choice, eos=one.stop_reason == "eos"), tandem=tandem)
        if asked.usage:
            yield _event({**self._about, "choices": [], "usage": self._usage(completions)})
        self._go_on(choices)

    def _usage(self, completions: list[Completion]) -> dict[str, int]:
        read = sum(len(request.prompt) for request in self.asked.requests)
        written = sum(len(one.tokens) for one in completions)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


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
    return b"data: " + dumps(value) + b"\n\n"


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
