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
_COMPUTING = {"params", "fused", "foreach", "capturable", "differentiable"}
"""Entries of an optimiser's groups that are not hyperparameters: its parameters, and how it computes."""


def tensors_of(parts: Mapping[str, Trained]) -> dict[str, Tensor]:
    """All tensors to store, by name: ``PART/model/PARAMETER`` and ``PART/optimizer/PARAMETER/MOMENT``.

    They are the tensors themselves, not copies.

    Raises:
        CheckpointError: a module or an optimiser holds something that has no name or is not a tensor.
    """
    tensors: dict[str, Tensor] = {}
    for part, optimizer, model, parameters in _named(parts):
        tensors |= {f"{part}/{_MODEL}/{name}": tensor.detach() for name, tensor in model.items()}
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{part}/{_OPTIMIZER}/{name}/{key}"] = value.detach()
    return tensors


def settings_of(parts: Mapping[str, Trained]) -> dict[str, Any]:
    """What optimisers hold beside tensors, as plain data: the hyperparameters of each group, and states that are
    numbers."""
    settings = {}
    for part, optimizer, _, parameters in _named(parts):
        names = {id(parameter): name for name, parameter in parameters.items()}
        groups = [
            {key: value for key, value in group.items() if key not in _COMPUTING}
            | {"params": [names[id(p)] for p in group["params"] if id(p) in names]}
            for group in optimizer.param_groups
        ]
        numbers = {
            name: {k: v for k, v in optimizer.state.get(parameter, {}).items() if not isinstance(v, Tensor)}
            for name, parameter in parameters.items()
        }
        settings[part] = {"groups": groups, "numbers": {name: values for name, values in numbers.items() if values}}
    return settings


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


def load_tensors(folder: Path, parts: Mapping[str, Trained], settings: Mapping[str, Any], *, alone: bool) -> None:
    """Fill modules and optimisers, in place, with what ``save_tensors`` wrote and ``settings_of`` returned.

    Raises:
        CheckpointError: the folder does not hold exactly these parts' tensors.
        torch.distributed.checkpoint.api.CheckpointException: on every process, if one of them cannot read.
    """
    metadata = stored_metadata(folder)
    targets: dict[str, Tensor] = {}
    states: dict[str, dict[str, dict[str, Any]]] = {}  # per part and parameter
    named = list(_named(parts))
    for part, _, model, parameters in named:
        if part not in settings:
            raise CheckpointError(f"{folder.parent}: holds no {part!r}, only {', '.join(settings) or 'nothing'}")
        targets |= {f"{part}/{_MODEL}/{name}": tensor.detach() for name, tensor in model.items()}
        states[part] = {name: dict(values) for name, values in settings[part]["numbers"].items()}
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
        _fill_optimizer(part, optimizer, parameters, states[part], settings[part]["groups"])


def _fill_optimizer(
    part: str,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    states: Mapping[str, dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    """Replace all of an optimiser's state, and its hyperparameters."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    group_of = {name: group for group in groups for name in group["params"]}
    position = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    packed = optimizer.state_dict()["param_groups"]
    for group, new in zip(optimizer.param_groups, packed, strict=True):
        saved = [group_of[names[id(p)]] for p in group["params"] if id(p) in names and names[id(p)] in group_of]
        values = [{k: v for k, v in s.items() if k != "params"} for s in saved]
        if any(v != values[0] for v in values):
            raise CheckpointError(f"{part}: parameters that share an optimiser group now had different hyperparameters")
        new.update(values[0] if values else {})
    state = {position[i]: states[name] for i, name in names.items() if name in states}
    optimizer.load_state_dict({"state": state, "param_groups": packed})


def _named(
    parts: Mapping[str, Trained],
) -> Iterator[tuple[str, torch.optim.Optimizer, dict[str, Tensor], dict[str, nn.Parameter]]]:
    """Yield (name of the part, optimiser, tensors of the model by name, trained parameters by name)."""
    for part, (module, optimizer) in parts.items():
        model = _model_tensors(part, module)
        yield part, optimizer, model, dict(_parameters(part, model, optimizer))


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


def _parameters(
    part: str, model: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of every parameter that the optimiser trains."""
    names = {id(tensor): name for name, tensor in model.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in names:
                yield names[id(parameter)], parameter
            elif parameter.requires_grad:
                raise CheckpointError(
                    f"{part}: the optimiser trains a parameter {tuple(parameter.shape)} that the module does not have; "
                    "make the optimiser after the model was sharded"
                )


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
