"""A fleet as an engine: the bits of the engine that decodes the same units alone, whatever happens to workers, however
fast the tools of an environment are."""

import copy
import pickle
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from threading import Thread
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import small_world
from helpers import agent_tokenizer, flat, prepared, prompts, qwen3, requests, small_qwen3, strategies, tokenizer
from local_workers import LocalWorkers, asked, bits, learnt, make, models
from tandemrl.config import ConfigError, load
from tandemrl.data.messages import Message
from tandemrl.data.rows import Row
from tandemrl.processes.calls import ChildCalls, ThreadCalls
from tandemrl.rollout.engine import (
    Engine,
    EngineError,
    Passes,
    Reply,
    Request,
    Responder,
    Sampling,
    Turn,
    check_authors,
)
from tandemrl.rollout.envs.environment import Answer, BrokenEnvironmentError, Environment, State
from tandemrl.rollout.envs.episodes import EpisodeRunner, Reader, make_episode_runner, opening_prompts
from tandemrl.rollout.fleet.engine import FleetEngine
from tandemrl.rollout.fleet.ray_workers import Generated
from tandemrl.rollout.spread import Rounds, SpreadEngine, units_of
from tandemrl.rollout.sync import fingerprint, sync_weights
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import before_word, word
from tandemrl.selection.boundaries import start_table, word_boundary_table
from tandemrl.selection.draws import request_key
from tandemrl.types import Transcript

STRATEGY = strategies()["word"]
SAMPLING = Sampling(max_tokens=12)


@cache
def newer() -> Any:
    return learnt(models()[0])


@pytest.fixture(scope="module")
def alone() -> tuple[list[Any], list[Any], Passes]:
    """What units of two requests give in one engine, before and after other weights."""
    engine = make()
    before = bits([group for unit in units_of(asked(), 2) for group in engine.generate(unit)])
    sync_weights(newer(), engine, version=3)
    passes, after = Passes(), []
    for unit in units_of(asked(), 2):
        after += engine.generate(unit)
        passes += engine.passes
    return before, bits(after), passes


@pytest.fixture
def fleet() -> Iterator[Callable[..., FleetEngine]]:
    """Makes fleets of workers in threads, which end with the test."""
    made: list[FleetEngine] = []

    def start(size: int, faults: Any = None, engine: Any = make, acting: Any = None) -> FleetEngine:
        made.append(FleetEngine(LocalWorkers(engine, faults, acting, size), size=size, unit_groups=2))
        return made[-1]

    yield start
    for each in made:
        each.close()


def workers_of(engine: FleetEngine) -> LocalWorkers:
    assert isinstance(engine._workers, LocalWorkers)
    return engine._workers


@pytest.mark.parametrize("size", [0, 3])
def test_any_number_of_workers_gives_the_bits_of_one_engine(size, fleet, alone):
    before, after, passes = alone
    engine: Any = fleet(size) if size else SpreadEngine(make(), unit_groups=2)
    assert isinstance(engine, Engine)
    told: list[int] = []
    first = engine.generate(asked(), progress=told.append)
    assert bits(first) == before
    assert sum(told) == sum(len(completion.tokens) for completion in flat(first))
    checksum = sync_weights(newer(), engine, version=3)
    assert checksum == fingerprint(newer().named_parameters())
    assert bits(engine.generate(asked())) == after != before
    assert engine.passes == passes
    found = {worker.engine.fingerprint() for worker in workers_of(engine).workers.values()} if size else {checksum}
    assert checksum in found <= {checksum, make().fingerprint()}


