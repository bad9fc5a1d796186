"""Models to be trained: loaded whole or in parts, with gradient checkpointing, and their optimiser."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tandemrl.config import ConfigError, ModelConfig, TrainConfig
from tandemrl.models.liger import use_liger
from tandemrl.models.loading import resolve_device
from tandemrl.models.sharded_loading import Adapters, load_sharded
from tandemrl.models.sharding import parameter_groups
from tandemrl.processes.world import World


def load_trained(
    model: ModelConfig, world: World, *, critic: bool = False, seed: int = 0, offload: bool = False
) -> PreTrainedModel:
    """Load the senior to be trained, or the critic, in float32.

    In a world of one it is the whole model, else the part of this process, with the senior's adapters if it has any.

    Args:
        seed: the seed of the adapters' first weights.
        offload: whether the parts are kept in host memory.

    Raises:
        ConfigError, ModelError: as ``load_model``, ``load_critic``, ``attach`` and ``load_sharded``.
    """
    path = (model.critic or model.senior) if critic else model.senior
    adapters = Adapters(model.lora, seed) if model.lora.rank and world.size > 1 and not critic else None
    how: dict[str, Any] = {"compute": getattr(torch, model.dtype), "device": model.device}
    loaded = load_sharded(path, world, **how, adapters=adapters, critic=critic, offload=offload)
    if model.liger and not critic:
        use_liger(loaded, name=path, device=resolve_device(model.device))
    if model.gradient_checkpointing:
        checkpoint_gradients(loaded)
    return loaded


def checkpoint_gradients(model: PreTrainedModel) -> None:
    """Switch on gradient checkpointing, in place: the model recomputes activations in backward.

    Raises:
        ConfigError: the model has dropout.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # transformers checkpoints in training mode only
    if any(module.p > 0 for module in model.modules() if isinstance(module, torch.nn.Dropout)):
        raise ConfigError("model.gradient_checkpointing=true: this model has dropout; its log-probs would be random")


def make_optimizer(model: PreTrainedModel, train: TrainConfig, lr: float) -> torch.optim.Optimizer:
    groups = parameter_groups(model.parameters())
    return torch.optim.AdamW(groups, lr=lr, betas=train.betas, weight_decay=train.weight_decay, fused=True)


def self_paired(model: ModelConfig) -> bool:
    """Whether the junior is the model that the senior starts from."""
    return model.junior is None or Path(model.junior).resolve() == Path(model.senior).resolve()
