"""``rollout.*`` of a config -> a vLLM engine; vllm is imported here only when it is asked for."""

from transformers import PreTrainedTokenizerBase

from tandemrl.config import ConfigError, RolloutConfig
from tandemrl.rollout.engine import Engine
from tandemrl.rollout.vllm import require_vllm


def vllm_engine(
    config: RolloutConfig,
    senior: str,
    junior: str | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: str,
    device: str,
    longest: int,
) -> Engine:
    """An engine for these models that serves requests of up to ``longest`` tokens, prompt and completion together.

    Raises:
        ConfigError: vLLM is not installed, or is built for another device than ``device``.
        EngineError: the models or the settings do not go together.
    """
    require_vllm("rollout.engine=vllm")
    try:
        from tandemrl.rollout.vllm.engine import VllmEngine, platform_device
    except ImportError as error:
        raise ConfigError(f"rollout.engine=vllm: the installed vLLM is broken: {error}") from None
    if (found := platform_device()) != device.partition(":")[0]:
        raise ConfigError(f"model.device={device}: the installed vLLM runs on {found}; set model.device={found}")
    v = config.vllm
    return VllmEngine(
        senior,
        junior,
        tokenizer,
        mode=v.mode,
        dtype=dtype,
        max_rows=config.max_rows,
        max_model_len=longest,
        tensor_parallel=config.tensor_parallel,
        multiprocess=v.multiprocess,
        devices=v.devices,
        kv_cache_gb=v.kv_cache_gb,
        gpu_memory_utilization=v.gpu_memory_utilization,
        sleep=v.sleep,
        prefix_caching=v.prefix_caching,
        max_batched_tokens=v.max_batched_tokens,
        enforce_eager=v.enforce_eager,
        junior_dtype=v.junior_dtype,
        junior_quantization=v.junior_quantization,
        junior_device=v.junior_device,
    )
