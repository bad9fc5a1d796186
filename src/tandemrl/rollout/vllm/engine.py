"""Tandem rollouts on vLLM: an ``Engine`` on a stock installation, which is extended by vLLM's own options only."""

import gc
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
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
from tandemrl.rollout.batch_engine import BatchEngine
from tandemrl.rollout.call import CallEngine
from tandemrl.rollout.decoding_rows import Decoder
from tandemrl.rollout.engine import Completion, EngineError, EngineInfo, Passes, Request, SentWeights
from tandemrl.rollout.relay import Job, LocalPartner, MakePartner, Relay, Writer, Written
from tandemrl.rollout.vllm import VLLM_TESTED
from tandemrl.rollout.vllm.call import VllmCall, death_reported, sampling_params
from tandemrl.rollout.vllm.sampler import HANDED_OVER, arguments_of
from tandemrl.rollout.vllm.weights import written_weights
from tandemrl.rollout.vllm.worker import TandemOptions, tandem_arguments
from tandemrl.selection import Who
from tandemrl.selection.boundaries import start_table
from tandemrl.selection.whole_words import id_tables, text_tables
from tandemrl.selection.words import vocabulary_of


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


# --------------------------------------------------------------------------------------------- an engine for each model

BLOCK_SIZE = 32
"""Tokens in a block of the KV cache on a CPU, where vLLM would take 128. A row that goes on reads the last one anew."""


