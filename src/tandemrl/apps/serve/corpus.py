"""Serves an index of documents by the protocol that ``retrieval.retriever=search`` asks: POST /search, as rlvr's."""

from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tandemrl.data.documents import with_title
from tandemrl.rollout.envs.retrieval import Corpus
from tandemrl.rollout.gateway.address import hosts_of, listen, run, url_of
from tandemrl.rollout.gateway.asgi import Door, json_object

LONGEST = 1 << 20
"""Bytes of a request's body, at most."""


def application(corpus: Corpus, host: str = "127.0.0.1") -> Starlette:
    """``POST /search`` with ``query`` and ``top_n``, in the address or as a JSON object, and ``GET /health``.

    Args:
        host: where it listens, for the names under which it is asked.
    """

    async def search(request: Request) -> Response:
        asked = dict(request.query_params) or await json_object(request)
        query, count = asked.get("query"), str(asked.get("top_n", ""))
        if not isinstance(query, str) or not (count.isascii() and count.isdigit() and int(count) > 0):
            raise HTTPException(400, f"expected a text as query and a number above 0 as top_n, found {asked!r:.200}")
        found = await run_in_threadpool(corpus.search, query, int(count))
        documents = [  # with the text as it is searched, which this library's clients take
            {
                "id": each.id,
                "title": each.title,
                "text": each.text,
                "body": each.text.removeprefix(with_title(each.title, "")),
            }
            for each in found
        ]
        return JSONResponse({"results": [{"document": each} for each in documents]})

    async def health(_: Request) -> Response:
        return Response()

    def refusal(status: int, message: str) -> Response:
        return PlainTextResponse(message, status)

    routes = [Route("/search", search, methods=["POST"]), Route("/health", health)]
    door = Middleware(Door, hosts=hosts_of(host), limit=LONGEST, hint="ask by the address of it", refusal=refusal)
    return Starlette(routes=routes, middleware=[door])


def serve(index: Path, *, host: str, port: int) -> None:
    """Run the server until it is interrupted.

    Raises:
        BrokenEnvironmentError: the folder has no index. EngineError: nothing can listen at the port.
    """
    app = application(Corpus(index), host)
    with listen(host, port) as listening:
        url = url_of(host, listening)
        print(f"serving {index}: retrieval.retriever=search retrieval.url={url} (Ctrl-C ends it)", flush=True)
        run(app, listening)
