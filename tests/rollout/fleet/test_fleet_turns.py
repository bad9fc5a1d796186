"""Units take turns with an environment: the same bits wherever they are decoded, however fast the tools are."""

import copy
import pickle
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

import small_world
from helpers import agent_tokenizer, flat, prepared, qwen3, small_qwen3
from local_workers import LocalWorkers
from tandemrl.config import load
from tandemrl.data.messages import Message
from tandemrl.data.rows import Row
from tandemrl.processes.calls import ChildCalls, ThreadCalls
from tandemrl.rollout.engine import Completion, EngineError, Reply, Request, Sampling, Turn, check_authors
from tandemrl.rollout.envs.environment import Answer, BrokenEnvironmentError, Environment, State
from tandemrl.rollout.envs.episodes import EpisodeRunner, Reader, make_episode_runner, opening_prompts
from tandemrl.rollout.fleet.engine import FleetEngine
from tandemrl.rollout.spread import Rounds, SpreadEngine
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import word
from tandemrl.selection.boundaries import word_boundary_table
from tandemrl.selection.draws import request_key
from tandemrl.types import Transcript

LIMITS = ["rollout.max_turns=3", "rollout.turn_tokens=12", "rollout.observation_tokens=48", "rollout.tool_timeout_s=5"]


class Uneven(small_world.Talk):
    """Takes its time, another one for each turn."""

    def reply(self, row: Row, state: State, message: Message) -> Answer:
        time.sleep(random.random() / 50)
        return super().reply(row, state, message)


class Broken(Environment):
    def reply(self, row: Row, state: State, message: Message) -> Answer:
        raise BrokenEnvironmentError("the index is gone")


@cache
def models() -> tuple[Any, Any]:
    size = len(agent_tokenizer(small_world.CALLS))
    return prepared(qwen3(vocabulary=size)), prepared(small_qwen3(vocabulary=size))


def make() -> TorchEngine:
    return TorchEngine(*copy.deepcopy(models()), agent_tokenizer(small_world.CALLS))


def acting(environment: Environment, *limits: str) -> EpisodeRunner:
    return EpisodeRunner(environment, agent_tokenizer(small_world.CALLS), load(None, [*LIMITS, *limits]).rollout)


def asked(runner: EpisodeRunner) -> list[Request]:
    """Five requests of two keys: with units of two, the last unit has one."""
    words = agent_tokenizer(small_world.CALLS)
    said = ("ab", "cde", "f", "ghi", "kl")
    rows = [Row(f"r{i}", ({"role": "user", "content": f"{text} one"},), "qa", text, {}) for i, text in enumerate(said)]
    prompts, _ = opening_prompts(rows, words, load().data, runner)
    strategy = word(0.5, 4, word_boundary_table(words))
    keys = [(request_key(0, 0, i, 0), request_key(0, 0, i, 1)) for i in range(len(rows))]
    return [
        runner.episode(Request(prompt.tokens, key, Sampling(30), strategy), prompt.row)
        for prompt, key in zip(prompts, keys, strict=True)
    ]


class Scripted:
    """Answers the turns of these numbers, one at a call."""

    def __init__(self, order: list[int]) -> None:
        self.order, self.submitted = order, list[int]()

    def submit(self, turn: Turn) -> None:
        self.submitted.append(turn.number)

    def replies(self, *, wait: bool) -> list[Reply]:
        return [Reply(self.order.pop(0), (7,))]

    def transcript(self, number: int) -> Transcript:
        return Transcript((), number, {})


def test_answers_come_in_rounds() -> None:
    """In the order of the numbers, when all are there and somebody waits; not those of an earlier unit."""
    scripted = Scripted([12, 9, 11, 10])
    rounds = Rounds(scripted, first=10)
    for number in range(3):
        rounds.submit(Turn(number, None, 0, np.array([1]), "eos"))
    assert scripted.submitted == [10, 11, 12]
    assert rounds.replies(wait=False) == []
    assert [reply.number for reply in rounds.replies(wait=True)] == [0, 1, 2]
    assert scripted.order == []
    assert rounds.transcript(2).state == 12


