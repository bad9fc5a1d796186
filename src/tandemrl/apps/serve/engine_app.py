"""The OpenAI-compatible application over any engine with open calls. Bodies and errors are those of vLLM's server."""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tandemrl.apps.asgi import Message, Receive, Send, limited, refused_host
from tandemrl.apps.serve.asked import Asked, Reader
from tandemrl.apps.serve.conversations import NEW, Conversations, Refused
from tandemrl.apps.serve.engine_thread import EngineThread, Job
from tandemrl.apps.serve.requests import conversation_of, parse
from tandemrl.apps.serve.texts import VERSION, Authors, Speaker, TextStream, dumps, summary
from tandemrl.config import SelectionConfig
from tandemrl.rollout.engine import Completion, EngineError
from tandemrl.selection import Strategy

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
MAX_BODY = 1 << 24
"""The length in bytes of the longest request: a million tokens, and more."""
MAX_SELECTIONS = 32
"""How many selections a server remembers the strategies of, with their token tables."""


def application(
    thread: EngineThread,
    reader: Reader,
    speaker: Speaker,
    *,
    model: str,
    strategy_of: Callable[[SelectionConfig], Strategy],
    selection: SelectionConfig,
    hosts: Collection[str],
    api_key: str | None = None,
) -> Starlette:
    """The application.

    Args:
        thread: the engine. It is closed with the application.
        model: the name of the model in requests.
        strategy_of: makes the strategy of a selection, or raises ``ValueError``.
        selection: that of requests which name none.
        hosts: the names under which the server is asked.
        api_key: the key that clients have to send; None: none.
    """
    routes = _Routes(thread, reader, speaker, model, lru_cache(MAX_SELECTIONS)(strategy_of), selection)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(thread.close)

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
        middleware=[Middleware(_Gate, hosts=hosts, key=api_key)],
        exception_handlers={HTTPException: _http_error, EngineError: _failed, Exception: _failed},
        lifespan=lifespan,
    )


