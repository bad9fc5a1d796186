"""``tandemrl serve``: what the middleware makes of requests and responses, and an OpenAI client of a real server."""

import asyncio
import contextlib
import copy
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pairs import CONTEXT, EOS, VLLM, greedy_gaps, models, reference, save
from transformers import AutoTokenizer
from typer.testing import CliRunner

from helpers import IDS, VOCABULARY, tokenizer
from real_model import smollm2
from tandemrl.config import SelectionConfig
from tandemrl.data.rows import chat_tokens
from tandemrl.models.loading import load_model
from tandemrl.rollout.engine import Completion, EngineError, Request, Sampling, replay_turns
from tandemrl.rollout.schedule import schedule_of
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, replay
from tandemrl.selection.draws import mix64
from tandemrl.training.checkpoint.export import export_hf

pytest.importorskip("tandemrl.rollout.vllm.server", reason="vllm brings fastapi")

from starlette.exceptions import HTTPException

from tandemrl.asgi import limited
from tandemrl.rollout.vllm import authorship, conversations, registry, server
from tandemrl.rollout.vllm.settings import TandemOptions

pytestmark = VLLM

DEFAULT = SelectionConfig(strategy="word", prob_senior=0.5, max_gap_tokens=4)
COMPLETIONS, CHAT = authorship.PATHS


def strategy_of(selection: SelectionConfig) -> Strategy:
    return schedule_of(selection, tokenizer(), VOCABULARY).strategy(1)


def authors(seed: int, tokens: Sequence[int], selection: SelectionConfig = DEFAULT) -> list[int]:
    """What a client computes for one choice."""
    keys, row = torch.tensor([mix64(seed)]), torch.tensor([tokens], dtype=torch.int64)
    return replay(strategy_of(selection), keys, row, torch.tensor([len(tokens)])).author[0].tolist()


# -------------------------------------------------------------------------------------------------- a stand-in for vLLM


@dataclass
class Fake:
    """An application with vLLM's routes around canned answers; ``seen`` are the bodies that reached it."""

    client: Any
    seen: list[dict[str, Any]]
    registered: list[dict[str, Strategy]]
    answer: dict[str, Any]

    def post(self, path: str = COMPLETIONS, **body: Any) -> Any:
        return self.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    from fastapi import Body, FastAPI, Request
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.testclient import TestClient

    app = FastAPI()
    seen: list[dict[str, Any]] = []
    registered: list[dict[str, Strategy]] = []
    answer: dict[str, Any] = {"status": 200, "body": {"choices": []}, "stream": None}

    async def collective_rpc(method: str, args: tuple[Any]) -> None:
        assert method == "tandem_register"
        registered.extend(args)

    # Nothing leaves this process, and functions whose types are checked cannot be pickled.
    monkeypatch.setattr(registry.cloudpickle, "dumps", lambda strategies: strategies)

    async def completions(body: dict[str, Any] = Body()) -> Any:  # noqa: B008
        seen.append(body)
        prompt = {"prompt_token_ids": answer["prompt"](body)} if "prompt" in answer else {}
        if body.get("stream") and "chunks" in answer:
            chunks = [answer["chunks"][0] | prompt, *answer["chunks"][1:], "data: [DONE]"]
            return StreamingResponse(iter([streamed(chunks)]), media_type="text/event-stream")
        if answer["stream"] is not None:
            return StreamingResponse(iter(answer["stream"]), media_type="text/event-stream")
        body = answer["body"] | prompt if isinstance(answer["body"], dict) else answer["body"]
        return JSONResponse(body, answer["status"])

    async def other(request: Request) -> Any:
        return JSONResponse({"heard": (await request.body()).decode()})

    async def tokenize(request: Request) -> Any:
        asked = json.loads(await request.body())
        return JSONResponse({"tokens": rendered(asked["messages"], asked["add_generation_prompt"])})

    for path in (COMPLETIONS, CHAT):
        app.post(path)(completions)
    app.post("/tokenize")(tokenize)
    for path in ("/detokenize", "/v1/responses", "/v1/models", "/health"):
        app.api_route(path, methods=["GET", "POST"])(other)
    app.add_middleware(authorship.Authorship)
    tokenizer().save_pretrained(tmp_path)
    app.state.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            tokenizer=str(tmp_path), get_vocab_size=lambda: VOCABULARY, try_get_generation_config=dict
        ),
        additional_config={"tandem": {"selection": vars(DEFAULT)}},
    )
    app.state.engine_client = SimpleNamespace(collective_rpc=collective_rpc)
    app.state.args = SimpleNamespace(host="gpu-7.example", allowed_hosts=["pair"])
    with TestClient(app, base_url="http://127.0.0.1:8000") as client:
        yield Fake(client, seen, registered, answer)


def rendered(messages: Sequence[Any], to_write: bool = True) -> list[int]:
    """A template that shows names of tools that are called, ends a turn with EOS and a newline, and hides the first of
    several turns: a prompt that is rendered anew is another one."""
    hidden = [i for i, message in enumerate(messages) if message["role"] == "assistant"][:-1]
    ids: list[int] = []
    for i, message in enumerate(messages):
        calls = "".join(call["function"]["name"] for call in message.get("tool_calls") or ())
        text = message["role"][0] + ("" if i in hidden else (message["content"] or "") + calls)
        ids += [*tokenizer().encode(text), EOS, IDS["Ċ"]]
    return [*ids, IDS["!"]] if to_write else ids


