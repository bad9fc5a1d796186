"""The processes of one training run: the mesh that they form, and what every one of them must agree on.

A mesh has four axes, from ``parallel.*`` of the config: ``dp_replicate`` and ``dp_shard`` split the rollouts of an
update, ``sp`` splits the tokens of a sequence (Ulysses, arXiv 2309.14509), ``tp`` splits the matrices (arXiv
1909.08053). A world of one has no process group and no mesh; nothing here costs it anything.
"""

import faulthandler
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tandemrl.config import ConfigError, ParallelConfig


class Shards(NamedTuple):
    """The groups of processes over which one forward pass is split. A group is None if its axis is not used.

    tensor: processes that each hold different columns of the matrices and different ids of the vocabulary. sequence:
    processes that each have different tokens of the batch, outside of attention.
    """

    tensor: dist.ProcessGroup | None = None
    sequence: dist.ProcessGroup | None = None


WHOLE = Shards()


class ParallelError(RuntimeError):
    """Processes cannot work together as the config asks. The message names the axis and the fix."""


@dataclass(frozen=True, eq=False)
class World:
    """All processes of a run, and the place of this one. The default is a world of one.

    data_rank, data_size: which of how many groups of processes this one belongs to, where each group sees other
    rollouts. mesh: the device mesh; None in a world of one. timeout_s: the time-out of a collective.
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
        """Wait for every process. If one is dead, this raises after ``parallel.timeout_s``."""
        if self.size > 1:
            dist.barrier()

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """The picklable ``value`` of every process, by rank.

        Args:
            group: another group of all processes, for calls from another thread.
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=group)
        return values

    def scatter_gather(
        self, items: Sequence[Any], compute: Callable[[Sequence[Any]], Sequence[Any]], group: Any = None
    ) -> list[Any]:
        """Compute one result per item, with the work divided over all processes, which all get all results in order.

        Args:
            compute: returns the results of some items. A process calls it with every ``size``-th item.
            group: see ``gather``.
        """
        own = items[self.rank :: self.size]
        parts = self.gather(compute(own) if own else [], group)
        return [parts[i % self.size][i // self.size] for i in range(len(items))]

    def new_cpu_group(self) -> dist.ProcessGroup | None:
        """A second group of all processes, on the CPU. Its collectives are independent of those of the first group."""
        return None if self.size == 1 else dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))

    def broadcast(self, value: Any, group: dist.ProcessGroup | None = None) -> Any:
        """The picklable ``value`` of rank 0.

        Args:
            group: see ``gather``.
        """
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    def data_sum(self, tensor: Tensor) -> Tensor:
        """The sum of ``tensor`` over the data axes. ``tensor`` itself is not changed."""
        return self._data_reduce(tensor, dist.ReduceOp.SUM)

    def data_max(self, tensor: Tensor) -> Tensor:
        """The maximum of ``tensor`` over the data axes, element by element."""
        return self._data_reduce(tensor, dist.ReduceOp.MAX)

    def _data_reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.data_size == 1:
            return tensor
        result = tensor.clone()
        assert self.mesh is not None
        dist.all_reduce(result, op=operation, group=self.mesh["data"].get_group())
        return result


def init_world(config: ParallelConfig, device: torch.device) -> World:
    """Make the world of the processes that torchrun started (``WORLD_SIZE``, ``RANK``), or of one without torchrun.

    With several processes, a collective that takes longer than ``parallel.timeout_s`` raises.

    Raises:
        ConfigError: the product of the axes is not the number of processes.
        ParallelError: the other processes did not join within ``parallel.timeout_s``.
    """
    size = launched()
    axes = axes_of(config, size)
    if size == 1:
        return World()
    timeout = timedelta(seconds=config.timeout_s)
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timeout)
        except (dist.DistError, ValueError, RuntimeError) as error:
            raise ParallelError(
                f"process {rank()} of {size} found no others within parallel.timeout_s="
                f"{config.timeout_s:g}: {str(error).splitlines()[0]}. Start every process with torchrun"
            ) from None
    world = _world_of(axes, device.type, config.timeout_s)
    assert world.mesh is not None
    for axis in (*axes, "data", "fsdp"):  # their own default is half an hour
        dist.distributed_c10d._set_pg_timeout(timeout, world.mesh[axis].get_group())
    return world


@contextmanager
def imagined_world(config: ParallelConfig, size: int) -> Iterator[World]:
    """A context with rank 0 of a world of ``size`` processes, of which the others do not exist.

    Its meshes and shapes are real, but its collectives return at once, with whatever is in memory. Where something
    cannot be divided evenly, rank 0 has the most.

    Raises:
        ConfigError: the product of the axes is not ``size``.
        ParallelError: this process already has a process group.
    """
    axes = axes_of(config, size)
    if size == 1:
        yield World()
        return
    if dist.is_initialized():
        raise ParallelError("this process belongs to a process group; imagine another one in a fresh process")
    dist.init_process_group("fake", rank=0, world_size=size)
    try:
        yield _world_of(axes, "cpu", config.timeout_s)
    finally:
        dist.destroy_process_group()


def _world_of(axes: dict[str, int], device_type: str, timeout_s: float) -> World:
    """This process's place in a mesh over the default process group."""
    mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    # Of ("dp_replicate", "fsdp"), for which FSDP has no other way yet.
    warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
    mesh["dp_replicate", "dp_shard"]._flatten("data")
    mesh["dp_shard", "sp"]._flatten("fsdp")
    data = mesh["data"]
    return World(dist.get_rank(), dist.get_world_size(), data.get_local_rank(), data.size(), mesh, timeout_s)


def launched() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this one is; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """A context with these environment variables, after which each is as before."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def destroy_world(limit_s: float) -> None:
    """Destroy the process group that ``init_world`` made, if it made one.

    In a run of one process, a process group is not ours: vLLM makes one for an engine in the same process.

    Args:
        limit_s: end this process if it takes longer, ``parallel.timeout_s``. What is left of a group that lost a
            process may hang; after a success, the others may wait for rank 0, which is still writing.
    """
    if launched() > 1 and dist.is_initialized():
        faulthandler.dump_traceback_later(limit_s, exit=True)
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


def axes_of(config: ParallelConfig, size: int) -> dict[str, int]:
    """The number of processes along each axis. If ``dp_shard`` is null, it takes what the other axes leave.

    Raises:
        ConfigError: the product of the axes is not ``size``.

    Examples:
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