def bits(written: list[list[Completion]]) -> list[Any]:
    return [
        (c.key, c.tokens.tolist(), c.author.tolist(), c.behaviour_logprobs.tolist(), c.stop_reason, c.transcript)
        for c in flat(written)
    ]


@pytest.fixture
def fleet() -> Iterator[Callable[..., FleetEngine]]:
    """Makes fleets of workers in threads, each with an environment of its own, which end with the test."""
    made: list[FleetEngine] = []

    def start(size: int, environment: Callable[[], Environment], *limits: str, **faults: str) -> FleetEngine:
        broken = {int(number.removeprefix("worker_")): fault for number, fault in faults.items()}
        workers = LocalWorkers(make, broken, lambda: acting(environment(), *limits), size)
        made.append(FleetEngine(workers, size=size, unit_groups=2))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_the_bits_of_an_episode_depend_on_its_unit_alone(fleet: Callable[..., FleetEngine]) -> None:
    """Without workers, with one, and with two of which one is lost amid its episodes."""
    runner = acting(Uneven())
    given, alone, first = asked(runner), SpreadEngine(make(), unit_groups=2), runner.episodes()
    written = alone.generate(given, responder=first)
    assert first.tally["asked"] > len(flat(written))
    assert max(len(c.turns) for c in flat(written)) == 3
    check_authors(flat(written), given[0].strategy)
    for engine in (fleet(1, Uneven), fleet(2, Uneven, worker_0="dies")):
        episodes, told = runner.episodes(), list[int]()
        assert bits(engine.generate(given, responder=episodes, progress=told.append)) == bits(written)
        assert episodes.tally == first.tally
        assert engine.passes == alone.passes
        assert sum(told) == sum(int((c.author >= 0).sum()) for c in flat(written))
    assert engine._workers.restarted == [0]
    by_itself = engine.generate(
        [copy.copy(request) for request in given]
    )  # and nobody takes turns that is not asked to
    assert all(c.transcript is None and (c.author >= 0).all() for c in flat(by_itself))


def test_what_goes_wrong_in_a_worker_is_told_as_without_one(fleet: Callable[..., FleetEngine]) -> None:
    runner = acting(small_world.Talk(), "rollout.tool_timeout_s=0.1", "rollout.max_turns=1")
    engine, episodes = (
        fleet(1, small_world.Deaf, "rollout.tool_timeout_s=0.1", "rollout.max_turns=1"),
        runner.episodes(),
    )
    written = flat(engine.generate(asked(runner), responder=episodes))
    assert {c.transcript.counts["tool_timeouts"] for c in written if c.transcript} == {1}
    with pytest.raises(
        EngineError, match=r"environment Talk: none of 10 turns was answered: all took more than 0\.1 s"
    ):
        episodes.check()
    with pytest.raises(EngineError, match=r"environment Broken: row r\d: .*the index is gone"):
        fleet(1, Broken).generate(asked(runner), responder=runner.episodes())


def test_a_worker_makes_the_environment_or_has_a_copy() -> None:
    words = agent_tokenizer(small_world.CALLS)
    ends = (words.eos_token_id, words.pad_token_id)
    settings = load(None, [*LIMITS, "rollout.environment=small_world:Talk"])
    named = make_episode_runner(settings, words, eos_token_ids=ends, junior=Reader(words, ends))
    passed = make_episode_runner(load(None, LIMITS), words, environment=small_world.Talk())
    for runner, config, kind in ((named, settings, ChildCalls), (passed, load(None, LIMITS), ThreadCalls)):
        assert runner is not None
        made = pickle.loads(pickle.dumps(runner.elsewhere(config)))()
        assert type(made.caller) is type(runner.caller) is kind
        assert made.ends == runner.ends
        assert type(made.environment) is small_world.Talk
        assert made.environment is not runner.environment
        for rendering, same in ((made.rendering, runner.rendering), (made.junior_rendering, runner.junior_rendering)):
            assert (rendering is None) == (same is None)
            if same is not None:
                said = [{"role": "user", "content": "ab 3"}]
                assert rendering.end_of_turn == same.end_of_turn
                assert rendering.context(said, ended=False) == same.context(said, ended=False)
