"""The page of `tandemrl play` and the five questions that it asks, for one person on this machine.

The browser keeps the text; each question brings it along. Only requests whose Host, and Origin where there is one, are
this machine are answered: no page from elsewhere can talk to the models.
"""

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

from tandemrl.apps.play.duo import Draft, Duo, Piece
from tandemrl.apps.play.problems import MAX_NEW, Problems
from tandemrl.config import SelectionConfig
from tandemrl.config.strategies import KINDS
from tandemrl.files import is_unicode
from tandemrl.rollout.engine import EngineError
from tandemrl.rollout.gateway import fields
from tandemrl.rollout.gateway.asgi import LOOPBACK, Door, json_object
from tandemrl.rollout.gateway.fields import Kind, Refused, whole

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
DEFAULT = SelectionConfig()
_WHOLE = whole(0, 2**53)
_DRAFT = {
    "prompt": Kind(lambda text: isinstance(text, str) and bool(text.strip()) and is_unicode(text), "a text"),
    "tokens": fields.list_of(_WHOLE),
    "authors": fields.list_of(whole(-1, 1)),
    **{"seed": _WHOLE, "given": _WHOLE, "temperature": fields.NUMBER, "selection": fields.OBJECT},
}


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
        return draft_of(body, begin_with, turns=duo.turns)

    def write(body: Mapping[str, Any]) -> dict[str, Any]:
        fields.check({"count": 0, **body}, {"count": whole(1, AT_ONCE)})
        return _shown(duo.write(draft(body), body["count"]))

    def say(body: Mapping[str, Any]) -> dict[str, Any]:
        typed = Kind(lambda text: isinstance(text, str) and bool(text) and is_unicode(text), "what you typed")
        fields.check({"text": "", **body}, {"text": typed})
        return _shown(duo.say(draft(body), body["text"]))

    def grade(body: Mapping[str, Any]) -> dict[str, Any]:
        written = draft(body)
        answered = duo.answered(written)
        verdict = None if answered is None else problems.verdict(written.prompt, *answered)
        return {"verdict": None if verdict is None else verdict._asdict()}

    def handovers(body: Mapping[str, Any]) -> dict[str, Any]:
        written = draft(body)
        return {"places": duo.handovers(written, *problems.graded(written.prompt))}

    def begin(body: Mapping[str, Any]) -> dict[str, Any]:
        offered = {
            "strategies": strategies_of(begin_with, turns=duo.turns),
            "problems": problems.prompts,
            "handovers": not duo.turns,
        }
        defaults = asdict(begin_with) | {"max_tokens": min(MAX_NEW, duo.longest)}
        return {**about, **offered, "defaults": defaults}

    asked = (begin, write, say, grade, handovers)
    routes = [Route(f"/{each.__name__}", question(each), methods=["POST"]) for each in asked]
    pages = [Route(path, _page(name)) for path, name in {"/": "play.html", **{f"/{n}": n for n in _ASSETS}}.items()]
    door = Middleware(Door, hosts=LOOPBACK, limit=MAX_BODY, hint="open http://127.0.0.1", refusal=_error)
    return Starlette(routes=[*pages, *routes], middleware=[door])


_ASSETS = ("play.css", "play.js", "share.js")


def _error(status: int, message: str) -> Response:
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
    return fields.stated(await json_object(request))


def strategies_of(begin_with: SelectionConfig, *, turns: bool) -> tuple[str, ...]:
    """The strategies that the page offers, and the one that it begins with.

    Args:
        turns: whether texts have several turns, so that those by turns work.
    """
    able = [name for name, kind in KINDS.items() if turns or not kind.by_turns]
    return tuple(dict.fromkeys((*able, begin_with.strategy)))


def draft_of(body: Mapping[str, Any], begin_with: SelectionConfig, *, turns: bool) -> Draft:
    """The text that a question brings along.

    Args:
        turns: see ``strategies_of``.

    Raises:
        ValueError: a field is of another type, or out of range; names it.
    """
    fields.check({"prompt": "", **body}, _DRAFT)
    tokens, authors, given = body.get("tokens") or (), body.get("authors") or (), body.get("given") or 0
    if len(tokens) != len(authors) or given > len(tokens) or (-1 in authors and not turns):
        raise Refused("authors: expected 0 or 1 for each of the tokens, and given within them")
    selected, offered = fields.stated(body.get("selection") or {}), strategies_of(begin_with, turns=turns)
    fields.check(selected, {"strategy": fields.one_of(*offered), **fields.SELECTION}, "selection.", only=True)
    selection = fields.with_selected(replace(DEFAULT, strategy=begin_with.strategy), selected)
    if selection.strategy == begin_with.strategy:
        selection = replace(selection, parameters=begin_with.parameters)
    temperature = float(body.get("temperature", 1.0))
    return Draft(body["prompt"], body.get("seed") or 0, selection, temperature, tuple(tokens), tuple(authors), given)


def _shown(piece: Piece) -> dict[str, Any]:
    return {"tokens": [token._asdict() for token in piece.tokens], "stop": piece.stop}
