"""Signatures of Python functions and environments, by which a resumed run notices that one was changed."""

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import getattr_static
from pathlib import Path, PurePath
from types import FunctionType, MethodType
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
    and objects that can be called. Of a script or a notebook, a function's own source counts alone; of the library,
    its name. An environment has its class and the attributes of its first signature: what it keeps later, such as an
    index, makes it no other one.
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
        closed = inner([cell.cell_contents for cell in value.__closure__ or ()])
        if _of_the_library(value):
            name = f"{value.__module__}.{value.__qualname__}"
            return (name, closed) if "<locals>" in name else name
        columns = [position[2:] for position in value.__code__.co_positions()]  # they tell lambdas of a line apart
        return _source(value), value.__qualname__, columns, closed, inner([value.__defaults__, value.__kwdefaults__])
    if isinstance(value, type):
        return [(_source(kind), kind.__qualname__) for kind in value.__mro__ if not _of_the_library(kind)]
    if isinstance(value, RetrievalConfig):
        return inner({name: each for name, each in vars(value).items() if name not in NO_PART_OF_A_SEARCH})
    record = is_dataclass(value) and not _of_the_library(type(value))
    called = isinstance(getattr_static(type(value), "__call__", None), FunctionType) and not isinstance(
        value, nn.Module
    )
    if record or called or isinstance(value, Environment):
        return type(value).__qualname__, inner([type(value), getattr(value, "__dict__", {})])
    return getattr(value, "__qualname__", type(value).__qualname__)


def _source(value: Any) -> str | None:
    """A hash of the source of the module where a function or class is; in a script or a notebook, of its own alone."""
    try:
        own = value.__module__ == "__main__"
        source = inspect.getsource(value) if own else Path(inspect.getfile(value)).read_text(encoding="utf-8")
    except (OSError, TypeError):  # it has none
        return None
    return hashlib.sha256(source.encode()).hexdigest()


def _of_the_library(value: Any) -> bool:
    return str(value.__module__).startswith(("tandemrl.", "builtins"))
