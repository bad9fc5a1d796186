"""The OpenAI-compatible application over any engine of the library: its routes, inside of ``Authorship``.

Bodies and errors are those of vLLM's server. The rest of the API that vLLM has is not there.
"""

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tandemrl.apps.asgi import Message, Receive, Send
from tandemrl.apps.serve.asked import Asked, Reader
from tandemrl.apps.serve.authorship import CHAT, COMPLETIONS, Authorship, Backend, error_body
from tandemrl.apps.serve.engine_thread import EngineThread, Job
from tandemrl.apps.serve.registry import DEFAULT_NAME, Strategies
from tandemrl.apps.serve.responses import VERSION, dumps
from tandemrl.apps.serve.texts import Speaker, TextStream
from tandemrl.config import SelectionConfig
from tandemrl.rollout.engine import Completion, EngineError
from tandemrl.selection import Strategy


def application(
    thread: EngineThread,
    reader: Reader,
    speaker: Speaker,
    *,
    model: str,
    strategy_of: Callable[[SelectionConfig], Strategy],
    selection: SelectionConfig,
    ends: frozenset[int],
    hosts: Collection[str],
    api_key: str | None = None,
) -> Starlette:
    """The application.

    Args:
        thread: the engine. It is closed with the application.
        model: the name of the model in requests.
        strategy_of: makes the strategy of a selection, or raises ``ValueError``.
        selection: that of requests which name none.
        ends: the token ids that end a turn.
        hosts: the names under which the server is asked.
        api_key: the key that clients have to send; None: none.
    """
    named: dict[str, Strategy] = {}

    async def register(strategies: dict[str, Strategy]) -> None:
        named.update(strategies)
        for name in named.keys() - strategies.keys():
            del named[name]

    backend = Backend(Strategies(selection, strategy_of, register), ends, hosts)
    named[DEFAULT_NAME] = backend.strategies[selection]
    routes = _Routes(thread, reader, speaker, model, named.__getitem__, ends)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(thread.close)

    middleware = [Middleware(Authorship, backend_of=lambda state: backend)]
    return Starlette(
        routes=[
            Route(COMPLETIONS, routes.completions, methods=["POST"]),
            Route(CHAT, routes.chat, methods=["POST"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/health", routes.health),
            Route("/version", routes.version),
        ],
        middleware=middleware if api_key is None else [*middleware, Middleware(_Key, key=api_key)],
        exception_handlers={HTTPException: _http_error, EngineError: _engine_error},
        lifespan=lifespan,
    )


async def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = HTTPStatus(error.status_code).phrase
    return JSONResponse(error_body(error.detail, error.status_code, kind=kind), error.status_code)


async def _engine_error(request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(error_body(str(error), 500, kind="Internal Server Error"), 500)


class _Key:
    """The middleware that asks for a key where models are asked."""

    def __init__(self, app: Callable[..., Awaitable[None]], key: str) -> None:
        self.app, self._wanted = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            sent = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(sent, self._wanted):
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class _Routes:
    """The endpoints."""

    def __init__(
        self,
        thread: EngineThread,
        reader: Reader,
        speaker: Speaker,
        model: str,
        strategy_of: Callable[[str], Strategy],
        ends: frozenset[int],
    ) -> None:
        self._thread, self._reader, self._speaker = thread, reader, speaker
        self._model, self._strategy_of, self._ends = model, strategy_of, ends
        self._began = int(time.time())

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
        return await self._write(request, chat=False)

    async def chat(self, request: HttpRequest) -> Response:
        return await self._write(request, chat=True)

    async def _write(self, request: HttpRequest, *, chat: bool) -> Response:
        body = await _object(request)
        if body.get("model") not in (None, self._model):
            message = f"The model `{body['model']}` does not exist. This server has `{self._model}`."
            return JSONResponse(error_body(message, 404, kind="NotFoundError", param="model"), 404)
        events: asyncio.Queue[Any] = asyncio.Queue()
        put, jobs = _from_any_thread(events), list[Job]()
        try:
            with _refusals():
                asked = self._reader.read(body, self._strategy_of, chat=chat)
                for i, each in enumerate(asked.requests):
                    before = i * len(each.keys)
                    jobs.append(self._thread.submit(each, _told(put, before) if asked.stream else None))
        except HTTPException:
            self._thread.cancel(jobs)
            raise
        prefix = "chatcmpl" if chat else "cmpl"
        kind = ("chat.completion" if chat else "text_completion") + (".chunk" if chat and asked.stream else "")
        about = {"id": f"{prefix}-{secrets.token_hex(16)}", "object": kind, "created": int(time.time())}
        about["model"] = self._model
        if asked.stream:
            for job in jobs:
                job.done.add_done_callback(lambda done: put(None))
            return StreamingResponse(self._chunks(asked, jobs, events, about), media_type="text/event-stream")
        gone = asyncio.create_task(_left(request))
        written = asyncio.gather(*(asyncio.wrap_future(job.done) for job in jobs))
        first: list[asyncio.Future[Any]] = [gone, written]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not written.done():
                return JSONResponse(None)
            return JSONResponse(await asyncio.to_thread(self._whole, asked, written.result(), about))
        finally:
            gone.cancel()
            self._thread.cancel(jobs)

    def _whole(self, asked: Asked, groups: list[list[Completion]], about: Mapping[str, Any]) -> dict[str, Any]:
        pairs = [(request, one) for request, group in zip(asked.requests, groups, strict=True) for one in group]
        choices = [
            self._speaker.choice(asked, index, one, request.prompt) for index, (request, one) in enumerate(pairs)
        ]
        prompt = {"prompt_token_ids": [*asked.requests[0].prompt]} if asked.chat else {}
        return {**about, "choices": choices, "usage": _usage(asked, [one for _, one in pairs])} | prompt

    async def _chunks(
        self, asked: Asked, jobs: list[Job], events: asyncio.Queue[Any], about: Mapping[str, Any]
    ) -> AsyncIterator[bytes]:
        """The server-sent events of a stream. ``events`` brings tokens, and None for each job that has ended."""
        samples = len(asked.requests[0].keys)
        streams = [TextStream(self._speaker.tokenizer, asked.style, self._ends) for _ in range(samples * len(jobs))]
        told = [[*asked.requests[index // samples].prompt] for index in range(len(streams))]

        def chunk(index: int, said: Mapping[str, Any]) -> bytes:
            choice = {"index": index, **said}
            if asked.chat or not told[index]:
                return _event({**about, "choices": [choice]})
            prompt, told[index] = told[index], []
            return _event({**about, "choices": [choice | {"prompt_token_ids": prompt}]})

        try:
            if asked.chat:
                for index in range(len(streams)):
                    said = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                    yield _event({**about, "choices": [{"index": index, **said}], "prompt_token_ids": told[0]})
            open_jobs = len(jobs)
            while open_jobs:
                event = await events.get()
                if event is None:
                    open_jobs -= 1
                    continue
                index, tokens, logprobs = event
                yield chunk(index, self._speaker.piece(asked, streams[index], tokens, logprobs))
            completions = [one for job in jobs for one in job.done.result()]
            for index, (stream, one) in enumerate(zip(streams, completions, strict=True)):
                yield chunk(index, self._speaker.last(asked, stream, one))
            if asked.usage:
                yield _event({**about, "choices": [], "usage": _usage(asked, completions)})
        except EngineError as error:
            yield _event(error_body(str(error), 500, kind="Internal Server Error"))
        finally:
            self._thread.cancel(jobs)
        yield b"data: [DONE]\n\n"


def _event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def _usage(asked: Asked, completions: list[Completion]) -> dict[str, int]:
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
