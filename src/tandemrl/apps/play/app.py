"""The page of `tandemrl play` and the four questions that it asks, for one person on this machine.

The browser keeps the text; each question brings it along. Only requests whose Host, and Origin where there is one, are
this machine are answered: no page from elsewhere can talk to the models.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.resources import files
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tandemrl.apps.asgi import LOOPBACK, limited, refused_host
from tandemrl.apps.play.duo import Draft, Duo, Piece
from tandemrl.apps.play.problems import MAX_NEW, Problems
from tandemrl.config import SelectionConfig, load
from tandemrl.config.strategies import KINDS
from tandemrl.files import is_unicode
from tandemrl.rollout.engine import EngineError

MAX_BODY = 1 << 20
AT_ONCE = 16
"""Tokens that one question may ask for: the page asks again and again, and can stop in between."""
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
STRATEGIES = tuple(name for name, kind in KINDS.items() if not kind.by_turns)
DEFAULT = SelectionConfig()
SELECTABLE = ("strategy", "first", "prob_senior", "max_gap_tokens", "chunk_size")
"""Keys of ``selection`` that the page may set."""


class Refused(ValueError):
    """A question that cannot be answered; the message says what is wrong with it."""


def application(
    duo: Duo, problems: Problems, *, about: Mapping[str, str], begin_with: SelectionConfig = DEFAULT
) -> Starlette:
    """The web application.

    Args:
        problems: the prompts that the page offers, beginning with the first, and marks as correct or incorrect.
        about: what the page calls the ``senior`` and the ``junior``.
        begin_with: who writes at first. Its strategy may be a custom one, which the page then offers, too.
    """
    lock = Lock()  # the models answer one question at a time

    def question(answer: Callable[[Mapping[str, Any]], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            def locked(body: Mapping[str, Any]) -> Any:
                with lock:
                    return answer(body)

            try:
                return JSONResponse(await run_in_threadpool(locked, await _body(request)), headers=HEADERS)
            except HTTPException as error:
                return _error(error.status_code, error.detail)
            except (ValueError, EngineError) as error:  # what is refused is a ValueError, bad keys and rows included
                return _error(400, str(error))
            except Exception as error:  # of a user's own reward, or of the device: the page shows it
                return _error(500, f"{type(error).__name__}: {error}")

        return endpoint

    def draft(body: Mapping[str, Any]) -> Draft:
        return draft_of(body, begin_with, apart=duo.apart)

    def write(body: Mapping[str, Any]) -> dict[str, Any]:
        return _shown(duo.write(draft(body), _whole(body.get("count"), "count", 1, AT_ONCE)))

    def say(body: Mapping[str, Any]) -> dict[str, Any]:
        text = body.get("text")
        if not isinstance(text, str) or not text or not is_unicode(text):
            raise Refused("text: expected what you typed")
        return _shown(duo.say(draft(body), text))

    def grade(body: Mapping[str, Any]) -> dict[str, Any]:
        written = draft(body)
        verdict = problems.verdict(written.prompt, duo.response(written))
        return {"verdict": None if verdict is None else verdict._asdict()}

    def begin(body: Mapping[str, Any]) -> dict[str, Any]:
        offered = {"strategies": strategies_of(begin_with, apart=duo.apart), "problems": problems.prompts}
        defaults = asdict(begin_with) | {"max_tokens": min(MAX_NEW, duo.longest)}
        return {**about, **offered, "defaults": defaults}

    routes = [Route(f"/{each.__name__}", question(each), methods=["POST"]) for each in (begin, write, say, grade)]
    pages = [Route(path, _page(name)) for path, name in {"/": "play.html", **{f"/{n}": n for n in _ASSETS}}.items()]
    return Starlette(routes=[*pages, *routes], middleware=[Middleware(_Door)])


_ASSETS = ("play.css", "play.js", "share.js")


class _Door:
    """The middleware that refuses requests to other hosts, and bodies of more than `MAX_BODY` bytes."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif (host := refused_host(scope, LOOPBACK)) is not None:
            await _error(400, f"requests to {host!r} are not answered; open http://127.0.0.1")(scope, receive, send)
        else:
            await self.app(scope, limited(receive, MAX_BODY, HTTPException), send)


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status, headers=HEADERS)


