"""Simulates a run with rollout workers: how many steps it makes in an hour, who waits for whom, how old rollouts are.

What the workers do is decided by the state machine of a real run (``rollout.fleet.dispatcher``), and the trainer does
what ``training.loop`` does with ``AsyncRollouts``. Only the clock and what happens in its time are made up, from
``Times``: those of a run that was made (``measured``), or those that follow from data sheets (``estimated``). No worker
is lost in it.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tandemrl.apps.planning.plan import Plan
from tandemrl.config import Config, ConfigError, load
from tandemrl.files import LineError, read_json_lines
from tandemrl.rollout.fleet.dispatcher import Dispatcher
from tandemrl.rollout.fleet.events import (
    Answered,
    Assign,
    Deliver,
    Event,
    Joined,
    Load,
    Loaded,
    Published,
    Start,
    Submitted,
    Tick,
)

STEPS = 20
"""How many steps are counted. Before them, the fleet settles; after them, it still has the next ones to generate."""
LEAST = 3
"""The fewest steps of a run that are measured. Its first one is not, nor are those with an evaluation."""


class Times(NamedTuple):
    """Seconds. ``update``: of everything in a step but waiting for rollouts. ``unit``: in which a worker generates a
    unit, on average; ``spread``: how long single ones take, as multiples of it, one of which is drawn for each.
    ``load``: in which a worker loads weights. ``resampled``: how many units are generated again in a step, one of which
    numbers is drawn for each."""

    update: float
    unit: float
    load: float = 0.0
    spread: Sequence[float] = (1.0,)
    resampled: Sequence[int] = (0,)


class Fleet(NamedTuple):
    """What a simulated run came to. Idle: fractions of time. ``staleness``: the fraction of steps by the staleness of
    their rollouts."""

    step_s: float
    idle_trainer: float
    idle_workers: float
    staleness: dict[int, float]

    @property
    def steps_per_hour(self) -> float:
        return 3600 / self.step_s


@dataclass
class _Clock:
    """The workers and the time."""

    times: Times
    dispatcher: Dispatcher
    random: random.Random
    now: float = 0.0
    coming: list[tuple[float, int, Event]] = field(default_factory=list)
    missing: Counter[int] = field(default_factory=Counter)
    """How many units of each batch were not delivered."""
    numbers: Any = field(default_factory=count)

    def tell(self, event: Event) -> None:
        for action in self.dispatcher.handle(event, self.now):
            match action:
                case Start(worker):
                    self._later(0.0, Joined(worker))
                case Load(worker, version):
                    self._later(self.times.load, Loaded(worker, version, 0))
                case Assign(worker, unit, attempt):
                    version = self.dispatcher.batches[unit.batch].version
                    seconds = self.times.unit * self.random.choice(self.times.spread)
                    self._later(seconds, Answered(worker, unit, attempt, version, 0, None))
                case Deliver(unit):
                    self.missing[unit.batch] -= 1

    def _later(self, seconds: float, event: Event) -> None:
        heappush(self.coming, (self.now + seconds, next(self.numbers), event))

    def go_on(self, until: float = math.inf, *, while_: Callable[[], bool] = lambda: True) -> None:
        """Let time pass, until a time or as long as something holds."""
        while while_() and self.coming and self.coming[0][0] <= until:
            self.now, _, event = heappop(self.coming)
            self.tell(event)
        if until < math.inf:
            self.now = until


def simulate(times: Times, *, workers: int, units: int, ahead: int, seed: int = 0) -> Fleet:
    """A run of ``units`` units a step, whose rollouts are generated ``ahead`` steps ahead (``train.async_steps``)."""
    dispatcher = Dispatcher(workers, max_staleness=ahead, timeout_s=math.inf, patience=1, numbers=count())
    clock, rounds = _Clock(times, dispatcher, random.Random(seed)), random.Random(f"resampled {seed}")
    clock.tell(Published(0, 0))
    versions: dict[int, int] = {}  # of the weights that generate the rollouts of a step
    batches, numbers = dict[int, int](), count()
    marks: list[tuple[float, float, float, float]] = []
    waited = 0.0

    def submit(step: int, size: int) -> int:
        batch = next(numbers)
        clock.missing[batch] = size
        clock.tell(Submitted(batch, size, dispatcher.newest, step))
        return batch

    def begin(step: int) -> None:
        versions[step], batches[step] = dispatcher.newest, submit(step, units)

    def wait(batch: int) -> None:
        nonlocal waited
        begun = clock.now
        clock.go_on(while_=lambda: clock.missing[batch] > 0)
        waited += clock.now - begun

    first = 2 + ahead
    for step in range(1, first + STEPS + 1):
        if step == first or step == first + STEPS:
            clock.tell(Tick())  # the dispatcher counts idle time up to its last event
            marks.append((clock.now, waited, dispatcher.idle_s, dispatcher.worker_s))
        if step not in versions:
            begin(step)
        wait(batches[step])
        if ahead:
            if step > 1:
                clock.tell(Published(step - 1, 0))
            for later in range(max(versions) + 1, step + ahead + 1):
                begin(later)
        if again := rounds.choice(times.resampled):
            wait(submit(step, again))
        clock.go_on(clock.now + times.update)
        if not ahead:
            clock.tell(Published(step, 0))
    seconds, waiting, idle, all_workers = (b - a for a, b in zip(*marks, strict=True))
    ages = Counter(step - 1 - versions[step] for step in range(first, first + STEPS))
    return Fleet(
        seconds / STEPS,
        waiting / seconds,
        idle / all_workers,
        {age: number / STEPS for age, number in sorted(ages.items())},
    )


def units_of(config: Config) -> int:
    """How many units the rollouts of a step are."""
    return math.ceil(config.train.prompts_per_step / (config.rollout.units or config.train.prompts_per_step))


def estimated(config: Config, plan: Plan) -> tuple[Times, Times]:
    """The times at best and at worst, of full-length rollouts and by data sheets, as those of the plan are.

    Nothing is resampled, since no data sheet says how often groups have equal rewards.
    """
    load = plan.sent_to_workers / plan.device.network
    (best, worst), (fast, slow) = plan.seconds["update"], plan.seconds["unit"]
    return Times(best, fast, load), Times(worst, slow, load / 0.2)


def measured(folder: str | Path, config: Config) -> Times:
    """The times of a run that was made, with workers or with ``rollout.unit_groups``; ``update`` and ``resampled`` in
    proportion to the prompts of a step.

    Evaluations have no part in them: their steps are left out, and workers count the time of rollouts apart. How long
    single units take is taken from the longest rollout of each. What a step resampled counts as one round.

    Raises:
        ConfigError: the run's units are of another size, it resampled otherwise, or it does not show how long units
            take.
    """
    run = load(folder)
    where = f"--times-of {folder}"
    ours, theirs = _must_agree(config), _must_agree(run)
    if ours != theirs:
        keys = " ".join(f"{key}={value}" for key, value in ours.items())
        raise ConfigError(f"{where}: its units are not those of this plan; train it with {keys}")
    if not run.rollout.workers and run.train.async_steps:
        raise ConfigError(f"{where}: its rollouts were generated beside its updates; train it with train.async_steps=0")
    steps = [step for step in _lines(Path(folder, "metrics.jsonl"), where)[1:] if "time/eval" not in step]
    if len(steps) < LEAST:
        raise ConfigError(
            f"{where}: after its first step it needs {LEAST} without an evaluation, and has {len(steps)}; train it "
            "with more train.steps or a greater train.eval_every"
        )
    prompts, size = run.train.prompts_per_step, config.rollout.units or 1
    more = config.train.prompts_per_step / prompts
    resampled = [step.get("groups/resampled", 0.0) for step in steps]
    rest = [  # with the scores of what was resampled
        step["time/step"]
        - step["time/rollout"]
        - step.get("time/resample", 0.0)
        + step.get("time/score", 0.0) * again / prompts
        for step, again in zip(steps, resampled, strict=True)
    ]
    if run.rollout.workers:
        unit_s, load_s = (_mean_of(f"fleet/{what}_s", steps, where) for what in ("unit", "load"))
    else:
        unit_s, load_s = fmean(step["time/rollout"] for step in steps) / units_of(run), 0.0
    units = tuple(math.ceil(more * again / size) for again in resampled)
    return Times(more * fmean(rest), unit_s, load_s, _spread(run, folder, where), units)


def _must_agree(config: Config) -> dict[str, Any]:
    """What must be the same in a run whose times are those of a plan."""
    rollout, train = config.rollout, config.train
    return {
        "rollout.unit_groups": rollout.units,
        "rollout.group_size": rollout.group_size,
        "train.max_resamples": train.max_resamples,
    }


def _mean_of(name: str, steps: Sequence[Any], where: str) -> float:
    values = [step[name] for step in steps if name in step]
    if not values:
        raise ConfigError(f"{where}: it has no {name}: it comes from an earlier version; train it anew")
    return fmean(values)


def _spread(run: Config, folder: str | Path, where: str) -> tuple[float, ...]:
    file = Path(folder, "samples.jsonl")
    longest: dict[tuple[int, int], int] = {}
    for line in _lines(file, where) if file.exists() else ():
        unit = line["step"], line["group"] // (run.rollout.units or 1)
        longest[unit] = max(longest.get(unit, 0), sum(author >= 0 for author in line["author"]))
    mean = fmean(longest.values()) if longest else 0.0
    return tuple(length / mean for length in longest.values()) if mean else (1.0,)


def _lines(file: Path, where: str) -> list[Any]:
    try:
        return [line for _, line in read_json_lines(file)]
    except (OSError, LineError) as error:
        raise ConfigError(f"{where}: {file}: {error}") from None
