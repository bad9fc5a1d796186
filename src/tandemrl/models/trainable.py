"""Models to be trained: loaded whole or in parts, with gradient checkpointing and Liger's kernels, and their
optimiser."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tandemrl.config import ConfigError, ModelConfig, TrainConfig
from tandemrl.config.hints import pip_install
from tandemrl.models.attention import ModelError, PackedLayout
from tandemrl.models.forward import hidden_states, with_gathered_parameters
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


# ---------------------------------------------------------------------------------------------------------------- Liger

LIGER_FAMILIES = ("llama", "qwen2", "qwen3")
LIGER_KERNELS = dict(rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False)
"""Which of Liger's kernels are used. Its losses are not, since log-probs come from ``head``."""


def use_liger(model: PreTrainedModel, *, name: str = "model", device: torch.device | None = None) -> PreTrainedModel:
    """Run a prepared model's RMSNorm, SwiGLU and RoPE by Liger's kernels (arXiv 2410.10989), in place; CUDA only.

    Liger changes the module of the model's family in transformers, so models of the family that are loaded later use
    the kernels, too. A probe checks that the model computes the same hidden states as before.

    Args:
        name: what error messages call the model.
        device: the device on which the model computes. None means where its weights are; offloaded weights are in host
            memory.

    Raises:
        ModelError: the model is not on CUDA, liger-kernel is not installed or has no kernels for this family, or the
            hidden states differ.
    """
    family, device = model.config.model_type, device or next(model.get_input_embeddings().parameters()).device
    if device.type != "cuda":
        raise ModelError(f"{name}: Liger kernels need a CUDA device, the model is on {device}; set model.liger=false")
    if family not in LIGER_FAMILIES:
        raise ModelError(
            f"{name}: no Liger kernels for {family}, only {', '.join(LIGER_FAMILIES)}; set model.liger=false"
        )
    try:
        liger = importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise ModelError(f"model.liger=true: {error}; install the extra: {pip_install('liger')}") from None
    tokens = torch.arange(7, device=device)
    positions, layout = tokens % 4, PackedLayout([np.arange(4), np.arange(4, 7)], device)
    with torch.no_grad():
        states = with_gathered_parameters(hidden_states, model)
        before = states(tokens, positions, layout)
        getattr(liger, f"apply_liger_kernel_to_{family}")(**LIGER_KERNELS, model=model)
        after = states(tokens, positions, layout)
    worst, scale = (after.float() - before.float()).abs().max().item(), max(1.0, before.float().abs().max().item())
    if not worst <= (1e-3 if before.dtype == torch.float32 else 0.1) * scale:
        raise ModelError(f"{name}: Liger kernels produce different hidden states (max difference {worst:.3g})")
    return model
