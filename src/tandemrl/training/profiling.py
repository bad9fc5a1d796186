"""Where the time of a run goes: seconds per phase, traces, tokens/s, and the share of the matmul peak (MFU).

``Clock`` times the phases of one step. It costs next to nothing and is always on. ``Profiler`` is what
``train.profile`` adds: traces of one step, and ``table.md`` and ``table.json`` over the other steps.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.benchmark import Timer
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tandemrl.distributed.watchdog import stamp
from tandemrl.distributed.world import World
from tandemrl.files import write_text
from tandemrl.types import Metrics

TRACED_CALLS = 32
"""How many decoding steps of a rollout are traced. A trace of all of them would fill gigabytes."""
COMPUTING = "update/forward_backward"
"""The phase whose time MFU is computed over. The optimiser's step is part of it; log-probs of frozen models are not."""


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


# ---------------------------------------------------------------------------------------------------------------- FLOPs


class Cost(NamedTuple):
    """FLOPs of forward and backward together.

    token: those of the linear layers, per packed token. prediction: those of the LM head, per scored token. pair: those
    of attention in all layers, per pair of a query and a key that it sees.
    """

    token: int
    prediction: int
    pair: int


def cost_of(model: PreTrainedModel) -> Cost:
    """What training a dense causal LM costs.

    Each weight costs 2 FLOPs per token in forward, 2 for the gradient of the input, and 2 for the gradient of the
    weight if it is trained. That is 6·N, or 4·N for frozen weights beside adapters. Embeddings, norms and softmax are
    left out, and so is recomputation.

    Attention multiplies queries with keys and weights with values, in forward and twice as much in backward. That is 12
    FLOPs per pair, layer, head and channel of a head.
    """
    head = model.get_output_embeddings()
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    config = model.config.get_text_config()
    channels = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Cost(
        token=sum(map(_flops_per_weight, linear)),
        prediction=_flops_per_weight(head.weight),
        pair=12 * config.num_hidden_layers * config.num_attention_heads * channels,
    )


def _flops_per_weight(weight: torch.Tensor) -> int:
    return weight.numel() * (6 if weight.requires_grad else 4)