def written(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


# ------------------------------------------------------------------------------------------------------------- requests


def test_a_request_gets_a_seed_and_asks_for_token_ids(fake: Fake) -> None:
    body = {"model": "m", "prompt": "a", "temperature": 0.5, "vllm_xargs": {"mine": 1}}
    for _ in range(2):
        assert fake.post(**body).status_code == 200
    one, two = fake.seen
    assert 0 <= one["seed"] != two["seed"] < 2**53
    wanted = {"n": 1, "return_token_ids": True, "vllm_xargs": {"mine": 1, "tandem_strategy": "default"}}
    assert {name: value for name, value in one.items() if name != "seed"} == body | wanted
    assert fake.registered == []


@pytest.mark.parametrize("seed", [0, 3, 2**63 - 2])
def test_a_seed_of_the_client_stays(fake: Fake, seed: int) -> None:
    assert fake.post(prompt="a", seed=seed, n=2).json()["tandem"]["seed"] == seed
    assert (fake.seen[0]["seed"], fake.seen[0]["n"]) == (seed, 2)


def test_minus_one_is_no_seed_as_in_vllm(fake: Fake) -> None:
    assert fake.post(prompt="a", seed=-1).status_code == 200
    assert fake.seen[0]["seed"] >= 0


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"use_beam_search": True}, "use_beam_search"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt_embeds": "AA=="}, "prompt_embeds"),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"vllm_xargs": {"tandem_key": 1}}, "vllm_xargs"),
        ({"seed": "3"}, "seed: expected a whole number from 0 to"),
        ({"seed": -2}, "seed"),
        ({"seed": 2**63 - 1, "n": 2}, "seed"),
        ({"n": True}, "n: expected a whole number from 1 to"),
        ({"prompt": ["a", "b"]}, "send `seed`"),
        ({"prompt": [[1, 2], [3]]}, "send `seed`"),
        ({"tandem": []}, "tandem: expected an object"),
        ({"tandem": {"p": 1}}, "tandem: unknown field 'p'; known: strategy, prob_senior"),
        ({"tandem": {"prob_senior": "1"}}, "tandem.prob_senior: expected float"),
        ({"tandem": {"max_gap_tokens": True}}, "tandem.max_gap_tokens: expected int"),
        ({"tandem": {"strategy": "words"}}, "tandem.strategy: 'words' is none of word, word_aligned"),
        ({"tandem": {"solo": "both"}}, "tandem.solo: 'both' is none of senior, junior"),
        ({"tandem": {"first": 1}}, "tandem.first: expected str"),
        ({"tandem": {"first": "me"}}, "tandem.first: 'me' is none of senior, junior"),
        ({"tandem": {"solo": "senior", "prob_senior": 0.5}}, "tandem.solo"),
        ({"tandem": {"prob_senior": 1.5}}, "prob_senior must be in [0, 1]"),
        ({"tandem": {"max_gap_tokens": 0}}, "max_gap_tokens must be at least 1"),
        ({"tandem": {"max_gap_tokens": 2**70}}, "tandem.max_gap_tokens: expected at most 2147483648"),
        ({"tandem": {"chunk_size": 2**63}}, "tandem.chunk_size: expected at most 2147483648"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(fake: Fake, body: dict[str, Any], reason: str) -> None:
    response = fake.post(**({"prompt": "a"} | body))
    assert response.status_code == 400
    assert reason in response.json()["detail"]
    assert fake.seen == fake.registered == []


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1, 2, 3]},
        {"prompt": ["a"]},
        {"prompt": ["a", "b"], "seed": 1},
        {"response_format": {"type": "text"}},
        {"response_format": None, "prompt_logprobs": None, "echo": False, "n": None, "seed": None, "tandem": None},
        {"tools": [], "tool_choice": "auto"},
        {"prompt": "\ud800", "temperature": float("nan"), "vllm_xargs": [1], "response_format": "x"},  # vLLM's to judge
    ],
)
def test_what_can_be_done_passes(fake: Fake, body: dict[str, Any]) -> None:
    assert fake.post(**body).status_code == 200


@pytest.mark.parametrize("body", [b"{bad", b"[1]", b"", b"\xff"])
def test_a_body_that_is_no_object_is_left_to_vllm(fake: Fake, body: bytes) -> None:
    response = fake.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code in (400, 422)
    assert "choices" not in response.text


def test_other_generating_routes_are_refused_and_the_rest_passes(fake: Fake) -> None:
    refused = fake.client.post("/v1/responses", json={"input": "a"})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("/v1/responses: a tandem server answers /v1/completions and")
    for path in ("/v1/models", "/health", "/v1/responses"):
        assert fake.client.get(path).json() == {"heard": ""}
    assert fake.client.post("/detokenize", content=b"x").json() == {"heard": "x"}


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1:8000", True),
        ("localhost:8000", True),
        ("LOCALHOST.", True),
        ("[::1]:8000", True),
        ("192.0.2.7:8000", True),
        ("gpu-7.example:8000", True),
        ("pair", True),
        (f"{socket.gethostname()}:8000", True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("[evil.example]:8000", False),
        ("", False),
    ],
)
def test_a_page_whose_name_was_bound_to_this_machine_is_not_answered(fake: Fake, host: str, is_ours: bool) -> None:
    """DNS rebinding: the Host is the name of the page."""
    for path in (COMPLETIONS, "/detokenize"):
        headers = {"content-type": "application/json", "host": host}
        response = fake.client.post(path, content=b'{"prompt": "a"}', headers=headers)
        assert response.status_code == (200 if is_ours else 400)
        if not is_ours:
            assert response.json()["error"]["message"].startswith(f"Host {host!r} is not answered; name it at the st")
    assert len(fake.seen) == is_ours


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/detokenize"])
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_without_end_is_refused_when_it_is_too_long(
    fake: Fake, path: str, announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authorship, "MAX_BODY", 1000)
    body = json.dumps({"prompt": "a" * 2000}).encode()
    for content, status in ((body, 413), (json.dumps({"prompt": "a"}).encode(), 200)):
        pieces = content if announced else (content[i : i + 100] for i in range(0, len(content), 100))
        response = fake.client.post(path, content=pieces, headers={"content-type": "application/json"})
        assert response.status_code == status
        assert status == 200 or response.json()["detail"] == "the body of a request may have at most 1000 bytes"
    assert len(fake.seen) == (path != "/detokenize")


def test_a_body_is_read_until_it_is_too_long_and_not_at_all_if_it_says_so() -> None:
    async def sent(headers: list[tuple[bytes, bytes]], pieces: int) -> tuple[Any, int]:
        left = iter(range(pieces))

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"12345", "more_body": next(left) < pieces - 1}

        try:
            got: Any = (await limited(receive, headers, 20, HTTPException)())["body"]
        except HTTPException as error:
            got = error.status_code
        return got, len(list(left))

    assert asyncio.run(sent([], 4)) == (b"12345" * 4, 0)
    assert asyncio.run(sent([], 100)) == (413, 95)
    assert asyncio.run(sent([(b"content-length", b"21")], 5)) == (413, 5)


def test_a_body_nested_without_end_is_left_to_vllm(fake: Fake) -> None:
    body = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    response = fake.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert (response.status_code, fake.seen) == (400, [])


# ----------------------------------------------------------------------------------------------------------- selections


def test_workers_learn_a_selection_once_and_before_its_first_request(fake: Fake) -> None:
    asked = [{"prob_senior": 0.25}, {"solo": "junior"}, {"prob_senior": 0.25}, {"prob_senior": 0.5}, {}]
    for tandem in asked:
        assert fake.post(prompt="a", tandem=tandem).status_code == 200
    names = [body["vllm_xargs"]["tandem_strategy"] for body in fake.seen]
    assert names == ["1", "2", "1", "default", "default"]
    assert [sorted(strategies) for strategies in fake.registered] == [["1", "default"], ["1", "2", "default"]]
    assert fake.registered[1]["2"].writers == "junior"
    assert all("tandem" not in body for body in fake.seen)


def test_any_number_of_selections_may_come_one_after_the_other(fake: Fake) -> None:
    text = written(30)
    fake.answer["body"] = {"choices": [{"index": 0, "token_ids": text}]}
    for i in range(3 * registry.MAX_SELECTIONS):
        tandem = {"strategy": "chunk", "chunk_size": 1 + i}
        got = fake.post(prompt="a", seed=5, tandem=tandem).json()
        assert got["choices"][0]["authorship"] == authors(5, text, replace(DEFAULT, **tandem))
        assert fake.post(prompt="a", tandem={"max_gap_tokens": 100}).status_code == 200  # used all the time: it stays
    names = [body["vllm_xargs"]["tandem_strategy"] for body in fake.seen]
    assert len(set(names[::2])) == len(names[::2])  # a worker that still knows an old one cannot take it for the new
    assert set(names[1::2]) == {names[1]}
    last = fake.registered[-1]
    assert len(last) == registry.MAX_SELECTIONS
    assert {"default", names[1], names[-2]} <= last.keys()


