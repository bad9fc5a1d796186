"""Turns faults from outside (a scheduler's signal, no memory, a dead process) into messages that say what to do.

The loop in ``train`` uses all of it. A signal ends the run after the step in which it came, with a checkpoint. An error
in a step names the step and the phase.
"""

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

from tandemrl.processes.world import World
from tandemrl.training.profiling import Clock

ENDING: dict[signal.Signals, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""The signals that end a run, and the handler that ends the process at once."""


class Stopped(SystemExit):
    """A signal ended the run early, after a completed step. The exit code is the shell's for that signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class OutOfMemoryError(RuntimeError):
    """The device or the host has no memory left; the message names the settings that need less of it."""


class LostProcessError(RuntimeError):
    """Another process of the run died or did not answer in time; the message names the step and the phase."""


# -------------------------------------------------------------------------------------------------------------- signals


class Signals:
    """Records the first SIGTERM or SIGINT inside a ``with`` block, and leaves the second one to the previous handler,
    which ends the process at once. If there was none, as in a job that a script has started in the background, where
    SIGINT is ignored, the second one ends the process all the same.

    It records nothing outside of the main thread, where Python handles no signals.

    Examples:
        >>> with Signals() as signals:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     signals.received
        15
    """

    def __init__(self) -> None:
        self.received = 0
        self._owner = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in ENDING}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        if os.getpid() != self._owner:  # a fork has no step to finish
            signal.raise_signal(number)
            return
        for each, handler in self._before.items():
            if handler in (signal.SIG_IGN, None):
                signal.signal(each, ENDING[each])
        self.received = number
        line = f"{signal.Signals(number).name}: the run stops after this step and saves it; again: at once\n"
        os.write(2, line.encode())  # print() could meet itself here

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not from Python


# --------------------------------------------------------------------------------------------------------------- errors

_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|not enough memory", re.IGNORECASE)
_LOST = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out|timeout|peer|heartbeat|remote process exited",
    re.IGNORECASE,
)
LESS_MEMORY = {
    "rollout": "a smaller rollout.max_rows or rollout.max_tokens",
    "resample": "a smaller rollout.max_rows or rollout.max_tokens",
    "score": "a smaller reward.workers, rollout.tool_workers or sandbox.memory_mb, or a judge elsewhere (judge.url)",
    "sync": "a smaller rollout.vllm.gpu_memory_utilization, parallel.offload_optimizer=true or model.dtype=bfloat16",
    "save": "model.dtype=bfloat16, or more processes with parallel.dp_shard",
    "eval": "a smaller rollout.max_rows or eval.max_tokens",
    "gate": "a smaller train.tokens_per_micro_batch",
    "update": "a smaller train.tokens_per_micro_batch, model.gradient_checkpointing=true, "
    "model.activation_offload=true, parallel.offload_optimizer=true, model.dtype=bfloat16, or more processes with "
    "parallel.dp_shard",
}
"""For each outermost phase, the settings to change if memory runs out in it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device (CUDA) or the host ran out of memory.

    torch raises a plain RuntimeError for the host, so the message decides. Errors of this library's classes do not
    count, since they already say what is wrong, such as a judge that is out of memory on another machine.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and _NO_MEMORY.search(str(error)) is not None


def is_lost_process(error: BaseException) -> bool:
    """Whether a collective failed because another process is gone, or did not answer within the time-out."""
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistError):
        return True
    # gloo's failures are plain RuntimeErrors that start with the place in its source
    return "gloo" in str(error) and _LOST.search(str(error)) is not None


def explained(error: Exception, *, step: int, phase: str, world: World) -> Exception:
    """The error to raise instead of one that ended a step. It names the step, the phase and the setting to change.

    Args:
        phase: where the error came from, outermost phase first, such as ``update/forward_backward``.

    Returns:
        an error of this module if the cause is known, else ``error`` itself with a note of where it happened.
    """
    where = f"step {step}, {phase or 'between phases'}"
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if is_out_of_memory(error):
        advice = LESS_MEMORY.get(phase.partition("/")[0], LESS_MEMORY["update"])
        return OutOfMemoryError(f"{where}: out of memory. It needs {advice}. ({first})")
    if world.size > 1 and is_lost_process(error):
        return LostProcessError(
            f"{where}: process {world.rank} of {world.size} lost another one: it died, and its own message says why, "
            f"or it did not come within parallel.timeout_s={world.timeout_s:g}. Start the run again to resume from the "
            f"last checkpoint; torchrun --max-restarts does so by itself. ({first})"
        )
    if type(error).__module__.startswith("tandemrl.") and len(error.args) == 1:  # shown as one line, without notes
        error.args = (f"{where}: {error}",)
    else:
        error.add_note(where)
    return error


@contextmanager
def explain_errors(step: int, clock: Clock, world: World) -> Iterator[Clock]:
    """A context of a step with its clock, which raises the ``explained`` form of an error inside it."""
    try:
        yield clock
    except Exception as error:
        explanation = explained(error, step=step, phase=clock.where, world=world)
        if explanation is error:
            raise
        raise explanation from error
