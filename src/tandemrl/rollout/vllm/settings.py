"""The settings of tandem decoding in vLLM: the options of the workers, what is refused, and the junior's config."""

import copy
from dataclasses import dataclass
from typing import Literal

from vllm.config import ModelConfig, VllmConfig
from vllm.config.utils import replace

from tandemrl.models.lora import AdapterPlan
from tandemrl.rollout.engine import EngineError
from tandemrl.rollout.vllm.modes import SchedulingMode


@dataclass(frozen=True)
class TandemOptions:
    """The options of a worker beyond vLLM's own settings. They come in ``additional_config={"tandem": {...}}``."""

    junior: str | None = None
    """Model folder or hub id. None means that only the senior writes."""
    mode: SchedulingMode = "lazy"
    draft: int | Literal["auto"] = 0
    """How many tokens the junior drafts in the modes ``draft`` and ``auto``. "auto" chooses it from step to step."""
    junior_dtype: str | None = None
    junior_quantization: str | None = None
    junior_device: str | None = None
    device: int = 0
    """The CUDA device of the first worker, by its number in the engine's process; the others follow it. Left to itself,
    vLLM would begin at 0 in every process of torchrun."""
    adapters: AdapterPlan | None = None
    """If given, the senior is these adapters on the junior's weights. They start as zero, and ``tandem_load`` takes
    only them."""
    record: bool = False
    """Whether to record the authors of every request, for ``tandem_record``."""


def options_of(config: VllmConfig) -> TandemOptions:
    """The options of tandem decoding in a config of vLLM; the defaults if it has none."""
    additional = config.additional_config
    return TandemOptions(**(additional.get("tandem", {}) if isinstance(additional, dict) else {}))


def check_config(config: VllmConfig) -> None:
    """Refuse models that tandem decoding does not support, and vLLM's other model runner.

    Raises:
        EngineError: the message names the setting and the value it needs.
    """
    rules = [
        (not config.use_v2_model_runner, "VLLM_USE_V2_MODEL_RUNNER", "0: written against the V1 model runner"),
        (not config.model_config.is_multimodal_model, "model", "text-only"),
        (not config.model_config.is_encoder_decoder, "model", "decoder-only"),
    ]
    for ok, name, needed in rules:
        if not ok:
            raise EngineError(f"tandem decoding needs {name} to be {needed}")


def junior_config(config: VllmConfig, options: TandemOptions) -> VllmConfig:
    """The config of the junior: the senior's config ``config`` with the junior's model in it."""
    assert options.junior is not None
    model = config.model_config
    junior = ModelConfig(
        model=options.junior,
        tokenizer=options.junior,
        trust_remote_code=model.trust_remote_code,
        dtype=options.junior_dtype or model.dtype,  # type: ignore[arg-type]  # a name; vLLM lists them, and checks
        quantization=options.junior_quantization,
        seed=model.seed,
        max_model_len=model.max_model_len,
        enforce_eager=model.enforce_eager,
        logprobs_mode=model.logprobs_mode,
    )
    compilation = copy.deepcopy(config.compilation_config)
    compilation.static_forward_context = {}
    own = replace(
        config,
        model_config=junior,
        quant_config=None,
        compilation_config=compilation,
        cache_config=copy.deepcopy(config.cache_config),
        parallel_config=copy.deepcopy(config.parallel_config),
        weight_transfer_config=None,
    )
    own.compilation_config.static_forward_context = {}
    own.parallel_config.rank = config.parallel_config.rank
    return own
