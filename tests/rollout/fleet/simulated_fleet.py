"""A trainer, a network and workers that exist in a simulated clock only, around the real ``Dispatcher``.

Everything follows from a seed: latencies, messages that are lost, doubled and reordered, workers that crash (noticed or
not), stall, live on after they were given up, or say that they have weights which never reached them; and trainers that
die and go on from their last checkpoint. What a worker answers is a number that follows from the weights it has and the
unit, and the next weights follow from all that was consumed, so one wrong answer changes everything after it.

``expected`` computes the same run by a plain loop, without workers, messages or faults.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from tandemrl.rollout.fleet.dispatcher import Dispatcher
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

TIMEOUT_S, TICK_S = 20.0, 2.0


class BrokenInvariantError(AssertionError):
    """What must never happen has happened."""


class Run(NamedTuple):
    """The size of a simulated run, and the faults in it: their rates per message, load, unit or step."""

    steps: int = 6
    units: int = 3
    workers: int = 2
    k: int = 1
    save_every: int = 2
    lost: float = 0.02
    doubled: float = 0.1
    crash: float = 0.05
    stall: float = 0.05
    stale_load: float = 0.05
    trainer_crash: float = 0.1
    faults_until_s: float = 400.0
    finish_within_s: float = 600.0
    """After the last fault. A unit takes seconds, and noticing a silent worker ``TIMEOUT_S``."""


def weights_after(weights: int, answers: list[int]) -> int:
    return hash((weights, *answers))


def answer_of(weights: int, step: int, index: int) -> int:
    return hash((weights, step, index, 1))


def expected(run: Run) -> list[list[int]]:
    """What each step consumes: by weights k updates older than the newest possible ones, or the first ones."""
    weights, consumed = [0], []
    for step in range(1, run.steps + 1):
        version = max(0, step - 1 - run.k)
        consumed.append([answer_of(weights[version], step, index) for index in range(run.units)])
        weights.append(weights_after(weights[-1], consumed[-1]))
    return consumed


@dataclass
class Worker:
    alive: bool = True
    version: int = -1
    weights: int = -1
    first: int | None = None
    stalled_until: float = 0.0
    free_at: float = 0.0


class Answer(NamedTuple):
    worker: int
    version: int
    value: int
    arrived: float


@dataclass
class Trainer:
    """The loop of ``training.loop`` with ``AsyncRollouts``, one phase after another."""

    step: int = 1
    weights: dict[int, int] = field(default_factory=lambda: {0: 0})
    batch_of: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The batch of each step that was asked for, and its version."""
    answers: dict[int, list[Answer]] = field(default_factory=dict)
    """Of each step, in the order of delivery."""
    batches: int = 0
    phase: str = "begin"
    consumed: list[list[int]] = field(default_factory=list)


