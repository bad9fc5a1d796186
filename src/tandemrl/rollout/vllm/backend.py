"""A running vLLM engine: its start, calls of its workers, its memory and the transfer of new weights into it."""

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import vllm
import vllm.envs
from torch import Tensor
from vllm import EngineArgs, LLMEngine

from tandemrl.config import RolloutConfig
from tandemrl.rollout.engine import EngineError, SentWeights
from tandemrl.rollout.vllm.settings import TandemOptions
from tandemrl.rollout.vllm.weights import written_weights
from tandemrl.rollout.vllm.worker import tandem_arguments


def platform_device() -> str:
    """The kind of device that the installed vLLM is built for: ``cpu`` or ``cuda``."""
    return str(vllm.platforms.current_platform.device_type)


class Backend:
    """A vLLM engine with tandem workers. It handles in which process and on which GPU the engine is, and its sleep.

    Args:
        llm: a ``vllm.LLMEngine``.
        dtype: the dtype of the engine's weights, by torch's name for it.
        in_process: whether the engine and its worker live in this process. Then weights are handed over as they
            are, else through a file.
        sleeps: whether the engine gives its memory back after every ``awake`` and takes it again for the next.
    """

    def __init__(self, llm: Any, *, dtype: str, in_process: bool = True, sleeps: bool = False) -> None:
        self.llm, self.dtype, self.in_process, self._sleeps = llm, dtype, in_process, sleeps
        self._asleep = set[str]()
        self.close: Callable[[], object] = lambda: None
        """Stop the engine and its workers. The object cannot be used afterwards."""

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
            model: model folder or hub id of the senior.
            options: the options of tandem decoding.
            config: ``rollout.*`` of a config.
            dtype: the dtype of the engine's weights, by torch's name for it.
            context: how many tokens the longest request can have, prompt and completion together.
            engine_args: further ``vllm.EngineArgs``.
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
            enable_prefix_caching=True,
            scheduling_policy="priority",
            enforce_eager=on_cpu if v.enforce_eager is None else v.enforce_eager,
            generation_config="vllm",  # sampling is what a Request says, not what the model folder recommends
            disable_log_stats=True,
            seed=0,
            **tandem_arguments(options),
        )
        if not on_cpu:
            args["gpu_memory_utilization"] = v.gpu_memory_utilization
        readable = _readable_modules() if on_cpu else nullcontext()
        with _startup(v.multiprocess, v.devices, unbound=on_cpu and parallel > 1), readable:
            llm = LLMEngine.from_engine_args(EngineArgs(**args | dict(engine_args)))
        backend = cls(
            llm,
            dtype=dtype,
            in_process=not v.multiprocess and parallel == 1,
            sleeps=v.sleep,
        )
        client: Any = llm.engine_core
        backend.close = client.shutdown
        if backend.in_process:
            client._finalizer.detach()  # it would shut down what engines in this process share
            _RUNNING.add(id(client.engine_core))
            backend.close = weakref.finalize(backend, _shut_down, client.engine_core)
        if v.sleep:  # the trainer has the memory first: what it resumes from comes there
            with backend.awake():
                pass
        return backend

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker.

        Returns:
            One result per worker.

        Raises:
            EngineError: the call failed. The message is that of the worker's error.
        """
        try:
            return self.llm.collective_rpc(method, args=args)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(str(error)) from error

    @contextmanager
    def awake(self) -> Iterator[None]:
        """A context in which the engine has its memory. Afterwards an engine that sleeps gives it to the trainer."""
        self.wake("weights", "kv_cache")
        try:
            yield
        finally:
            if self._sleeps:
                self.llm.sleep(level=1)
                self._asleep = {"weights", "kv_cache"}

    def wake(self, *tags: str) -> None:
        """Take back memory that was given to the trainer. ``tags`` are vLLM's names of its parts: weights, kv_cache."""
        if asleep := [tag for tag in tags if tag in self._asleep]:
            self.llm.wake_up(tags=asleep)
            self._asleep -= set(asleep)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the senior's weights in place, and drop the KV cache, which is that of the old weights.

        Running requests, which must be ``paused``, are preempted: their tokens so far are read again.

        Raises:
            EngineError: the weights do not match the engine's model.
        """
        self.wake("weights")
        sent = SentWeights.of(weights)
        # In this process they are gathered while they are loaded.
        handed = nullcontext(sent) if self.in_process else written_weights(sent, getattr(torch, self.dtype))
        with handed as given:
            self.call("tandem_load", given)
        self.llm.reset_prefix_cache(reset_running_requests=True)


_RUNNING: set[int] = set()
"""The ids of the engine cores that run in this process. They share torch.distributed and other globals, which the last
one shuts down."""


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
    """A context for the start of vLLM, after which environment variables and torch's globals are as before.

    vLLM reads some settings from environment variables only, and changes globals of torch that the trainer needs.

    Args:
        multiprocess: whether the engine gets a process of its own.
        devices: ``CUDA_VISIBLE_DEVICES`` of the engine; None leaves it as it is.
        unbound: whether the ranks are not bound to CPU cores.
    """
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)), "VLLM_USE_V2_MODEL_RUNNER": "0"}
    if devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices
    if unbound and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:  # else ranks want a NUMA node each
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    before = {name: os.environ[name] for name in environment if name in os.environ}
    set_num_threads, threads, random_state = torch.set_num_threads, torch.get_num_threads(), torch.get_rng_state()
    os.environ.update(environment)
    vllm.envs.disable_envs_cache()  # an earlier engine may have frozen its own
    try:
        yield
    finally:
        for name in environment:
            del os.environ[name]
        os.environ.update(before)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)


@contextmanager
def _readable_modules() -> Iterator[None]:
    """A context in which vLLM does not see modules that it cannot read.

    On a CPU, vLLM 0.32 reads the attributes of every object in every module when it starts. It fails if they are not a
    mapping, as with the functions of llvmlite, which numba loads.
    """
    hidden = {
        name: module
        for name, module in list(sys.modules.items())
        for value in list((getattr(module, "__dict__", None) or {}).values())
        if hasattr(value, "__dict__") and not isinstance(vars(value), Mapping)
    }
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(hidden)
