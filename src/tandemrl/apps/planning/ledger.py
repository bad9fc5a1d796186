"""Measures what a computation holds: the peak bytes of its live storages, on real tensors and on fake ones alike."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """A context that looks at every dispatched operation.

    peak: the greatest number of bytes in storages that were made inside, without those of ``disregard``. Memory that a
    kernel allocates and frees by itself, such as its workspace, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._disregarded: set[int] = set()

    def disregard(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting the storages of ``tensors``, which are counted elsewhere."""
        self._disregarded |= {id(storage) for storage in storages(tensors)}

    def begin(self) -> None:
        """Start counting anew. Storages that are alive stay known."""
        self.peak = 0

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
        return result

    def _forget(self, key: int, _: Any) -> None:
        self._live.pop(key, None)
        self._disregarded.discard(key)


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind tensors, each once. For distributed tensors they are those of the local parts."""
    locals_ = (t._local_tensor if isinstance(t, DTensor) else t for t in tensors)
    return list({id(storage): storage for storage in (local.untyped_storage() for local in locals_)}.values())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The number of bytes in the storages behind tensors."""
    return sum(storage.nbytes() for storage in storages(tensors))
