"""A fleet as an engine: the bits of the engine that decodes the same units alone, whatever happens to workers."""

import copy
from collections.abc import Callable, Iterator
from functools import cache
from threading import Thread
from typing import Any
from unittest.mock import Mock

import pytest

from helpers import flat, prompts, requests, strategies, tokenizer
from local_workers import LocalWorkers, asked, bits, learnt, make, models
from tandemrl.config import ConfigError, load
from tandemrl.rollout.engine import Engine, EngineError, Passes, Responder, Sampling
from tandemrl.rollout.fleet.engine import FleetEngine
from tandemrl.rollout.fleet.ray_workers import Generated
from tandemrl.rollout.spread import SpreadEngine, units_of
from tandemrl.rollout.sync import fingerprint, sync_weights
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import before_word
from tandemrl.selection.boundaries import start_table

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

    def start(size: int = 2, faults: dict[int, str] | None = None) -> FleetEngine:
        made.append(FleetEngine(LocalWorkers(make, faults, size=size), size=size, unit_groups=2))
        return made[-1]

    yield start
    for each in made:
        each.close()


def workers_of(engine: FleetEngine) -> LocalWorkers:
    assert isinstance(engine._workers, LocalWorkers)
    return engine._workers


@pytest.mark.parametrize("size", [0, 1, 2, 3])
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
