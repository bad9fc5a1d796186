"""Reads the headers of a model's weight files, and finds what is missing or cut off before any weight is loaded."""

import json
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

from tandemrl.models.attention import ModelError

_OPTIONAL = ("gated_repo", "missing_entries", "connection_errors")


def weight_files(path: str | Path, *, download: bool = False) -> list[Path]:
    """The safetensors files of a model in a folder or on the hub; none if it has another format.

    Args:
        download: download them. Otherwise there are none if not all of them are in the hub's cache.

    Raises:
        ModelError: a folder has no weights, a file of them is missing, or their index cannot be read.
    """

    def find(name: str) -> Path | None:
        optional: dict[str, Any] = {f"_raise_exceptions_for_{what}": False for what in _OPTIONAL}
        found = cached_file(path, name, local_files_only=not download, **optional)
        return None if found is None else Path(found)

    if whole := find(SAFE_WEIGHTS_NAME):
        return [whole]
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        if (Path(path) / CONFIG_NAME).is_file() and not (find(WEIGHTS_NAME) or find(WEIGHTS_INDEX_NAME)):
            expected = f"{SAFE_WEIGHTS_NAME}, {SAFE_WEIGHTS_INDEX_NAME} or {WEIGHTS_NAME}"
            raise ModelError(f"{path}: no weights are there; expected {expected}")
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of weight files ({error}); copy or download it again") from None
    files = [found for name in names if (found := find(name))]
    if len(files) < len(names) and (download or Path(path).is_dir()):
        missing = next(name for name in names if name not in {file.name for file in files})
        raise ModelError(
            f"{index.parent / missing}: no such file; {len(names) - len(files)} of the {len(names)} files of weights "
            f"that {index.name} names are missing. Copy or download them again"
        )
    return files if len(files) == len(names) else []


@contextmanager
def opened(path: str | Path, *, download: bool = False) -> Iterator[dict[str, Any]]:
    """A context with every tensor of a model's safetensors files by name, to be read later. Only headers are read.

    Args:
        download: as for ``weight_files``.

    Raises:
        ModelError: as ``weight_files``, or a file is not whole.
    """
    with ExitStack() as files:
        slices: dict[str, Any] = {}
        for file in weight_files(path, download=download):
            try:
                tensors = files.enter_context(safe_open(file, framework="pt"))
                names = tensors.keys()  # it cannot be iterated itself
                slices |= {name: tensors.get_slice(name) for name in names}
            except SafetensorError as error:
                raise ModelError(
                    f"{file}: no whole safetensors file ({error}); copy or download it again, or `git lfs pull`"
                ) from None
        yield slices


def stored_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a model's safetensors files that are on this machine, by name.

    Raises:
        ModelError: as ``opened``.
    """
    with opened(path) as tensors:
        return {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}


def check_weights(path: str | Path, model: PreTrainedModel, *, without: str | None = None) -> None:
    """Check by their headers that a model's weight files are whole and have every parameter of ``model``.

    Names and shapes are not compared for an architecture whose files hold other tensors than its parameters.

    Args:
        model: the model of the path's configuration; its parameters may be on the meta device.
        without: the name of a submodule whose parameters need not be there.

    Raises:
        ModelError: as ``stored_shapes``, or parameters are missing there or have another shape.
    """
    stored = stored_shapes(path)
    if stored and not is_converted(model) and (problems := misfits(model, stored, without=without)):
        raise ModelError(
            f"{path}: {len(problems)} of its weights do not fit the model, the first: {problems[0]}. "
            f"Its weights and its {CONFIG_NAME} are not of one model, or a file is missing"
        )


def misfits(model: PreTrainedModel, stored: Mapping[str, tuple[int, ...]], *, without: str | None = None) -> list[str]:
    """Which parameters of a model its files lack or hold in another shape, in words.

    Args:
        stored: the shapes of the tensors in the files, by name.
        without: the name of a submodule whose parameters need not be there.
    """
    found, shapes = [], {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, key in stored_names(model, stored).items():
        there = stored.get(key)
        if there is None and not (without and name.startswith(f"{without}.")):
            found.append(f"{name} is missing")
        elif there is not None and there != shapes[name]:
            found.append(f"{key} is {list(there)} there, {list(shapes[name])} by its {CONFIG_NAME}")
    return found


def stored_names(model: PreTrainedModel, stored: Container[str]) -> dict[str, str]:
    """For each parameter, the name under which the files store it. It may be the name of a parameter that is tied to
    it, or its name in the body, if the files are of the body alone."""
    body = f"{model.base_model_prefix}."
    every = {names[0]: (*names, *(name.removeprefix(body) for name in names)) for names in tied_names(model)}
    return {name: next((each for each in names if each in stored), name) for name, names in every.items()}


def tied_names(model: nn.Module) -> list[list[str]]:
    """All names of each parameter; several if it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def is_converted(model: PreTrainedModel) -> bool:
    """Whether transformers makes the model's parameters out of other tensors in its files."""
    return bool(get_model_conversion_mapping(model, add_legacy=False)) or hasattr(model.config, "quantization_config")
