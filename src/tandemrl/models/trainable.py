"""Models to be trained: loaded whole or in parts, with gradient checkpointing, and their optimiser."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from tandemrl.config import ConfigError, ModelConfig, TrainConfig
from tandemrl.models.compile import compile_layers, use_liger
from tandemrl.models.loading import resolve_device
from tandemrl.models.sharded_loading import Adapters, load_sharded
from tandemrl.models.sharding import parameter_groups
from tandemrl.processes.world import World


def load_policy(model: ModelConfig, world: World, *, seed: int, offload: bool = False) -> PreTrainedModel:
    """Load the senior to be trained in float32.

    In a world of one it is the whole model, else the part of this process, with its adapters if it has any.

    Args:
        seed: the seed of the adapters' first weights.
        offload: whether the parts are kept in host memory.

    Raises:
        ConfigError, ModelError: as ``load_model``, ``attach`` and ``load_sharded``.
    """
    policy = load_sharded(
        model.senior,
        world,
        compute=getattr(torch, model.dtype),
        device=model.device,
        adapters=Adapters(model.lora, seed) if model.lora.rank and world.size > 1 else None,
        offload=offload,
    )
    if model.liger:
        use_liger(policy, name=model.senior, device=resolve_device(model.device))
    if model.gradient_checkpointing:
        checkpoint_gradients(policy)
    return policy


def load_value_model(model: ModelConfig, world: World, *, offload: bool = False) -> PreTrainedModel:
    """Load the critic to be trained. It is sharded and recomputes activations like the policy.

    Raises:
        ModelError: the model cannot be loaded as a critic.
    """
    path = model.critic or model.senior
    dtype = getattr(torch, model.dtype)
    critic = load_sharded(path, world, compute=dtype, device=model.device, critic=True, offload=offload)
    if model.compile:
        compile_layers(critic)
    if model.gradient_checkpointing:
        checkpoint_gradients(critic)
    return critic


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
    return torch.optim.AdamW(
        parameter_groups(model.parameters()), lr=lr, betas=train.betas, weight_decay=train.weight_decay, fused=True
    )


def self_paired(model: ModelConfig) -> bool:
    """Whether the junior is the model that the senior starts from."""
    return model.junior is None or Path(model.junior).resolve() == Path(model.senior).resolve()