class Simulation:
    """One run. ``dispatcher``: the class to test; ``ahead``: how many steps too many the trainer asks for ahead;
    ``prefix_cache``: the workers answer with what they computed of their first weights; ``forgets``: a checkpoint has
    no rollouts in flight."""

    def __init__(
        self,
        seed: int,
        run: Run = Run(),  # noqa: B008
        *,
        dispatcher: Callable[..., Dispatcher] = Dispatcher,
        ahead: int = 0,
        prefix_cache: bool = False,
        forgets: bool = False,
    ) -> None:
        self.random, self.run, self.make = random.Random(seed), run, dispatcher
        self.ahead, self.prefix_cache, self.forgets = ahead, prefix_cache, forgets
        self.numbers, self.sequence, self.now = count(), count(), 0.0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.workers: dict[int, Worker] = {}
        self.fenced_at: dict[int, float] = {}
        self.started: set[int] = set()
        self.truth = expected(run)
        self.events = self.redone = self.restarts = self.trainers = 0
        self.staleness: list[int] = []
        self.saved = self.snapshot(Trainer())
        self.begin_trainer()

    # ------------------------------------------------------------------------------------------------------- the clock

    def later(self, delay: float, call: Callable[..., None], *values: Any) -> None:
        heapq.heappush(self.heap, (self.now + delay, next(self.sequence), call, values))

    def fault(self, rate: float) -> bool:
        return self.now < self.run.faults_until_s and self.random.random() < rate

    def finish(self) -> list[list[int]]:
        """Run to the end. Returns what was consumed, step by step.

        Raises:
            BrokenInvariantError: something happened that must not, or the run does not get on.
        """
        while len(self.trainer.consumed) < self.run.steps:
            self.now, _, call, values = heapq.heappop(self.heap)
            call(*values)
            self.events += 1
            if self.now > self.run.faults_until_s + self.run.finish_within_s:
                raise BrokenInvariantError(f"no end {self.run.finish_within_s:g} s after the last fault")
            if self.events > 100_000:
                raise BrokenInvariantError("events without end")
        return self.trainer.consumed

    def send(self, call: Callable[..., None], *values: Any) -> None:
        """A message: late by chance, so that it may overtake others; perhaps lost, perhaps twice."""
        if not self.fault(self.run.lost):
            self.later(self.random.uniform(0.01, 1.0), call, *values)
        if self.fault(self.run.doubled):
            self.later(self.random.uniform(0.01, 15.0), call, *values)

    # ----------------------------------------------------------------------------------------------------- the trainer

    def snapshot(self, trainer: Trainer) -> Trainer:
        ahead = {} if self.forgets else {s: a for s, a in trainer.answers.items() if s >= trainer.step}
        return Trainer(
            trainer.step,
            {trainer.step - 1: trainer.weights[trainer.step - 1]},
            {step: (0, min(answer.version for answer in ahead[step])) for step in ahead},
            {step: [*answers] for step, answers in ahead.items()},
            consumed=[*trainer.consumed],
        )

    def begin_trainer(self) -> None:
        self.trainers, self.down = self.trainers + 1, False
        self.trainer = self.snapshot(self.saved)
        self.dispatcher = self.make(
            self.run.workers,
            max_staleness=self.run.k,
            timeout_s=TIMEOUT_S,
            patience=10**9,
            numbers=self.numbers,
        )
        self.live_versions: set[int] = set()
        self.publish()
        self.advance()
        self.tick(self.trainers)

    def tick(self, trainer: int) -> None:
        if trainer == self.trainers:
            self.tell(trainer, Tick())
            self.later(TICK_S, self.tick, trainer)

    def publish(self) -> None:
        version = self.trainer.step - 1
        self.live_versions.add(version)
        self.tell(self.trainers, Published(version, hash(self.trainer.weights[version])))

    def ask(self, step: int) -> None:
        t, version = self.trainer, self.trainer.step - 1
        if step <= self.run.steps and step not in t.batch_of:
            t.batches += 1
            t.batch_of[step], t.answers[step] = (t.batches, version), []
            self.tell(self.trainers, Submitted(t.batches, self.run.units, version, step))

    def complete(self, step: int) -> bool:
        return len(self.trainer.answers.get(step, ())) == self.run.units

    def advance(self) -> None:
        """Do what the trainer can do now."""
        t = self.trainer
        if t.phase == "begin":
            t.phase = "taking"
            self.ask(t.step)
        if t.phase == "taking" and self.complete(t.step):
            t.phase = "training"
            for step in range(t.step + 1, t.step + 1 + self.run.k + self.ahead):
                self.ask(step)
            self.later(self.random.uniform(0.5, 5.0), self.trained)
        if t.phase == "saving" and all(map(self.complete, t.batch_of)):
            self.saved = self.snapshot(t)
            t.phase = "begin"
            self.advance()

    def trained(self) -> None:
        if self.fault(self.run.trainer_crash):
            self.down = True
            self.later(5.0, self.begin_trainer)
            for number, worker in self.workers.items():  # some of its workers live on for a while
                worker.alive = worker.alive and self.random.random() < 0.5
                self.fenced_at.setdefault(number, self.now)
            return
        t = self.trainer
        answers = t.answers.pop(t.step)
        del t.batch_of[t.step]
        self.consume(t.step, answers)
        t.consumed.append([answer.value for answer in answers])
        t.weights[t.step] = weights_after(t.weights[t.step - 1], t.consumed[-1])
        saves = t.step % self.run.save_every == 0
        t.step += 1
        t.phase = "saving" if saves else "begin"
        self.publish()
        self.advance()

    def consume(self, step: int, answers: list[Answer]) -> None:
        """The invariants of what is learnt from."""
        for answer in answers:
            self.staleness.append(step - 1 - answer.version)
            if self.staleness[-1] > self.run.k:
                raise BrokenInvariantError(f"step {step} learns from weights {answer.version}")
        if step != len(self.trainer.consumed) + 1 or len(answers) != self.run.units:
            raise BrokenInvariantError(f"step {step} consumes other units than its own")
        if [a.value for a in answers] != self.truth[step - 1]:
            raise BrokenInvariantError(f"step {step} consumes what it would not without faults")

    # ------------------------------------------------------------------------------------------------------ the driver

    def tell(self, trainer: int, event: Any) -> None:
        """An event arrives at the dispatcher, whoever's answer it is: workers outlive trainers."""
        if self.down or trainer not in (-1, self.trainers):  # -1: from a worker
            return
        if isinstance(event, Answered):
            event = event._replace(answer=event.answer._replace(arrived=self.now))
        for action in self.dispatcher.handle(event, self.now):
            self.carry_out(action)

    def carry_out(self, action: Any) -> None:
        match action:
            case Start(number):
                if number in self.started:
                    raise BrokenInvariantError(f"worker {number} starts twice")
                self.started.add(number)
                self.restarts += 1
                self.later(self.random.uniform(1.0, 5.0), self.boot, number)
            case Load(number, version):
                if version not in self.live_versions:
                    raise BrokenInvariantError(f"weights {version} were dropped")
                self.send(self.load, number, version, self.trainer.weights[version])
            case Assign(number, unit, attempt):
                if number in self.fenced_at:
                    raise BrokenInvariantError(f"worker {number} was given up")
                [step] = [s for s, (batch, _) in self.trainer.batch_of.items() if batch == unit.batch]
                self.redone += attempt > 1
                self.send(self.generate, number, unit, attempt, step)
            case Fence(number):
                self.fenced_at.setdefault(number, self.now)
                if number in self.workers and self.random.random() < 0.5:
                    self.workers[number].alive = False
            case Deliver(unit, answer):
                self.deliver(unit, answer)
            case Retire(version):
                self.live_versions.remove(version)
            case Fail(why):
                raise BrokenInvariantError(why)

    def deliver(self, unit: Unit, answer: Answer) -> None:
        """The invariants of what is handed over: each unit once, in order, from a worker that counted when it came."""
        t = self.trainer
        [step] = [s for s, (batch, _) in t.batch_of.items() if batch == unit.batch] or [None]
        if step is None or any(not self.complete(s) for s in t.batch_of if s < step):
            raise BrokenInvariantError(f"{unit} is handed over before its time, or after")
        if unit.index != len(t.answers[step]):
            raise BrokenInvariantError(f"{unit} is handed over twice or out of order")
        if self.fenced_at.get(answer.worker, self.now + 1) < answer.arrived:
            raise BrokenInvariantError(f"{unit} is from worker {answer.worker}, which had been given up")
        self.check_versions(unit, step, answer)
        t.answers[step].append(answer)
        self.later(0.0, self.wake, self.trainers)

    def check_versions(self, unit: Unit, step: int, answer: Answer) -> None:
        """The invariant of weights: those that an answer names are those that wrote it, and none is too old."""
        asked = self.trainer.batch_of[step][1]
        if answer.version != asked:
            raise BrokenInvariantError(f"{unit} is from weights {answer.version}")
        if answer.value != answer_of(self.trainer.weights[answer.version], step, unit.index):
            raise BrokenInvariantError(f"{unit} is not from weights {answer.version}")

    def wake(self, trainer: int) -> None:
        if trainer == self.trainers and not self.down:
            self.advance()

    # ----------------------------------------------------------------------------------------------------- the workers

    def boot(self, number: int) -> None:
        if self.fault(self.run.crash):
            self.tell(-1, Lost(number, "did not start"))
            return
        self.workers[number] = Worker()
        self.send(self.tell, -1, Joined(number))

    def ready(self, number: int, call: Callable[..., None], *values: Any) -> Worker | None:
        """The worker, if it can act now. A stalled or busy one acts later, a dead one never; one may crash."""
        worker = self.workers.get(number)
        if worker is None or not worker.alive:
            return None
        if (wait := max(worker.stalled_until, worker.free_at) - self.now) > 0:
            self.later(wait, call, number, *values)
            return None
        if self.fault(self.run.stall):
            worker.stalled_until = self.now + self.random.uniform(5.0, 60.0)
        if self.fault(self.run.crash):
            worker.alive = False
            if self.random.random() < 0.7:  # else nobody says so
                self.later(self.random.uniform(0.1, 10.0), self.tell, -1, Lost(number, "crashed"))
            return None
        return worker

    def load(self, number: int, version: int, weights: int) -> None:
        if (worker := self.ready(number, self.load, version, weights)) is None:
            return
        worker.version = version
        if not self.fault(self.run.stale_load):
            worker.weights = weights
        worker.first = worker.weights if worker.first is None else worker.first
        self.send(self.tell, -1, Loaded(number, version, hash(worker.weights)))

    def generate(self, number: int, unit: Unit, attempt: int, step: int) -> None:
        if (worker := self.ready(number, self.generate, unit, attempt, step)) is None:
            return
        worker.free_at = self.now + self.random.uniform(0.5, 6.0)
        self.later(worker.free_at - self.now, self.answer, number, unit, attempt, step)

    def answer(self, number: int, unit: Unit, attempt: int, step: int) -> None:
        worker = self.workers[number]
        if not worker.alive:
            return
        wrote = worker.first if self.prefix_cache and worker.first is not None else worker.weights
        answer = Answer(number, worker.version, answer_of(wrote, step, unit.index), 0.0)
        self.send(self.tell, -1, Answered(number, unit, attempt, worker.version, hash(worker.weights), answer))
