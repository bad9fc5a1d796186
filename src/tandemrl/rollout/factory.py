"""The engine that ``rollout.*`` of a config asks for. vLLM is imported only if the config asks for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.config import ConfigError, RolloutConfig
from tandemrl.config.schema import JuniorEndpointConfig
from tandemrl.models.loading import load_model, resolve_device, stored_eos_token_ids
from tandemrl.models.lora import AdapterPlan
from tandemrl.processes.names import instantiate
from tandemrl.processes.world import World
from tandemrl.rollout.endpoint_partner import EndpointJunior
from tandemrl.rollout.engine import Engine
from tandemrl.rollout.fleet.engine import FleetEngine
from tandemrl.rollout.fleet.ray_workers import Acting, Cluster, RayWorkers
from tandemrl.rollout.spread import SpreadEngine
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.rollout.vllm import cannot_import, require_vllm

STORED_VERSIONS = 4  # of the senior's weights that a cluster of our own has room for
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
    load_elsewhere: Callable[[], PreTrainedModel] | None = None
    """Loads the model for the torch engine of a worker in another process, to which it is pickled. None stands for the
    model at ``path``, in the dtype of the engine."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """That of a junior with a vocabulary of its own, which only some engines can have (``EngineKind.steps``)."""
    endpoint: JuniorEndpointConfig | None = None
    """Where such a junior is served. Then nothing is loaded."""

    def elsewhere(self, dtype: str, device: str) -> "ModelSource":
        """The source for a worker: of what ``load`` holds in this process, nothing is sent there."""
        load = self.load_elsewhere or partial(load_frozen, self.path, dtype, device)
        return self._replace(load=load, load_elsewhere=None)


def load_frozen(path: str, dtype: str, device: str) -> PreTrainedModel:
    """A model that a worker decodes with."""
    return load_model(path, dtype=dtype, device=device).requires_grad_(False)


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
    acting: Acting | None = None,
    ends: Sequence[int] | None = None,
    world: World | None = None,
) -> Engine:
    """Make the engine for these models: one in this process, or ``rollout.workers`` of them, used as one.

    A ``factory`` or a `module:name` of the user's own is called with what its parameters name: those of this function,
    and its own with the values of ``rollout.engine_parameters``.

    Args:
        junior: the frozen partner. None means that the senior writes alone.
        dtype: the dtype of the vLLM engine. The torch engine takes its models as they are loaded.
        device: ``model.device``, for the vLLM engine. The torch engine takes its models as they are loaded.
        longest: how many tokens the longest request of the vLLM engine has, prompt and completion together. None stands
            for the context of the models.
        factory: used instead of ``rollout.engine``.
        acting: with workers, makes what the authors take turns with there, as a responder does here.
        ends: the ids that end a text. None stands for those of the models: of both, if they have one vocabulary.
        world: processes that all make one, and the same calls of it. Rank 0 has the workers.

    Raises:
        ConfigError: vLLM is not installed, or is built for another device than ``device``; or an engine of the user's
            own cannot be made.
        EngineError, ModelError: the models or the settings do not fit together.
    """
    given = {"tokenizer": tokenizer, "dtype": dtype, "longest": longest, "ends": ends}
    if config.workers == 0:
        engine = _own_engine(factory, config, {**given, "senior": senior, "junior": junior, "device": device})
        alone = config.units is None and (world is None or world.size == 1)
        return engine if alone else SpreadEngine(engine, world, config.units)
    assert config.units is not None
    fleet = partial(FleetEngine, size=config.workers, unit_groups=config.units, world=world)
    if world is not None and not world.main:
        return fleet(None)
    there = device.partition(":")[0]  # of the cards that Ray gives it, a worker takes the first
    models = {"senior": senior, "junior": junior}
    given |= {name: None if model is None else model.elsewhere(dtype, there) for name, model in models.items()}
    make = partial(_own_engine, factory, replace(config, workers=0, unit_groups=None), {**given, "device": there})
    on_cards = resolve_device(device).type == "cuda"
    stored = sum(file.stat().st_size for file in Path(senior.path).glob("*.safetensors"))
    cluster = Cluster(
        config.ray,
        config.workers,
        gpus=config.tensor_parallel if on_cards else 0,
        store_bytes=STORED_VERSIONS * stored or None,
    )
    return fleet(RayWorkers(make, cluster, acting, config.worker_timeout_s))


def _own_engine(factory: EngineFactory | None, config: RolloutConfig, given: Mapping[str, Any]) -> Engine:
    """The engine of this process; see ``make_engine``. ``given``: its further arguments by name."""
    where = f"rollout.engine={config.engine}"
    engine = instantiate(
        factory or config.kind.path,
        where,
        ConfigError,
        config.engine_parameters,
        config=lambda: config,
        **{name: partial(given.get, name) for name in given},
    )
    if not isinstance(engine, Engine):
        raise ConfigError(f"{where}: returned a {type(engine).__name__}, not an Engine; see rollout/engine.py: Engine")
    return engine


def ends_of(senior: ModelSource, junior: ModelSource | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that end a text of these models. A junior with a vocabulary of its own has its own, in its own ids."""
    one = junior is not None and junior.tokenizer is None and junior.endpoint is None
    return stored_eos_token_ids(senior.path, tokenizer, junior.path if one and junior is not None else None)


def torch_engine(
    config: RolloutConfig,
    senior: ModelSource,
    junior: ModelSource | None,
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int] | None,
) -> TorchEngine:
    """The reference engine."""
    partner = None
    if junior is not None and junior.endpoint is not None and junior.tokenizer is not None:
        partner = EndpointJunior(junior.endpoint, junior.tokenizer)
    return TorchEngine(
        senior.load(),
        None if junior is None or partner is not None else junior.load(),
        tokenizer,
        max_rows=config.max_rows,
        draft_tokens=config.draft_tokens,
        host_every=config.host_every,
        junior_tokenizer=None if junior is None else junior.tokenizer,
        partner=partner,
        ends=ends_of(senior, junior, tokenizer) if ends is None else ends,
    )


def vllm_engine(
    config: RolloutConfig,
    senior: ModelSource,
    junior: ModelSource | None,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str,
    device: str,
    longest: int | None,
    ends: Sequence[int] | None,
) -> Engine:
    """Stock vLLM, on the device that it is built for."""
    require_vllm("rollout.engine=vllm")
    try:
        from tandemrl.rollout.vllm.engine import VllmEngine, platform_device
    except ImportError as error:
        raise cannot_import("rollout.engine=vllm", error) from None
    kind = resolve_device(device).type if device == "auto" else device.partition(":")[0]
    if (platform := platform_device()) != kind:
        raise ConfigError(f"model.device={device}: the installed vLLM runs on {platform}; set model.device={platform}")
    number = resolve_device(device).index or 0  # this process's, which holds the trainer, too
    return VllmEngine(
        senior.path,
        None if junior is None else junior.path,
        tokenizer,
        config,
        dtype=dtype,
        device=number,
        longest=longest,
        adapters=senior.adapters,
        ends=ends,
    )
