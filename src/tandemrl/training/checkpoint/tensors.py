"""The tensors of models and optimisers in a folder, written and read by any number of processes.

Each process writes what it holds, through ``torch.distributed.checkpoint``. Names and shapes in the folder are those of
whole tensors, so that any mesh can read what any other wrote. Of a module, the trained parameters and the saved buffers
are stored, tied ones once. Frozen parameters come from the model that a run is built from.

torch's own ``get_optimizer_state_dict`` is not used: it fills an optimiser that has not stepped yet by stepping it,
which would shift the bias correction of every later step.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tandemrl.training.checkpoint.manifest import CheckpointError
from tandemrl.training.state import Trained


def tensors_of(parts: Mapping[str, Trained]) -> dict[str, Tensor]:
    """All tensors to store, not copies: ``PART/model/PARAMETER`` and ``PART/optimizer/PARAMETER/MOMENT``."""
    tensors: dict[str, Tensor] = {}
    for part, (module, optimizer) in parts.items():
        for name, tensor in _stored(module).items():
            tensors[f"{part}/model/{name}"] = tensor.detach()
            for moment, value in optimizer.state.get(tensor, {}).items():
                tensors[f"{part}/optimizer/{name}/{moment}"] = value.detach()
    return tensors


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    """Write named tensors. Unless ``alone``, every process must call this, each with its shards of the same tensors.

    Raises:
        torch.distributed.checkpoint.api.CheckpointException: on every process, if one of them fails.
    """
    with _silent():
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), no_dist=alone)


def load_tensors(folder: Path, parts: Mapping[str, Trained], *, alone: bool) -> None:
    """Fill modules and optimisers, in place, with what ``save_tensors`` wrote. The hyperparameters of optimisers stay:
    they are the config's.

    Raises:
        CheckpointError: the folder does not hold exactly these parts' tensors.
        torch.distributed.checkpoint.api.CheckpointException: on every process, if one of them cannot read.
    """
    reader = dcp.FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    targets: dict[str, Tensor] = {}
    states: list[tuple[torch.optim.Optimizer, dict[Tensor, dict[str, Tensor]]]] = []
    for part, (module, optimizer) in parts.items():
        model, state = _stored(module), dict[Tensor, dict[str, Tensor]]()
        targets |= {f"{part}/model/{name}": tensor.detach() for name, tensor in model.items()}
        for key, entry in stored.items():
            name, _, moment = key.removeprefix(f"{part}/optimizer/").rpartition("/")
            if key.startswith(f"{part}/optimizer/") and name in model:
                assert isinstance(entry, TensorStorageMetadata)
                targets[key] = state.setdefault(model[name], {})[moment] = _like(model[name], entry)
        states.append((optimizer, state))
    missing, more = set(targets) - set(stored), {key for key in stored if key.split("/", 1)[0] in parts} - set(targets)
    if missing or more:
        raise CheckpointError(
            f"{folder.parent}: does not fit the model: missing {_listed(missing)}; not in the model or its optimiser "
            f"{_listed(more)}. It was written by a run with another model or other trained parameters"
        )
    with _silent():
        dcp.load(targets, storage_reader=reader, no_dist=alone)
    for optimizer, state in states:
        optimizer.state.clear()
        optimizer.state.update(state)


def _stored(module: nn.Module) -> dict[str, Tensor]:
    """The trained parameters and saved buffers by name, tied ones once. Copies that FSDP gathered are freed first."""
    tensors, seen = dict[str, Tensor](), set[int]()
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in seen and (value.requires_grad or not isinstance(value, nn.Parameter)):
            tensors[name] = value
        seen.add(id(value))
    return tensors


def _like(parameter: Tensor, entry: TensorStorageMetadata) -> Tensor:
    """An empty tensor for an optimiser's moment. It is sharded like the parameter if it has the parameter's shape."""
    dtype = entry.properties.dtype
    if entry.size == parameter.shape and parameter.ndim:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(entry.size, dtype=dtype, device=parameter.device)  # a fused optimiser's step counts there


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:3]) or "nothing"
    return f"{shown}, … ({len(names)})" if len(names) > 3 else shown


@contextmanager
def _silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