def test_a_selection_in_use_is_not_forgotten() -> None:
    async def many() -> None:
        tables: list[dict[str, Strategy]] = []

        async def register(table: dict[str, Strategy]) -> None:
            tables.append(table)

        strategies = registry.Strategies(DEFAULT, strategy_of, register)
        selections = [replace(DEFAULT, max_gap_tokens=100 + i) for i in range(registry.MAX_SELECTIONS)]
        names = [await strategies.acquire(selection) for selection in selections[:-1]]
        with pytest.raises(authorship.Refused, match="in use at this moment"):
            await strategies.acquire(selections[-1])
        assert await strategies.acquire(selections[3]) == names[3]  # a second request with it
        strategies.release(selections[3])
        with pytest.raises(authorship.Refused):
            await strategies.acquire(selections[-1])
        strategies.release(selections[5])
        name = await strategies.acquire(selections[-1])
        assert tables[-1].keys() == {"default", name, *names} - {names[5]}

    asyncio.run(many())


@pytest.mark.parametrize("stream", [None, [b"data: [DONE]\n\n"]])
def test_a_request_gives_its_selection_back_however_it_ends(fake: Fake, stream: Any) -> None:
    fake.answer["stream"] = stream
    for status in (200, 404):
        fake.answer["status"] = status
        for i in range(registry.MAX_SELECTIONS + 1):
            assert fake.post(prompt="a", tandem={"max_gap_tokens": 100 * status + i}).status_code != 400
    fake.answer |= {"status": 200, "stream": None, "body": {"choices": [{"index": 0, "token_ids": None}]}}
    for i in range(registry.MAX_SELECTIONS + 1):
        with pytest.raises(EngineError, match="without token ids"):
            fake.post(prompt="a", tandem={"max_gap_tokens": i + 1})


# ------------------------------------------------------------------------------------------------------------ responses


def test_every_choice_gets_its_authors(fake: Fake) -> None:
    """Two prompts, three samples of each: sample i has the seed + i, whatever its prompt."""
    texts = [written(count, seed=count) for count in (40, 0, 7, 1, 33, 20)]
    order = [3, 1, 0, 2, 5, 4]
    prompts = {"prompt_token_ids": [1, 2]}
    fake.answer["body"] = {
        "choices": [{"index": i, "text": "é", "token_ids": texts[i]} | prompts for i in order],
        "usage": {"total_tokens": 3},
    } | prompts
    response = fake.post(prompt=["a", "b"], n=3, seed=11)
    assert int(response.headers["content-length"]) == len(response.content)
    got = response.json()
    wanted = {i: authors(11 + i % 3, texts[i]) for i in order}
    assert {choice["index"]: choice["authorship"] for choice in got["choices"]} == wanted
    assert [choice["token_ids"] for choice in got["choices"]] == [texts[i] for i in order]
    share = np.mean([author for row in wanted.values() for author in row])
    assert 0 < share < 1
    assert got["tandem"] == pytest.approx(got["tandem"] | {"senior_frac": share})
    assert (got["tandem"]["seed"], got["tandem"]["strategy"]) == (11, "word")
    assert got["usage"] == {"total_tokens": 3}
    assert "prompt_token_ids" not in response.text

    asked = fake.post(prompt=["a", "b"], n=3, seed=11, return_token_ids=True).json()
    assert asked["prompt_token_ids"] == asked["choices"][0]["prompt_token_ids"] == [1, 2]


def test_a_response_without_tokens_has_no_share(fake: Fake) -> None:
    fake.answer["body"] = {"choices": [{"index": 0, "token_ids": []}]}
    got = fake.post(prompt="a").json()
    assert got["choices"][0]["authorship"] == []
    assert got["tandem"]["senior_frac"] is None


def test_a_choice_without_token_ids_is_an_error(fake: Fake) -> None:
    fake.answer["body"] = {"choices": [{"index": 0, "token_ids": None}]}
    with pytest.raises(EngineError, match="without token ids"):
        fake.post(prompt="a")


def test_a_client_that_is_gone_gets_no_authors(fake: Fake) -> None:
    fake.answer["body"] = None
    assert fake.post(prompt="a").json() is None


def test_errors_of_vllm_stay_as_they_are(fake: Fake) -> None:
    fake.answer |= {"status": 404, "body": {"error": {"message": "no such model"}}}
    response = fake.post(prompt="a")
    assert response.status_code == 404
    assert response.json() == fake.answer["body"]


def test_authors_follow_the_selection_of_the_request(fake: Fake) -> None:
    text = written(30)
    fake.answer["body"] = {"choices": [{"index": 0, "token_ids": text}]}
    for tandem in ({"strategy": "bernoulli", "prob_senior": 0.25}, {"strategy": "chunk", "chunk_size": 2}):
        got = fake.post(CHAT, messages=[], seed=5, tandem=tandem).json()
        assert got["choices"][0]["authorship"] == authors(5, text, replace(DEFAULT, **tandem))
        assert got["tandem"]["strategy"] == tandem["strategy"]
    assert fake.post(prompt="a", tandem={"solo": "junior"}).json()["choices"][0]["authorship"] == [0] * 30
    assert fake.post(prompt="a", tandem={"solo": "senior"}).json()["choices"][0]["authorship"] == [1] * 30


# -------------------------------------------------------------------------------------------------------- conversations

CALL = {"id": "call-1", "type": "function", "function": {"name": "ab", "arguments": '{"c": 1}'}}
OPENING = [{"role": "system", "content": "abc"}, {"role": "user", "content": "de f"}]


def says(fake: Fake, tokens: list[int], *, stream: bool = False, **message: Any) -> dict[str, Any]:
    """Let vLLM answer a chat with these tokens; the message that the client gets."""
    said = {"role": "assistant", "content": None, "tool_calls": []} | message
    choice = {"index": 0, "finish_reason": "stop"}
    if stream:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": letter} for letter in said["content"] or ""]
        for i, call in enumerate(said["tool_calls"]):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            deltas.append({"tool_calls": [{**call, "index": i, "function": {"name": name, "arguments": ""}}]})
            deltas += [{"tool_calls": [{"index": i, "function": {"arguments": part}}]} for part in arguments]
        parts = np.array_split(np.array(tokens), len(deltas))
        chunks = [
            {"choices": [{"index": 0, "delta": delta, "token_ids": part.tolist(), "finish_reason": None}]}
            for delta, part in zip(deltas, parts, strict=True)
        ]
        chunks[-1]["choices"][0]["finish_reason"] = "stop"
        fake.answer |= {"stream": None, "chunks": chunks}
    fake.answer |= {"body": {"choices": [choice | {"message": said, "token_ids": tokens}]}}
    return said


def ask(fake: Fake, messages: Sequence[Any], conversation: str, **body: Any) -> Any:
    """A chat; as vLLM does, the answer tells the ids of the prompt."""
    tandem = body.pop("tandem", {}) | {"conversation": conversation}

    def heard(seen: dict[str, Any]) -> list[int]:
        return (seen.get("kv_transfer_params") or {}).get("prompt_token_ids") or rendered(messages)

    fake.answer["prompt"] = heard
    return fake.post(CHAT, messages=list(messages), tandem=tandem, **body)


