"""One function on many processes of this machine: what torchrun does, without its start-up time.

The processes are forked from a server that has imported torch and transformers once per test session; each has one
thread and the environment that torchrun gives, so that ``parallel.join`` finds the others. The function must be
importable (defined at the top of a test module).
"""

import faulthandler
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import TCPStore

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.fsdp", "transformers", "tandemrl.parallel"])


def run(function: Callable[..., Any], size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """``function(*args)`` in ``size`` processes; their results by rank, which are pickled.

    Raises:
        RuntimeError: one of them raised (with its traceback) or died; the others are killed.
        TimeoutError: not all were done after ``timeout`` seconds; all are killed, after they have written to stderr
            where they hang.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))
    processes: list[Any] = []
    pipes: dict[Connection, int] = {}
    for rank in range(size):
        receive, send = _CONTEXT.Pipe(duplex=False)
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
        process = _CONTEXT.Process(target=_child, args=(send, environment, 0.95 * timeout, function, args), daemon=True)
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
    finally:
        for process in processes:
            if len(results) < size:
                process.kill()
            process.join()
    return [results[rank] for rank in range(size)]


def _child(
    send: Connection, environment: dict[str, str], patience: float, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    faulthandler.dump_traceback_later(patience)
    torch.set_num_threads(1)
    try:
        answer = (False, function(*args))
    except BaseException:
        answer = (True, traceback.format_exc())
    send.send_bytes(pickle.dumps(answer))  # by value: shared memory would die with this process
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
