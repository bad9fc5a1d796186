"""Low-rank adapters (LoRA, arXiv 2106.09685): W + alpha / rank · B A, of which A and B alone are trained.

peft's adapters are put into the model in place, so that it keeps its class, decoder, head and config. Outside of the
trainer, the engine, checksums and exports get plain weights from ``merged_parameters``. The exception is an engine
whose senior is adapters on the junior's weights (``adapted_alias``), which gets the adapters alone.
"""

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tandemrl.config import ConfigError, LoraConfig
from tandemrl.models.sharding import full_parameters, full_tensor

ADAPTER = "default"
_BASE = "base_layer."  # what peft puts before the name of a weight that it adapts


class AdapterDropout(nn.Module):
    """Dropout on the inputs of an adapter, which is active only inside of `dropping`.

    Elsewhere it does nothing, even in training mode, unlike peft's own module: log-probs that are compared must not be
    random.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share, self.active = share, False
        self.part, self.parts = 0, 1
        """If processes share the inputs: which of how many equal parts of the last dimension this process has."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.active or self.parts == 1:
            return F.dropout(inputs, self.share, training=self.active)
        whole = inputs.new_ones(*inputs.shape[:-1], inputs.shape[-1] * self.parts)
        return inputs * F.dropout(whole, self.share).chunk(self.parts, dim=-1)[self.part]


@contextmanager
def dropping(model: nn.Module, key: Sequence[int], device: torch.device) -> Iterator[None]:
    """A context in which the dropout of adapters is active. It does nothing if the adapters have no dropout.

    The draws follow from ``key`` alone, and the global random state is restored afterwards. Run backward inside as
    well, since recomputed activations have to be those of the forward.

    Args:
        key: integers that seed the draws.
        device: the device on which the model computes, which may differ from where its parameters are kept.
    """
    dropouts = [module for module in model.modules() if isinstance(module, AdapterDropout)]
    if not dropouts:
        yield
        return
    [seed] = np.random.SeedSequence(list(key)).generate_state(1, np.uint64)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed) >> 1)
        for module in dropouts:
            module.active = True
        try:
            yield
        finally:
            for module in dropouts:
                module.active = False