def conversation_of(response: Any) -> str:
    """A stream tells it in the chunk that ends the turn."""
    if response.headers["content-type"].startswith("text/event-stream"):
        return next(e["tandem"] for e in events(response.content) if "tandem" in e)["conversation"]
    return response.json()["tandem"]["conversation"]


def authors_of(response: Any) -> list[int]:
    if response.headers["content-type"].startswith("text/event-stream"):
        chunks = [event for event in events(response.content) if isinstance(event, dict)]
        return [author for chunk in chunks for choice in chunk["choices"] for author in choice["authorship"]]
    return response.json()["choices"][0]["authorship"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_token_by_token(fake: Fake, stream: bool) -> None:
    """What was written stays as it is, whatever a template would make of it; strategy and counters go on."""
    turns = [[*written(30, seed=1), EOS], written(20, seed=2), [*written(12, seed=3), EOS]]
    tools = [{"type": "function", "function": {"name": "ab"}}]
    messages: list[Any] = list(OPENING)
    said = says(fake, turns[0], stream=stream, tool_calls=[CALL])
    got = ask(fake, messages, "new", stream=stream, tools=tools, tandem={"strategy": "bernoulli"})
    id, seed = conversation_of(got), fake.seen[0]["seed"]
    selection = replace(DEFAULT, strategy="bernoulli")
    wanted = (
        replay_turns(strategy_of(selection), [mix64(seed)], [[np.array(turn) for turn in turns]]).author[0].tolist()
    )
    assert authors_of(got) == wanted[:31]
    assert "kv_transfer_params" not in fake.seen[0]

    messages += [said | {"refusal": None, "content": ""}, {"role": "tool", "tool_call_id": "call-1", "content": "x y"}]
    said = says(fake, turns[1], stream=stream, content="hello")
    got = ask(fake, messages, id, stream=stream, tools=tools)
    first = [*rendered(OPENING), *turns[0]]
    second = [*first, IDS["Ċ"], *rendered([messages[-1]])]
    assert fake.seen[1]["kv_transfer_params"] == {"prompt_token_ids": second}
    extra = {"tandem_strategy": "1", "tandem_history": turns[0], "tandem_turns": [31]}
    assert (fake.seen[1]["seed"], fake.seen[1]["vllm_xargs"]) == (seed, extra)
    assert (authors_of(got), conversation_of(got)) == (wanted[31:51], id)

    messages += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "z"}]
    says(fake, turns[2], stream=stream, content="q")
    got = ask(fake, messages, id, stream=stream, tools=tools, seed=seed)
    third = [*second, *turns[1], EOS, IDS["Ċ"], *rendered([messages[-1]])]  # the end that the author did not write
    assert fake.seen[2]["kv_transfer_params"] == {"prompt_token_ids": third}
    assert fake.seen[2]["vllm_xargs"]["tandem_turns"] == [31, 20]
    assert fake.seen[2]["vllm_xargs"]["tandem_history"] == turns[0] + turns[1]
    assert authors_of(got) == wanted[51:]


@pytest.fixture
def talk(fake: Fake) -> tuple[str, list[Any]]:
    """A conversation of one turn, and the messages that go on with it."""
    said = says(fake, [*written(5), EOS], content="ab")
    return conversation_of(ask(fake, OPENING, "new", seed=3)), [*OPENING, said, {"role": "user", "content": "c"}]


def edited(messages: Sequence[Any], at: int, **changes: Any) -> list[Any]:
    return [message | changes if i == at else message for i, message in enumerate(messages)]


@pytest.mark.parametrize(
    ("edit", "body", "reason"),
    [
        (lambda m: edited(m, 0, content="abd"), {}, "messages[0]: not what it was in conversation conv-"),
        (lambda m: edited(m, 2, content="abc"), {}, "messages[2]: not what it was"),
        (lambda m: edited(m, 2, tool_calls=[CALL]), {}, "messages[2]: not what it was"),
        (lambda m: m[1:], {}, "messages[0]: not what it was"),
        (lambda m: m[:2], {}, "messages[2]: not what it was"),
        (lambda m: m[:3], {}, "messages: after the 3 messages of conversation conv-"),
        (lambda m: [*m, {"role": "assistant", "content": "d"}], {}, "only this server writes those"),
        (lambda m: "ab", {}, "messages: expected a list"),
        (lambda m: m, {"tools": [{"type": "function"}]}, "tools: they cannot change"),
        (lambda m: m, {"seed": 4}, "a conversation keeps those of its first request"),
        (lambda m: m, {"tandem": {"prob_senior": 0.25}}, "a conversation keeps those of its first request"),
        (lambda m: m, {"n": 2}, "n: only 1 is possible in a conversation"),
        (lambda m: m, {"continue_final_message": True}, "continue_final_message: only false"),
        (lambda m: m, {"kv_transfer_params": {"prompt_token_ids": [2]}}, "kv_transfer_params"),
        (lambda m: m, {"conversation": "conv-0"}, "tandem.conversation: 'conv-0' is not known; a server remembers"),
    ],
)
def test_a_history_that_was_not_is_refused(fake: Fake, talk: Any, edit: Any, body: dict[str, Any], reason: str) -> None:
    id, messages = talk
    tandem = body.pop("tandem", {}) | {"conversation": body.pop("conversation", id)}
    refused = fake.post(CHAT, messages=edit(messages), tandem=tandem, **body)
    assert refused.status_code == 400
    assert reason in refused.json()["detail"]
    assert len(fake.seen) == 1
    assert ask(fake, messages, id).status_code == 200  # and it still goes on


def test_conversations_are_chats(fake: Fake) -> None:
    refused = fake.post(COMPLETIONS, prompt="a", tandem={"conversation": "new"})
    assert refused.status_code == 400
    assert "only /v1/chat/completions has messages" in refused.json()["detail"]
    refused = fake.post(CHAT, messages=OPENING, tandem={"conversation": 3})
    assert "tandem.conversation: expected str" in refused.json()["detail"]


