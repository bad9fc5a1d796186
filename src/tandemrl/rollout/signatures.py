"""Signatures of Python functions and environments, by which a resumed run notices that one was changed."""

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import getattr_static
from pathlib import Path, PurePath
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from tandemrl.config import RetrievalConfig
from tandemrl.rollout.envs.environment import Environment
from tandemrl.selection.strategies import OnDevices

NO_PART_OF_A_SEARCH = ("url", "api_key_env", "timeout_s", "retries", "backoff_s", "device")
"""Keys of ``retrieval.*`` that do not change what a search finds. ``url`` may be an exception: see `searched_by`."""


def searched_by(config: RetrievalConfig) -> dict[str, Any]:
    """The keys of ``retrieval.*``, with their values, that what a search finds depends on.

    ``url`` is one of them if requests to the service name no model, since then only the address tells services apart.
    """
    unnamed = config.url is not None and (config.model is None or config.api == "tei")
    return {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if (field.name not in NO_PART_OF_A_SEARCH or (field.name == "url" and unnamed))
        and (field.name != "parameters" or config.parameters)
    }


def signature(value: Any) -> str:
    """A text that differs between functions of different modules, places or arguments, and if their module has changed.

    Arguments are defaults, bound values, and what a function closes over: plain values, collections, tensors, functions
    and objects that can be called. A function of a script or a notebook has its code for a source, one of the
    library's its name. An environment has its methods and the attributes of its first signature: what it keeps
    later, such as an index, makes it no other one.
    """
    if isinstance(value, Environment) and _SIGNED in vars(value):
        return str(vars(value)[_SIGNED])
    content = _content(value)
    if isinstance(content, str):
        return content
    name = getattr(value, "__qualname__", type(value).__qualname__)
    signed = f"{name}:{hashlib.sha256(repr(content).encode()).hexdigest()[:16]}"
    if isinstance(value, Environment):
        vars(value)[_SIGNED] = signed
    return signed


_SIGNED = "_signature"
"""The attribute in which an environment has its first signature."""


def _content(value: Any, within: tuple[Any, ...] = ()) -> Any:
    """What a signature is the hash of; a text if it can be read.

    Args:
        within: the values that this one was found in, which end the recursion.
    """
    inner = partial(_content, within=(*within, value))
    if any(value is outer for outer in within):
        return type(value).__qualname__
    if value is None or isinstance(value, int | float | str | bytes | PurePath):
        return repr(value)
    if isinstance(value, OnDevices):
        return inner(value.table)
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return tuple(value.shape), str(value.dtype), hashlib.sha256(data).hexdigest()
    if isinstance(value, Mapping):
        return [(repr(key), inner(each)) for key, each in list(value.items())]  # threads may fill it
    if isinstance(value, list | tuple):
        return [type(value).__qualname__, *map(inner, value)]
    if isinstance(value, set | frozenset):
        return sorted(repr(inner(each)) for each in list(value))
    if isinstance(value, partial):
        return inner([value.func, value.args, dict(sorted(value.keywords.items()))])
    if isinstance(value, MethodType):
        return inner([value.__func__, value.__self__])
    if isinstance(value, FunctionType):
        closed = [cell.cell_contents for cell in value.__closure__ or ()]
        if not _of_the_library(value):
            return _source(value), inner([closed, value.__defaults__, value.__kwdefaults__])
        name = f"{value.__module__}.{value.__qualname__}"
        return (name, inner(closed)) if "<locals>" in name else name
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, [inner(each) for each in value.co_consts]
    if isinstance(value, type):
        kinds = [kind for kind in value.__mro__ if not (kind.__module__ == "builtins" or _of_the_library(kind))]
        return [inner({name: _plain(each) for name, each in vars(kind).items() if _counts(name)}) for kind in kinds]
    if isinstance(value, RetrievalConfig):
        return inner({name: each for name, each in vars(value).items() if name not in NO_PART_OF_A_SEARCH})
    record = is_dataclass(value) and not type(value).__module__.startswith("tandemrl.config.")
    of_python = isinstance(getattr_static(type(value), "__call__", None), FunctionType) and not isinstance(
        value, nn.Module
    )
    if record or of_python or isinstance(value, Environment):
        return type(value).__qualname__, inner([type(value), getattr(value, "__dict__", {})])
    return getattr(value, "__qualname__", type(value).__qualname__)


def _source(function: FunctionType) -> Any:
    """The source of a function's module, and where in it the function is; without that, the function's code."""
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    if function.__module__ == "__main__" or file is None or not Path(file).is_file():
        return _content(function.__code__)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest(), [*function.__code__.co_positions()]


def _of_the_library(value: Any) -> bool:
    return str(value.__module__).startswith("tandemrl.")


def _counts(name: str) -> bool:
    """Whether a member of a class is its author's."""
    return not (name.startswith("__") and name.endswith("__")) or name in ("__init__", "__call__")


def _plain(member: Any) -> Any:
    """The function of a static method, a class method or a property."""
    return getattr(member, "__func__", getattr(member, "fget", member))