def test_workers_drop_what_an_author_proposes(fleet: Callable[..., FleetEngine]) -> None:
    whole_words = requests(prompts(2), SAMPLING, before_word(0.5, start_table(tokenizer())), samples=2)
    found, told = (flat(engine.generate(whole_words)) for engine in (make(), fleet(1)))
    for one, other in zip(found, told, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.handover_logprobs is not None
        assert other.handover_logprobs is not None
        assert one.handover_logprobs.tolist() == other.handover_logprobs.tolist()
    assert any(each.handover_logprobs.any() for each in found)


@pytest.mark.parametrize("fault", ["dies", "its engine dies"])
def test_a_worker_is_lost_in_the_middle_and_nothing_else_happens(fault, fleet, alone):
    engine = fleet(2, {0: fault, 1: fault})
    assert bits(engine.generate(asked())) == alone[0]
    assert workers_of(engine).restarted
    engine.generate(asked())
    assert engine.counts()["restarts"] == len(workers_of(engine).restarted)


def test_a_worker_that_weights_do_not_reach_generates_nothing_that_counts(fleet, alone):
    engine = fleet(1, {0: "is stale"})
    engine.generate(asked())
    sync_weights(newer(), engine, version=3)
    assert bits(engine.generate(asked())) == alone[1]
    assert workers_of(engine).restarted == [0]


def test_weights_that_reach_nobody_end_the_run(fleet: Callable[..., FleetEngine]) -> None:
    engine = fleet(1, {0: "always stale"})
    sync_weights(newer(), engine, version=3)
    with pytest.raises(EngineError, match=r"do not last: 4 tries of a unit failed; the last: weights 3 did not reach"):
        engine.generate(asked())


def test_workers_that_do_not_start_are_an_error_with_the_cause() -> None:
    with pytest.raises(EngineError, match="out of memory"):
        FleetEngine(LocalWorkers(make, {0: "does not start"}), size=1, unit_groups=2)


def test_a_worker_whose_engine_is_another_one_is_refused() -> None:
    workers = LocalWorkers(make, size=2)
    models = iter([make(), TorchEngine(copy.deepcopy(newer()), copy.deepcopy(make().junior), tokenizer())])
    workers.make = lambda: next(models)
    with pytest.raises(EngineError, match="the engine of a worker is another one"):
        FleetEngine(workers, size=2, unit_groups=2)


def test_rollouts_of_a_step_keep_their_weights_though_newer_ones_come(fleet, alone):
    """The snapshot was taken before; its lost unit is generated again, after the newer weights were sent."""
    engine = fleet(2, {0: "dies later", 1: "dies later"})
    sync_weights(newer(), engine, version=3)
    before = engine.snapshot()
    written: list[Any] = []
    thread = Thread(target=lambda: written.extend(before.generate(asked())))
    thread.start()
    sync_weights(models()[0], engine, version=4)
    workers_of(engine).go_on.set()
    thread.join()
    assert workers_of(engine).restarted
    assert before.policy_version == 3
    assert bits(written) == alone[1]
    after = engine.generate(asked())
    assert {c.policy_version for c in flat(after)} == {4}
    assert [c[:-1] for c in bits(after)] == [c[:-1] for c in alone[0]]


def test_a_fleet_that_is_aborted_gives_up_its_calls(fleet: Callable[..., FleetEngine]) -> None:
    engine = fleet(1)
    begun = workers_of(engine).ask

    def ask(*given: Any) -> Generated:
        engine.abort()
        return begun(*given)

    workers_of(engine).ask = ask  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the fleet was closed"):
        engine.generate(asked())


def test_what_no_worker_can_serve_is_refused(fleet: Callable[..., FleetEngine]) -> None:
    engine = fleet(1)
    with pytest.raises(EngineError, match="request 0: empty prompt"):
        engine.generate(requests([[]], SAMPLING, STRATEGY))
    with pytest.raises(EngineError, match="the workers have no environment to take turns with"):
        engine.generate(asked(), responder=Mock(spec=Responder))
    sync_weights(newer(), engine, version=3)
    with pytest.raises(EngineError, match="newer ones need a greater number, not 3"):
        engine.load_weights([], 3)
    assert engine.generate([]) == []


REFUSED = {
    "train.async_steps=2": "train.async_steps=2: must be 0 or 1 with rollout.workers=0",
    "rollout.workers=2 train.async_steps=9": "must be between 0 and 8",
    "rollout.workers=1 rollout.environment=multihop rollout.max_turns=20": r"timeout_s=600\.0: must be above 600",
    "rollout.workers=1 rollout.engine=vllm rollout.vllm.multiprocess=true rollout.vllm.devices=1": "1: must be null",
    "rollout.workers=2 model.device=cuda rollout.vllm.junior_device=cuda:1": r"junior_device=cuda:1: must be null with",
}


@pytest.mark.parametrize("asked", REFUSED)
def test_what_a_fleet_cannot_do_is_refused_in_the_config(asked: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[asked]):
        load(overrides=asked.split())


# -------------------------------------------------------------------------------------------- turns with an environment


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
def callers() -> tuple[Any, Any]:
    size = len(agent_tokenizer(small_world.CALLS))
    return prepared(qwen3(vocabulary=size)), prepared(small_qwen3(vocabulary=size))


def calling() -> TorchEngine:
    return TorchEngine(*copy.deepcopy(callers()), agent_tokenizer(small_world.CALLS))


def acting(environment: Environment, *limits: str) -> EpisodeRunner:
    return EpisodeRunner(environment, agent_tokenizer(small_world.CALLS), load(None, [*LIMITS, *limits]).rollout)


def episodes_of(runner: EpisodeRunner) -> list[Request]:
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


def test_the_bits_of_an_episode_depend_on_its_unit_alone(fleet: Callable[..., FleetEngine]) -> None:
    """Without workers, with one, and with two of which one is lost amid its episodes."""
    runner = acting(Uneven())
    given, alone, first = episodes_of(runner), SpreadEngine(calling(), unit_groups=2), runner.episodes()
    written = alone.generate(given, responder=first)
    assert first.tally["asked"] > len(flat(written))
    assert max(len(c.turns) for c in flat(written)) == 3
    check_authors(flat(written), given[0].strategy)
    for size, faults in ((1, {}), (2, {0: "dies"})):
        engine = fleet(size, faults, calling, lambda: acting(Uneven()))
        episodes, told = runner.episodes(), list[int]()
        assert bits(engine.generate(given, responder=episodes, progress=told.append)) == bits(written)
        assert episodes.tally == first.tally
        assert engine.passes == alone.passes
        assert sum(told) == sum(int((c.author >= 0).sum()) for c in flat(written))
    assert engine._workers.restarted == [0]
    by_itself = engine.generate([*given])  # and nobody takes turns that is not asked to
    assert all(c.transcript is None and (c.author >= 0).all() for c in flat(by_itself))


def test_what_goes_wrong_in_a_worker_is_told_as_without_one(fleet: Callable[..., FleetEngine]) -> None:
    limits = ("rollout.tool_timeout_s=0.1", "rollout.max_turns=1")
    runner = acting(small_world.Talk(), *limits)
    engine, episodes = fleet(1, {}, calling, lambda: acting(small_world.Deaf(), *limits)), runner.episodes()
    written = flat(engine.generate(episodes_of(runner), responder=episodes))
    assert {c.transcript.counts["tool_timeouts"] for c in written if c.transcript} == {1}
    with pytest.raises(
        EngineError, match=r"environment Talk: none of 10 turns was answered: all took more than 0\.1 s"
    ):
        episodes.check()
    broken = fleet(1, {}, calling, lambda: acting(Broken()))
    with pytest.raises(EngineError, match=r"environment Broken: row r\d: .*the index is gone"):
        broken.generate(episodes_of(runner), responder=runner.episodes())


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