def test_a_turn_that_failed_is_none(fake: Fake, talk: Any) -> None:
    id, messages = talk
    fake.answer["status"] = 500
    assert ask(fake, messages, id).status_code == 500
    fake.answer |= {"status": 200, "chunks": [{"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [2]}]}]}
    assert ask(fake, messages, id, stream=True).status_code == 200  # it broke off
    del fake.answer["chunks"]
    assert ask(fake, messages, id).status_code == 200
    first, *others = [body["kv_transfer_params"] for body in fake.seen[1:]]
    assert others == [first] * 2


def test_a_template_without_ends_of_turns_is_refused(fake: Fake, talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    id, messages = talk
    monkeypatch.setattr(sys.modules[__name__], "EOS", IDS["a"])
    refused = ask(fake, messages, id)
    assert refused.status_code == 400
    assert "does not end each turn with one EOS token" in refused.json()["detail"]


def test_the_conversations_used_last_are_remembered(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MAX_CONVERSATIONS", 2)
    said = says(fake, [*written(5), EOS], content="ab")
    first, second = (conversation_of(ask(fake, OPENING, "new")) for _ in range(2))
    messages = [*OPENING, said, {"role": "user", "content": "c"}]
    assert ask(fake, messages, first).status_code == 200
    ask(fake, OPENING, "new")
    assert "is not known" in ask(fake, messages, second).json()["detail"]
    assert ask(fake, [*messages, said, messages[-1]], first).status_code == 200


def test_a_conversation_is_written_by_one_request_at_a_time() -> None:
    table = conversations.Conversations()
    more = [{**message, "more": "x"} for message in OPENING]  # nobody needs it again
    talk = conversations.Conversation.begin(1, DEFAULT, {}).after(more, [2], [3])
    assert [*talk.messages] == OPENING
    table.give_back(talk)
    table.take(talk.id)
    with pytest.raises(authorship.Refused, match="another request goes on with conv-"):
        table.take(talk.id)
    table.give_back(talk)
    assert table.take(talk.id) is talk


# -------------------------------------------------------------------------------------------------------------- streams


def events(data: bytes) -> list[Any]:
    """The chunks of a stream; comments and [DONE] as they are."""
    assert data.endswith(b"\n\n")
    lines = data[:-2].decode().split("\n\n")
    return [json.loads(line[6:]) if line.startswith("data: {") else line for line in lines]


def streamed(chunks: Sequence[Any]) -> bytes:
    lines = (f"data: {json.dumps(chunk)}" if isinstance(chunk, dict) else chunk for chunk in chunks)
    return "".join(f"{line}\n\n" for line in lines).encode()


@pytest.mark.parametrize("piece", [1, 7, 10**6])
def test_stream_chunks_get_the_authors_of_their_own_tokens(fake: Fake, piece: int) -> None:
    """Samples take turns, with one to four tokens a chunk; the stream is cut anywhere."""
    texts = [written(25, seed=1), written(18, seed=2)]
    generator = np.random.default_rng(0)
    chunks: list[Any] = [
        {"choices": [{"index": i, "delta": {"role": "assistant"}}], "prompt_token_ids": [1]} for i in (0, 1)
    ]
    left = {i: list(text) for i, text in enumerate(texts)}
    while left:
        i = int(generator.choice(list(left)))
        count = int(generator.integers(1, 5))
        some, left[i] = left[i][:count], left[i][count:]
        done = None if left[i] else "length"
        chunks.append({"choices": [{"index": i, "delta": {"content": "é"}, "token_ids": some, "finish_reason": done}]})
        if done:
            del left[i]
    usage, error = {"choices": [], "usage": {"total_tokens": 9}}, {"error": {"message": "x"}}
    chunks[4:4] = [": keep-alive"]
    whole = streamed([*chunks, usage, error, "data: [DONE]"])
    fake.answer["stream"] = [whole[i : i + piece] for i in range(0, len(whole), piece)]
    got = events(fake.post(CHAT, messages=[], stream=True, n=2, seed=7).content)

    assert got[-3:] == [usage, error, "data: [DONE]"]
    assert got[4] == ": keep-alive"
    told: dict[int, list[int]] = {0: [], 1: []}
    finished = [chunk for chunk in got if "tandem" in chunk]
    for chunk in got[:-3]:
        for choice in chunk["choices"] if isinstance(chunk, dict) else ():
            assert ("authorship" in choice) == ("token_ids" in choice)
            assert len(choice.get("authorship", ())) == len(choice.get("token_ids", ()))
            told[choice["index"]] += choice.get("authorship", [])
    assert told == {0: authors(7, texts[0]), 1: authors(8, texts[1])}
    assert all(chunk["choices"][0]["finish_reason"] == "length" for chunk in finished)
    assert finished[-1]["tandem"]["senior_frac"] == pytest.approx(np.mean(told[0] + told[1]))
    assert b"prompt_token_ids" not in streamed(got)
    plain = [{k: v for k, v in chunk.items() if k != "tandem"} if isinstance(chunk, dict) else chunk for chunk in got]
    for chunk in plain:
        for choice in chunk.get("choices", ()) if isinstance(chunk, dict) else ():
            choice.pop("authorship", None)
    for chunk in chunks[:2]:
        del chunk["prompt_token_ids"]
    assert plain == [*chunks, usage, error, "data: [DONE]"]


def test_a_disconnect_reaches_the_application() -> None:
    """After the body, and in the middle of it."""

    async def received(messages: Sequence[dict[str, Any]], calls: int) -> list[Any]:
        queue = iter(messages)

        async def receive() -> Any:
            return next(queue)

        async def nothing(message: Any) -> None: ...

        server = authorship.Authorship(nothing)
        server.strategies = registry.Strategies(DEFAULT, strategy_of, nothing)
        exchange = authorship._Exchange(server, {"path": COMPLETIONS}, limited(receive, [], 10, HTTPException), nothing)
        return [await exchange.receive() for _ in range(calls)]

    gone = {"type": "http.disconnect"}
    first, more = ({"type": "http.request", "body": b"[", "more_body": True}, {"type": "http.request", "body": b"]"})
    got = asyncio.run(received([first, more, gone], 2))
    assert got == [{"type": "http.request", "body": b"[]", "more_body": False}, gone]
    assert asyncio.run(received([first, gone], 1)) == [gone]


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command_hands_on_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandemrl.cli.main import app

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(server, "serve", lambda *arguments, **keywords: calls.append((*arguments, keywords)))
    options = ["serve", "--senior", "S", "--junior", "J", "--strategy", "chunk", "--chunk-size", "3", "--port", "1"]
    options += ["--allowed-host", "pair"]
    options += ["--mode", "lockstep", "--template-arguments", "{enable_thinking: true, n: 1}"]
    result = CliRunner().invoke(app, [*options, "--", "--max-model-len", "64"])
    assert result.exit_code == 0, result.output
    [(senior, tandem, keywords)] = calls
    selection = vars(SelectionConfig(strategy="chunk", chunk_size=3))
    assert (senior, tandem) == ("S", TandemOptions(junior="J", mode="lockstep", selection=selection))
    assert keywords["vllm_args"] == ["--max-model-len", "64"]
    assert (keywords["tool_call_parser"], keywords["allowed_hosts"]) == (None, ["pair"])
    assert keywords["template_arguments"] == {"enable_thinking": True, "n": 1}
    assert keywords["port"] == 1
    assert (keywords["host"], keywords["api_key"]) == ("127.0.0.1", None)


def test_a_server_is_open_to_this_machine_alone_unless_told_otherwise() -> None:
    options = TandemOptions(junior="J", selection=vars(DEFAULT))
    defaults = inspect.signature(server.serve).parameters
    assert defaults["host"].default == "127.0.0.1"
    args = server.server_arguments("S", options, host="0.0.0.0", port=1, api_key="s3cret", vllm_args=())
    assert (args.allowed_origins, args.allowed_hosts) == ([], [])  # no web page but ours, of which there is none
    assert (args.host, args.api_key) == ("0.0.0.0", ["s3cret"])
    args = server.server_arguments("S", options, host="127.0.0.1", port=1, vllm_args=["--api-key", "a", "b"])
    assert (args.host, args.api_key) == ("127.0.0.1", ["a", "b"])
    with pytest.raises(EngineError, match="--api-key is set by tandemrl serve"):
        server.server_arguments("S", options, host="x", port=1, api_key="a", vllm_args=["--api-key", "b"])


@pytest.mark.parametrize(
    ("template", "option", "flags", "parser"),
    [
        ("{{ tools | length }}", None, [], "hermes"),
        ("{{ messages }} {{ stools }}", None, [], None),
        ("{{ tools | length }}", "mistral", [], "mistral"),
        ("{{ tools }} {{- '\"parameters\": ' }}", None, [], "llama3_json"),
        ("{{ tools }} {{ '\"parameters\": ' }}<tool_call>", None, [], "hermes"),
        ("", "mistral", [], "mistral"),
        ("{{ tools }}", None, ["--enable-auto-tool-choice", "--tool-call-parser", "llama3_json"], "llama3_json"),
    ],
)
def test_tool_calls_are_read_where_a_template_knows_tools(template, option, flags, parser) -> None:
    options = TandemOptions(junior="J", selection=vars(DEFAULT))
    chosen = server.tool_call_parser_of(option, template, flags)
    args = server.server_arguments("S", options, host="x", port=1, tool_call_parser=chosen, vllm_args=flags)
    assert (args.tool_call_parser, args.enable_auto_tool_choice) == (parser, parser is not None)


def test_the_chat_template_gets_the_arguments_of_training() -> None:
    make = partial(server.server_arguments, "S", TandemOptions(junior="J", selection=vars(DEFAULT)), host="x", port=1)
    assert make(vllm_args=()).default_chat_template_kwargs is None
    quiet = {"enable_thinking": False}
    assert make(template_arguments=quiet, vllm_args=()).default_chat_template_kwargs == quiet
    theirs = ["--default-chat-template-kwargs", '{"enable_thinking": true}']
    with pytest.raises(EngineError, match="leave it out after `--`; give --template-arguments before it"):
        make(template_arguments=quiet, vllm_args=theirs)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(EngineError, match=f"port {port} of 127.0.0.1 is in use; choose another one with --port"):
            server.check_port("127.0.0.1", port)
    server.check_port("127.0.0.1", port)
    with pytest.raises(EngineError, match=r"--host 192\.0\.2\.1 --port"):  # an address of documentation, nobody's
        server.check_port("192.0.2.1", port)


GIB = 2**30


def config_of(layers: int, heads: int, size: int, dtype: torch.dtype, length: int) -> Any:
    """The part of a ``VllmConfig`` that its KV cache depends on."""
    model = SimpleNamespace(
        max_model_len=length,
        dtype=dtype,
        get_num_layers=lambda parallel: layers,
        get_num_kv_heads=lambda parallel: heads,
        get_head_size=lambda: size,
    )
    return SimpleNamespace(model_config=model, parallel_config=None, cache_config=SimpleNamespace(block_size=128))


def test_the_kv_cache_is_for_the_models_and_not_for_the_machine() -> None:
    """Qwen3-4B and 0.6B: 36 and 28 layers of 8 heads of 128, a key and a value of 2 bytes each."""
    pair = [config_of(36, 8, 128, torch.bfloat16, 4096), config_of(28, 8, 128, torch.bfloat16, 4096)]
    sequence = (147_456 + 114_688) * (4096 + 256)
    assert server.kv_cache_bytes(pair, free=1000 * GIB) == 8 * sequence
    assert server.kv_cache_bytes(pair, free=8 * GIB) == 4 * GIB
    assert server.kv_cache_bytes(pair, free=sequence) == sequence
    with pytest.raises(EngineError, match=r"4096 tokens takes 1\.06 GiB of KV cache, and 1\.00 GiB of memory are free"):
        server.kv_cache_bytes(pair, free=GIB)


@pytest.mark.parametrize(
    ("flags", "is_open"),
    [([], True), (["--gpu-memory-utilization", "0.3"], False), (["--kv-cache-memory-bytes", "1G"], False)],
)
def test_a_kv_cache_that_was_asked_for_stays(flags: list[str], is_open: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms

    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(vllm.platforms.current_platform, "device_type", "cpu", raising=False)
    options = TandemOptions(junior="J", selection=vars(DEFAULT))
    args = server.server_arguments("S", options, host="127.0.0.1", port=1, vllm_args=flags)
    assert server.kv_cache_is_open(args) == is_open
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    assert not server.kv_cache_is_open(args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strategy", "words"], "'words' is none of word"),
        (["--mode", "eager"], "mode=eager: must be one of lazy, majority, lockstep, draft, auto"),
        (["--mode", "auto", "--draft-tokens", "none"], "'none' is neither auto nor a positive number"),
        (["--prob-senior", "2"], "prob_senior must be in [0, 1]"),
        (["--junior", "./nowhere"], "nowhere"),
        (["--", "--worker-cls", "x"], "--worker-cls is set by tandemrl serve"),
        (["--", "--async-scheduling"], "--async-scheduling is set by tandemrl serve"),
        (["--", "--headless"], "--headless"),
        (["--tool-call-parser", "a", "--", "--tool-call-parser", "b"], "--tool-call-parser is set by tandemrl serve"),
        (["--tool-call-parser", "words"], "--tool-call-parser: 'words' is none of"),
        (["--", "--logits-processors", "a:B"], "--logits-processors would act on the senior's tokens only"),
        (["--", "other-model"], "the model is set by tandemrl serve"),
        (["--", "--pipeline-parallel-size", "2"], "pipeline_parallel_size"),
        (["--", "--enable-lora"], "enable_lora"),
    ],
)
def test_a_server_that_cannot_work_does_not_start(
    pair: Path, options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}.items():
        monkeypatch.setenv(name, value)  # `serve` sets them for good: put them back
    from tandemrl.cli.main import app

    result = CliRunner().invoke(
        app, ["serve", "--senior", str(pair / "senior"), "--junior", str(pair / "junior"), *options]
    )
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith("error:")]) == 1


def test_without_vllm_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandemrl.cli.main import app

    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    result = CliRunner().invoke(app, ["serve", "--senior", "S", "--junior", "J"])
    assert result.exit_code == 2
    assert "pip install -e '.[vllm]'" in result.stderr


def test_the_guard_refuses_what_only_vllm_sees() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from tandemrl.rollout.vllm.guard import Guard

    Guard.validate_params(SamplingParams(seed=0))
    for params, reason in [
        (SamplingParams(), "without a seed"),
        (SamplingParams(seed=1, prompt_logprobs=0), "prompt_logprobs"),
        (SamplingParams(seed=1, structured_outputs=StructuredOutputsParams(regex="a")), "structured outputs"),
    ]:
        with pytest.raises(ValueError, match=reason):
            Guard.validate_params(params)


def test_allowed_tokens_are_refused_where_vllm_confines_other_requests_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from tandemrl.rollout.vllm.guard import Guard

    confined = vllm.SamplingParams(seed=0, allowed_token_ids=[5])
    monkeypatch.setattr(vllm, "__version_tuple__", (0, 31, 0))
    Guard.validate_params(confined)
    monkeypatch.setattr(vllm, "__version_tuple__", (0, 30, 1))
    Guard.validate_params(vllm.SamplingParams(seed=0))
    with pytest.raises(ValueError, match=r"allowed_token_ids \(vLLM .* confines other requests"):
        Guard.validate_params(confined)


# -------------------------------------------------------------------------------------------------------- a real server

TURNS = """{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor -%}
{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}!{% endif %}"""
SERVED = SelectionConfig(strategy="word", max_gap_tokens=4)
MODEL = "tandem"
PAIR = "Llama junior"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for name, model in zip(("senior", "junior"), models(PAIR), strict=True):
        save(model, folder / name)
    with_turns = copy.deepcopy(tokenizer())
    with_turns.chat_template = TURNS
    with_turns.save_pretrained(folder / "senior")
    return folder


def test_an_engine_with_the_servers_arguments_writes_to_the_end_in_every_mode(pair: Path) -> None:
    """Where rows wait for the other model (majority), vLLM's own scheduler would never call on them again. And where a
    seeded prompt is computed in pieces, vLLM winds back the row's generator, which that of a CPU refuses."""
    from vllm import AsyncEngineArgs, LLMEngine, SamplingParams

    from tandemrl.rollout.vllm.backend import _RUNNING, _shut_down, _startup
    from tandemrl.rollout.vllm.versions import keep_running

    options = TandemOptions(junior=str(pair / "junior"), mode="majority", draft=4, selection=vars(SERVED))
    flags = ["--max-model-len", str(CONTEXT), "--enforce-eager", "--kv-cache-memory-bytes", str(2**26)]
    flags += ["--dtype", "float32", "--distributed-executor-backend", "uni", "--max-num-batched-tokens", "64"]
    flags += ["--max-num-seqs", "8"]
    with _startup(False, None, unbound=False):
        args = server.server_arguments(str(pair / "senior"), options, host="127.0.0.1", port=8000, vllm_args=flags)
        engine = LLMEngine.from_vllm_config(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    client: Any = engine.engine_core
    keep_running(client)  # else it takes down what other engines of this process share
    _RUNNING.add(id(client.engine_core))
    try:
        for mode in ("majority", "lazy", "lockstep", "draft", "auto"):
            engine.collective_rpc("tandem_mode", args=(mode,))
            for seed in range(6):
                params = SamplingParams(seed=seed, max_tokens=30, ignore_eos=True)
                engine.add_request(str(seed), {"prompt_token_ids": written(30, seed=seed)}, params)
            left = {str(seed) for seed in range(6)}
            for _ in range(40 * 6):
                left -= {output.request_id for output in engine.step() if output.finished} if left else set()
            assert not left, mode
    finally:
        _shut_down(client.engine_core)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path


@contextlib.contextmanager
def serving(senior: Path, junior: Path, log: Path, *options: str, context: int = CONTEXT) -> Iterator[Server]:
    """The command in a process group of its own, which never outlives the tests."""
    port = free_port()
    command = [sys.executable, "-c", "from tandemrl.cli.main import main; main()", "serve"]
    command += ["--senior", str(senior), "--junior", str(junior), *options]
    command += ["--host", "127.0.0.1", "--port", str(port), "--", "--served-model-name", MODEL, "--dtype", "float32"]
    command += ["--max-model-len", str(context), "--enforce-eager"]
    command += ["--distributed-executor-backend", "uni"]
    # No process of its own for the worker: each one imports vLLM anew.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
        while not healthy(url):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.2)
        yield Server(process, url, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def running(pair: Path) -> Iterator[Server]:
    options = ["--max-gap-tokens", "4", "--mode", "draft", "--draft-tokens", "4"]
    with serving(pair / "senior", pair / "junior", pair / "server.log", *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Server) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=120)


def complete(client: Any, prompt: Any = "ab cd", *, max_tokens: int = 40, tandem: Any = None, **options: Any) -> Any:
    body = {"ignore_eos": True} | ({} if tandem is None else {"tandem": tandem}) | options.pop("extra", {})
    return client.completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens, extra_body=body, **options)


def test_a_completion_has_authors(client: Any) -> None:
    response = complete(client, seed=3)
    [choice] = response.choices
    assert len(choice.authorship) == len(choice.token_ids) == 40
    assert choice.authorship == authors(3, choice.token_ids, SERVED)
    assert set(choice.authorship) == {0, 1}
    assert response.tandem["senior_frac"] == pytest.approx(np.mean(choice.authorship))
    again = complete(client, seed=3)
    assert (again.choices[0].text, again.choices[0].authorship) == (choice.text, choice.authorship)
    other = complete(client)
    assert other.choices[0].text != choice.text
    assert complete(client, seed=other.tandem["seed"]).choices[0].text == other.choices[0].text


def test_every_token_is_the_argmax_of_the_author_it_is_said_to_have(client: Any) -> None:
    prompt = written(9)
    for tandem in ({}, {"strategy": "alternating"}, {"solo": "junior"}, {"solo": "senior"}):
        [choice] = complete(client, prompt, temperature=0, tandem=tandem).choices
        channels = np.array(choice.token_ids), np.array(choice.authorship, dtype=np.int8), np.zeros(40, np.float32)
        request = Request(tuple(prompt), (0,), Sampling(temperature=0.0), strategy_of(SERVED))
        assert greedy_gaps(models(PAIR), [request], [[Completion(0, *channels, "length")]]).max() < 1e-4
        if "solo" in tandem:
            assert set(choice.authorship) == {int(tandem["solo"] == "senior")}


def test_log_probs_are_the_authors(client: Any) -> None:
    """Sampled under temperature 1, judged by an uncached forward of the author."""
    from helpers import author_logits

    prompt = written(9)
    [choice] = complete(client, prompt, logprobs=0, seed=4).choices
    written_by = Completion(0, np.array(choice.token_ids), np.array(choice.authorship), np.zeros(40), "length")
    logits = torch.from_numpy(author_logits(*models(PAIR), prompt, written_by))
    wanted = logits.log_softmax(-1)[torch.arange(40), torch.tensor(choice.token_ids)]
    assert choice.logprobs.token_logprobs == pytest.approx(wanted.tolist(), abs=1e-3)


def test_samples_differ_and_have_their_own_authors(client: Any) -> None:
    response = complete(client, n=3, seed=20)
    assert len({choice.text for choice in response.choices}) == 3
    for choice in response.choices:
        assert choice.authorship == authors(20 + choice.index, choice.token_ids, SERVED)
    pairs = complete(client, ["ab", "cd e"], n=2, seed=20)
    for choice in pairs.choices:
        assert choice.authorship == authors(20 + choice.index % 2, choice.token_ids, SERVED)


def test_a_chat(client: Any) -> None:
    body = {"ignore_eos": True, "tandem": {"strategy": "bernoulli", "prob_senior": 0.25}}
    messages = [{"role": "user", "content": "ab cd"}]
    response = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, seed=8, extra_body=body)
    [choice] = response.choices
    selection = replace(SERVED, strategy="bernoulli", prob_senior=0.25)
    assert choice.authorship == authors(8, choice.token_ids, selection)
    assert 0 < sum(choice.authorship) < 20
    assert choice.message.content
    assert response.tandem["strategy"] == "bernoulli"


def test_a_conversation_writes_what_the_reference_engine_does(client: Any) -> None:
    """Over three turns, the second of them streamed."""
    from openai import BadRequestError

    messages: list[Any] = [{"role": "user", "content": "ab cd"}]
    body: dict[str, Any] = {"tandem": {"conversation": "new"}, "return_token_ids": True}
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "messages": messages, "extra_body": body}
    engine, turns = reference(PAIR), list[tuple[int, ...]]()
    ids = [*tokenizer().encode("ab cd"), EOS, IDS["!"]]
    for number in range(3):
        if number == 1:
            chunks = list(client.chat.completions.create(**options, stream=True))
            parts = [choice for chunk in chunks for choice in chunk.choices if getattr(choice, "token_ids", None)]
            own = [token for part in parts for token in part.token_ids]
            content = "".join(part.delta.content or "" for part in parts)
            said: Any = {"role": "assistant", "content": content}
            authorship = [author for part in parts for author in part.authorship]
            told = next(chunk.tandem for chunk in chunks if getattr(chunk, "tandem", None))
        else:
            response = client.chat.completions.create(**options)
            said, told = response.choices[0].message, response.tandem
            own, authorship = response.choices[0].token_ids, response.choices[0].authorship
            assert response.prompt_token_ids == ids
        request = Request(
            tuple(ids), (mix64(told["seed"]),), Sampling(max_tokens=20), strategy_of(SERVED), history=tuple(turns)
        )
        [[wanted]] = engine.generate([request])
        assert own == wanted.tokens.tolist()
        assert authorship == wanted.author.tolist()
        turns.append(tuple(own))
        ids += [*own, *([] if own[-1] == EOS else [EOS]), *tokenizer().encode("ef"), EOS, IDS["!"]]
        messages += [said, {"role": "user", "content": "ef"}]
        body["tandem"] = {"conversation": told["conversation"]}
    messages[0]["content"] = "ab"
    with pytest.raises(BadRequestError, match=r"messages\[0\]: not what it was"):
        client.chat.completions.create(**options)


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_tells_what_the_whole_response_tells(client: Any, chat: bool) -> None:
    body = {"ignore_eos": True}
    create = client.chat.completions.create if chat else client.completions.create
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "ab"}]} if chat else {"prompt": "ab"}
    asked = prompt | {"model": MODEL, "max_tokens": 20, "n": 2, "seed": 5, "extra_body": body}
    whole = create(**asked)
    chunks = [chunk for chunk in create(**asked, stream=True, stream_options={"include_usage": True})]
    assert chunks[-1].usage.completion_tokens == 40
    parts = sorted(
        (c for chunk in chunks for c in chunk.choices if getattr(c, "token_ids", None)), key=lambda c: c.index
    )
    for choice, (index, own) in zip(whole.choices, groupby(parts, key=lambda c: c.index), strict=True):
        own = list(own)
        assert choice.index == index
        assert [token for part in own for token in part.token_ids] == choice.token_ids
        assert [author for part in own for author in part.authorship] == choice.authorship
        assert "".join((part.delta.content if chat else part.text) or "" for part in own) == (
            choice.message.content if chat else choice.text
        )
    summaries = [chunk.tandem for chunk in chunks if getattr(chunk, "tandem", None)]
    assert len(summaries) == 2
    assert summaries[-1] == whole.tandem


