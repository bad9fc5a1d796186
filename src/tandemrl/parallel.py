"""Many processes, one training run: the mesh, the sharding of models, and what every process must agree on.

A mesh has four axes, from ``parallel.*`` of the config: ``dp_replicate`` and ``dp_shard`` split the rollouts of an
update, ``sp`` splits the tokens of a sequence (Ulysses, arXiv 2309.14509), ``tp`` splits the matrices (arXiv
1909.08053). Weights, gradients and optimiser state are sharded over ``dp_shard`` and ``sp`` together (FSDP2) and
replicated over ``dp_replicate``. Gradients are summed, never averaged: the loss divides by global totals, so that any
mesh gives the gradient of one process.

A world of one has no process group, no mesh and no wrapper; nothing here costs it anything.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from tandemrl.config import ConfigError, ParallelConfig
from tandemrl.model import ModelError, Shards, packed_logprobs
from tandemrl.watchdog import WATCHDOG, stamp

AXES = ("dp_replicate", "dp_shard", "sp", "tp")


class ParallelError(RuntimeError):
    """Processes cannot work together as asked; the message names the axis and the fix."""


@dataclass(frozen=True, eq=False)
class World:
    """All processes of a run, and the place of this one. The default is a world of one.

    data: groups of processes that see different rollouts. mesh: None in a world of one. timeout_s: of a collective.
    """

    rank: int = 0
    size: int = 1
    data_rank: int = 0
    data_size: int = 1
    mesh: DeviceMesh | None = None
    timeout_s: float = 1800.0

    @property
    def main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def shards(self) -> Shards:
        """How one forward pass is split."""
        if self.mesh is None:
            return Shards()
        group = {axis: self.mesh[axis].get_group() for axis in ("tp", "sp") if self.mesh[axis].size() > 1}
        return Shards(tensor=group.get("tp"), sequence=group.get("sp"))

    def barrier(self) -> None:
        """Wait for every process; a dead one raises after ``parallel.timeout_s``."""
        if self.size > 1:
            dist.barrier()
            stamp()

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Everybody's picklable ``value``, by rank. ``group``: of all processes, for use from another thread."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=group)
        stamp()
        return values

    def another_group(self) -> dist.ProcessGroup | None:
        """A second group of all processes, in host memory: what travels in it has an order of its own."""
        return None if self.size == 1 else dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))

    def agreed(self, value: Any) -> Any:
        """Rank 0's picklable ``value``."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        stamp()
        return box[0]

    def data_sum(self, tensor: Tensor) -> Tensor:
        """The sum over the data axes of what each of them has; ``tensor`` is not changed."""
        if self.data_size == 1:
            return tensor
        total = tensor.clone()
        assert self.mesh is not None
        dist.all_reduce(total, group=self.mesh["data"].get_group())
        stamp()
        return total

    def data_max(self, tensor: Tensor) -> Tensor:
        """The largest over the data axes, element by element."""
        if self.data_size == 1:
            return tensor
        largest = tensor.clone()
        assert self.mesh is not None
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.mesh["data"].get_group())
        stamp()
        return largest


def join(config: ParallelConfig, device: torch.device) -> World:
    """Take this process's place among those that torchrun started (``WORLD_SIZE``, ``RANK``; absent: one process).

    Among several, a collective that takes longer than ``parallel.timeout_s`` raises, and from now on ``WATCHDOG`` ends
    this process if its work stands still for a little longer than that.

    Raises:
        ConfigError: the axes do not multiply to the number of processes.
        ParallelError: the others did not come within ``parallel.timeout_s``.
    """
    size = launched()
    axes = axes_of(config, size)
    if size == 1:
        return World()
    WATCHDOG.begin(config.timeout_s, f"process {os.environ.get('RANK')} of {size}")
    timeout = timedelta(seconds=config.timeout_s)
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timeout)
        except (dist.DistError, ValueError, RuntimeError) as error:
            raise ParallelError(
                f"process {os.environ.get('RANK')} of {size} found no others within parallel.timeout_s="
                f"{config.timeout_s:g}: {str(error).splitlines()[0]}. Start every process with torchrun"
            ) from None
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    mesh["dp_replicate", "dp_shard"]._flatten("data")
    mesh["dp_shard", "sp"]._flatten("fsdp")
    for axis in (*AXES, "data", "fsdp"):  # their own default is half an hour
        dist.distributed_c10d._set_pg_timeout(timeout, mesh[axis].get_group())
    data = mesh["data"]
    return World(dist.get_rank(), size, data.get_local_rank(), data.size(), mesh, config.timeout_s)


def launched() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def leave() -> bool:
    """Take down the process group that ``join`` made, if it did; whether this was the main process.

    In a run of one process a group is somebody else's: vLLM has one for an engine that lives in the process.
    """
    if launched() == 1 or not dist.is_initialized():
        return True
    main = dist.get_rank() == 0
    dist.destroy_process_group()
    WATCHDOG.end()
    return main


