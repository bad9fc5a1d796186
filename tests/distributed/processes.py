"""One function on many processes of this machine: what torchrun does, without its start-up time.

The processes are forked from a server that has imported torch and the library once per test session; each has one
thread and the environment that torchrun gives, so that ``init_world`` finds the others. The function must be
importable (defined at the top of a test module).
"""

import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore
from torch.distributed.tensor import DTensor

from runs import FORKED
from tandemrl.config import ParallelConfig
from tandemrl.processes.world import init_world


def status(name: str) -> int:
    """Bytes of this process, such as ``VmRSS`` or, since the last reset, ``VmHWM``, by Linux's account."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def run(function: Callable[..., Any], size: int, *args: Any, timeout: float = 300.0) -> list[Any]:
    """``function(*args)`` in ``size`` processes; their results by rank, which are pickled.

    Raises:
        RuntimeError: one of them raised (with its traceback) or died, also after its result was there; the others are
            killed. The message ends with what they wrote to stderr, such as the stack of a crash.
        TimeoutError: not all were done after ``timeout`` seconds; all are killed, after they have written where they
            hang.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _run(function, size, args, timeout, Path(folder))
        except (RuntimeError, TimeoutError) as error:
            logs = [path.read_text(errors="replace")[-20000:] for path in sorted(Path(folder).iterdir())]
            text = "\n".join(f"--- stderr of process {rank}:\n{log}" for rank, log in enumerate(logs))
            raise type(error)(f"{error}\n{text}") from None


MESHES_OF_TWO = [ParallelConfig(**{axis: 2}) for axis in ("dp_shard", "dp_replicate", "sp", "tp")]


def on_every_mesh(compute: Callable[..., Any], *args: Any) -> list[Any]:
    """In one of two processes: what ``compute(world, *args)`` gives on each of ``MESHES_OF_TWO``, with the data rank
    and how many there are."""
    worlds = (init_world(axes, torch.device("cpu")) for axes in MESHES_OF_TWO)
    return [((world.data_rank, world.data_size), compute(world, *args)) for world in worlds]


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The whole gradients of the parameters that have one."""
    own = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in own.items()}


def _run(function: Callable[..., Any], size: int, args: tuple[Any, ...], timeout: float, folder: Path) -> list[Any]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    processes: list[Any] = []
    pipes: dict[Connection, int] = {}
    for rank in range(size):
        receive, send = FORKED.Pipe(duplex=False)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the server is the store above: no race for a free port
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        log = str(folder / f"{rank:03}.log")
        process = FORKED.Process(target=_child, args=(send, environment, log, function, args), daemon=True)
        process.start()
        send.close()
        processes.append(process)
        pipes[receive] = rank
    results: dict[int, Any] = {}
    end = time.monotonic() + timeout
    try:
        while pipes:
            ready = wait(list(pipes), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                for rank in pipes.values():
                    os.kill(processes[rank].pid, signal.SIGUSR1)
                time.sleep(1)  # for the stacks
                raise TimeoutError(f"processes {sorted(pipes.values())} of {size} were not done after {timeout:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                try:
                    failed, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    processes[rank].join(5)
                    raise RuntimeError(f"process {rank} died with exit code {processes[rank].exitcode}") from None
                if failed:
                    raise RuntimeError(f"process {rank} of {size} failed:\n{value}")
                results[rank] = value
        for rank, process in enumerate(processes):
            process.join(max(1.0, end - time.monotonic()))
            if process.exitcode != 0:
                raise RuntimeError(f"process {rank} gave its result and then ended with exit code {process.exitcode}")
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[rank] for rank in range(size)]


def _child(
    send: Connection, environment: dict[str, str], log: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        answer = (False, function(*args))
    except BaseException:
        answer = (True, traceback.format_exc())
    send.send_bytes(pickle.dumps(answer))  # by value: shared memory would die with this process
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
