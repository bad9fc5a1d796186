"""Measures what a computation holds and sends: the peak bytes of its live storages, and its collectives.

Both are counted as torch dispatches operations, on real tensors and on fake ones alike.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
}
"""Torch's names of the collectives that training uses."""


AXES = ("fsdp", "data", "dp_replicate", "dp_shard", "sp", "tp")
"""The axes of a mesh of ``distributed.world``. If two of them have the same processes, the last one names the group."""


class Collective(NamedTuple):
    """A kind of collective that a pass uses. ``axis`` is the axis of the mesh."""

    kind: str
    axis: str


class Ledger(TorchDispatchMode):
    """A context that counts in every dispatched operation.

    peak: the greatest number of bytes in storages that were made inside, without those of ``disregard``. calls, sent:
    for each kind of collective, how many there were, and the bytes of the whole tensors. For an all-gather these are
    the bytes of its output, for every other collective those of its input.

    Memory that a kernel allocates and frees by itself, such as its workspace, is not seen.

    Args:
        mesh: the mesh whose axes name the groups of processes; None in a world of one.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.peak = 0
        self.calls: Counter[Collective] = Counter()
        self.sent: Counter[Collective] = Counter()
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._disregarded: set[int] = set()
        self._axes = {} if mesh is None else {mesh[axis].get_group().group_name: axis for axis in AXES}

    def disregard(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting the storages of ``tensors``, which are counted elsewhere."""
        self._disregarded |= {id(storage) for storage in storages(tensors)}

    def begin(self) -> None:
        """Start counting anew. Storages that are alive stay known."""
        self.peak = 0
        self.calls.clear()
        self.sent.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):  # distributed: their parts come by themselves
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        more = False
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if id(storage) not in self._live:
                    more = True
                    self._live[id(storage)] = weakref.ref(storage, partial(self._forget, id(storage)))
        if more:  # summed up anew: storages are resized without any operation, as FSDP frees what it has gathered
            held = (storage() for key, storage in self._live.items() if key not in self._disregarded)
            self.peak = max(self.peak, sum(storage.nbytes() for storage in held if storage is not None))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args)
        return result

    def _forget(self, key: int, _: Any) -> None:
        self._live.pop(key, None)
        self._disregarded.discard(key)

    def _count(self, func: Any, args: Any) -> None:
        kind = KINDS.get(func._opname)
        if kind is None:  # such as wait_tensor
            return
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        if func.namespace == "c10d":
            objects = (arg for arg in args if isinstance(arg, torch.ScriptObject))
            [group] = [each for each in objects if each._type().name() == "ProcessGroup"]  # type: ignore[attr-defined]  # the stub lacks it
            name = dist.ProcessGroup.unbox(group).group_name
        else:
            name = args[-1]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        whole = max(sizes) if kind in ("all-gather", "reduce-scatter") else sizes[0]
        if func.namespace != "c10d" and kind == "all-gather":
            whole *= args[1]  # the functional one has no output among its arguments
        collective = Collective(kind, self._axes.get(name, "all"))
        self.calls[collective] += 1
        self.sent[collective] += whole


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind tensors, each once. For distributed tensors they are those of the local parts."""
    locals_ = (t._local_tensor if isinstance(t, dist.tensor.DTensor) else t for t in tensors)
    return list({id(storage): storage for storage in (local.untyped_storage() for local in locals_)}.values())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The number of bytes in the storages behind tensors."""
    return sum(storage.nbytes() for storage in storages(tensors))