def error_body(message: str, status: int = 400, *, kind: str = "Bad Request", param: str | None = None) -> Any:
    """The body of an error, as OpenAI's and vLLM's servers write it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind, said = HTTPStatus(error.status_code).phrase, error.detail
    if error.status_code == 404:
        said = f"{request.url.path}: a tandem server answers {COMPLETIONS}, {CHAT} and {GENERATE} only"
    return JSONResponse(error_body(said, error.status_code, kind=kind), error.status_code)


async def _failed(request: HttpRequest, error: Exception) -> Response:
    said = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
    return JSONResponse(error_body(said, 500, kind="Internal Server Error"), 500)


class _Gate:
    """The middleware that refuses other hosts, bodies of more than ``MAX_BODY`` bytes, and, where models are asked,
    requests without the key."""

    def __init__(self, app: Callable[..., Awaitable[None]], hosts: Collection[str], key: str | None) -> None:
        self.app, self._hosts = app, hosts
        self._wanted = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sent = dict(scope["headers"]).get(b"authorization", b"")
        locked = self._wanted is not None and scope["path"].startswith(("/v1", "/inference"))
        if (host := refused_host(scope, self._hosts)) is not None:
            reason = f"Host {host!r} is not answered; name it at the start of the server: --allowed-host NAME"
            await JSONResponse(error_body(reason), 400)(scope, receive, send)
        elif locked and not hmac.compare_digest(sent, self._wanted or b""):
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        else:
            await self.app(scope, limited(receive, MAX_BODY, HTTPException), send)


@dataclass(slots=True)
class _Routes:
    """The endpoints."""

    _thread: EngineThread
    _reader: Reader
    _speaker: Speaker
    _model: str
    _strategy_of: Callable[[SelectionConfig], Strategy]
    _selection: SelectionConfig
    _conversations: Conversations = field(default_factory=Conversations)
    _began: int = field(default_factory=lambda: int(time.time()))

    async def health(self, request: HttpRequest) -> Response:
        return Response()

    async def version(self, request: HttpRequest) -> Response:
        return JSONResponse({"version": VERSION})

    async def models(self, request: HttpRequest) -> Response:
        context = self._reader.context
        card = {"id": self._model, "object": "model", "created": self._began, "owned_by": "tandemrl"}
        return JSONResponse({"object": "list", "data": [card | {"root": self._model, "max_model_len": context}]})

    async def tokenize(self, request: HttpRequest) -> Response:
        body = await _object(request)
        with _refusals():
            if "messages" in body:
                to_answer = body.get("add_generation_prompt", True) is True
                ids = self._reader.chat_ids(body, body.get("tools") or [], to_answer=to_answer)
            else:
                [ids] = self._reader.prompts(body)
        return JSONResponse({"count": len(ids), "max_model_len": self._reader.context, "tokens": ids})

    async def detokenize(self, request: HttpRequest) -> Response:
        body = await _object(request)
        with _refusals():
            [ids] = self._reader.prompts({"prompt": body.get("tokens")})
            if max(ids) >= self._thread.engine.vocabulary or min(ids) < 0:
                raise ValueError(f"tokens: expected ids below {self._thread.engine.vocabulary}")
        return JSONResponse({"prompt": self._reader.tokenizer.decode(ids)})

    async def completions(self, request: HttpRequest) -> Response:
        return await self._write(request, await _object(request), chat=False)

    async def chat(self, request: HttpRequest) -> Response:
        return await self._write(request, await _object(request), chat=True)

    async def generate(self, request: HttpRequest) -> Response:
        body = await _object(request)
        with _refusals():
            body = self._reader.of_tokens(body)
        return await self._write(request, body, chat=False, raw=True)

    async def _write(self, request: HttpRequest, body: Mapping[str, Any], *, chat: bool, raw: bool = False) -> Response:
        if body.get("model") not in (None, self._model):
            message = f"The model `{body['model']}` does not exist. This server has `{self._model}`."
            return JSONResponse(error_body(message, 404, kind="NotFoundError", param="model"), 404)
        with _refusals():
            asked = replace(self._read(body, chat=chat, session=request.headers.get("x-session-id")), raw=raw)
        exchange, streams = _Exchange(self._thread, self._speaker, self._reader.ends, asked, self._model), False
        try:
            with _refusals():
                exchange.submit()
            if asked.stream:
                streams = True
                return _Stream(self._chunks(exchange, body), partial(self._close, exchange))
            gone = asyncio.create_task(_left(request))
            written = asyncio.gather(*(asyncio.wrap_future(job.done) for job in exchange.jobs))
            try:
                first: list[asyncio.Future[Any]] = [gone, written]
                await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
                if not written.done():
                    return JSONResponse(None)
                whole = await asyncio.to_thread(exchange.whole, written.result())
                self._go_on(exchange, body)
                return JSONResponse(whole)
            finally:
                gone.cancel()
        finally:
            if not streams:
                self._close(exchange)

    async def _chunks(self, exchange: "_Exchange", body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        try:
            async for chunk in exchange.chunks():
                yield chunk
            self._go_on(exchange, body)
        except EngineError as error:
            yield _event(error_body(str(error), 500, kind="Internal Server Error"))
        finally:
            self._close(exchange)
        yield b"data: [DONE]\n\n"

    def _close(self, exchange: "_Exchange") -> None:
        """Hear that a request has ended, in whatever way."""
        self._thread.cancel(exchange.jobs)
        if not exchange.closed and (conversation := exchange.asked.parsed.conversation) is not None:
            self._conversations.give_back(conversation)
        exchange.closed = True

    def _go_on(self, exchange: "_Exchange", body: Mapping[str, Any]) -> None:
        """Add the turn to the conversation, if there is one and the turn is not empty."""
        conversation, [request, *_] = exchange.asked.parsed.conversation, exchange.asked.requests
        if conversation is not None and (turn := exchange.choices[0]["token_ids"]):
            after = conversation.after([*body["messages"], exchange.choices[0]["message"]], request.prompt, turn)
            exchange.asked = replace(exchange.asked, parsed=exchange.asked.parsed._replace(conversation=after))

    def _read(self, body: Mapping[str, Any], *, chat: bool, session: str | None) -> Asked:
        """Read a request. The conversation that it continues is taken from then on."""
        id = conversation_of(body)
        if id is not None and not chat:
            raise Refused(f"tandem.conversation: only {CHAT} has messages to go on from")
        known, ids = None if id in (None, NEW) else self._conversations.take(str(id)), None
        try:
            parsed = parse(body, self._selection, known)
            if known is not None:
                ids = self._reader.after(known, body)
            try:
                strategy = self._strategy_of(parsed.selection)
            except ValueError as error:
                raise Refused(f"tandem: {error}") from None
            return self._reader.read(body, parsed, strategy, chat=chat, ids=ids, session=session)
        except BaseException:
            if known is not None:
                self._conversations.give_back(known)
            raise


class _Stream(StreamingResponse):
    """A stream of events, and what is to be done at its end, in whatever way it comes."""

    def __init__(self, chunks: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(chunks, media_type="text/event-stream")
        self._close = close

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()


class _Exchange:
    """One request and its response."""

    def __init__(self, thread: EngineThread, speaker: Speaker, ends: Collection[int], asked: Asked, model: str) -> None:
        self._thread, self._speaker, self._ends, self.asked = thread, speaker, ends, asked
        self.jobs, self.closed = list[Job](), False
        self.choices: list[dict[str, Any]] = []
        """Those of the response, as soon as all is written."""
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        prefix = "chatcmpl" if asked.chat else "cmpl"
        kind = ("chat.completion" if asked.chat else "text_completion") + (".chunk" * (asked.chat and asked.stream))
        self._about = {"id": f"{prefix}-{secrets.token_hex(16)}", "object": kind, "created": int(time.time())}
        self._about["model"] = model
        if asked.raw:
            self._about = {"request_id": secrets.token_hex(16)}

    def submit(self) -> None:
        """Begin to write."""
        put = _from_any_thread(self._events)
        for i, each in enumerate(self.asked.requests):
            told = _told(put, i * len(each.keys)) if self.asked.stream else None
            self.jobs.append(self._thread.submit(each, told))
        for job in self.jobs if self.asked.stream else ():
            job.done.add_done_callback(lambda done: put(None))

    def whole(self, groups: Sequence[Sequence[Completion]]) -> dict[str, Any]:
        """The whole response."""
        asked, completions = self.asked, [one for group in groups for one in group]
        self._choose(completions)
        shown = asked.parsed.show_prompt
        prompt = {"prompt_token_ids": [*asked.requests[0].prompt]} if asked.chat and shown else {}
        tandem = summary(asked.parsed, completions)
        return {**self._about, "choices": self.choices, "usage": _usage(asked, completions), "tandem": tandem} | prompt

    def _choose(self, completions: Sequence[Completion]) -> None:
        requests = [request for request in self.asked.requests for _ in request.keys]
        for index, (request, one) in enumerate(zip(requests, completions, strict=True)):
            choice = self._speaker.choice(self.asked, index, one) | {"authorship": one.author.tolist()}
            if self.asked.parsed.show_prompt and not self.asked.chat:
                choice["prompt_token_ids"] = [*request.prompt]
            self.choices.append(choice)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The server-sent events of a stream.

        Raises:
            EngineError: the engine failed.
        """
        asked, parsed = self.asked, self.asked.parsed
        requests = [request for request in asked.requests for _ in request.keys]
        streams = [TextStream(self._speaker.tokenizer, asked.style, self._ends) for _ in requests]
        authors = [Authors(each.strategy, parsed.key(i), parsed.history) for i, each in enumerate(requests)]
        prompts = [{"prompt_token_ids": [*each.prompt]} if parsed.show_prompt else {} for each in requests]

        def chunk(index: int, said: Mapping[str, Any], **more: Any) -> bytes:
            choice = {"index": index, **said, "authorship": authors[index].of(said.get("token_ids", ()))}
            if not asked.chat:  # with the first chunk of a choice
                choice, prompts[index] = choice | prompts[index], {}
            return _event({**self._about, "choices": [choice]} | more)

        for index in range(len(streams)) if asked.chat else ():
            said = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            yield chunk(index, said, **prompts[index])
        open_jobs = len(self.jobs)
        while open_jobs:
            if (event := await self._events.get()) is None:
                open_jobs -= 1
                continue
            index, tokens, logprobs = event
            yield chunk(index, self._speaker.piece(asked, streams[index], tokens, logprobs))
        completions = [one for job in self.jobs for one in job.done.result()]
        self._choose(completions)
        tandem = summary(parsed, completions)
        for index, (stream, choice) in enumerate(zip(streams, self.choices, strict=True)):
            eos = completions[index].stop_reason == "eos"
            yield chunk(index, self._speaker.last(asked, stream, choice, eos=eos), tandem=tandem)
        if asked.usage:
            yield _event({**self._about, "choices": [], "usage": _usage(asked, completions)})


def _event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def _usage(asked: Asked, completions: Sequence[Completion]) -> dict[str, int]:
    read = sum(len(request.prompt) for request in asked.requests)
    written = sum(len(one.tokens) for one in completions)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _from_any_thread(events: asyncio.Queue[Any]) -> Callable[[Any], None]:
    """Puts something into a queue of the running loop, from any thread."""
    loop = asyncio.get_running_loop()

    def put(event: Any) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(events.put_nowait, event)

    return put


def _told(put: Callable[[Any], None], first: int) -> Callable[[int, list[int], list[float]], None]:
    """What tells of a job's tokens, by the index of the choice; that of its first key is ``first``."""
    return lambda number, tokens, logprobs: put((first + number, tokens, logprobs))


@contextmanager
def _refusals() -> Iterator[None]:
    """Turns what is wrong with a request into an answer of status 400."""
    try:
        yield
    except (ValueError, EngineError) as error:  # bad keys and rows are ValueErrors
        raise HTTPException(400, str(error)) from None


async def _object(request: HttpRequest) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        HTTPException: it is none.
    """
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError):
        raise HTTPException(400, "the body: expected a JSON object") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "the body: expected a JSON object")
    return body


async def _left(request: HttpRequest) -> None:
    """Wait until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
