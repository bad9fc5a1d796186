"""What a user may ask for to make a prepared model faster, in place: Liger kernels and torch.compile."""

import importlib
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import numpy as np
import torch
from transformers import PreTrainedModel

from tandemrl.models.attention import ModelError, PackedLayout, UlyssesLayout
from tandemrl.models.forward import gathering, hidden_states

LIGER_FAMILIES = ("llama", "qwen2", "qwen3")
LIGER_DEVICES = ("cuda",)
LIGER_KERNELS = dict(rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False)
"""Log-probs come from ``head``, without Liger's losses."""


def use_liger(model: PreTrainedModel, *, name: str = "model", device: torch.device | None = None) -> PreTrainedModel:
    """Run a prepared model's RMSNorm, SwiGLU and RoPE by Liger's kernels (arXiv 2410.10989), in place; CUDA only.

    Liger changes the family's module in transformers: models of it that are loaded later use the kernels too. A probe
    proves that the model computes as before.

    Args:
        device: where it computes; None = where its weights are, which may rest in host memory.

    Raises:
        ModelError: not on CUDA, liger-kernel is not installed, no kernels for this family, or other hidden states.
    """
    family, device = model.config.model_type, device or _weights_device(model)
    if device.type not in LIGER_DEVICES:
        raise ModelError(f"{name}: Liger kernels need a CUDA device, the model is on {device}; set model.liger=false")
    if family not in LIGER_FAMILIES:
        raise ModelError(
            f"{name}: no Liger kernels for {family}, only {', '.join(LIGER_FAMILIES)}; set model.liger=false"
        )
    try:
        liger = importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise ModelError(f"model.liger=true: {error}; install the extra: pip install 'tandemrl[liger]'") from None
    tokens = torch.arange(7, device=device)
    positions, layout = tokens % 4, PackedLayout([np.arange(4), np.arange(4, 7)], device)
    with torch.no_grad():
        states = gathering(hidden_states, model)
        before = states(tokens, positions, layout)
        getattr(liger, f"apply_liger_kernel_to_{family}")(**LIGER_KERNELS, model=model)
        after = states(tokens, positions, layout)
    worst, scale = (after.float() - before.float()).abs().max().item(), max(1.0, before.float().abs().max().item())
    if not worst <= (1e-3 if before.dtype == torch.float32 else 0.1) * scale:
        raise ModelError(f"{name}: Liger kernels give other hidden states (max difference {worst:.3g})")
    return model


def _weights_device(model: PreTrainedModel) -> torch.device:
    return next(model.get_input_embeddings().parameters()).device


_COMPILED = "layers_are_compiled"


def require_compiler(model: PreTrainedModel, key: str, device: torch.device | None = None) -> None:
    """Make ready for ``torch.compile``.

    Args:
        key: of the configuration, which asks for it. device: where the model computes; None = where its weights are.

    Raises:
        ModelError: on a CPU without a C++ compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    device = device or _weights_device(model)
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise ModelError(
            f"{key}=true needs a C++ compiler and {compiler} is not there; install it, name another one in the "
            f"environment variable CXX, or set {key}=false"
        )
    # A graph holds for a range of sizes, such as 1025 to 2048; past the limit nothing more would be compiled.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)


def compile_layers(
    model: PreTrainedModel, *, backend: str = "inductor", device: torch.device | None = None
) -> PreTrainedModel:
    """Compile every decoder layer of a prepared model with ``torch.compile``, in place, all but its attention.

    Shapes are dynamic, so packed batches of similar lengths share graphs; the first forward and backward take tens of
    seconds. Where one token per row is decoded, compiled layers would only be slower: see ``eagerly``.

    Args:
        backend: of ``torch.compile``. device: where the model computes; None = where its weights are.

    Raises:
        ModelError: on a CPU without a C++ compiler.
    """
    require_compiler(model, "model.compile", device)
    _leave_attention_out()
    for layer in model.get_decoder().layers:
        layer.compile(dynamic=True, backend=backend)
    setattr(model, _COMPILED, True)
    return model


@cache
def _leave_attention_out() -> None:
    """Compiled, each packing would be a case of its own."""
    for layout in (PackedLayout, UlyssesLayout):
        layout.attend = torch.compiler.disable(layout.attend)  # type: ignore[method-assign]  # in place, once


def eagerly(model: PreTrainedModel) -> AbstractContextManager[object]:
    """A context in which compiled layers run uncompiled, those of all models and on every thread."""
    return torch.compiler.set_stance("force_eager") if hasattr(model, _COMPILED) else nullcontext()
