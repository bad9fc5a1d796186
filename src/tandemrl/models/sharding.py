"""Distributes one model over many processes, which share its parameters and sum its gradients.

Weights, gradients and optimiser state are sharded over ``dp_shard`` and ``sp`` together (FSDP2) and replicated over
``dp_replicate``; ``tp`` splits the matrices (arXiv 1909.08053). Gradients are summed, never averaged: the loss divides
by global totals, so that any mesh gives the gradient of one process. In a world of one there is no wrapper.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from tandemrl.models.attention import ModelError
from tandemrl.models.forward import hidden_states, packed_logits, packed_logprobs
from tandemrl.processes.world import World

# ------------------------------------------------------------------------------------------------------------- sharding


def shard(
    model: PreTrainedModel, world: World, *, dtype: torch.dtype, forward: Any = packed_logprobs, offload: bool = False
) -> PreTrainedModel:
    """Shard a model over the world, in place: matrices over ``tp``, then every parameter over ``dp_shard`` x ``sp``.

    Every process must hold the same weights, or none (meta tensors, see ``sharded_loading``). Parameters become
    DTensors and keep their names and dtype. In a world of one nothing happens.

    Args:
        dtype: the dtype in which forwards compute. Gradients are reduced in float32.
        forward: the function of the model that the caller runs instead of ``model.forward``. It becomes a method of
            the same name, around which FSDP gathers the parameters outside of the layers (see
            ``with_gathered_parameters``).
        offload: keep parameters, gradients and optimiser state in host memory, where the optimiser steps. On a CPU they
            are there anyway, but the same code runs.

    Raises:
        ModelError: the model has no plan for ``tp``, or its heads cannot be divided evenly (see ``check_heads``).
    """
    if world.mesh is None:
        return model
    check_heads(model, world)
    if world.mesh["tp"].size() > 1:
        _tensor_parallel(model, world.mesh["tp"])
    # Also over a single process, where only tp splits: FSDP is what computes in another dtype, and what offloads.
    mesh = world.mesh["dp_replicate", "fsdp"] if world.mesh["dp_replicate"].size() > 1 else world.mesh["fsdp"]
    mixed = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    policy = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=mixed, offload_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    for function in (forward, hidden_states, packed_logits):
        name = function.__name__
        setattr(model, name, MethodType(function, model))
        register_fsdp_forward_method(model, name)
        setattr(model, name, MethodType(partial(_freed_without_backward, getattr(model, name)), model))
    return model


def _freed_without_backward(forward: Any, model: FSDPModule, *args: Any, **kwargs: Any) -> Any:
    """Run ``forward``, and free the parameters that FSDP gathered outside of the layers if no backward will follow.

    FSDP frees them in backward. Otherwise a later change of the weights would have no effect on them, and
    ``model.parameters()`` would not be the sharded ones.
    """
    result = forward(*args, **kwargs)
    if not torch.is_grad_enabled():
        model.reshard()
    return result


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a model. FSDP gathers and frees the parameters of a layer together.

    Raises:
        ModelError: the model does not name its layers.
    """
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(f"{type(model).__name__} does not name its layers (_no_split_modules); it cannot be sharded")
    return layers


def check_heads(model: PreTrainedModel, world: World) -> None:
    """Check that ``tp`` and ``sp`` can divide the attention heads of a model evenly.

    Raises:
        ModelError: they cannot.
    """
    assert world.mesh is not None
    config = model.config.get_text_config()
    tp, sp = world.mesh["tp"].size(), world.mesh["sp"].size()
    both = f"parallel.tp={tp} x parallel.sp={sp}"  # sp repeats heads of keys where they do not suffice
    limits = (("num_attention_heads", tp * sp, both), ("num_key_value_heads", tp, f"parallel.tp={tp}"))
    for name, parts, axes in limits:
        if (heads := getattr(config, name)) % parts:
            raise ModelError(f"{name} is {heads}: {axes} must divide it, so that every process has some of the heads")