def update_flops(
    cost: Cost, lengths: Sequence[int], *, predictions: int | None = None, shared: Sequence[int] = ()
) -> int:
    """FLOPs of forward and backward over sequences of these lengths: 6·N·t + attention.

    Args:
        lengths: how many tokens each sequence has.
        predictions: how many tokens get a log-prob. None means all of them, as in the usual 6·N·t.
        shared: the lengths of leading parts that are computed with another sequence, and not again.

    Examples:
        >>> update_flops(Cost(token=6, prediction=12, pair=1), [2, 3], predictions=4)
        87
    """
    tokens = sum(lengths) - sum(shared)
    pairs = sum(n * (n + 1) // 2 for n in lengths) - sum(n * (n + 1) // 2 for n in shared)
    return cost.token * tokens + cost.prediction * (tokens if predictions is None else predictions) + cost.pair * pairs


@cache
def matmul_peak(device: torch.device, dtype: torch.dtype, size: int | None = None, seconds: float = 1.0) -> float:
    """Measure the FLOP/s of a large square matrix product: the best block of repeated runs over about ``seconds``.

    It is measured with torch's current number of threads and precision settings.

    Args:
        size: how many rows and columns the matrices have. None means 2048 on a CPU and 8192 elsewhere.
    """
    n = size or (2048 if device.type == "cpu" else 8192)
    a, b = (torch.rand(n, n, device=device).sub_(0.5).to(dtype) for _ in range(2))
    timer = Timer(
        "torch.mm(a, b, out=c)",
        globals={"torch": torch, "a": a, "b": b, "c": torch.empty_like(a)},
        num_threads=torch.get_num_threads(),
    )
    return 2 * n**3 / min(timer.blocked_autorange(min_run_time=seconds).times)


# -------------------------------------------------------------------------------------------------------------- profile


class Work(NamedTuple):
    """What all processes together did in a step.

    written: the tokens of the rollouts. trained: the tokens of the sequences that the update used. flops: the FLOPs of
    their forwards and backwards.
    """

    written: float
    trained: float
    flops: float


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
        model: the model that is trained.
        last: the last step of the run.
    """

    def __init__(
        self,
        folder: Path | None,
        model: PreTrainedModel,
        device: torch.device,
        dtype: torch.dtype,
        world: World,
        *,
        first: int,
        last: int,
    ) -> None:
        self._folder, self._world, self._device = folder, world, device
        self.cost = Cost(0, 0, 0) if folder is None else cost_of(model)
        self._first, self._traced = first, min(first + 1, last)
        self._records: list[StepRecord] = []
        self._phases: set[str] = set()  # traced ones
        self._peak = matmul_peak(device, dtype) if folder is not None and world.main else 0.0

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
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
        tracer = profile(activities=activities)
        calls = 0

        def called(tokens: int) -> None:
            nonlocal calls
            calls += 1
            if calls == TRACED_CALLS:
                tracer.stop()

        tracer.start()
        try:
            yield called
        finally:
            if calls < TRACED_CALLS:
                tracer.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f".new-trace_{phase}.json.gz"
        tracer.export_chrome_trace(str(unfinished))
        os.replace(unfinished, self._folder / f"trace_{phase}.json.gz")

    def step(self, step: int, clock: Clock, work: Work) -> None:
        """Record a finished step and write the table. All processes must call this."""
        if self._folder is None:
            return
        everybody = self._world.gather(clock.own())
        own = everybody[0]
        slowest = {phase: max(seconds.get(phase, 0.0) for seconds in everybody) for phase in own}
        self._records.append(StepRecord(own, slowest, work, skewed=step in (self._first, self._traced)))
        if self._world.main:
            table = summarise(self._records, peak=self._peak, processes=self._world.size)
            table |= {"device": str(self._device), "threads": torch.get_num_threads()}
            write_text(self._folder / "table.json", json.dumps(table, indent=1) + "\n")
            write_text(self._folder / "table.md", markdown(table))


def summarise(records: Sequence[StepRecord], *, peak: float, processes: int) -> dict[str, Any]:
    """Means over the steps that are not skewed, or over all steps if every one is.

    Args:
        peak: the peak FLOP/s of one process.
        processes: how many processes there are.

    Returns:
        plain numbers: the seconds of a step; for each phase its seconds, its share, and its seconds in the slowest
        process; tokens/s; and ``mfu``, the FLOPs of the update divided by what all processes could have computed at
        the peak during its forward, backward and optimiser step.
    """
    used = [record for record in records if not record.skewed] or list(records)
    names = list(dict.fromkeys(name for record in used for name in record.own))
    mean = {name: fmean(record.own.get(name, 0.0) for record in used) for name in names}
    slowest = {name: fmean(record.slowest.get(name, 0.0) for record in used) for name in names}
    whole = sum(mean.values())
    written, trained, flops = (fmean(column) for column in zip(*(record.work for record in used), strict=True))
    rollout = _of(mean, "rollout")
    update = _of(mean, "update")
    computing = _of(mean, COMPUTING)
    return {
        "steps": len(used),
        "processes": processes,
        "step_s": whole,
        "phases": {
            name: {"s": mean[name], "share": _ratio(mean[name], whole), "slowest_s": slowest[name]} for name in names
        },
        "tokens_per_s": {
            "step (written)": _ratio(written, whole),
            "rollout (written)": _ratio(written, rollout),
            "update (trained)": _ratio(trained, update),
        },
        "update_flops": flops,
        "matmul_peak_flops_per_s": peak,
        "mfu": _ratio(flops, computing * peak * processes),
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
    lines += [
        "",
        f"MFU of the update (forward, backward, optimiser): {table['mfu']:.1%}, from "
        f"{table['update_flops'] / 1e12:.3g} TFLOP per step and the measured matmul peak of "
        f"{table['matmul_peak_flops_per_s'] / 1e12:.3g} TFLOP/s per process.",
    ]
    return "\n".join(lines) + "\n"


def _of(own: Mapping[str, float], phase: str) -> float:
    """The seconds of a phase together with the phases inside it."""
    return sum(seconds for name, seconds in own.items() if name == phase or name.startswith(f"{phase}/"))


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0
