"""``tandemrl serve`` as it runs, asked by OpenAI's client: the same with every engine."""

import json
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients import authors, served_here, strategy_of, written
from pairs import CONTEXT, VLLM, reference
from served import PAIR, SERVED, Server, complete, healthy, openai_client, save_pair, serving

import artefacts
from helpers import save_speaker
from tandemrl.config import load
from tandemrl.rollout.engine import Request, Sampling
from tandemrl.selection import solo
from tandemrl.selection.draws import mix64

OpenAI: Any = pytest.importorskip("openai", reason="the tests ask by OpenAI's client").OpenAI


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module", params=["torch", pytest.param("vllm", marks=VLLM)])
def running(request: pytest.FixtureRequest, pair: Path) -> Iterator[Server]:
    options = ["selection.max_gap_tokens=4", "rollout.draft_tokens=4"]
    log = pair / f"{request.param}.log"
    with serving(request.param, pair / "senior", pair / "junior", log, *options) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: Server) -> Any:
    return openai_client(running)


def test_a_completion_has_authors(client: Any) -> None:
    response = complete(client, seed=3)
    [choice] = response.choices
    assert len(choice.authorship) == len(choice.token_ids) == 20
    assert choice.authorship == authors(3, choice.token_ids, SERVED)
    assert set(choice.authorship) == {0, 1}
    assert response.tandem["senior_frac"] == pytest.approx(np.mean(choice.authorship))
    again = complete(client, seed=3)
    assert (again.choices[0].text, again.choices[0].authorship) == (choice.text, choice.authorship)
    other = complete(client)
    assert other.choices[0].text != choice.text
    assert complete(client, seed=other.tandem["seed"]).choices[0].text == other.choices[0].text


def test_a_client_that_leaves_frees_its_request(client: Any) -> None:
    for _ in range(3):
        stream = complete(client, max_tokens=CONTEXT - 10, stream=True)
        next(iter(stream))
        stream.close()
    assert complete(client, max_tokens=3).choices[0].token_ids


def test_requests_that_come_at_any_time_write_what_they_write_alone(client: Any) -> None:
    """From several threads, in tandem and alone, each a while after the other."""
    engine, generator = reference(PAIR), np.random.default_rng(0)
    asked = [
        (written(5 + i % 20, seed=i), i, [{}, {"solo": "senior"}, {"strategy": "bernoulli"}][i % 3]) for i in range(20)
    ]
    waits = generator.exponential(0.02, len(asked)).cumsum().tolist()
    begin = time.monotonic()

    def ask(one: tuple[Any, float]) -> Any:
        (prompt, seed, tandem), wait = one
        time.sleep(max(0.0, begin + wait - time.monotonic()))
        return complete(client, prompt, seed=seed, tandem=tandem, max_tokens=5 + 2 * seed % 30)

    with ThreadPoolExecutor(16) as pool:
        responses = list(pool.map(ask, zip(asked, waits, strict=True)))
    requests = [
        Request(
            tuple(prompt),
            (mix64(seed),),
            Sampling(max_tokens=5 + 2 * seed % 30, ignore_eos=True),
            solo("senior") if "solo" in tandem else strategy_of(replace(SERVED, **tandem)),
        )
        for prompt, seed, tandem in asked
    ]
    for response, [wanted] in zip(responses, engine.generate(requests), strict=True):
        assert response.choices[0].token_ids == wanted.tokens.tolist()
        assert response.choices[0].authorship == wanted.author.tolist()


def test_it_says_what_it_serves_and_where(running: Server, pair: Path) -> None:
    senior, junior = pair / "senior", pair / "junior"
    line = f"serving {senior} (float32) and its junior {junior} (float32) at {running.url}/v1, without an API key"
    deadline = time.monotonic() + 20
    while line not in running.log.read_text():  # it is said a moment after the server is healthy
        assert time.monotonic() < deadline, running.log.read_text()[-4000:]
        time.sleep(0.05)


def test_an_interrupt_ends_it(running: Server) -> None:
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(timeout=60) == 0, running.log.read_text()[-4000:]
    assert not healthy(running.url)


TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look there.",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "array", "items": {"type": "string"}}},
                "required": ["at"],
            },
        },
    }
]
CALL = """<tool_call>
{"name":"look", "arguments": {"at":["é","😀 42"] }}
</tool_call>"""


def test_a_published_template_tells_of_tools_and_its_calls_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Qwen3's tokenizer. The models generate the call after any prompt that ends as its template ends one."""
    words = artefacts.tokenizer("qwen3")

    def template(messages: Sequence[Any]) -> list[int]:
        ids: list[int] = words.apply_chat_template(
            messages, tools=TOOLS, add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
        return ids

    question = {"role": "user", "content": "What is there?"}
    written = [*words.encode(CALL), words.eos_token_id]
    folder = save_speaker(tmp_path / "pair", words, [template([question])[-1], *written])
    keys = [f"model.senior={folder}", f"model.junior={folder}", "model.device=cpu", "selection.strategy=alternating"]
    with served_here(load(overrides=keys), monkeypatch) as asking:
        client = OpenAI(base_url="http://127.0.0.1/v1", api_key="none", max_retries=0, http_client=asking)
        body = {"return_token_ids": True}
        create = partial(client.chat.completions.create, model=str(folder), tools=TOOLS, temperature=0, seed=1)
        whole = create(messages=[question], extra_body=body)
        [choice] = whole.choices
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "a cat"}
        said = choice.message.model_dump(exclude_none=True)
        after = create(messages=[question, said, result], extra_body=body)
        parts = [part for chunk in create(messages=[question], stream=True) for part in chunk.choices]
    assert whole.prompt_token_ids == template([question])
    assert choice.token_ids == written
    assert set(choice.authorship) == {0, 1}
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "look")
    assert json.loads(call.function.arguments) == {"at": ["é", "😀 42"]}
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    made = {"type": "function", "function": {"name": "look", "arguments": {"at": ["é", "😀 42"]}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [made]}
    assert after.prompt_token_ids == template([question, turn, {"role": "tool", "content": "a cat"}])
    streamed = [piece.function for part in parts for piece in part.delta.tool_calls or ()]
    assert "".join(piece.name or "" for piece in streamed) == "look"
    assert json.loads("".join(piece.arguments or "" for piece in streamed)) == {"at": ["é", "😀 42"]}
    assert not any(part.delta.content for part in parts)
    assert [part.finish_reason for part in parts if part.finish_reason] == ["tool_calls"]
