"""Programs that ask the models: what becomes of those that do well, and of those that do not."""

import asyncio
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from helpers import EOS, IDS, agent_tokenizer, prepared, qwen3
from tandemrl.config import Config, ConfigError, load
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Score
from tandemrl.rollout.collect import generate
from tandemrl.rollout.engine import EngineError, Sampling
from tandemrl.rollout.envs.episodes import make_episode_runner, opening_prompts
from tandemrl.rollout.gateway.source import AgentFailedError, Endpoint, Outcome, Source, agent, openai_agent
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import before_word, bernoulli

WORDS = agent_tokenizer(())
PROGRAM = str(Path(__file__).with_name("program.py"))
ROWS = [Row(f"r{i}", ({"role": "user", "content": f"ab {i}"},), "own", "ab", {}) for i in range(9)]


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine(*(prepared(qwen3(seed)) for seed in (0, 1)), WORDS)


def config(*overrides: str) -> Config:
    return load(None, ["rollout.max_tokens=40", "rollout.turn_tokens=8", "rollout.observation_tokens=60", *overrides])


def run(
    engine: Any, source: Source, rows: Sequence[Row] = ROWS[:2], *overrides: str, size: int = 2, **more: Any
) -> Any:
    """The completions of all episodes, in order."""
    settings = config(*overrides)
    runner = make_episode_runner(settings, WORDS, environment=source, eos_token_ids=[IDS[EOS]])
    assert runner is not None
    prompts, _ = opening_prompts(rows, WORDS, settings.data, runner)
    how: dict[str, Any] = {"strategy": bernoulli(0.5), "sampling": Sampling(40), "group_size": size} | more
    batch = generate(engine, [*enumerate(prompts)], **how, seed=1, step=1, episode_runner=runner)
    assert [len(group) for group in batch.completions] == [size] * len(rows)
    return [each for group in batch.completions for each in group]


async def ask(url: str, messages: Sequence[Any], **more: Any) -> Any:
    async with httpx.AsyncClient(timeout=60, verify=False) as client:
        response = await client.post(f"{url}/chat/completions", json={"messages": messages, **more})
        response.raise_for_status()
        return response.json()["choices"][0]["message"]


async def twice(row: Row, base_url: str) -> Any:
    messages = [*row.messages]
    for _ in range(2):
        messages += [await ask(base_url, messages), {"role": "user", "content": "cd"}]
    return 0.25


def test_a_function_and_a_command_write_the_same_under_the_same_keys(engine: TorchEngine) -> None:
    by_function = run(engine, openai_agent(twice, scores=True))
    by_command = run(engine, openai_agent([sys.executable, PROGRAM, ""], scores=True))
    for one, other in zip(by_function, by_command, strict=True):
        assert (one.key, one.tokens.tolist(), one.author.tolist()) == (
            other.key,
            other.tokens.tolist(),
            other.author.tolist(),
        )
        assert (len(one.turns), one.branches) == (2, ())
        assert (one.transcript.state["score"], other.transcript.state["score"]) == (0.25, 0.5)
        assert [m["role"] for m in one.transcript.messages] == ["assistant", "user", "assistant"]
        assert other.transcript.counts == {"agent/requests": 2, "agent/forks": 0, "agent/failed": 0, "agent/asked": 2}
    assert len({one.key for one in by_function}) == 4


def test_what_an_agent_ends_with(engine: TorchEngine) -> None:
    async def ending(row: Row, client: Any) -> Any:
        await client.chat.completions.create(model="senior", messages=row.messages)
        told = {"r0": "7", "r1": None, "r2": {"answer": "8", "counts": {"tries": 3}}}
        return told[row.example_id]

    texts = run(engine, openai_agent(ending), ROWS[:3], size=1)
    assert [one.transcript.answer for one in texts] == ["7", None, "8"]
    assert texts[2].transcript.counts["tries"] == 3
    assert {*np.concatenate([one.author for one in texts])} == {1}  # the senior was asked
    score = Score(2.0, {"acc": 1.0}, "8")

    async def scored(row: Row, base_url: str) -> Any:
        await ask(base_url, row.messages)
        return score if row.example_id == "r0" else {"score": 1, "answer": "x"}

    source = openai_agent(scored, scores=True)
    first, second = run(engine, source, size=1)
    assert source.score(ROWS[0], first.transcript) == score
    assert source.score(ROWS[1], second.transcript) == 1.0
    [third] = run(engine, openai_agent([sys.executable, PROGRAM, "object"]), ROWS[:1], size=1)
    assert third.transcript.answer == '{"a": 1}'  # what a model may have written
    for told, scores in ((0.5, False), ("x", True), ({"points": 1}, True), ({"counts": {"tries": "x"}}, True)):

        async def wrong(row: Row, base_url: str, told: Any = told) -> Any:
            await ask(base_url, row.messages)
            return told

        with pytest.raises(ConfigError, match="the agent ended with"):
            run(engine, openai_agent(wrong, scores=scores))


