"""The page of `tandemrl play` as a client without a browser sees it."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the play extra")
from starlette.testclient import TestClient
from typer.testing import CliRunner

from helpers import CHAT_TEMPLATE, IDS, prepared, qwen3, small_qwen3, tokenizer
from tandemrl.apps.play.app import application
from tandemrl.apps.play.duo import PLACES, Draft, Duo
from tandemrl.apps.play.problems import EXAMPLE, Problems, known_problems
from tandemrl.cli.main import app as command
from tandemrl.config import SelectionConfig, load
from tandemrl.rewards.protocol import GraderError
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.tasks.generated.synthetic import uses_jargon


@pytest.fixture(scope="module")
def client() -> TestClient:
    senior, junior, chat = prepared(qwen3()), prepared(small_qwen3()), tokenizer()
    chat.chat_template = CHAT_TEMPLATE
    duo = Duo(TorchEngine(senior, junior, chat), junior, chat, longest=64)
    problems = Problems(load(), [replace(EXAMPLE, messages=({"role": "user", "content": "a b"},), ground_truth="b")])
    app = application(duo, problems, about={"senior": "S", "junior": "<script>"})
    return TestClient(app, base_url="http://127.0.0.1:8765")


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_inline_script(client: TestClient) -> None:
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    for path in ("/play.css", "/play.js", "/share.js"):
        assert path in page.text
        assert client.get(path).status_code == 200
        assert "http" not in client.get(path).text.replace("http-equiv", "")
    assert "onclick" not in page.text


def test_a_text_is_written_and_said(client: TestClient) -> None:
    begun = client.post("/begin", json={}).json()
    assert begun["junior"] == "<script>"
    draft: dict[str, Any] = {"prompt": begun["problems"][0], "seed": 4, "tokens": [], "authors": []}
    first = client.post("/write", json=draft | {"count": 4}).json()
    again = client.post("/write", json=draft | {"count": 4}).json()
    assert first == again
    assert len(first["tokens"]) == 4
    draft["tokens"] = [token["id"] for token in first["tokens"]]
    draft["authors"] = [token["author"] for token in first["tokens"]]
    said = client.post("/say", json=draft | {"text": "c"}).json()
    assert [token["author"] for token in said["tokens"]] == [0]
    graded = client.post("/grade", json=draft | {"tokens": [IDS["b"]], "authors": [0]}).json()
    assert graded == {"verdict": {"correct": False, "answer": None, "expected": "b"}}
    assert client.post("/grade", json=draft | {"prompt": "b a"}).json() == {"verdict": None}


def test_handing_over_is_harmful_in_jargon_and_nothing_between_equals(pair: Path, solver: Duo) -> None:
    """The right answer in jargon, which the junior cannot read. Between equal models every effect is exactly 0."""
    problems = Problems(*known_problems(str(pair / "senior")))
    asked, alone = problems.prompts[0], SelectionConfig("solo")
    for seed in range(40):
        tokens = solver.write(Draft(asked, seed, alone), 128).tokens
        text = "".join(token.text for token in tokens)
        if uses_jargon(text) and f"boxed{{{problems.rows[asked].ground_truth}}}" in text:
            break
    draft = {"prompt": asked, "seed": seed, "tokens": [t.id for t in tokens], "authors": [t.author for t in tokens]}
    client = TestClient(application(solver, problems, about={}), base_url="http://127.0.0.1:8765")
    assert client.post("/begin", json={}).json()["handovers"]
    places = client.post("/handovers", json=draft).json()["places"]
    ats = [place["at"] for place in places]
    assert ats == sorted({0, *ats})
    assert len(places) <= PLACES
    assert min(place["high"] for place in places) < 0
    assert all(place["low"] <= place["effect"] <= place["high"] for place in places)
    senior = solver.engine.models[0]
    same = Duo(TorchEngine(senior, senior, solver.tokenizer), senior, solver.tokenizer, longest=256)
    client = TestClient(application(same, problems, about={}), base_url="http://127.0.0.1:8765")
    assert {place["effect"] for place in client.post("/handovers", json=draft).json()["places"]} == {0.0}
    refused = client.post("/handovers", json=draft | {"prompt": "How many?"})
    assert (refused.status_code, "choose one of the problems" in refused.json()["error"]) == (400, True)


def test_a_junior_of_another_vocabulary_is_refused_with_what_works(tmp_path: Path) -> None:
    other = copy.deepcopy(tokenizer())
    other.add_tokens(["x y"])
    for name, words in (("senior", tokenizer()), ("junior", other)):
        words.save_pretrained(tmp_path / name)
    result = CliRunner().invoke(command, ["play", "--senior", f"{tmp_path}/senior", "--junior", f"{tmp_path}/junior"])
    assert result.exit_code == 2
    assert "another vocabulary than the senior; serve it (`tandemrl serve --engine torch`)" in result.stderr


def test_what_fails_is_said_as_json(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise GraderError("functions.mine: KeyError: 'x'")

    monkeypatch.setattr(Problems, "verdict", broken)
    draft = {"prompt": "a b", "seed": 4, "tokens": [IDS["b"]], "authors": [0]}
    answer = client.post("/grade", json=draft)
    assert answer.status_code == 500
    assert "GraderError: functions.mine: KeyError: 'x'" in json.dumps(answer.json(), ensure_ascii=False)


@pytest.mark.parametrize("question", ["write", "say", "grade", "handovers"])
def test_tokens_outside_the_vocabulary_are_refused_by_each_question(client: TestClient, question: str) -> None:
    for token in (999, 2**70, -1):
        body = {"prompt": "a b", "count": 1, "text": "c", "tokens": [token], "authors": [1]}
        answer = client.post(f"/{question}", json=body)
        assert answer.status_code == 400
        assert re.search("outside the vocabulary|whole number from 0", answer.json()["error"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": " "}, "prompt: expected a text"),
        ({"count": 17}, "count: expected a whole number from 1 to 16"),
        ({"tokens": [1]}, "authors: expected 0 or 1 for each"),
        ({"tokens": [1], "authors": [-1]}, "authors: expected 0 or 1 for each"),
        ({"tokens": [1], "authors": [2]}, "authors: expected a list, each a whole number from -1 to 1"),
        ({"prompt": "\ud800"}, "prompt: expected a text"),
        ({"temperature": float("nan")}, "temperature: expected a number"),
        ({"selection": {"strategy": "turn"}}, "selection.strategy: expected one of word, "),
        ({"selection": {"prob_senior": 2}}, "prob_senior must be in"),
        ({"selection": {"anneal_steps": 2}}, "selection.anneal_steps: unknown field; known: strategy, "),
        ({"temperature": -1}, "sampling.temperature must be 0"),
        ({"count": None}, "count: expected a whole number from 1 to 16"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(client: TestClient, change: dict[str, Any], message: str) -> None:
    body = json.dumps({"prompt": "a", "count": 1} | change)
    answer = client.post("/write", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert message in answer.json()["error"]


def test_what_is_null_is_as_if_it_were_not_there(client: TestClient) -> None:
    nothing = {"temperature": None, "seed": None, "selection": {"strategy": None, "first": None, "prob_senior": None}}
    body = {"prompt": "a", "count": 2}
    assert client.post("/write", json=body | nothing).json() == client.post("/write", json=body).json()
    assert "expected what you typed" in client.post("/say", json={"prompt": "a", "text": None}).json()["error"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example:8765"}, 400),
        ({"Origin": "http://evil.example"}, 400),
        ({"Origin": "http://127.0.0.1:9999"}, 400),
        ({"Content-Type": "text/plain"}, 400),
        ({"Origin": "http://127.0.0.1:8765"}, 200),
        ({"Host": "localhost:8765", "Origin": "http://localhost:8765"}, 200),
    ],
)
def test_only_this_machine_is_answered(client: TestClient, headers: dict[str, str], status: int) -> None:
    sent = {"Content-Type": "application/json"} | headers
    assert client.post("/begin", content=b"{}", headers=sent).status_code == status


def test_a_body_without_end_or_nested_without_end_is_refused(client: TestClient) -> None:
    long, none = "the body of a request may have at most 1048576 bytes", "the body: expected a JSON object"
    for content, wanted in ((iter([b" " * (1 << 18)] * 8), (413, long)), (b"[" * 100_000, (400, none))):
        answer = client.post("/begin", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]) == wanted
