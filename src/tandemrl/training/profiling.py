"""Where the time of a run goes: seconds per phase, traces, and tokens/s.

``Clock`` times the phases of one step. It costs next to nothing and is always on. ``Profiler`` is what
``train.profile`` adds: traces of one step, and ``table.md`` and ``table.json`` over the other steps.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerAction, profile, record_function

from tandemrl.distributed.watchdog import stamp
from tandemrl.distributed.world import World
from tandemrl.files import write_text
from tandemrl.types import Metrics

TRACED_CALLS = 32
"""How many decoding steps of a rollout are traced. A trace of all of them would fill gigabytes."""


# ---------------------------------------------------------------------------------------------------------------- clock


class Clock:
    """Measures the seconds of each phase of one step. Phases may nest and repeat.

    seconds: the whole time of each path of phases, such as ``update/logprobs``. where: the innermost phase that an
    error came from, or "".

    Args:
        device: a device to synchronise with at both ends of every phase, so that its work counts in the phase that
            started it. None does not synchronise; work on a CUDA device may then count in a later phase.
        step: the number of the step, for the watchdog.

    Examples:
        >>> clock = Clock()
        >>> with clock("update"):
        ...     with clock("logprobs"):
        ...         pass
        >>> list(clock.seconds)
        ['update', 'update/logprobs']
    """

    def __init__(self, device: torch.device | None = None, step: int = 0) -> None:
        self.seconds: dict[str, float] = {}
        self.where = ""
        self._path = ""
        self._step = step
        self._device = device if device is not None and device.type == "cuda" else None
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        outer = self._path
        path = self._path = f"{outer}/{phase}" if outer else phase
        self.seconds.setdefault(path, 0.0)  # outer phases first
        stamp(f"step {self._step}, {path}")
        start = self._now()
        try:
            with record_function(path):
                yield
        except BaseException:
            self.where = self.where or path
            raise
        finally:
            self._path = outer
            stamp(f"step {self._step}, {outer or 'between phases'}")
        self.seconds[path] += self._now() - start

    def total(self) -> float:
        """Seconds since the clock was made."""
        return self._now() - self._start

    def own(self) -> dict[str, float]:
        """The seconds of each phase without the phases inside it, and ``idle``, the seconds outside of all phases.

        Their sum is the time of the whole step.
        """
        out = {path: seconds - sum(nested(self.seconds, path)) for path, seconds in self.seconds.items()}
        return out | {"idle": self.total() - sum(nested(self.seconds, ""))}

    def metrics(self, tokens: float) -> Metrics:
        """The metrics ``time/…`` of the step and its outer phases, and ``tokens/s``.

        Args:
            tokens: the tokens that ``tokens/s`` counts.
        """
        total = self.total()
        outer = {f"time/{path}": seconds for path, seconds in self.seconds.items() if "/" not in path}
        return {"time/step": total, "tokens/s": tokens / total} | outer

    def _now(self) -> float:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def nested(seconds: dict[str, float], path: str) -> list[float]:
    """The seconds of each phase directly inside ``path``."""
    prefix = f"{path}/" if path else ""
    return [s for name, s in seconds.items() if name.startswith(prefix) and "/" not in name[len(prefix) :]]


# -------------------------------------------------------------------------------------------------------------- profile


class Work(NamedTuple):
    """What all processes together did in a step.

    written: the tokens of the rollouts. trained: the tokens of the sequences that the update used.
    """

    written: float
    trained: float


class StepRecord(NamedTuple):
    """The measurements of a finished step.

    own: the seconds of each phase without the phases inside it. slowest: for each phase, the seconds of the process
    that took longest. skewed: whether the step was traced, or was the first one of the process, which warms up.
    """

    own: dict[str, float]
    slowest: dict[str, float]
    work: Work
    skewed: bool


class Profiler:
    """Does what ``train.profile`` asks for: traces of one step, and a table that is rewritten after every step.

    ``trace_rollout.json.gz`` (the first decoding steps) and ``trace_update.json.gz`` are traces of rank 0 in the second
    step of the process. Open them in ui.perfetto.dev.

    Args:
        folder: where the files go. None records nothing.
        last: the last step of the run.
    """

    def __init__(self, folder: Path | None, device: torch.device, world: World, *, first: int, last: int) -> None:
        self._folder, self._world, self._device = folder, world, device
        self._first, self._traced = first, min(first + 1, last)
        self._records: list[StepRecord] = []
        self._phases: set[str] = set()  # traced ones

    def clock(self, step: int) -> Clock:
        """The clock of a step."""
        return Clock(None if self._folder is None else self._device, step)

    @contextmanager
    def trace(self, phase: str, step: int) -> Iterator[Callable[[int], None]]:
        """A context that traces what happens inside, if this step is the one to trace.

        It yields a function to call once per decoding step. The trace ends after ``TRACED_CALLS`` calls.
        """
        if self._folder is None or not self._world.main or step != self._traced or phase in self._phases:
            yield lambda tokens: None
            return
        self._phases.add(phase)
        self._folder.mkdir(parents=True, exist_ok=True)
        file = str(self._folder / f"trace_{phase}.json.gz")
        with profile(schedule=_first_calls, on_trace_ready=lambda done: done.export_chrome_trace(file)) as tracer:
            yield lambda tokens: tracer.step()

    def step(self, step: int, clock: Clock, work: Work) -> None:
        """Record a finished step and write the table. All processes must call this."""
        if self._folder is None:
            return
        everybody = self._world.gather(clock.own())
        own = everybody[0]
        slowest = {phase: max(seconds.get(phase, 0.0) for seconds in everybody) for phase in own}
        self._records.append(StepRecord(own, slowest, work, skewed=step in (self._first, self._traced)))
        if self._world.main:
            table = summarise(self._records, processes=self._world.size)
            table |= {"device": str(self._device), "threads": torch.get_num_threads()}
            write_text(self._folder / "table.json", json.dumps(table, indent=1) + "\n")
            write_text(self._folder / "table.md", markdown(table))


def _first_calls(call: int) -> ProfilerAction:
    if call < TRACED_CALLS - 1:
        return ProfilerAction.RECORD
    return ProfilerAction.RECORD_AND_SAVE if call == TRACED_CALLS - 1 else ProfilerAction.NONE


def summarise(records: Sequence[StepRecord], *, processes: int) -> dict[str, Any]:
    """Means over the steps that are not skewed, or over all steps if every one is.

    Returns:
        plain numbers: the seconds of a step; for each phase its seconds, its share, and its seconds in the slowest
        process; and tokens/s.
    """
    used = [record for record in records if not record.skewed] or list(records)
    names = list(dict.fromkeys(name for record in used for name in record.own))
    mean = {name: fmean(record.own.get(name, 0.0) for record in used) for name in names}
    slowest = {name: fmean(record.slowest.get(name, 0.0) for record in used) for name in names}
    whole = sum(mean.values())
    written, trained = (fmean(column) for column in zip(*(record.work for record in used), strict=True))
    return {
        "steps": len(used),
        "processes": processes,
        "step_s": whole,
        "phases": {
            name: {"s": mean[name], "share": _ratio(mean[name], whole), "slowest_s": slowest[name]} for name in names
        },
        "tokens_per_s": {
            "step (written)": _ratio(written, whole),
            "rollout (written)": _ratio(written, _of(mean, "rollout")),
            "update (trained)": _ratio(trained, _of(mean, "update")),
        },
    }


def markdown(table: Mapping[str, Any]) -> str:
    """The table of ``summarise`` in Markdown.

    The time of a phase leaves out the phases listed under it; ``idle`` is the time outside of all phases.
    """
    several = table["processes"] > 1
    lines = [
        f"Means of {table['steps']} step(s), {table['processes']} process(es): {table['step_s']:.3f} s per step.",
        "",
        "| phase | s | share |" + (" slowest process, s |" if several else ""),
        "|---|---:|---:|" + ("---:|" if several else ""),
    ]
    for name, row in table["phases"].items():
        slowest = f" {row['slowest_s']:.3f} |" if several else ""
        lines.append(f"| {name} | {row['s']:.3f} | {row['share']:.1%} |{slowest}")
    lines += ["", "| tokens/s of | |", "|---|---:|"]
    lines += [f"| {name} | {value:,.0f} |" for name, value in table["tokens_per_s"].items()]
    return "\n".join(lines) + "\n"


def _of(own: Mapping[str, float], phase: str) -> float:
    """The seconds of a phase together with the phases inside it."""
    return sum(seconds for name, seconds in own.items() if name == phase or name.startswith(f"{phase}/"))


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0