def test_a_source_of_ones_own_and_branches(engine: TorchEngine) -> None:
    """Summaries fork; each token that was sampled is in one branch, with its own authors."""

    class Summaries(Source):
        async def episode(self, row: Row, endpoint: Endpoint) -> Outcome:
            first = await ask(endpoint.base_url, row.messages)
            await ask(endpoint.base_url, [*row.messages, first, {"role": "user", "content": "ef"}])
            await asyncio.gather(*(ask(endpoint.base_url, [{"role": "user", "content": "short"}]) for _ in range(2)))
            return Outcome(counts={"mine": 1}, state={"x": 1})

    for one in run(engine, Summaries(), ROWS[:1]):
        branches = (one, *one.branches)
        assert one.transcript.counts == {"agent/requests": 4, "agent/forks": 2, "agent/failed": 0, "mine": 1}
        assert sorted(len(each.turns) for each in branches) == [1, 1, 2]
        assert len({each.key for each in branches}) == 3
        assert all(each.prompt is not None for each in branches)
        assert one.transcript.state == {"state": {"x": 1}}


def test_the_yaml_names_a_command_or_a_function() -> None:
    named = config("rollout.environment=agent", "rollout.agent.run=[test_agents:twice]", "rollout.agent.scores=true")
    assert agent(named).run is twice
    assert agent(config("rollout.environment=agent", "rollout.agent.run=[python,x.py]")).run == ("python", "x.py")
    for overrides, message in (
        (["rollout.environment=agent"], "rollout.agent.run=.*must be a command or"),
        (["rollout.agent.run=[x]"], "rollout.agent.run=.*else empty"),
        (["rollout.environment=agent", "rollout.agent.run=[x]", "rollout.workers=1"], "rollout.workers=1: must be 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(*overrides)
    for given in (lambda row: 1.0, "python x.py", []):
        with pytest.raises(ConfigError, match="openai_agent"):
            openai_agent(given)


def left(marker: str) -> list[str]:
    """The processes of programs that have a mark of the test in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += [path.parent.name] * (f"OF_THIS_TEST={marker}".encode() in path.read_bytes())
    return [pid for pid in found if pid != str(os.getpid())]


def assert_none_left(marker: str) -> None:
    deadline = time.monotonic() + 20
    while found := left(marker):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


FAULTS = ("", "crash", "hang", "flood", "child")


def test_a_command_that_goes_wrong_has_no_score_and_leaves_no_process(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THIS_TEST", marker := f"marker-{os.getpid()}")

    class Mixed(Source):
        async def episode(self, row: Row, endpoint: Endpoint) -> Outcome:
            fault = FAULTS[int(row.example_id[1:]) % len(FAULTS)]
            one = openai_agent([sys.executable, PROGRAM, fault], scores=True)
            return await one.episode(row, endpoint)

    limits = ["rollout.agent.timeout_s=20", "rollout.agent.max_failed=0.9"]
    done = run(engine, Mixed(), ROWS[: len(FAULTS)], *limits, size=1)
    failures = [one.transcript.state.get("failure", "") for one in done]
    assert [one.stop_reason == "failed" for one in done] == [False, True, True, False, False]
    assert "exit status 1" in failures[1]
    assert "no luck" in failures[1]
    assert "no end within 20 s" in failures[2]
    assert [len(one.turns) for one in done] == [2, 1, 1, 2, 2]
    assert_none_left(marker)
    with pytest.raises(EngineError, match=r"3 of 3 episodes failed, more than .*max_failed=0.5; mostly: exit status 1"):
        run(engine, openai_agent([sys.executable, PROGRAM, "crash"]), ROWS[:3], size=1)
    with pytest.raises(ConfigError, match="No such file"):
        run(engine, openai_agent(["/no/such/program"]), ROWS[:1])


def test_a_program_that_ends_the_process_or_itself_fails_alone(engine: TorchEngine) -> None:
    async def leaves(row: Row, base_url: str) -> None:
        await ask(base_url, row.messages)
        if row.example_id == "r0":
            sys.exit(0)
        raise asyncio.CancelledError

    done = run(engine, openai_agent(leaves), ROWS[:2], "rollout.agent.max_failed=1", size=1)
    assert [one.transcript.state["failure"] for one in done] == ["SystemExit: 0", "it was cancelled"]


def test_why_an_episode_failed_has_no_address(engine: TorchEngine) -> None:
    """Else no two episodes fail for the same reason, and the name of a session is written to a file."""
    done = run(engine, openai_agent(twice), ROWS[:1], "rollout.max_turns=1", "rollout.agent.max_failed=1")
    [cause] = {one.transcript.state["failure"] for one in done}
    assert "for url '/sessions/SESSION/v1/chat/completions'" in cause


@pytest.mark.parametrize("how", ["interrupted", "stopped"])
def test_no_process_outlives_a_run_that_ends(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("OF_THIS_TEST", marker := f"{how}-{os.getpid()}")

    class Ends(threading.Event):
        def is_set(self) -> bool:
            began = bool(left(marker))
            if began and how == "interrupted":
                raise KeyboardInterrupt
            return began

    class Hanging(Source):
        def make_runner(self, *given: Any, **named: Any) -> Any:
            runner = super().make_runner(*given, **named)
            runner.stopped = Ends()
            return runner

        async def episode(self, row: Row, endpoint: Endpoint) -> Outcome:
            return await openai_agent([sys.executable, PROGRAM, "hang"]).episode(row, endpoint)

    with pytest.raises(KeyboardInterrupt if how == "interrupted" else EngineError):
        run(engine, Hanging(), ROWS[:1])
    assert_none_left(marker)


def test_requests_take_no_proxy_and_sessions_alone_are_answered(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    statuses = []

    async def asks(row: Row, base_url: str, client: Any) -> float:
        await client.chat.completions.create(model="both", messages=row.messages)
        async with httpx.AsyncClient(trust_env=False) as outside:
            root = base_url.partition("/sessions")[0]
            paths = ("/v1/chat/completions", "/inference/v1/generate")
            statuses.extend([(await outside.post(root + path, json={})).status_code for path in paths])
        return 1.0

    for agent_ in (openai_agent(asks, scores=True), openai_agent([sys.executable, PROGRAM, ""], scores=True)):
        [one] = run(engine, agent_, ROWS[:1], "rollout.agent.max_failed=1", size=1)
        assert one.stop_reason != "failed", one.transcript.state
    assert statuses == [401, 401]


def test_texts_of_one_author_have_the_channel_of_handovers(engine: TorchEngine) -> None:
    """Where the strategy drops proposals. Else they cannot be packed beside others, or lose it of an earlier turn."""

    async def roles(row: Row, base_url: str) -> float:
        first = await ask(base_url, row.messages)
        await ask(base_url, [*row.messages, first, {"role": "user", "content": "cd"}], model="senior")
        await ask(base_url, [{"role": "user", "content": "ef"}], model="junior")
        return 1.0

    starts = torch.arange(engine.vocabulary) % 3 != 1  # with EOS
    done = run(engine, openai_agent(roles, scores=True), ROWS, strategy=before_word(0.5, starts))
    both = [each for one in done for each in (one, *one.branches)]
    assert all(each.handover_logprobs is not None for each in both)
    assert any((each.handover_logprobs < 0).any() for each in both if len(each.turns) == 2)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"rollout.environment=agent: must be .* with several processes"):
        config("rollout.environment=agent", "rollout.agent.run=[x]", "parallel.dp_shard=2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one trainer process"):
        make_episode_runner(config(), WORDS, environment=openai_agent(twice), eos_token_ids=[IDS[EOS]])


class Faulty(Source):
    """Agents that do anything, by the number of their row and of their episode."""

    def __init__(self, seed: int) -> None:
        self.seed, self.begun, self.tally = seed, Counter[str](), Counter[str]()

    async def episode(self, row: Row, endpoint: Endpoint) -> Outcome:
        number = self.begun[row.example_id]
        self.begun[row.example_id] += 1
        chance = random.Random(f"{self.seed} {row.example_id} {number}")
        what = chance.choice(("good", "crash", "hang", "flood", "fork", "repeat", "parallel", "idle", "leave", "late"))
        self.tally[what] += 1
        url, messages = endpoint.base_url, [*row.messages]
        if what == "idle":
            return Outcome(score=1.0)
        said = await ask(url, messages)
        if what == "crash":
            raise AgentFailedError("as if killed")
        if what == "hang":
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                await ask(url, messages)  # the session is closed by then, or it is written in vain
        if what == "flood":
            with suppress(httpx.HTTPStatusError):
                for _ in range(100):
                    await ask(url, messages)
        if what == "fork":
            await ask(url, [{"role": "user", "content": "x y"}])
        if what == "repeat":
            await ask(url, messages)
        if what == "parallel":
            await asyncio.gather(*(ask(url, [*messages, said, {"role": "user", "content": f"{i}"}]) for i in range(3)))
        if what == "leave":
            with pytest.raises(httpx.TimeoutException):
                async with httpx.AsyncClient(timeout=0.001, verify=False) as client:
                    await client.post(f"{url}/chat/completions", json={"messages": [*messages, said, *messages]})
        if what != "late":
            await ask(url, [*messages, said, {"role": "user", "content": "go"}]) if what == "good" else None
        return Outcome(score=float(number), state={"what": what})


@pytest.mark.parametrize("rows", [10, pytest.param(250, marks=pytest.mark.slow)])
def test_random_faults_lose_nothing(engine: TorchEngine, rows: int) -> None:
    """None is lost, none that failed has a score, and each token that was sampled is there once."""
    source, size = Faulty(seed=1), 4
    some = [
        replace(ROWS[0], example_id=f"e{i}", messages=({"role": "user", "content": f"ab {i}"},)) for i in range(rows)
    ]
    limits = ["rollout.agent.timeout_s=20", "rollout.agent.max_failed=1", "rollout.max_turns=6"]
    done = run(engine, source, some, *limits, size=size)
    assert len(done) == rows * size == sum(source.tally.values())
    failed = sum(one.stop_reason == "failed" for one in done)
    causes = Counter(one.transcript.state.get("failure") for one in done)
    assert failed == source.tally["crash"] + source.tally["hang"] + source.tally["idle"], causes
    for one in done:
        state = one.transcript.state
        assert ("score" in state) != (one.stop_reason == "failed")
        branches, seen = (one, *one.branches), set()
        for each in branches if len(one.tokens) else ():
            whole = [*each.prompt, *each.tokens.tolist()]
            for turn_end in np.flatnonzero(np.diff(each.author >= 0, append=False) & (each.author >= 0)):
                place = (
                    each.key,
                    len(each.prompt) + int(turn_end),
                    tuple(whole[: len(each.prompt) + int(turn_end) + 1]),
                )
                assert place not in seen
                seen.add(place)
        assert sum(len(each.turns) for each in branches) == one.transcript.counts["agent/requests"]
        what = (state.get("state") or {}).get("what")
        expected = {"fork": [1], "repeat": [1], "parallel": [2], "good": [0], "late": [0], "flood": [4, 5]}
        if what in expected:  # a flood ends by its requests or by its tokens
            assert one.transcript.counts["agent/forks"] in expected[what], what


def test_a_coroutine_that_holds_up_all_others_ends_the_run(engine: TorchEngine) -> None:
    async def blocks(row: Row, base_url: str) -> None:
        time.sleep(12)

    with pytest.raises(EngineError, match="a coroutine has held up all others for 1 s"):
        run(engine, openai_agent(blocks), ROWS[:1], "rollout.agent.timeout_s=1")


def test_an_engine_that_fails_says_so(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandemrl.rollout.decoding.DecodingBatch.step", lambda *given: 1 / 0)
    with pytest.raises(EngineError, match="the engine failed: ZeroDivisionError"):
        run(engine, openai_agent(twice, scores=True))