class _WithAdapters(ParallelStyle):
    """The tensor-parallel style of a matrix W [out, in] and of the matrices A [r, in] and B [out, r] of its adapter.

    In the column-wise style, W and B are split; in the row-wise style, W and A are. The third matrix is whole on every
    process, and so is its gradient.
    """

    def __init__(self, style: ParallelStyle) -> None:
        self.style = style

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        if not hasattr(module, "lora_A"):
            return parallelize_module(module, device_mesh, self.style)
        by_rows = isinstance(self.style, RowwiseParallel)
        for part in (module.base_layer, *(module.lora_A if by_rows else module.lora_B).values()):
            parallelize_module(part, device_mesh, self.style)
        if by_rows:  # the inputs are split, too
            for dropout in module.lora_dropout.values():
                dropout.part, dropout.parts = device_mesh.get_local_rank(), device_mesh.size()
        return module


def _tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split the matrices of the layers by the model's own plan, and embedding and LM head by vocabulary, in place."""
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        # norms of single heads: each process has other heads, the weight's gradient is the sum over them
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    model_plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    model_plan = {name: style for name, style in model_plan.items() if name.startswith("layers.")}
    if not model_plan or not set(model_plan.values()) <= styles.keys():
        raise ModelError(
            f"{type(model).__name__} has no tensor-parallel plan of {', '.join(styles)}; use parallel.tp=1"
        )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    plan: dict[str, ParallelStyle] = {
        f"{model.base_model_prefix}.{name}": _WithAdapters(styles[style]) for name, style in model_plan.items()
    }
    names = {module: name for name, module in model.named_modules()}
    plan[names[embedding]] = RowwiseParallel(input_layouts=Replicate())
    if head is not None:
        plan[names[head]] = ColwiseParallel(output_layouts=Replicate())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    parallelize_module(model, mesh, plan)
    for name, parameter in model.named_parameters():  # SequenceParallel makes new ones, which learn
        parameter.requires_grad_(name in trained)
    if tied:
        head.weight = embedding.weight


# ------------------------------------------------------------------------------------------------ parameters in parts


def full_parameters(
    model: nn.Module, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of every parameter whose name is ``wanted``. All processes must iterate together."""
    _reshard(model)
    for name, parameter in model.named_parameters():
        if wanted(name):
            yield name, full_tensor(parameter.detach())


def _reshard(model: nn.Module) -> None:
    """Free the gathered copies, in the compute dtype, that a forward without a backward leaves behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def trained_parts(model: nn.Module) -> list[Tensor]:
    """The part of each trained parameter that this process holds. The tensors share its storage; they are no copies."""
    _reshard(model)
    trained = (parameter.detach() for parameter in model.parameters() if parameter.requires_grad)
    return [parameter.to_local() if isinstance(parameter, DTensor) else parameter for parameter in trained]


@contextmanager
def swapped_weights(parts: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[None]:
    """A context in which ``parts`` have the values of ``others``. Afterwards they have their own again, bit by bit."""
    with torch.no_grad():
        own = [part.to("cpu", copy=True) for part in parts]
        try:
            for part, other in zip(parts, others, strict=True):
                part.copy_(other)
            yield
        finally:
            for part, value in zip(parts, own, strict=True):
                part.copy_(value)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, of which this process may hold only a part. All processes that hold a part must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    parted = [axis for axis, each in enumerate(placements) if not (each.is_replicate() or each.is_partial())]
    for axis in parted[:-1]:  # FSDP has parted what TP had parted; torch warns if it finds the order by itself
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.full_tensor()


def parameter_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """The trained parameters as optimiser groups of one device mesh each, since fused updates cannot mix meshes."""
    return [{"params": group} for group in _by_mesh(p for p in parameters if p.requires_grad)]


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale all gradients so that their global norm is at most ``limit``, and return the norm before scaling."""
    groups = _by_mesh(p for p in parameters if p.grad is not None)
    norms = [full_tensor(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])) for group in groups]
    if not norms:
        return 0.0
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, limit, total)
    return total.item()


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())
