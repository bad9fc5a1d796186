"""The tensors of models and optimisers in a folder, written and read by any number of processes.

Each process writes what it holds, through ``torch.distributed.checkpoint``. Names and shapes in the folder are those of
whole tensors, so that any mesh can read what any other wrote. Of a module, the trained parameters and the saved buffers
are stored, tied ones once. Frozen parameters come from the model that a run is built from.

torch's own ``get_optimizer_state_dict`` is not used: it fills an optimiser that has not stepped yet by stepping it,
which would shift the bias correction of every later step.
"""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from tandemrl.training.checkpoint.manifest import CheckpointError
from tandemrl.training.state import Trained

_MODEL, _OPTIMIZER = "model", "optimizer"


def tensors_of(parts: Mapping[str, Trained]) -> dict[str, Tensor]:
    """All tensors to store, by name: ``PART/model/PARAMETER`` and ``PART/optimizer/PARAMETER/MOMENT``.

    They are the tensors themselves, not copies.

    Raises:
        CheckpointError: a module holds something that is not a tensor, or an optimiser trains something else.
    """
    tensors: dict[str, Tensor] = {}
    for part, optimizer, model, parameters in _named(parts):
        tensors |= {f"{part}/{_MODEL}/{name}": tensor.detach() for name, tensor in model.items()}
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{part}/{_OPTIMIZER}/{name}/{key}"] = value.detach()
    return tensors


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    """Write named tensors. Unless ``alone``, every process must call this, each with its shards of the same tensors.

    Raises:
        torch.distributed.checkpoint.api.CheckpointException: on every process, if one of them fails.
    """
    with _silent():
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(folder), no_dist=alone)


def stored_metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The size and the dtype of every tensor in a folder.

    Raises:
        OSError, pickle.UnpicklingError: the folder's ``.metadata`` is missing, or holds more than metadata.
    """
    return dict(_Reader(folder).read_metadata().state_dict_metadata)  # type: ignore[arg-type]  # _Reader refuses any other kind


def load_tensors(folder: Path, parts: Mapping[str, Trained], *, alone: bool) -> None:
    """Fill modules and optimisers, in place, with what ``save_tensors`` wrote. The hyperparameters of optimisers stay:
    they are the config's.

    Raises:
        CheckpointError: the folder does not hold exactly these parts' tensors.
        torch.distributed.checkpoint.api.CheckpointException: on every process, if one of them cannot read.
    """
    metadata = stored_metadata(folder)
    targets: dict[str, Tensor] = {}
    states: dict[str, dict[str, dict[str, Tensor]]] = {}  # per part and parameter
    named = list(_named(parts))
    for part, _, model, parameters in named:
        targets |= {f"{part}/{_MODEL}/{name}": tensor.detach() for name, tensor in model.items()}
        states[part] = {}
        for key, entry in metadata.items():
            owner, kind, rest = key.split("/", 2)
            name, _, moment = rest.rpartition("/")
            if (owner, kind) == (part, _OPTIMIZER) and name in parameters:
                targets[key] = states[part].setdefault(name, {})[moment] = _like(parameters[name], entry)
    expected, present = set(targets), {key for key in metadata if key.split("/", 1)[0] in parts}
    if expected != present:
        raise CheckpointError(
            f"{folder.parent}: does not fit the model: missing {_listed(expected - present)}; not in the model or its "
            f"optimiser {_listed(present - expected)}. It was written by a run with another model or other trained "
            "parameters"
        )
    for key, target in targets.items():
        size, dtype = metadata[key].size, metadata[key].properties.dtype
        if size != target.shape or dtype != target.dtype:
            raise CheckpointError(
                f"{folder.parent}: {key} is {dtype} {tuple(size)}, the model's is {target.dtype} {tuple(target.shape)}"
            )
    if targets:
        with _silent():
            dcp.load(targets, storage_reader=_Reader(folder), no_dist=alone)
    for part, optimizer, _, parameters in named:
        groups = optimizer.state_dict()["param_groups"]
        place = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
        state = {place[id(parameters[name])]: values for name, values in states[part].items()}
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _named(
    parts: Mapping[str, Trained],
) -> Iterator[tuple[str, torch.optim.Optimizer, dict[str, Tensor], dict[str, Tensor]]]:
    """Yield (name of the part, optimiser, tensors of the model by name, trained parameters by name)."""
    for part, (module, optimizer) in parts.items():
        model = _model_tensors(part, module)
        trained = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
        parameters = {name: value for name, value in model.items() if trained.pop(id(value), None) is not None}
        if unknown := [tuple(parameter.shape) for parameter in trained.values() if parameter.requires_grad]:
            raise CheckpointError(
                f"{part}: the optimiser trains a parameter {unknown[0]} that the module does not have; make the "
                "optimiser after the model was sharded"
            )
        yield part, optimizer, model, parameters


def _model_tensors(part: str, module: nn.Module) -> dict[str, Tensor]:
    """The trained parameters and saved buffers by name, tied ones once. Copies that FSDP gathered are freed first."""
    tensors: dict[str, Tensor] = {}
    seen = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{part}: {name} of the module is a {type(value).__name__}, not a tensor")
        frozen = isinstance(value, nn.Parameter) and not value.requires_grad
        if not frozen and id(value) not in seen:
            tensors[name] = value
        seen.add(id(value))
    return tensors


def _like(parameter: Tensor, entry: TensorStorageMetadata) -> Tensor:
    """An empty tensor for an optimiser's moment. It is sharded like the parameter if it has the parameter's shape."""
    dtype = entry.properties.dtype
    if entry.size == parameter.shape and parameter.ndim:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(entry.size, dtype=dtype)


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:3]) or "nothing"
    return f"{shown}, … ({len(names)})" if len(names) > 3 else shown


@contextmanager
def _silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Reader(dcp.FileSystemReader):
    """A reader that runs no code from the folder, although ``.metadata`` is a pickle and entries may be pickles."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path, ".metadata"), "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"{self.path}/.metadata is a {type(metadata).__name__}")
        for name, what in metadata.state_dict_metadata.items():
            if not isinstance(what, TensorStorageMetadata) or name.count("/") < 2:
                raise pickle.UnpicklingError(f"{self.path}: {name} is not a tensor of a model or an optimiser")
        return metadata


class _Unpickler(pickle.Unpickler):
    """An unpickler that allows only plain data and the classes that describe tensors."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return Path
        if (module, name) in _DESCRIPTIONS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a checkpoint; the file may be malicious")


_DESCRIPTIONS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
