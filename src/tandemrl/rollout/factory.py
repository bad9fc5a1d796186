"""The engine that ``rollout.*`` of a config asks for. vLLM is imported only if the config asks for it."""

from collections.abc import Callable
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.config import ConfigError, RolloutConfig
from tandemrl.config.components import engine_kind
from tandemrl.models.loading import resolve_device
from tandemrl.models.lora import AdapterPlan
from tandemrl.processes.names import made
from tandemrl.rollout.engine import Engine
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.rollout.vllm import cannot_import, require_vllm

EngineFactory = Callable[..., Engine]
"""A function or class that makes an engine of what its parameters name (see `make_engine`)."""


class ModelSource(NamedTuple):
    """A model that an engine decodes with."""

    path: str
    """Model folder or hub id, from which vLLM loads it."""
    load: Callable[[], PreTrainedModel]
    """Loads the model for the torch engine, which then owns it."""
    adapters: AdapterPlan | None = None
    """The adapters of a senior that the vLLM engine runs as adapters on the junior's weights. The torch engine does not
    read it: there, ``load`` gives a model with adapters."""


def make_engine(
    config: RolloutConfig,
    senior: ModelSource,
    junior: ModelSource | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    longest: int | None = None,
    factory: EngineFactory | None = None,
) -> Engine:
    """Make the engine for these models.

    A ``factory`` or a `module:name` of the user's own is called with what its parameters name: those of this function,
    and its own with the values of ``rollout.engine_parameters``.

    Args:
        junior: the frozen partner. None means that the senior writes alone.
        dtype: the dtype of the vLLM engine. The torch engine takes its models as they are loaded.
        device: ``model.device``, for the vLLM engine. The torch engine takes its models as they are loaded.
        longest: how many tokens the longest request of the vLLM engine has, prompt and completion together. None stands
            for the context of the models.
        factory: used instead of ``rollout.engine``.

    Raises:
        ConfigError: vLLM is not installed, or is built for another device than ``device``; or an engine of the user's
            own cannot be made.
        EngineError, ModelError: the models or the settings do not fit together.
    """
    where = f"rollout.engine={config.engine}"
    engine = made(
        factory or engine_kind(config.engine).path,
        where,
        ConfigError,
        config.engine_parameters,
        config=lambda: config,
        senior=lambda: senior,
        junior=lambda: junior,
        tokenizer=lambda: tokenizer,
        dtype=lambda: dtype,
        device=lambda: device,
        longest=lambda: longest,
    )
    if not isinstance(engine, Engine):
        raise ConfigError(f"{where}: returned a {type(engine).__name__}, not an Engine; see rollout/engine.py: Engine")
    return engine


def torch_engine(
    config: RolloutConfig, senior: ModelSource, junior: ModelSource | None, tokenizer: PreTrainedTokenizerBase
) -> TorchEngine:
    """The reference engine."""
    return TorchEngine(
        senior.load(),
        None if junior is None else junior.load(),
        tokenizer,
        max_rows=config.max_rows,
        compile=config.compile,
        draft_tokens=config.draft_tokens,
    )


def vllm_engine(
    config: RolloutConfig,
    senior: ModelSource,
    junior: ModelSource | None,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str,
    device: str,
    longest: int | None,
) -> Engine:
    """Stock vLLM, on the device that it is built for."""
    require_vllm("rollout.engine=vllm")
    try:
        from tandemrl.rollout.vllm.backend import platform_device
        from tandemrl.rollout.vllm.engine import VllmEngine
    except ImportError as error:
        raise cannot_import("rollout.engine=vllm", error) from None
    kind = resolve_device(device).type if device == "auto" else device.partition(":")[0]
    if (platform := platform_device()) != kind:
        raise ConfigError(f"model.device={device}: the installed vLLM runs on {platform}; set model.device={platform}")
    return VllmEngine.start(
        senior.path,
        None if junior is None else junior.path,
        tokenizer,
        config,
        dtype=dtype,
        device=resolve_device(device).index or 0,  # this process's, which holds the trainer, too
        longest=longest,
        adapters=senior.adapters,
    )
