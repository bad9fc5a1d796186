"""Where the time of a run goes: seconds per phase and tokens/s, and with ``train.profile`` inner phases and traces."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, profile, record_function

from tandemrl.types import Metrics

TRACED_CALLS = 32
"""How many decoding steps of a rollout are traced. A trace of all of them would fill gigabytes."""


class Clock:
    """Measures the seconds of each phase of one step. Phases may nest and repeat.

    seconds: the whole time of each path of phases, such as ``update/logprobs``. where: the innermost phase that an
    error came from, or "".

    Args:
        device: a device to synchronise with at both ends of every phase, so that its work counts in the phase that
            started it. None does not synchronise; work on a CUDA device may then count in a later phase.
        inner: whether ``metrics`` has inner phases, too.

    Examples:
        >>> clock = Clock()
        >>> with clock("update"):
        ...     with clock("logprobs"):
        ...         pass
        >>> list(clock.seconds)
        ['update', 'update/logprobs']
    """

    def __init__(self, device: torch.device | None = None, *, inner: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self.where = ""
        self._path = ""
        self._inner = inner
        self._device = device if device is not None and device.type == "cuda" else None
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        outer = self._path
        path = self._path = f"{outer}/{phase}" if outer else phase
        self.seconds.setdefault(path, 0.0)  # outer phases first
        start = self._now()
        try:
            with record_function(path):
                yield
        except BaseException:
            self.where = self.where or path
            raise
        finally:
            self._path = outer
        self.seconds[path] += self._now() - start

    def total(self) -> float:
        """Seconds since the clock was made."""
        return self._now() - self._start

    def metrics(self, tokens: float) -> Metrics:
        """The metrics ``time/…`` of the step and its phases, and ``tokens/s``.

        Args:
            tokens: the tokens that ``tokens/s`` counts.
        """
        total = self.total()
        phases = {f"time/{path}": s for path, s in self.seconds.items() if self._inner or "/" not in path}
        return {"time/step": total, "tokens/s": tokens / total} | phases

    def _now(self) -> float:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Profiler:
    """What ``train.profile`` adds: inner phases in the metrics, and traces of one step.

    ``trace_rollout.json.gz`` (the first decoding steps) and ``trace_update.json.gz`` are traces of the second step of
    the process. Open them in ui.perfetto.dev.

    Args:
        folder: where the traces go. None means no profile.
        device: where the models compute.
        traces: whether this process writes them.
        step: the step to trace.
    """

    def __init__(self, folder: Path | None, device: torch.device, *, traces: bool, step: int) -> None:
        self._folder, self._device, self._step = folder, device, step
        self._left = {"rollout", "update"} if traces else set[str]()

    def clock(self) -> Clock:
        """The clock of a step."""
        on = self._folder is not None
        return Clock(self._device if on else None, inner=on)

    @contextmanager
    def trace(self, phase: str, step: int) -> Iterator[Callable[[int], None]]:
        """A context that traces what happens inside, if this step is the one to trace.

        It yields a function to call once per decoding step. The trace ends after ``TRACED_CALLS`` calls.
        """
        if self._folder is None or step != self._step or phase not in self._left:
            yield lambda tokens: None
            return
        self._left.remove(phase)
        self._folder.mkdir(parents=True, exist_ok=True)
        file = str(self._folder / f"trace_{phase}.json.gz")
        with profile(schedule=_first_calls, on_trace_ready=lambda done: done.export_chrome_trace(file)) as tracer:
            yield lambda tokens: tracer.step()


def _first_calls(call: int) -> ProfilerAction:
    if call < TRACED_CALLS - 1:
        return ProfilerAction.RECORD
    return ProfilerAction.RECORD_AND_SAVE if call == TRACED_CALLS - 1 else ProfilerAction.NONE