def test_refusals_are_errors_of_the_client_and_leave_the_server_alive(client: Any) -> None:
    from openai import APIStatusError, BadRequestError, NotFoundError

    with pytest.raises(BadRequestError, match="use_beam_search"):
        complete(client, extra={"use_beam_search": True})
    with pytest.raises(BadRequestError, match="max_model_len"):
        complete(client, max_tokens=10 * CONTEXT)
    with pytest.raises(NotFoundError, match="nope"):
        client.completions.create(model="nope", prompt="a")
    with pytest.raises(BadRequestError, match="a tandem server answers"):
        client.responses.create(model=MODEL, input="a")
    strict = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": strict}]
    with pytest.raises(BadRequestError, match="structured outputs"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "a"}], tools=tools)
    with pytest.raises(APIStatusError, match="the body of a request may have at most") as refused:
        complete(client, "a" * authorship.MAX_BODY)
    assert refused.value.status_code == 413
    with pytest.raises(BadRequestError, match=r"Host 'evil\.example' is not answered"):
        complete(client, extra_headers={"Host": "evil.example"})
    assert [model.id for model in client.models.list()] == [MODEL]
    assert complete(client, max_tokens=2).choices[0].authorship


def test_a_client_that_leaves_frees_its_request(client: Any, running: Server) -> None:
    stream = complete(client, max_tokens=CONTEXT - 10, stream=True)
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{running.url}/metrics", timeout=5) as response:
            running_now = [
                line for line in response.read().decode().splitlines() if line.startswith("vllm:num_requests_running")
            ]
        if running_now and all(line.endswith(" 0.0") for line in running_now):
            break
        time.sleep(0.05)
    else:
        pytest.fail("the request still runs")
    assert complete(client, max_tokens=3).choices[0].token_ids


