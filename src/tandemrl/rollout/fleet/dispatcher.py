"""Which worker generates what, with which weights, and what is accepted: a state machine without I/O.

Events go in, actions come out (both in ``events``), and its owner carries them out: ``engine.FleetEngine``, or the
simulation in the tests. It knows neither tensors nor a clock: the time comes with each event.

A *batch* is what one call of ``generate`` asks for. It is split into *units*: fixed sets of keys that are always
decoded together, so that an answer has the same bits whichever worker gives it. A lost unit is simply asked for again.

- Each batch names its weights by their *version* when it is submitted. No unit is generated with others, however late
  or often it is asked for: a worker that has other weights gets these first, and they are kept as long as a batch
  needs them.
- Each answer repeats worker, unit, attempt, version and checksum. One that was not asked for like that is dropped.
- Answers are delivered in the order of batches and units. Nothing is dropped for its age: a batch whose weights are
  more than ``max_staleness`` versions behind its step is refused when it is submitted.
- A worker that is lost, is silent for ``timeout_s``, or has other weights than it should, is *fenced*: it is ended,
  whatever still comes from it is dropped, and a new one, under a new number, replaces it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal

from tandemrl.rollout.fleet.events import (
    Action,
    Answered,
    Assign,
    Deliver,
    Event,
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
    Unit,
)


class DispatchError(RuntimeError):
    """A batch was submitted that must not be generated like this."""


State = Literal["starting", "loading", "idle", "generating"]


@dataclass
class _Worker:
    state: State = "starting"
    version: int | None = None
    """The weights that it has, or is loading."""
    job: tuple[Unit, int] | None = None
    """The unit that it was asked for last, and the attempt."""


@dataclass
class _Batch:
    version: int
    waiting: list[int]
    """The units that no worker generates and none has answered: a heap."""
    attempts: list[int]
    """How often each unit was assigned."""
    answers: dict[int, Any]
    """Answers that wait for earlier ones."""
    delivered: int = 0


class Dispatcher:
    """The state of a fleet.

    Args:
        workers: how many there shall be.
        max_staleness: how many versions older than the newest possible ones a batch's weights may be
            (``train.async_steps``).
        timeout_s: a worker that has not done in this time what it was asked for is replaced.
        patience: after so many lost workers without an answer in between, ``Fail``.
        numbers: the numbers of workers, none of which occurs twice.
    """

    def __init__(
        self,
        workers: int,
        *,
        max_staleness: int,
        timeout_s: float,
        patience: int,
        numbers: Iterator[int],
    ) -> None:
        self.size, self.max_staleness, self.timeout_s, self.patience = workers, max_staleness, timeout_s, patience
        self.redone = self.restarts = 0
        """Units that were assigned again, and workers that were replaced."""
        self.idle_s = self.worker_s = 0.0
        """The time of all workers in which they had nothing to do, and all of it, in seconds."""
        self.done, self.done_s = Counter[str](), defaultdict[str, float](float)
        """How often workers have done what they were asked for, by their state until then, and the seconds it took."""
        self.workers: dict[int, _Worker] = {}
        self.batches: dict[int, _Batch] = {}
        self.checksums: dict[int, int | None] = {}
        """The checksum of each version that can be loaded; None until a worker has loaded it."""
        self._idle: dict[int | None, dict[int, None]] = {}
        """The idle workers by the version that they have, each in the order in which they became idle."""
        self._busy: dict[int, float] = {}
        """All others: since when they do what they were asked for, the longest first."""
        self._coming = Counter[int | None]()
        """How many workers are loading each version."""
        self._numbers, self._lost_in_a_row, self._last_batch, self._now = numbers, 0, -1, 0.0
        self._silent_at = 0.0
        """Before this time, no worker is silent for too long."""
        self._needed_anew = False
        """Whether other weights may be needed than before."""
        self._actions: list[Action] = []

    @property
    def newest(self) -> int:
        """The version that was published last; -1 before the first."""
        return max(self.checksums, default=-1)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take note of an event. Returns what to do, in this order.

        Raises:
            DispatchError: the batch that was submitted has a number out of order, or weights that are not there or too
                old for its step.
        """
        elapsed, self._now, self._actions = now - self._now, now, []
        self.idle_s += elapsed * sum(map(len, self._idle.values()))
        self.worker_s += elapsed * len(self.workers)
        match event:
            case Published(version, checksum):
                self.checksums[version], self._needed_anew = checksum, True
            case Submitted():
                self._submit(event)
            case Joined(number) if self._state(number) == "starting":
                self._become(number, "idle")
            case Loaded(number) if self._state(number) == "loading":
                self._loaded(event)
            case Answered(number) if self.accepts(event):
                self._answered(event)
            case Lost(number, why) if number in self.workers:
                self.fence(number, why)
        self.check_time()
        while len(self.workers) < self.size and self._lost_in_a_row < self.patience:
            self.workers[number := next(self._numbers)] = _Worker()
            self._become(number, "starting")
            self._actions.append(Start(number))
        self._dispatch()
        self._retire()
        return self._actions

    def _state(self, number: int) -> str:
        return self.workers[number].state if number in self.workers else "fenced"

    def _become(self, number: int, state: State, version: int | None = None) -> None:
        """Change the state of a worker, and with it the version that it has or is loading, if one is given.

        Everything that is looked up for an event is kept up to date here, so that no event costs a look at all workers.
        """
        worker = self.workers[number]
        if state in ("idle", "loading") and number in self._busy:
            self.done[worker.state] += 1
            self.done_s[worker.state] += self._now - self._busy[number]
        self._unlist(number, worker)
        worker.state = state
        if version is not None:
            worker.version = version
        if state == "idle":
            self._idle.setdefault(worker.version, {})[number] = None
        else:
            self._busy[number] = self._now
            self._coming[worker.version] += state == "loading"

    def _unlist(self, number: int, worker: _Worker) -> None:
        if worker.state == "idle":
            del self._idle[worker.version][number]
            if not self._idle[worker.version]:
                del self._idle[worker.version]
        else:
            self._busy.pop(number, None)
            self._coming[worker.version] -= worker.state == "loading"

    def _submit(self, event: Submitted) -> None:
        if event.batch <= self._last_batch:
            raise DispatchError(f"batch {event.batch} comes after batch {self._last_batch}")
        if event.version not in self.checksums:
            raise DispatchError(f"batch {event.batch} needs weights {event.version}; there are {[*self.checksums]}")
        if (staleness := event.step - 1 - event.version) > self.max_staleness:
            raise DispatchError(
                f"the rollouts of step {event.step} would be generated with weights {event.version}, which are then "
                f"{staleness} steps old; at most {self.max_staleness} are allowed"
            )
        self._last_batch = event.batch
        self.batches[event.batch] = _Batch(event.version, [*range(event.units)], [0] * event.units, {})

    def accepts(self, event: Answered) -> bool:
        """Whether an answer is from a worker that counts, to what it was asked last."""
        return self._state(event.worker) == "generating" and self.workers[event.worker].job == (
            event.unit,
            event.attempt,
        )

    def trusts(self, version: int, checksum: int, expected: int | None) -> bool:
        """Whether a worker that shall have the version ``expected`` has it, bit for bit."""
        if version != expected:
            return False
        if self.checksums[version] is None:
            self.checksums[version] = checksum
        return checksum == self.checksums[version]

    def _loaded(self, event: Loaded) -> None:
        worker = self.workers[event.worker]
        if event.version != worker.version:
            return  # a copy of an older message
        if event.version in self.checksums and not self.trusts(event.version, event.checksum, worker.version):
            self.fence(event.worker, f"weights {event.version} did not reach it: it has {event.checksum:#x}")
        else:
            self._become(event.worker, "idle")

    def _answered(self, event: Answered) -> None:
        batch, worker = self.batches[event.unit.batch], self.workers[event.worker]
        if not self.trusts(event.version, event.checksum, batch.version):
            self.fence(event.worker, f"it answered with weights {event.version}, asked for {batch.version}")
            return
        worker.job, self._lost_in_a_row = None, 0
        self._become(event.worker, "idle")
        batch.answers[event.unit.index] = event.answer
        self.deliver()

    def deliver(self) -> None:
        """Hand over the answers that are next."""
        while self.batches:
            number, batch = next(iter(self.batches.items()))
            while batch.delivered in batch.answers:
                answer = batch.answers.pop(batch.delivered)
                self._actions.append(Deliver(Unit(number, batch.delivered), answer))
                batch.delivered += 1
            if batch.delivered < len(batch.attempts):
                return
            del self.batches[number]
            self._needed_anew = True

    def check_time(self) -> None:
        """Fence workers that are silent for too long."""
        while self._busy and self._now > self._silent_at:
            number, since = next(iter(self._busy.items()))
            if self._now - since <= self.timeout_s:
                self._silent_at = since + self.timeout_s  # those that follow are busy since later
                return
            self.fence(number, f"no sign of it for {self.timeout_s:g} s while {self.workers[number].state}")

    def fence(self, number: int, why: str) -> None:
        """Give up a worker, and let the unit that it was asked for wait again."""
        worker = self.workers.pop(number)
        self._unlist(number, worker)
        self._actions.append(Fence(number, why))
        if worker.job is not None:
            unit, _ = worker.job
            heappush(self.batches[unit.batch].waiting, unit.index)
        self.restarts += 1
        self._lost_in_a_row += 1
        if self._lost_in_a_row == self.patience:
            self._actions.append(
                Fail(f"{self.patience} workers were lost and none answered in between; the last: {why}")
            )

    def _dispatch(self) -> None:
        """Give every worker something to do, the oldest batch first; without units, the newest weights."""
        for number, batch in self.batches.items():
            wanted = batch.version
            ready = self._idle.get(wanted, {})
            while batch.waiting and ready:
                self.assign(next(iter(ready)), Unit(number, heappop(batch.waiting)))
            for _ in range(len(batch.waiting) - self._coming[wanted]):
                if not self._idle:
                    return
                self._load(next(iter(next(iter(self._idle.values())))), wanted)
        for version in [version for version in self._idle if self.checksums and version != self.newest]:
            for chosen in [*self._idle[version]]:
                self._load(chosen, self.newest)

    def assign(self, number: int, unit: Unit) -> None:
        """Let a worker that has the unit's weights generate it."""
        worker, attempts = self.workers[number], self.batches[unit.batch].attempts
        attempts[unit.index] += 1
        self.redone += attempts[unit.index] > 1
        worker.job = unit, attempts[unit.index]
        self._become(number, "generating")
        self._actions.append(Assign(number, unit, attempts[unit.index]))

    def _load(self, number: int, version: int) -> None:
        self._become(number, "loading", version)
        self._actions.append(Load(number, version))

    def _retire(self) -> None:
        """Forget the weights that no batch needs any more."""
        if not self._needed_anew:
            return
        self._needed_anew = False
        needed = {self.newest} | {batch.version for batch in self.batches.values()}
        for version in sorted(self.checksums.keys() - needed):
            del self.checksums[version]
            self._actions.append(Retire(version))