def attach(model: PreTrainedModel, config: LoraConfig, seed: int) -> PreTrainedModel:
    """Put adapters into linear layers, in place, and train nothing else. They start as no change (B = 0).

    Call this before the model is sharded. No global random state is consumed.

    Args:
        config: the rank, the target layers and the other settings of the adapters.
        seed: seed of the initial values of A.

    Raises:
        ConfigError: ``targets`` names no linear layer, or a layer that cannot be adapted.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    where = f"model.lora.targets={list(config.targets)}"
    if "all-linear" in config.targets and len(config.targets) > 1:
        raise ConfigError(f"{where}: all-linear stands alone")
    settings = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # peft's annotation says int; it divides by the rank
        target_modules="all-linear" if config.targets == ("all-linear",) else list(config.targets),
    )
    head = model.get_output_embeddings()
    device = head.weight.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(settings, model, ADAPTER)
        except ValueError as error:
            raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from None
    adapted = adapted_layers(model)
    for target in config.targets:
        if target != "all-linear" and not any(name == target or name.endswith(f".{target}") for name in adapted):
            raise ConfigError(f"{where}: the model has no linear layer {target}")
    for name, layer in adapted.items():
        if config.dropout > 0:
            layer.lora_dropout[ADAPTER] = AdapterDropout(config.dropout)
        if not isinstance(layer.base_layer, nn.Linear) or layer.base_layer is head:
            raise ConfigError(f"{where}: {name} cannot be adapted; name linear layers other than the LM head")
    return model


def attach_without_memory(model: PreTrainedModel, config: LoraConfig, seed: int) -> dict[str, Tensor]:
    """As ``attach``, for a model on the meta device, which stays there.

    Returns:
        the initial adapters by name, as ``attach`` draws them on a CPU.

    Raises:
        ConfigError: as ``attach``.
    """
    # Adapters follow their layer's device: one stored element per parameter makes a weight on the CPU of any shape.
    _replace_parameters(model, lambda parameter: torch.zeros((), dtype=parameter.dtype).expand(parameter.shape))
    attach(model, config, seed)
    layers = adapted_layers(model)
    drawn = {name: p.detach() for name, p in model.named_parameters() if is_adapter(name, layers)}
    _replace_parameters(model, lambda parameter: parameter.detach().to("meta"))
    return drawn


def _replace_parameters(model: nn.Module, make: Callable[[nn.Parameter], Tensor]) -> None:
    """Replace every parameter by ``make(parameter)``, in place. Tied ones stay tied, and frozen ones stay frozen."""
    made: dict[int, nn.Parameter] = {}
    kept = list(model.parameters())  # alive, so that no id is used twice
    for parameter in kept:
        made[id(parameter)] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
    for module in model.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, leaf, made[id(parameter)])


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that have adapters, by their names in the base model; empty for a model without adapters."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def alias(model: PreTrainedModel) -> PreTrainedModel:
    """A second model on the same weights, frozen and in eval mode.

    It has modules and parameters of its own, but they share the storage of the first model's weights.
    """
    shared = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, shared).eval()


def adapted_alias(base: PreTrainedModel, config: LoraConfig, seed: int) -> PreTrainedModel:
    """A frozen copy of ``base`` with adapters and without dropout, to decode with.

    It shares the storage of the base's weights and has their dtype. ``base`` itself stays without adapters.

    Raises:
        ConfigError: as ``attach``.
    """
    return attach(alias(base), replace(config, dropout=0.0), seed).requires_grad_(False)


class AdapterPlan(NamedTuple):
    """Which linear layers have adapters, and what these compute: scaling · B A x."""

    layers: tuple[str, ...]
    """The names of the layers in the base model."""
    rank: int
    scaling: float


def adapter_plan(base: PreTrainedModel, config: LoraConfig) -> AdapterPlan:
    """The plan of the adapters that ``attach`` would put into ``base``, which is not changed.

    Raises:
        ConfigError: as ``attach``.
    """
    layers = adapted_layers(adapted_alias(base, config, seed=0))
    return AdapterPlan(tuple(layers), config.rank, config.alpha / config.rank)


def adapter_names(layer: str) -> tuple[str, str]:
    """The names of the adapter matrices A [rank, in] and B [out, rank] of a layer."""
    return f"{layer}.lora_A.{ADAPTER}.weight", f"{layer}.lora_B.{ADAPTER}.weight"


def name_with_adapters(name: str, layers: Container[str]) -> str:
    """The name that a parameter of the base has in the model with adapters in ``layers``."""
    owner, _, leaf = name.rpartition(".")
    return f"{owner}.{_BASE}{leaf}" if owner in layers else name


def is_adapter(name: str, layers: Container[str]) -> bool:
    """Whether a parameter belongs to an adapter. ``layers`` are the names of ``adapted_layers``."""
    return name.partition(".lora_")[0] in layers


def merged_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of every parameter, under the base model's names and with adapters merged.

    A model without adapters yields its own parameters. All processes of a sharded model must iterate together.
    """
    layers = adapted_layers(model)
    for name, value in base_parameters(model):
        owner, _, leaf = name.rpartition(".")
        yield name, _merged(value, layers[owner]) if leaf == "weight" and owner in layers else value


def base_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of every parameter except the adapters', under the base model's names."""
    layers = adapted_layers(model)
    for name, value in full_parameters(model):
        if not is_adapter(name, layers):
            yield base_name(name), value


def base_name(name: str) -> str:
    """The base model's name of a parameter that does not belong to an adapter."""
    return name.replace(f".{_BASE}", ".")


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of the adapters' matrices A [r, in] and B [out, r], under peft's names on disk.

    All processes of a sharded model must iterate together.
    """
    layers = adapted_layers(model)
    for name, value in full_parameters(model, lambda name: is_adapter(name, layers)):
        yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", value


def peft_config(model: nn.Module, base: str) -> Any:
    """The ``peft.LoraConfig`` of a model's adapters, whose layers it names in full. ``base`` is the name of the model
    that they belong to."""
    from peft import LoraConfig as PeftConfig

    layers = adapted_layers(model)
    first = next(iter(layers.values()))
    return PeftConfig(
        r=first.r[ADAPTER],
        lora_alpha=first.lora_alpha[ADAPTER],
        target_modules=list(layers),
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )


@torch.no_grad()
def _merged(weight: Tensor, layer: Any) -> Tensor:
    """weight [out, in] + scaling · B [out, r] A [r, in], in the weight's dtype."""
    a, b = (full_tensor(part[ADAPTER].weight.detach()).to(weight.dtype) for part in (layer.lora_A, layer.lora_B))
    return torch.addmm(weight, b, a, alpha=layer.scaling[ADAPTER])


def adapter_free(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context in which ``model`` computes as it did before ``attach``, so that a reference needs no weights of its
    own.

    The adapters are scaled by 0. They stay trainable, since switching their gradients off and on would confuse FSDP.
    """
    from peft.helpers import rescale_adapter_scale

    return rescale_adapter_scale(model, 0.0)