def test_it_says_what_it_serves_and_where(running: Server, pair: Path) -> None:
    senior, junior = pair / "senior", pair / "junior"
    line = f"serving {senior} (float32) and its junior {junior} (float32) at {running.url}/v1, without an API key"
    assert line in running.log.read_text()


def test_an_interrupt_ends_it(running: Server) -> None:
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(timeout=60) == 0, running.log.read_text()[-4000:]
    assert not healthy(running.url)


@pytest.mark.slow
def test_a_pretrained_pair_answers_as_the_torch_engine_does(tmp_path: Path) -> None:
    """A greedy chat with SmolLM2 and a junior with some noise in its matrices."""
    from openai import OpenAI

    folder, junior = smollm2(), load_model(smollm2())
    words, noise = AutoTokenizer.from_pretrained(folder), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in junior.parameters():
            if parameter.ndim == 2:
                parameter.add_(0.05 * parameter.std() * torch.randn(parameter.shape, generator=noise))
    export_hf(junior, words, tmp_path / "junior")
    question = [{"role": "user", "content": "List three colours."}]
    size = junior.config.vocab_size
    prompt = tuple(chat_tokens(words, question, "here", {}))
    strategy = schedule_of(SERVED, words, size).strategy(1)
    request = Request(prompt, (mix64(8),), Sampling(max_tokens=24, temperature=0.0), strategy)
    [[expected]] = TorchEngine(load_model(folder), junior, words).generate([request])
    with serving(folder, tmp_path / "junior", tmp_path / "log", "--max-gap-tokens", "4", context=256) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)
        response = client.chat.completions.create(model=MODEL, messages=question, max_tokens=24, temperature=0, seed=8)
    [choice] = response.choices
    assert choice.token_ids == expected.tokens.tolist()
    assert choice.authorship == expected.author.tolist()
    assert set(choice.authorship) == {0, 1}
    assert choice.message.content == words.decode(expected.tokens, skip_special_tokens=True)
