"""Signals, and errors that say where they happened and what to change."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runs import config
from tandemrl.processes.world import World
from tandemrl.rollout.engine import EngineError
from tandemrl.training.checkpoint import latest
from tandemrl.training.faults import (
    ENDING,
    LESS_MEMORY,
    LostProcessError,
    OutOfMemoryError,
    Signals,
    explained,
    is_lost_process,
    is_out_of_memory,
)
from tandemrl.training.gates import TrainError
from tandemrl.training.loop import train


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted_and_handlers_come_back(number: signal.Signals) -> None:
    outside = signal.signal(number, ENDING[number])  # a suite that was started in the background ignores SIGINT
    before = signal.getsignal(number)
    with Signals() as signals:
        assert signals.received == 0
        signal.raise_signal(number)
        assert signals.received == number
        assert signal.getsignal(number) is before  # the second one ends the process
    assert signal.getsignal(number) is before
    with Signals() as signals:
        pass
    assert (signals.received, signal.getsignal(number)) == (0, before)
    signal.signal(number, outside)


def _exit_code(work: Callable[[], None]) -> int:
    """Of a fork of this process that does ``work``."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_second_signal_ends_the_process_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        with Signals() as signals:
            for _ in range(2):
                signal.raise_signal(signal.SIGTERM)
                os.write(1, f"noted {signals.received}\n".encode())

    assert _exit_code(work) == -signal.SIGTERM
    out, err = capfd.readouterr()
    assert out == "noted 15\n"
    assert err.startswith("SIGTERM: the run stops after this step")


MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    MemoryError(),
]


@pytest.mark.parametrize("error", MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("phase", ["rollout", "update/forward_backward", "eval", "sync", ""])
def test_out_of_memory_names_what_to_change(error: Exception, phase: str) -> None:
    assert is_out_of_memory(error)
    explanation = explained(error, step=7, phase=phase, world=World())
    assert isinstance(explanation, OutOfMemoryError)
    assert str(explanation).startswith(f"step 7, {phase or 'between phases'}: out of memory.")
    assert LESS_MEMORY[phase.partition("/")[0] or "update"] in str(explanation)


LOST = [
    RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3110"),
    RuntimeError(
        "[third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation"
    ),
    dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:2, remote process exited or there was a network error"),
]


@pytest.mark.parametrize("error", LOST, ids=["closed", "timed out", "nccl"])
def test_a_lost_process_is_named_with_the_phase(error: Exception) -> None:
    assert is_lost_process(error)
    assert not is_out_of_memory(error)
    explanation = explained(error, step=3, phase="rollout", world=World(rank=1, size=4, timeout_s=90.0))
    assert isinstance(explanation, LostProcessError)
    assert str(explanation).startswith("step 3, rollout: process 1 of 4 lost another one")
    assert "parallel.timeout_s=90" in str(explanation)
    assert explained(error, step=3, phase="rollout", world=World()) is error  # nobody to lose


def test_other_errors_stay_what_they_are_and_say_where() -> None:
    ours = EngineError("weights did not reach the engine")
    explanation = explained(ours, step=2, phase="sync", world=World())
    assert explanation is ours
    assert str(explanation) == "step 2, sync: weights did not reach the engine"
    bug = KeyError("name")
    assert explained(bug, step=2, phase="", world=World(size=2)) is bug
    assert bug.__notes__ == ["step 2, between phases"]
    assert not is_out_of_memory(ours)
    assert not is_lost_process(ValueError("gloo: connection closed"))


# ------------------------------------------------------------------------------------------------------------ in a run

SHORT = ("train.steps=3", "train.save_every=10", "train.eval_every=0", "loss.entropy_coef=0.01")


def on_call(monkeypatch: pytest.MonkeyPatch, name: str, number: int, act: Callable[[Any], Any]) -> None:
    """Replace a function by one whose result goes through ``act`` on its ``number``-th call."""
    module, _, attribute = name.rpartition(".")
    function, calls = getattr(sys.modules[module], attribute), count(1)

    def replaced(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        return act(result) if next(calls) == number else result

    monkeypatch.setattr(name, replaced)


def test_what_ends_a_run_names_its_step_and_its_phase(tiny_pair, tmp_path, monkeypatch):
    def no_memory(_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    out, loss = tmp_path / "run", "tandemrl.training.update.policy_loss"
    settings = config(tiny_pair, out, *SHORT, "train.save_every=1")
    with monkeypatch.context() as patch:
        on_call(patch, loss, 2, no_memory)
        with pytest.raises(OutOfMemoryError, match=r"step 2, update/forward_backward: .*tokens_per_micro_batch"):
            train(settings, quiet=True)
    on_call(monkeypatch, loss, 1, lambda found: (found[0] * float("nan"), found[1]))
    with pytest.raises(TrainError, match=r"^step 2, update/forward_backward/optimizer: the gradient norm .* is nan"):
        train(settings, quiet=True)
    assert latest(out) == out / "checkpoints" / "step_1"


def test_scoring_processes_outlive_a_signal_to_the_whole_job() -> None:
    command = [sys.executable, "-m", "tandemrl.rewards.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(pickle.dumps((None, None)))
        worker.stdin.flush()
        assert worker.stdout.readline() == b'"ready"\n'
        worker.send_signal(signal.SIGTERM)
        worker.send_signal(signal.SIGINT)
        worker.stdin.write(pickle.dumps((0, pickle.dumps(("operator:add", 1, 2)), 5.0)))
        worker.stdin.flush()
        assert worker.stdout.readline() == b'{"number": 0, "result": 3}\n'
        worker.stdin.close()
        assert worker.wait(20) == 0
