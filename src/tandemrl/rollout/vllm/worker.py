"""The workers and the scheduler of tandem decoding, which vLLM's ``worker_cls`` and ``scheduler_cls`` name."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import torch
from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.config.utils import replace
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

if current_platform.is_cpu():  # its import replaces torch.cuda's streams and events, which nothing on a GPU survives
    from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from tandemrl.models.lora import AdapterPlan
from tandemrl.rollout.engine import EngineError, SentWeights
from tandemrl.rollout.sync import fingerprint
from tandemrl.rollout.vllm.planner import JUNIOR, SENIOR, SchedulingMode
from tandemrl.rollout.vllm.runner import TandemModelRunner, TandemOutput
from tandemrl.rollout.vllm.weights import (
    adapted_parameters,
    hf_parameters,
    load_adapters,
    load_checkpoint_weights,
    read_weights,
)
from tandemrl.selection import Strategy, Who


@dataclass(frozen=True)
class TandemOptions:
    """The options of a worker beyond vLLM's own settings. They come in ``additional_config={"tandem": {...}}``."""

    junior: str | None = None
    """Model folder or hub id. None means that only the senior writes."""
    draft: int | str = 0
    """How many tokens the junior drafts. "auto" chooses it from step to step."""
    junior_dtype: str | None = None
    junior_quantization: str | None = None
    junior_device: str | None = None
    device: int = 0
    """The CUDA device of the first worker, by its number in the engine's process; the others follow it. Left to itself,
    vLLM would begin at 0 in every process of torchrun."""
    adapters: AdapterPlan | None = None
    """If given, the senior is these adapters on the junior's weights. They start as zero, and ``tandem_load`` takes
    only them."""


class _TandemWorker:
    """What the workers below add to vLLM's. ``LLMEngine.collective_rpc`` calls the methods named ``tandem_*``."""

    vllm_config: VllmConfig
    device_config: DeviceConfig
    model_runner: Any
    device: torch.device
    local_rank: int

    def init_device(self) -> None:
        model = self.vllm_config.model_config
        if model.is_multimodal_model or model.is_encoder_decoder:
            raise EngineError(f"{model.model}: tandem decoding needs a text-only model that is decoder-only")
        options = TandemOptions(**self.vllm_config.additional_config["tandem"])
        if self.device_config.device_type == "cuda":
            self.local_rank += options.device  # by which vLLM chooses the device
        super().init_device()  # type: ignore[misc]  # vLLM's worker, the other base of both classes below
        senior, junior = self.model_runner, None
        if options.junior is not None:
            config = _junior_config(self.vllm_config, options)
            device = torch.device(options.junior_device or senior.device)
            with set_current_vllm_config(config):
                junior = type(senior)(config, device)
        self.model_runner = TandemModelRunner(senior, junior, draft=options.draft, adapters=options.adapters)

    def set_kv_cache_layout(self, kv_cache_layout: str) -> None:
        """Adopt the engine's layout for both models: on CUDA, vLLM profiles their memory before there is a cache."""
        for runner in self.model_runner.runners.values():
            record_kv_cache_layout(runner.vllm_config.cache_config, kv_cache_layout)

    def tandem_register(self, strategies: Mapping[str, Strategy] | bytes) -> None:
        """Replace the strategies that requests can name.

        Args:
            strategies: the strategies by name, pickled if they come from another process.
        """
        known = cloudpickle.loads(strategies) if isinstance(strategies, bytes) else strategies
        self.model_runner.strategies = known

    def tandem_begin(self) -> None:
        """Hear that a call begins."""
        with torch.inference_mode():  # as in a step, where the planner's tensors come from
            self.model_runner.planner.begin_call()

    def tandem_load(self, weights: SentWeights | str) -> None:
        """Replace the senior's weights in place, or only its adapters if it is adapters.

        Args:
            weights: the trainer's, or the path of a file with them (``written_weights``).
        """
        sent = read_weights(weights) if isinstance(weights, str) else weights
        with self.model_runner.runner_of(SENIOR) as runner:
            if self.model_runner.adapters is None:
                load_checkpoint_weights(runner, sent)
            else:
                load_adapters(runner.get_model(), sent)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the sender may change its tensors once this returns

    def tandem_fingerprint(self, who: Who) -> int:
        """The checksum of the weights that a model computes with (see ``rollout.sync.fingerprint``).

        Raises:
            EngineError: the weights cannot be read back.
        """
        runners, author = self.model_runner.runners, SENIOR if who == "senior" else JUNIOR
        if author not in runners:
            raise EngineError("this engine has no junior")
        with self.model_runner.runner_of(author):
            if author == SENIOR and self.model_runner.adapters is not None:
                return fingerprint(adapted_parameters(runners[SENIOR], runners[JUNIOR]))
            return fingerprint(hf_parameters(runners[author]))

    def tandem_mode(self, mode: SchedulingMode) -> None:
        """Set the scheduling mode, which measurements compare."""
        self.model_runner.planner.mode = mode

    def tandem_stats(self) -> dict[str, Any]:
        """The counts of ``planner.Stats`` since a call began, and as ``requests`` how many the planner knows."""
        planner = self.model_runner.planner
        return dataclasses.asdict(planner.stats) | {"requests": len(planner.slots)}


