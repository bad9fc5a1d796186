"""The dispatcher in simulated fleets: whatever happens, a run consumes what it would without faults; planted bugs are
found."""

from collections import Counter
from itertools import count
from typing import Any

import pytest
from simulated_fleet import BrokenInvariantError, Run, Simulation, expected

from tandemrl.rollout.fleet.dispatcher import Dispatcher, DispatchError
from tandemrl.rollout.fleet.events import (
    Answered,
    Assign,
    Deliver,
    Fail,
    Fence,
    Joined,
    Load,
    Loaded,
    Lost,
    Published,
    Retire,
    Start,
    Submitted,
    Tick,
    Unit,
)


def run_of(seed: int) -> Run:
    """Sizes that go round with the seed."""
    return Run(workers=1 + seed % 4, units=1 + seed // 4 % 4, k=seed // 16 % 4, save_every=1 + seed // 64 % 3)


def simulate(seeds: range) -> Counter[str]:
    """Run the seeds. Returns what happened in all of them together."""
    happened = Counter[str]()
    for seed in seeds:
        run = run_of(seed)
        simulation = Simulation(seed, run)
        consumed = simulation.finish()
        assert consumed == expected(run), seed
        happened["events"] += simulation.events
        happened["redone"] += simulation.redone
        happened["workers"] += simulation.restarts
        happened["trainers"] += simulation.trainers
        happened["stale"] += sum(staleness > 0 for staleness in simulation.staleness)
    return happened


def test_whatever_happens_a_run_consumes_what_it_would_without_faults() -> None:
    happened = simulate(range(500))
    assert happened["redone"] > 500  # the faults are there
    assert happened["trainers"] > 600
    assert happened["workers"] > 3000
    assert happened["stale"] > 1000


@pytest.mark.slow
def test_ten_thousand_seeds() -> None:
    simulate(range(10_000))


def test_a_simulation_follows_from_its_seed() -> None:
    first, second = Simulation(7, run_of(7)), Simulation(7, run_of(7))
    assert first.finish() == second.finish()
    assert (first.events, first.now, first.staleness) == (second.events, second.now, second.staleness)


def test_the_answers_without_faults_by_hand() -> None:
    """k = 1 and one unit: steps 1 and 2 with the first weights, step 3 with those after step 1."""
    first, second = hash((0, 1, 0, 1)), hash((0, 2, 0, 1))
    third = hash((hash((0, first)), 3, 0, 1))
    assert expected(Run(steps=3, units=1, k=1)) == [[first], [second], [third]]


# -------------------------------------------------------------------------------------------------------- planted bugs


class NoVersionCheck(Dispatcher):
    def trusts(self, version: int, checksum: int, expected: int | None) -> bool:
        return True


class NoChecksum(Dispatcher):
    def trusts(self, version: int, checksum: int, expected: int | None) -> bool:
        return version == expected


class CountedVersions(Dispatcher):
    """Which weights a worker has is what was sent to it, not what it says."""

    def handle(self, event: Any, now: float) -> Any:
        if isinstance(event, Answered) and event.worker in self.workers:
            sent = self.workers[event.worker].version
            event = event._replace(version=sent, checksum=self.checksums.get(sent))
        return super().handle(event, now)


class LateAnswers(Dispatcher):
    """An answer of a worker that was given up is accepted if the unit is still open."""

    def accepts(self, event: Answered) -> bool:
        batch = self.batches.get(event.unit.batch)
        if batch is None or event.unit.index in batch.answers or event.unit.index < batch.delivered:
            return False
        if event.unit.index in batch.waiting:
            batch.waiting.remove(event.unit.index)
        if event.worker not in self.workers:
            self.workers[event.worker] = type(next(iter(self.workers.values())))("generating")
        return True


class AnyAttempt(Dispatcher):
    """Copies of an answer count again."""

    def accepts(self, event: Answered) -> bool:
        return event.worker in self.workers and event.unit.batch in self.batches

    def deliver(self) -> None:
        for batch in self.batches.values():
            done = [index for index in batch.answers if index < batch.delivered]
            batch.delivered = min([batch.delivered, *done])
        super().deliver()


class LostRetry(Dispatcher):
    def fence(self, number: int, why: str) -> None:
        self.workers[number].job = None
        super().fence(number, why)


class NoTimeout(Dispatcher):
    def check_time(self) -> None:
        pass


class NewestWeights(Dispatcher):
    """A unit that is asked for again gets the weights of now."""

    def assign(self, number: int, unit: Unit) -> None:
        if self.batches[unit.batch].attempts[unit.index]:
            self.batches[unit.batch].version = self.newest
        super().assign(number, unit)


class AsTheyCome(Dispatcher):
    """Answers are handed over in the order in which they come."""

    def deliver(self) -> None:
        for number, batch in [*self.batches.items()]:
            for index in [*batch.answers]:
                self._actions.append(Deliver(Unit(number, index), batch.answers.pop(index)))
                batch.delivered += 1
            if batch.delivered == len(batch.attempts):
                del self.batches[number]


class EagerRetire(Dispatcher):
    """Only the newest weights are kept."""

    def _retire(self) -> None:
        for version in sorted(self.checksums.keys() - {self.newest}):
            del self.checksums[version]
            self._actions.append(Retire(version))


PLANTED: dict[str, dict[str, Any]] = {
    "no version check": {"dispatcher": NoVersionCheck},
    "no checksum": {"dispatcher": NoChecksum},
    "counter instead of versions": {"dispatcher": CountedVersions},
    "answer of a fenced worker accepted": {"dispatcher": LateAnswers},
    "double consume": {"dispatcher": AnyAttempt},
    "lost retry": {"dispatcher": LostRetry},
    "no time-out": {"dispatcher": NoTimeout},
    "retry with other weights": {"dispatcher": NewestWeights},
    "out of order": {"dispatcher": AsTheyCome},
    "weights dropped too early": {"dispatcher": EagerRetire},
    "stale prefix cache": {"prefix_cache": True},
    "one step too far ahead": {"ahead": 1},
    "checkpoint without rollouts in flight": {"forgets": True},
}


def found_at(limit: int, **planted: Any) -> tuple[int, str]:
    """The first seed below the limit at which a planted bug is found, and how."""
    for seed in range(limit):
        try:
            Simulation(seed, run_of(seed), **planted).finish()
        except (BrokenInvariantError, DispatchError) as error:
            return seed, str(error)
    return limit, "not found"


@pytest.mark.parametrize("planted", PLANTED.values(), ids=list(PLANTED))
def test_a_planted_bug_is_found_within_200_seeds(planted: dict[str, Any]) -> None:
    seed, how = found_at(200, **planted)
    assert seed < 200, how


# ------------------------------------------------------------------------------------------------------------ by hand


def dispatcher(workers: int = 1, *, k: int = 0, patience: int = 3) -> Dispatcher:
    return Dispatcher(workers, max_staleness=k, timeout_s=10.0, patience=patience, numbers=count())


def test_one_unit_from_start_to_end() -> None:
    fleet = dispatcher()
    assert fleet.handle(Published(0, 7), 0.0) == [Start(0)]
    assert fleet.handle(Submitted(1, 1, 0, 1), 0.0) == []
    assert fleet.handle(Joined(0), 1.0) == [Load(0, 0)]
    assert fleet.handle(Loaded(0, 0, 7), 2.0) == [Assign(0, Unit(1, 0), 1)]
    assert fleet.handle(Answered(0, Unit(1, 0), 1, 0, 7, "text"), 5.0) == [Deliver(Unit(1, 0), "text")]
    assert fleet.handle(Answered(0, Unit(1, 0), 1, 0, 7, "text"), 5.0) == []
    assert fleet.handle(Published(1, 8), 6.0) == [Load(0, 1), Retire(0)]
    assert (fleet.redone, fleet.restarts, fleet.idle_s, fleet.worker_s) == (0, 0, 1, 6)
    assert fleet.done == {"starting": 1, "loading": 1, "generating": 1}
    assert fleet.done_s == {"starting": 1, "loading": 1, "generating": 3}


def test_a_silent_worker_is_replaced_and_its_unit_asked_for_again() -> None:
    fleet = dispatcher()
    for event in (Published(0, 7), Submitted(1, 1, 0, 1), Joined(0), Loaded(0, 0, 7)):
        fleet.handle(event, 0.0)
    assert fleet.handle(Tick(), 10.0) == []
    fence, start = fleet.handle(Tick(), 10.5)
    assert fence == Fence(0, "no sign of it for 10 s while generating")
    assert start == Start(1)
    assert fleet.handle(Joined(1), 11.0) == [Load(1, 0)]
    assert fleet.handle(Loaded(1, 0, 7), 11.0) == [Assign(1, Unit(1, 0), 2)]
    assert fleet.handle(Answered(0, Unit(1, 0), 1, 0, 7, "late"), 12.0) == []
    assert fleet.handle(Answered(1, Unit(1, 0), 2, 0, 7, "text"), 12.0) == [Deliver(Unit(1, 0), "text")]
    assert (fleet.redone, fleet.restarts) == (1, 1)


def test_a_fleet_that_only_dies_gives_up() -> None:
    fleet = dispatcher(patience=2)
    assert fleet.handle(Tick(), 0.0) == [Start(0)]
    assert fleet.handle(Lost(0, "no memory"), 1.0) == [Fence(0, "no memory"), Start(1)]
    why = "2 workers were lost and none answered in between; the last: no memory"
    assert fleet.handle(Lost(1, "no memory"), 2.0) == [Fence(1, "no memory"), Fail(why)]
    assert fleet.handle(Tick(), 3.0) == []


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (Submitted(3, 1, 4, 5), "batch 3 comes after batch 3"),
        (Submitted(4, 1, 3, 4), "needs weights 3; there are .4."),
        (Submitted(4, 1, 4, 7), "weights 4, which are then 2 steps old; at most 1 are allowed"),
    ],
)
def test_a_batch_that_must_not_be_generated_is_refused(event: Submitted, why: str) -> None:
    fleet = dispatcher(k=1)
    fleet.handle(Published(4, 7), 0.0)
    fleet.handle(Submitted(3, 1, 4, 6), 0.0)
    with pytest.raises(DispatchError, match=why):
        fleet.handle(event, 1.0)
