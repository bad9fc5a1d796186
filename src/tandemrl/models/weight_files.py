"""Reads the headers of a model's weight files, and finds what is missing or cut off before any weight is loaded."""

import json
from collections.abc import Callable, Container
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from tandemrl.models.attention import ModelError

Shapes = dict[str, tuple[int, ...]]
"""The shape of every tensor by its name."""


def stored_shapes(path: str | Path) -> Shapes | None:
    """The tensors of a model's safetensors files, in a folder or in the hub's cache. Only headers are read.

    Returns:
        None if not all files are known: they are not downloaded yet, or have another format.

    Raises:
        ModelError: a folder has no weights, a file of them is missing, or a file is not whole.
    """
    folder = Path(path)
    find = _in_folder(folder) if folder.is_dir() else _in_cache(str(path))
    if whole := find(SAFE_WEIGHTS_NAME):
        return _header(whole)
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        pickled = find(WEIGHTS_NAME) or find(WEIGHTS_INDEX_NAME)
        if pickled is None and (folder / CONFIG_NAME).is_file():
            expected = f"{SAFE_WEIGHTS_NAME}, {SAFE_WEIGHTS_INDEX_NAME} or {WEIGHTS_NAME}"
            raise ModelError(f"{path}: no weights are there; expected {expected}")
        if pickled is not None and pickled.name == WEIGHTS_INDEX_NAME and folder.is_dir():
            _parts(pickled, find)
        return None
    files = _parts(index, find) if folder.is_dir() else [find(name) for name in _named(index)]
    headers = [_header(file) for file in files if file is not None]
    return {name: shape for header in headers for name, shape in header.items()} if None not in files else None


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
    if stored is None or is_converted(model):
        return
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    problems = []
    for name, key in stored_names(model, stored).items():
        there = stored.get(key, stored.get(key.removeprefix(f"{model.base_model_prefix}.")))  # of the body alone
        if there is None and not (without and name.startswith(f"{without}.")):
            problems.append(f"{name} is missing")
        elif there is not None and there != shapes[name]:
            problems.append(f"{key} is {list(there)} there, {list(shapes[name])} by its {CONFIG_NAME}")
    if problems:
        raise ModelError(
            f"{path}: {len(problems)} of the {len(shapes)} weights do not fit the model, the first: {problems[0]}. "
            f"Its weights and its {CONFIG_NAME} are not of one model, or a file is missing"
        )


def stored_names(model: nn.Module, stored: Container[str]) -> dict[str, str]:
    """For each parameter, the name under which the files store it. It may be the name of a parameter that is tied to
    it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: next((n for n in (first, *rest) if n in stored), first) for first, *rest in names.values()}


def is_converted(model: PreTrainedModel) -> bool:
    """Whether transformers makes the model's parameters out of other tensors in its files."""
    return bool(get_model_conversion_mapping(model, add_legacy=False)) or hasattr(model.config, "quantization_config")


def _in_folder(folder: Path) -> Callable[[str], Path | None]:
    return lambda name: folder / name if (folder / name).is_file() else None


def _in_cache(name: str) -> Callable[[str], Path | None]:
    def find(file: str) -> Path | None:
        try:
            found = try_to_load_from_cache(name, file)
        except HFValidationError:
            return None
        return Path(found) if isinstance(found, str) else None

    return find


def _named(index: Path) -> list[str]:
    """The files that an index names."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of weight files ({error}); copy or download it again") from None


def _parts(index: Path, find: Callable[[str], Path | None]) -> list[Path | None]:
    names = _named(index)
    files = [find(name) for name in names]
    missing = [name for name, file in zip(names, files, strict=True) if file is None]
    if missing:
        raise ModelError(
            f"{index.parent / missing[0]}: no such file; {len(missing)} of the {len(names)} files of weights that "
            f"{index.name} names are missing. Copy or download them again"
        )
    return files


def _header(file: Path) -> Shapes:
    """The shapes in the header of a safetensors file, if the file has all of the bytes that the header tells of."""
    try:
        with safe_open(file, framework="np") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ModelError(
            f"{file}: no whole safetensors file ({error}); copy or download it again, or `git lfs pull`"
        ) from None