class VllmWriter(Writer):
    """A `relay.Writer`, whose engine was told of the vocabulary (``tandem_spans``)."""

    def __init__(self, engine: VllmEngine) -> None:
        self._llm, self._eos = engine.llm, engine.eos
        self._flying: dict[int, tuple[str, bool]] = {}  # vLLM's name of the request, and whether it is greedy

    def __len__(self) -> int:
        return len(self._flying)

    def __contains__(self, number: object) -> bool:
        return number in self._flying

    def begin(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            row, sampling = job.row, job.row.request.sampling
            arguments = {"tandem_key": row.key, **arguments_of(job.span)}
            params = sampling_params(f"completion {row.number}", sampling, self._eos, job.room, arguments)
            prompt = {"prompt_token_ids": [*job.tokens]}
            name = self._llm.add_request(str(row.number), prompt, params, priority=row.number)
            self._flying[row.number] = name, sampling.temperature == 0

    def step(self, *, wait: bool) -> dict[int, Written]:
        whole = {}
        for output in self._llm.step() if self._flying else ():
            number, span = int(output.request_id), output.outputs[0]
            _, greedy = self._flying.pop(number)
            tokens, logprobs, over = list(span.token_ids), list(span.logprobs.logprobs), None
            if span.stop_reason == HANDED_OVER:
                tokens.pop()
                over = logprobs.pop()
            if greedy:
                logprobs, over = [0.0] * len(tokens), None if over is None else 0.0
            whole[number] = Written(tokens, logprobs, over)
        return whole

    def keep(self, live: Collection[int], waiting: Collection[int]) -> None:
        if gone := [self._flying.pop(number)[0] for number in [*self._flying] if number not in live]:
            self._llm.abort_request(gone, internal=True)
            if not live:  # the call is over: a step that failed was given blocks that no model has filled
                self._llm.reset_prefix_cache()


class VllmTwoEngines(BatchEngine):
    """Two engines of vLLM, one for each model, behind the interface of one; the loop is that of the reference engine.

    Strategies that drop proposals (``Strategy.starts``) can be had of it, and the senior alone.

    Args:
        senior, junior, tokenizer, config, dtype, engine_args, options: as of ``VllmEngine``. Each engine takes half of
            the share of the device's memory.
        junior_tokenizer: that of a junior with a vocabulary of its own, whose context is all that its model has.
        longest: of the senior's tokens.
        ends: of a text in them.

    Raises:
        EngineError: a setting needs both models in one engine, or is not supported.
        ModelError: the models do not share a vocabulary, and no tokenizer of the junior is given.
    """

    def __init__(
        self,
        senior: str | Path,
        junior: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        junior_tokenizer: PreTrainedTokenizerBase | None,
        config: RolloutConfig | None = None,
        *,
        longest: int | None = None,
        dtype: str = "float32",
        ends: Sequence[int] | None = None,
        engine_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        config, apart = config or RolloutConfig(), junior_tokenizer is not None
        v = config.vllm
        if (config.tensor_parallel, config.draft_tokens, v.junior_device) != (1, 0, None):
            raise EngineError(
                "with a vLLM engine for each model, rollout.tensor_parallel must be 1, rollout.draft_tokens 0 and "
                "rollout.vllm.junior_device null"
            )
        if not apart:
            vocabulary_check(tokenizer, load_tokenizer(junior))
            ends = ends or stored_eos_token_ids(str(senior), tokenizer, str(junior))
        half = replace(config, vllm=replace(v, gpu_memory_utilization=v.gpu_memory_utilization / 2))
        given = ({"block_size": BLOCK_SIZE} if platform_device() == "cpu" else {}) | dict(engine_args or {})
        shared: dict[str, Any] = {} if apart else {"longest": longest, "ends": ends}
        shared |= {"dtype": v.junior_dtype or dtype, "engine_args": given | {"quantization": v.junior_quantization}}
        with ExitStack() as started:
            first = VllmEngine(
                senior, None, tokenizer, half, longest=longest, dtype=dtype, ends=ends, engine_args=given, **options
            )
            started.callback(first.close)
            second = VllmEngine(junior, None, junior_tokenizer or tokenizer, half, **shared, **options)
            started.callback(second.close)
            self.engines = {1: first, 0: second}
            self._writers = {who: VllmWriter(engine) for who, engine in self.engines.items()}
            vocabulary, context = first.vocabulary, first.context
            make_partner: MakePartner | None = None
            if apart:
                named = {"writer": self._writers.pop(0), "ends": second.eos, "context": second.context}
                make_partner = partial(LocalPartner, vocabulary=vocabulary_of(second.tokenizer), **named)
            else:
                vocabulary, context = min(vocabulary, second.vocabulary), min(context, second.context)
            decoder = Decoder({}, {}, vocabulary, first.eos, tokenizer)
            super().__init__(decoder, context, max_rows=config.max_rows, has_junior=True, make_partner=make_partner)
            self._starts = None if apart else start_table(tokenizer, vocabulary)[:vocabulary]
            for engine in (first, second):
                one = self._starts
                known: Any = text_tables(engine.tokenizer, engine.vocabulary) if one is None else id_tables(one)
                engine.call_workers("tandem_spans", known if engine.in_process else cloudpickle.dumps(known))
            started.pop_all()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("vllm", self.engines[1].info.dtype, drops=True)

    def generate(self, requests: Sequence[Request], **named: Any) -> list[list[Completion]]:
        if all(r.strategy.starts is None and r.strategy.writers == "senior" for r in requests):
            alone = self.engines[1]
            written = alone.generate(requests, **named)
            self.passes = alone.passes
            return written
        with death_reported(), ExitStack() as awake:
            for engine in self.engines.values():
                awake.enter_context(engine.awake())
            return super().generate(requests, **named)

    def abort(self) -> None:
        self.engines[1].abort()  # if the senior writes alone
        super().abort()

    def check(self, index: int, request: Request) -> None:
        """Refuse also a request that asks for something that spans cannot give."""
        super().check(index, request)
        if request.strategy.starts is None and request.strategy.writers == "senior":
            return  # it has one span, of any ids
        if request.sampling.ignore_eos:
            raise EngineError(
                f"request {index}: where each model has a vLLM engine of its own, spans end by EOS; leave out "
                "ignore_eos, or use rollout.engine=torch"
            )
        starts, known = request.strategy.starts, self._starts
        same = starts is not None and (known is None or torch.equal(starts[: len(known)].nonzero(), known.nonzero()))
        if not same:
            raise EngineError(
                f"request {index}: its strategy drops no proposals, or not where words begin for this engine of vLLM; "
                "use strategies such as before_word in all steps, with the tokenizer's start_table, or "
                "rollout.engine=torch"
            )

    def make_batch(self, requests: Sequence[Request], *, turns: bool, streams: bool) -> Relay:
        return self.relay(self._writers, turns=turns)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self.exclusive():
            self.engines[1].load_weights(weights, version)
            self.policy_version = version

    def fingerprint(self, who: Who = "senior") -> int:
        return self.engines[1 if who == "senior" else 0].fingerprint()

    def close(self) -> None:
        with ExitStack() as closing:
            for engine in self.engines.values():
                closing.callback(engine.close)
