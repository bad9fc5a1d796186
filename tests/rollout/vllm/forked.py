"""vLLM's processes, forked from one that has imported it: that alone takes each of them ten seconds of a core.

``tests/rollout/test_generate.py`` has a process that is spawned, as they are outside of the tests.
"""

import os
from contextlib import nullcontext
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.popen_forkserver import Popen
from typing import Any
from unittest import mock

_server = forkserver.ForkServer()  # not the one of `runs.FORKED`, whose processes know nothing of vLLM
_server.set_forkserver_preload(
    [
        "tandemrl.rollout.vllm.worker",
        "vllm.model_executor.models.llama",
        "vllm.model_executor.models.qwen3",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.worker.cpu_worker",
    ]
)


class _Popen(Popen):
    def _launch(self, process_obj: Any) -> None:
        with mock.patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process):
            super()._launch(process_obj)


class _Process(ForkServerProcess):
    """With the environment that its parent has now, not the server's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._environment = dict(os.environ)

    @staticmethod
    def _Popen(process_obj: Any) -> Popen:
        return _Popen(process_obj)

    def run(self) -> None:
        global _server
        os.environ.clear()
        os.environ.update(self._environment)
        _server = forkserver._forkserver  # type: ignore[attr-defined]  # its own processes are the server's, too
        fork_vllm()
        super().run()


class _Context(ForkServerContext):
    Process = _Process  # type: ignore[assignment]


def fork_vllm() -> None:
    """From now on, vLLM forks its processes."""
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    utils.get_mp_context = multiproc_executor.get_mp_context = _Context


def scan_once() -> None:
    """From now on, only the first engine of this process looks through all modules, two thirds of another one's start:
    for what vLLM cannot read, and for kernels of which it has its own on a CPU."""
    from vllm.platforms.cpu import CpuPlatform

    from tandemrl.rollout.vllm import engine

    readable, first = engine._readable_modules, iter([True])
    engine._readable_modules = lambda: readable() if next(first, False) else nullcontext()
    CpuPlatform.register_triton_kernel_overrides = staticmethod(cache(CpuPlatform.register_triton_kernel_overrides))


def stop_server() -> None:
    """Once no process is left."""
    _server._stop()  # type: ignore[attr-defined]
