"""The service of an index, as runs ask it."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandemrl.config import RetrievalConfig
from tandemrl.data.rows import Row
from tandemrl.rollout.engine import EngineError
from tandemrl.rollout.envs.environment import BrokenEnvironmentError
from tandemrl.rollout.envs.retrieval import Corpus, make_retriever, write_corpus

pytest.importorskip("bm25s", reason="needs the retrieval extra")
pytest.importorskip("Stemmer", reason="needs the retrieval extra")
testclient = pytest.importorskip("starlette.testclient", reason="needs the serve extra")

from tandemrl.apps.serve import corpus as corpus_server  # noqa: E402  # after what it needs

DOCS = [
    {"id": "a", "title": "Ann", "body": "Ann was born\nin Paris."},
    {"id": 7, "text": "The capital of France, on the Seine."},
    {"id": "c", "title": "Lyon", "text": "Foxes run in Lyon & Paris, Paris."},
]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(each) + "\n" for each in DOCS))
    write_corpus(tmp_path / "corpus.jsonl", tmp_path / "index")
    return tmp_path / "index"


@pytest.fixture
def client(index: Path) -> Iterator[Any]:
    with testclient.TestClient(corpus_server.application(Corpus(index)), base_url="http://127.0.0.1") as asking:
        yield asking


def ids(reply: Any) -> list[str]:
    assert reply.status_code == 200
    return [each["document"]["id"] for each in reply.json()["results"]]


def test_both_forms_of_a_query(client: Any) -> None:
    assert ids(client.post("/search", params={"query": "Paris", "top_n": 2})) == ["c", "a"]
    assert ids(client.post("/search", json={"query": "paris & foxes", "top_n": 1})) == ["c"]
    assert ids(client.post("/search", json={"query": "nothing of it", "top_n": 3})) == []
    assert client.get("/health").status_code == 200
    [found] = client.post("/search", json={"query": "born", "top_n": 5}).json()["results"]
    body = "Ann was born\nin Paris."
    assert found == {"document": {"id": "a", "title": "Ann", "text": f"# Ann\n{body}", "body": body}}


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"json": {"query": "Paris"}}, 400),
        ({"json": {"query": "Paris", "top_n": 0}}, 400),
        ({"json": {"query": ["Paris"], "top_n": 1}}, 400),
        ({"content": "Paris"}, 400),
        ({"content": "x" * (corpus_server.LONGEST + 1)}, 413),
        ({"json": {"query": "Paris", "top_n": 1}, "headers": {"host": "evil.example"}}, 400),
    ],
)
def test_what_is_no_query_is_refused(client: Any, asked: dict[str, Any], status: int) -> None:
    assert client.post("/search", **asked).status_code == status


def test_a_run_finds_by_the_service_what_it_finds_on_disk(client: Any, index: Path, monkeypatch: Any) -> None:
    from tandemrl.processes import http

    async def send(self: Any, path: str, body: Any) -> Any:
        reply = client.post(path, json=body)
        return http.Response(reply.status_code, reply.content)

    monkeypatch.setattr(http.Client, "_send", send)
    row = Row("q", ({"role": "user", "content": "?"},), "musique", "France", {})
    local = RetrievalConfig(retriever="bm25", index=str(index))
    served = RetrievalConfig(retriever="search", url="http://127.0.0.1:1", backoff_s=0.0)
    for query in ("Who was born in Paris?", "capital & foxes", "zebra"):
        expected = make_retriever(local)(row, query, 2)
        assert make_retriever(served)(row, query, 2) == expected


def test_no_index_and_a_port_in_use_are_refused(index: Path, tmp_path: Path) -> None:
    with pytest.raises(BrokenEnvironmentError, match="no whole index"):
        corpus_server.serve(tmp_path, host="127.0.0.1", port=0)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(EngineError, match="is in use"):
        corpus_server.serve(index, host="127.0.0.1", port=taken.getsockname()[1])
