"""The middleware of ``tandemrl serve``: what it makes of requests and responses of a stand-in for a server."""

import asyncio
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from clients import DEFAULT, authors, events, strategy_of, written
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from helpers import EOS as EOS_SURFACE
from helpers import IDS, tokenizer
from tandemrl.apps.asgi import limited
from tandemrl.apps.serve import authorship, conversations, registry
from tandemrl.rollout.engine import EngineError, replay_turns
from tandemrl.selection import Strategy
from tandemrl.selection.draws import mix64

COMPLETIONS, CHAT = authorship.PATHS
EOS = IDS[EOS_SURFACE]


# -------------------------------------------------------------------------------- a stand-in for a server


@dataclass
class Fake:
    """An application with a server's routes around canned answers; ``seen`` are the bodies that reached it."""

    client: Any
    seen: list[dict[str, Any]]
    registered: list[dict[str, Strategy]]
    answer: dict[str, Any]

    def post(self, path: str = COMPLETIONS, **body: Any) -> Any:
        return self.client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


@pytest.fixture
def fake() -> Iterator[Fake]:
    seen: list[dict[str, Any]] = []
    registered: list[dict[str, Strategy]] = []
    answer: dict[str, Any] = {"status": 200, "body": {"choices": []}, "stream": None}

    async def register(strategies: dict[str, Strategy]) -> None:
        registered.append(strategies)

    async def completions(request: Request) -> Any:
        try:
            body = json.loads(await request.body())
        except (ValueError, RecursionError):
            raise HTTPException(400, "no JSON") from None
        if not isinstance(body, dict):
            raise HTTPException(422, "no object")
        seen.append(body)
        prompt = {"prompt_token_ids": answer["prompt"](body)} if "prompt" in answer else {}
        if body.get("stream") and "chunks" in answer:
            chunks = [answer["chunks"][0] | prompt, *answer["chunks"][1:], "data: [DONE]"]
            return StreamingResponse(iter([streamed(chunks)]), media_type="text/event-stream")
        if answer["stream"] is not None:
            return StreamingResponse(iter(answer["stream"]), media_type="text/event-stream")
        whole = answer["body"] | prompt if isinstance(answer["body"], dict) else answer["body"]
        return JSONResponse(whole, answer["status"])

    async def other(request: Request) -> Any:
        return JSONResponse({"heard": (await request.body()).decode()})

    async def tokenize(request: Request) -> Any:
        asked = json.loads(await request.body())
        return JSONResponse({"tokens": rendered(asked["messages"], asked["add_generation_prompt"])})

    async def told(request: Request, error: Any) -> Any:
        return JSONResponse({"detail": error.detail}, error.status_code)

    hosts = authorship.hosts_of("gpu-7.example", ["pair"])
    backend = authorship.Backend(registry.Strategies(DEFAULT, strategy_of, register), frozenset({EOS}), hosts)
    others = ("/detokenize", "/v1/responses", "/v1/models", "/health")
    routes = [Route(path, completions, methods=["POST"]) for path in (COMPLETIONS, CHAT)]
    routes += [Route("/tokenize", tokenize, methods=["POST"])]
    routes += [Route(path, other, methods=["GET", "POST"]) for path in others]
    middleware = [Middleware(authorship.Authorship, backend_of=lambda state: backend)]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: told})
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
        {
            "prompt": "\ud800",
            "temperature": float("nan"),
            "vllm_xargs": [1],
            "response_format": "x",
        },  # the server's to judge
    ],
)
def test_what_can_be_done_passes(fake: Fake, body: dict[str, Any]) -> None:
    assert fake.post(**body).status_code == 200


@pytest.mark.parametrize("body", [b"{bad", b"[1]", b"", b"\xff"])
def test_a_body_that_is_no_object_is_left_to_the_server(fake: Fake, body: bytes) -> None:
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


def test_a_body_nested_without_end_is_left_to_the_server(fake: Fake) -> None:
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
        with pytest.raises(conversations.Refused, match="in use at this moment"):
            await strategies.acquire(selections[-1])
        assert await strategies.acquire(selections[3]) == names[3]  # a second request with it
        strategies.release(selections[3])
        with pytest.raises(conversations.Refused):
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


def test_errors_of_the_server_stay_as_they_are(fake: Fake) -> None:
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
    """Let the server answer a chat with these tokens; the message that the client gets."""
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
    """A chat; the answer tells the ids of the prompt."""
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
    with pytest.raises(conversations.Refused, match="another request goes on with conv-"):
        table.take(talk.id)
    table.give_back(talk)
    assert table.take(talk.id) is talk


# -------------------------------------------------------------------------------------------------------------- streams


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
            assert len(choice["authorship"]) == len(choice.get("token_ids", ()))
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

        backend = authorship.Backend(registry.Strategies(DEFAULT, strategy_of, nothing), frozenset(), ())
        server = authorship.Authorship(nothing, lambda state: backend)
        limit = limited(receive, [], 10, HTTPException)
        exchange = authorship._Exchange(server, backend, {"path": COMPLETIONS}, limit, nothing)
        return [await exchange.receive() for _ in range(calls)]

    gone = {"type": "http.disconnect"}
    first, more = ({"type": "http.request", "body": b"[", "more_body": True}, {"type": "http.request", "body": b"]"})
    got = asyncio.run(received([first, more, gone], 2))
    assert got == [{"type": "http.request", "body": b"[]", "more_body": False}, gone]
    assert asyncio.run(received([first, gone], 1)) == [gone]