def _page(name: str) -> Callable[[Request], Any]:
    content = (files("tandemrl.apps.play") / "page" / name).read_bytes()
    media_type = TYPES[name[name.rindex(".") :]]

    async def endpoint(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return endpoint


async def _body(request: Request) -> Mapping[str, Any]:
    """The JSON object of a question from our own page.

    Raises:
        Refused: it comes from another page, or is something else.
        HTTPException: it is too long.
    """
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers["host"]:
        raise Refused(f"requests from {origin} are not answered")
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise Refused("expected application/json")
    try:
        body = json.loads(await request.body() or b"{}")
    except RecursionError:
        raise Refused("nested too deeply") from None
    if not isinstance(body, dict):
        raise Refused("expected a JSON object")
    return body


def strategies_of(begin_with: SelectionConfig, *, apart: bool = False) -> tuple[str, ...]:
    """The strategies that the page offers: those of one turn, and the one that it begins with.

    Args:
        apart: whether the models have two vocabularies, so that only some strategies work.
    """
    able = [name for name in STRATEGIES if not apart or KINDS[name].by_text is not None]
    return tuple(dict.fromkeys((*able, begin_with.strategy)))


def draft_of(body: Mapping[str, Any], begin_with: SelectionConfig = DEFAULT, *, apart: bool = False) -> Draft:
    """The text that a question brings along.

    Args:
        apart: see ``strategies_of``.

    Raises:
        ValueError: a field is of another type, or out of range; names it.
    """
    prompt, temperature = body.get("prompt"), body.get("temperature", 1.0)
    if not isinstance(prompt, str) or not prompt.strip() or not is_unicode(prompt):
        raise Refused("prompt: expected a text")
    tokens, authors = ([_whole(each, name) for each in body.get(name, ())] for name in ("tokens", "authors"))
    if len(tokens) != len(authors) or not set(authors) <= {0, 1}:
        raise Refused("authors: expected 0 or 1 for each of the tokens")
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise Refused("temperature: expected a number")
    selection = _selection(body.get("selection", {}), begin_with, apart=apart)
    seed, given = _whole(body.get("seed", 0), "seed"), _whole(body.get("given", 0), "given", high=len(tokens))
    return Draft(prompt, seed, selection, float(temperature), tuple(tokens), tuple(authors), given)


def _selection(given: Any, begin_with: SelectionConfig, *, apart: bool) -> SelectionConfig:
    """Who writes. Ranges are those of the configuration; its texts are no code, and its numbers no texts."""
    if not isinstance(given, dict) or not set(given) <= set(SELECTABLE):
        raise Refused(f"selection: expected an object with any of {', '.join(SELECTABLE)}")
    given, able = {"strategy": begin_with.strategy} | given, strategies_of(begin_with, apart=apart)
    for name, allowed in (("strategy", able), ("first", ("senior", "junior"))):
        if given.get(name, allowed[0]) not in allowed:
            raise Refused(f"selection.{name}: expected one of {', '.join(allowed)}")
    for name in SELECTABLE[2:]:
        if isinstance(given.get(name, 0), bool) or not isinstance(given.get(name, 0), (int, float)):
            raise Refused(f"selection.{name}: expected a number")
    chosen = load(overrides=[f"selection.{name}={value}" for name, value in given.items()]).selection
    own = begin_with.parameters if chosen.strategy == begin_with.strategy else {}
    return replace(chosen, parameters=own)


def _whole(value: Any, name: str, low: int = 0, high: int = 2**53) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise Refused(f"{name}: expected a whole number from {low} to {high}")
    return value


def _shown(piece: Piece) -> dict[str, Any]:
    return {"tokens": [token._asdict() for token in piece.tokens], "stop": piece.stop, "next": int(piece.next)}
