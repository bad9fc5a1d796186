"""The settings of tandem decoding in vLLM: the options of the workers, what is refused, and the junior's config."""

import copy
from dataclasses import dataclass

from vllm.config import ModelConfig, VllmConfig
from vllm.config.utils import replace

from tandemrl.models.lora import AdapterPlan
from tandemrl.rollout.engine import EngineError


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


def check_config(config: VllmConfig) -> None:
    """Refuse models that tandem decoding does not support.

    Raises:
        EngineError: the model is not a decoder of text.
    """
    model = config.model_config
    if model.is_multimodal_model or model.is_encoder_decoder:
        raise EngineError(f"{model.model}: tandem decoding needs a text-only model that is decoder-only")


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
