"""Tandem rollouts on vLLM: an ``Engine`` on a stock installation, which is extended by vLLM's own options only."""

import gc
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import vllm
import vllm.envs
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase
from vllm import EngineArgs, LLMEngine

from tandemrl.config import RolloutConfig
from tandemrl.models.loading import load_tokenizer, stored_eos_token_ids, vocabulary_check
from tandemrl.models.lora import AdapterPlan
from tandemrl.processes.world import environment
from tandemrl.rollout.call import CallEngine
from tandemrl.rollout.engine import EngineError, EngineInfo, Passes, SentWeights
from tandemrl.rollout.vllm import VLLM_TESTED
from tandemrl.rollout.vllm.call import VllmCall
from tandemrl.rollout.vllm.weights import written_weights
from tandemrl.rollout.vllm.worker import TandemOptions, tandem_arguments
from tandemrl.selection import Who


def platform_device() -> str:
    """The kind of device that the installed vLLM is built for: ``cpu`` or ``cuda``."""
    return str(vllm.platforms.current_platform.device_type)


class VllmEngine(CallEngine):
    """Tandem decoding inside vLLM; see ``rollout.engine.Engine`` for the contract and ``planner`` for the idea.

    It starts vLLM as ``rollout.*`` of a config says, and handles in which process and on which GPU vLLM is, and its
    sleep. With ``rollout.vllm.sleep``, vLLM gives its memory back after every call, and takes it again for the next.
    The weights on disk are policy version 0.

    Args:
        senior: model folder or hub id of the senior.
        junior: model folder or hub id of the junior. None allows only strategies by which the senior writes alone.
        tokenizer: the tokenizer of the senior.
        config: ``rollout.*`` of a config; None stands for the defaults.
        dtype: the dtype of the engine's weights, by torch's name for it.
        device: the CUDA device of the engine's models, by its number in this process. ``rollout.vllm.devices`` and
            ``junior_device`` take precedence.
        longest: how many tokens prompt and completion may have together. None means as many as both models allow.
        adapters: if given, the senior is these adapters on the junior's weights. Both are then loaded from the same
            folder, and the weights only once.
        ends: the ids that end a completion. None stands for those of both models.
        engine_args: further ``vllm.EngineArgs``.

    Raises:
        EngineError: a setting is not supported, or a model has too few logits for the tokenizer.
        ModelError: the models do not share a vocabulary.
    """

    def __init__(
        self,
        senior: str | Path,
        junior: str | Path | None,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig | None = None,
        *,
        dtype: str = "float32",
        device: int = 0,
        longest: int | None = None,
        adapters: AdapterPlan | None = None,
        ends: Sequence[int] | None = None,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if vllm.__version__.partition("+")[0] != VLLM_TESTED:
            tested = f"tandem decoding was tested with {VLLM_TESTED}, and relies on internals that change"
            warnings.warn(f"vLLM {vllm.__version__}: {tested}", stacklevel=2)
        config = config or RolloutConfig()
        v, parallel, on_cpu = config.vllm, config.tensor_parallel, platform_device() == "cpu"
        paths = [str(path) for path in (senior, junior) if path is not None]
        if junior is not None:
            vocabulary_check(tokenizer, load_tokenizer(junior))
        models = [AutoConfig.from_pretrained(path, trust_remote_code=False) for path in paths]
        vocabulary = min(model.vocab_size for model in models)
        if vocabulary < len(tokenizer):
            raise EngineError(f"a model has {vocabulary} logits for the tokenizer's {len(tokenizer)} tokens")
        context = min(longest or sys.maxsize, *(model.max_position_embeddings for model in models))
        options = TandemOptions(
            junior=None if junior is None else str(junior),
            draft=config.draft_tokens,
            junior_dtype=v.junior_dtype,
            junior_quantization=v.junior_quantization,
            junior_device=v.junior_device,
            device=device if v.devices is None else 0,  # the first of those that its process sees
            adapters=adapters,
        )
        kv_cache_gb = 1.0 if on_cpu and v.kv_cache_gb is None else v.kv_cache_gb
        args: dict[str, Any] = dict(
            model=str(senior),
            tokenizer=str(senior),
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
            **({} if on_cpu else {"gpu_memory_utilization": v.gpu_memory_utilization}),
        )
        if ends is None:
            ends = stored_eos_token_ids(paths[0], tokenizer, *paths[1:])
        readable = _readable_modules() if on_cpu else nullcontext()
        with _startup(v.multiprocess, v.devices, unbound=on_cpu and parallel > 1), readable:
            self.llm: Any = _started(args | dict(engine_args or {}))
        self.eos = tuple(end for end in ends if end < vocabulary)  # a generation config may be of a larger one
        self.tokenizer, self.vocabulary, self.context, self.has_junior = tokenizer, vocabulary, context, len(paths) > 1
        self.policy_version, self.passes = 0, Passes()
        self._info = EngineInfo("vllm", dtype, adapters=adapters is not None)
        self.in_process = not v.multiprocess and parallel == 1
        """Whether vLLM and its worker live in this process. Then weights are handed over as they are, else through a
        file."""
        self._sleeps, self._asleep = v.sleep, set[str]()
        client: Any = self.llm.engine_core
        self._close: Callable[[], object] = client.shutdown
        if self.in_process:
            client._finalizer.detach()  # it would shut down what engines in this process share
            _RUNNING.add(id(client.engine_core))
            self._close = weakref.finalize(self, _shut_down, client.engine_core)
        if self._sleeps:  # the trainer has the memory first: what it resumes from comes there
            with self.awake():
                pass

    @property
    def info(self) -> EngineInfo:
        return self._info

    def make_call(self, *, turns: bool, streams: bool) -> VllmCall:
        return VllmCall(self, turns=turns, streams=streams)

    def call_workers(self, method: str, *args: Any) -> list[Any]:
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

    def stats(self) -> dict[str, Any]:
        """The counts of ``planner.Stats`` in the last call, and as ``requests`` how many the planner knows."""
        return self.call_workers("tandem_stats")[0]

    @contextmanager
    def awake(self) -> Iterator[None]:
        """A context in which vLLM has its memory. Afterwards, if it sleeps, it gives it to the trainer."""
        self._wake("weights", "kv_cache")
        try:
            yield
        finally:
            if self._sleeps:
                self.llm.sleep(level=1)
                self._asleep = {"weights", "kv_cache"}

    def _wake(self, *tags: str) -> None:
        """Take back memory that was given to the trainer. ``tags`` are vLLM's names of its parts: weights, kv_cache."""
        if asleep := [tag for tag in tags if tag in self._asleep]:
            self.llm.wake_up(tags=asleep)
            self._asleep -= set(asleep)

    # ---------------------------------------------------------------------------------------------------------- weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """As ``Engine.load_weights``, after which the KV cache, which is that of the old weights, is dropped.

        Raises:
            EngineError: the weights do not match the engine's model.
        """
        with self.exclusive():
            self._wake("weights")
            sent = SentWeights.of(weights)
            # In this process they are gathered while they are loaded.
            handed = nullcontext(sent) if self.in_process else written_weights(sent, getattr(torch, self._info.dtype))
            with handed as given:
                self.call_workers("tandem_load", given)
            self.llm.reset_prefix_cache(reset_running_requests=True)
            self.policy_version = version

    def fingerprint(self, who: Who = "senior") -> int:
        with self.exclusive():
            self._wake("weights")
            checksums = set(self.call_workers("tandem_fingerprint", who))
        if len(checksums) > 1:
            ranks = sorted(map(hex, checksums))
            raise EngineError(f"the ranks of the engine hold different weights of the {who}: {ranks}")
        return checksums.pop()

    def close(self) -> None:
        self._close()


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
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)), "VLLM_USE_V2_MODEL_RUNNER": "0"}
    if devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = devices
    if unbound and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:  # else ranks want a NUMA node each
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    set_num_threads, threads, random_state = torch.set_num_threads, torch.get_num_threads(), torch.get_rng_state()
    try:
        with environment(variables):
            vllm.envs.disable_envs_cache()  # an earlier engine may have frozen its own
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_rng_state(random_state)


def _started(args: Mapping[str, Any]) -> LLMEngine:
    """vLLM with these arguments.

    Raises:
        EngineError: it does not start; the message says why, and which keys say how much memory it may have.
    """
    try:
        return LLMEngine.from_engine_args(EngineArgs(**args))
    except EngineError:
        raise
    except (ValueError, RuntimeError) as error:  # of its settings, of memory, of a process of its own
        fix = (
            "; raise rollout.vllm.kv_cache_gb (on a GPU, also gpu_memory_utilization), or lower the context: --context "
            "of serve, data.max_prompt_tokens and rollout.max_tokens of a run"
        )
        why = str(error).rstrip(".")
        raise EngineError(f"vLLM does not start: {why}{fix if 'memory' in why else ''}") from error


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