def axes_of(config: ParallelConfig, size: int) -> dict[str, int]:
    """Processes along each axis; ``dp_shard`` null takes what the others leave.

    Raises:
        ConfigError: the axes do not multiply to ``size``.

    Example:
        >>> axes_of(ParallelConfig(tp=2), 8)
        {'dp_replicate': 1, 'dp_shard': 4, 'sp': 1, 'tp': 2}
    """
    others = config.dp_replicate * config.sp * config.tp
    shard = max(1, size // others) if config.dp_shard is None else config.dp_shard
    axes = {"dp_replicate": config.dp_replicate, "dp_shard": shard, "sp": config.sp, "tp": config.tp}
    if math.prod(axes.values()) != size:
        product = " x ".join(f"{axis} {count}" for axis, count in axes.items())
        raise ConfigError(
            f"parallel: {product} = {math.prod(axes.values())} processes, but {size} run; start it with "
            f"torchrun --nproc-per-node N --no-python tandemrl train … , or change parallel.*"
        )
    return axes


# ------------------------------------------------------------------------------------------------------------- sharding


def shard(
    model: PreTrainedModel, world: World, *, dtype: torch.dtype, forward: Any = packed_logprobs, offload: bool = False
) -> PreTrainedModel:
    """Split a model over the world, in place: matrices over ``tp``, then every parameter over ``dp_shard`` x ``sp``.

    Every process must hold the same weights. Parameters become DTensors and keep their names and dtype; forwards
    compute in ``dtype``, gradients are reduced in float32. In a world of one nothing happens.

    Args:
        forward: the function of the model that the caller runs instead of ``model.forward``; it becomes a method of
            the same name, around which FSDP gathers the parameters outside of the layers.
        offload: keep parameters, gradients and optimiser state in host memory, and step there.

    Raises:
        ModelError: the model has no plan for ``tp``, or heads that ``tp`` x ``sp`` does not divide.
    """
    if world.mesh is None:
        return model
    check_heads(model, world)
    if world.mesh["tp"].size() > 1:
        _tensor_parallel(model, world.mesh["tp"])
    # Also over a single process, where only tp splits: FSDP is what computes in another dtype, and what offloads.
    mesh = world.mesh["dp_replicate", "fsdp"] if world.mesh["dp_replicate"].size() > 1 else world.mesh["fsdp"]
    mixed = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    policy = CPUOffloadPolicy() if offload and mesh.device_type == "cuda" else OffloadPolicy()
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=mixed, offload_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    name = forward.__name__
    setattr(model, name, MethodType(forward, model))
    register_fsdp_forward_method(model, name)
    setattr(model, name, MethodType(partial(_freed_without_backward, getattr(model, name)), model))
    return model


def _freed_without_backward(forward: Any, model: FSDPModule, *args: Any, **kwargs: Any) -> Any:
    """FSDP frees what it gathered outside of the layers in backward. Where none comes, a later change of the weights
    would go unseen, and ``model.parameters()`` would not be the sharded ones."""
    result = forward(*args, **kwargs)
    if not torch.is_grad_enabled():
        model.reshard()
    return result


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers: what is gathered and freed as one."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(f"{type(model).__name__} does not name its layers (_no_split_modules); it cannot be sharded")
    return layers


def check_heads(model: PreTrainedModel, world: World) -> None:
    """Raises:
    ModelError: attention heads that cannot be dealt out evenly.
    """
    assert world.mesh is not None
    config = model.config.get_text_config()
    tp, sp = world.mesh["tp"].size(), world.mesh["sp"].size()
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(config, name)) % (tp * sp):
            raise ModelError(
                f"{name} is {heads}: parallel.tp={tp} x parallel.sp={sp} must divide it (every process of the two "
                "axes attends with some of the heads)"
            )


def _tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Matrices of the layers by the model's own plan; embedding and LM head by vocabulary."""
    styles: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        # norms of single heads: each process has other heads, the weight's gradient is the sum over them
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
    }
    given = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    given = {name: style for name, style in given.items() if name.startswith("layers.")}
    if not given or not set(given.values()) <= styles.keys():
        raise ModelError(
            f"{type(model).__name__} has no tensor-parallel plan of {', '.join(styles)}; use parallel.tp=1"
        )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight
    plan = {f"{model.base_model_prefix}.{name}": styles[style] for name, style in given.items()}
    name = next(name for name, module in model.named_modules() if module is embedding)
    plan[name] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh, plan)
    if tied:
        head.weight = embedding.weight
    elif head is not None:
        for key, parameter in list(head.named_parameters()):
            part = torch.distributed.tensor.distribute_tensor(parameter.data, mesh, [Shard(0)])
            head.register_parameter(key, nn.Parameter(part, requires_grad=parameter.requires_grad))


# ------------------------------------------------------------------------------------------------ parameters in parts


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of every parameter; all processes have to ask for them, and in step."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a forward without a backward leaves gathered copies, in the compute dtype
    for name, parameter in model.named_parameters():
        yield name, whole(parameter.detach())


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which this process may hold a part; all that do have to ask for it."""
    if not isinstance(tensor, DTensor):
        return tensor
    gathered = tensor.full_tensor()
    stamp()
    return gathered


def parameter_groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """The parameters as optimiser groups of one mesh each: fused updates cannot mix them."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault(_mesh_of(parameter), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale all gradients so that their global norm is at most ``limit``; returns the norm before."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(_mesh_of(parameter), []).append(parameter)
    norms = [whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])) for group in groups.values()]
    if not norms:
        return 0.0
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for group in groups.values():
        nn.utils.clip_grads_with_norm_(group, limit, total)
    return total.item()


def _mesh_of(tensor: Tensor) -> Any:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def share(items: Sequence[Any], world: World) -> Sequence[Any]:
    """This process's share of a sequence that all processes have: every ``world.size``-th item."""
    return items[world.rank :: world.size]


def merge(shares: Sequence[Sequence[Any]]) -> list[Any]:
    """Inverse of ``share``, from everybody's results.

    Example:
        >>> merge([["a", "c"], ["b"]])
        ['a', 'b', 'c']
    """
    total = sum(map(len, shares))
    return [shares[i % len(shares)][i // len(shares)] for i in range(total)]