if current_platform.is_cpu():

    class TandemCPUWorker(_TandemWorker, CPUWorker):
        """The ``worker_cls`` on CPUs."""


class TandemGPUWorker(_TandemWorker, Worker):
    """The ``worker_cls`` on CUDA devices."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """vLLM's context of memory that sleeps, but one that both models' runners can enter, one after the other."""
        return _Again(partial(super()._maybe_get_memory_pool_context, tag))


class TandemScheduler(Scheduler):
    """vLLM's scheduler, which also gives requests KV slots for drafts, as many as the workers ask for and its budget
    allows."""

    _ahead = 0

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule a step as vLLM does, with KV slots for drafts in the requests that decode."""
        room = self.max_num_scheduled_tokens // max(1, len(self.running)) - 1
        ahead = min(self._ahead, room)
        for request in self.running if ahead > 0 else ():
            if request.num_computed_tokens == request.num_tokens - 1:
                # Placeholders, of which what is not written is rolled back. The last token needs no slot.
                left = request.max_tokens - request.num_output_tokens - 1
                request.spec_token_ids = [-1] * min(ahead, left)
        return super().schedule(*args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, Any]:
        """Take up the output of a step as vLLM does, and note how far the junior drafts in the next step."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if isinstance(model_runner_output, TandemOutput) and model_runner_output.ahead is not None:
            self._ahead = model_runner_output.ahead
        return outputs


class _Again(AbstractContextManager[None]):
    """A context that can be entered again once it is left; ``make`` makes one that cannot."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make, self._entered = make, ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(self._make())

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


def _junior_config(config: VllmConfig, options: TandemOptions) -> VllmConfig:
    """The config of the junior: the senior's config ``config`` with the junior's model in it."""
    assert options.junior is not None
    model = config.model_config
    junior = ModelConfig(
        model=options.junior,
        tokenizer=options.junior,
        trust_remote_code=model.trust_remote_code,
        dtype=options.junior_dtype or model.dtype,  # a name; vLLM lists them, and checks
        quantization=options.junior_quantization,
        seed=model.seed,
        max_model_len=model.max_model_len,
        enforce_eager=model.enforce_eager,
        logprobs_mode=model.logprobs_mode,
    )
    own = replace(
        config,
        model_config=junior,
        quant_config=None,
        compilation_config=copy.deepcopy(config.compilation_config),
        cache_config=copy.deepcopy(config.cache_config),
        parallel_config=copy.deepcopy(config.parallel_config),
        weight_transfer_config=None,
    )
    own.compilation_config.static_forward_context = {}
    own.parallel_config.rank = config.parallel_config.rank
    return own


def tandem_arguments(options: TandemOptions) -> dict[str, Any]:
    """The engine arguments that make stock vLLM decode in tandem."""
    worker: type[_TandemWorker] = TandemCPUWorker if current_platform.is_cpu() else TandemGPUWorker
    return {
        "worker_cls": f"{worker.__module__}.{worker.__qualname__}",
        "scheduler_cls": f"{TandemScheduler.__module__}.{TandemScheduler.__qualname__}",
        "additional_config": {"tandem": dataclasses.asdict(options)},
        "async_scheduling": False,
        "logprobs_mode": "processed_logprobs",
    }
