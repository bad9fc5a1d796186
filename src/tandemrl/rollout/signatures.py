"""Signatures of Python functions and environments, by which a resumed run notices that one was changed."""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import PurePath
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from tandemrl.config import RetrievalConfig
from tandemrl.losses import Recipe
from tandemrl.rollout.envs.environment import Environment
from tandemrl.selection import Strategy
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
    """A text that differs between two functions that differ in their code, constants, defaults or the plain values,
    collections and tensors that they close over.

    The signature of a recipe or a strategy covers its fields, that of one of the library's own functions its name and
    what it closes over, that of an environment its methods, tools and attributes, and that of another object that can
    be called, or of its method, its class and attributes; of a torch module only the name of its class.
    """
    return _signature(value, ())


def _signature(value: Any, within: tuple[Any, ...]) -> str:
    """``signature`` of a value that was found in the functions ``within``, which ends the recursion of a function that
    closes over itself."""
    sign = partial(_signature, within=(*within, value))
    if getattr(value, "__module__", None) and value.__module__.startswith("tandemrl.") and callable(value):
        name = f"{value.__module__}.{value.__qualname__}"
        if "<locals>" not in name or any(value is outer for outer in within):
            return name
        return f"{name}:{_hash([sign(cell.cell_contents) for cell in value.__closure__ or ()])}"
    if isinstance(value, Recipe):
        return f"{value.name}:{_hash({key: sign(field) for key, field in value._asdict().items()})}"
    if isinstance(value, Strategy):
        return f"strategy:{_hash({key: sign(field) for key, field in value._asdict().items()})}"
    if isinstance(value, Environment):
        if any(value is outer for outer in within):
            return type(value).__qualname__
        members = sorted(_members(value).items())
        return f"{type(value).__qualname__}:{_hash([(name, _each(member, sign)) for name, member in members])}"
    if isinstance(value, type):
        members = sorted(_of(value).items())
        return f"{value.__qualname__}:{_hash([(name, _each(member, sign)) for name, member in members])}"
    if isinstance(value, Mapping):
        return f"mapping:{_hash([(repr(key), sign(each)) for key, each in value.items()])}"
    if isinstance(value, partial):
        bound = [sign(x) for x in value.args], {key: sign(x) for key, x in sorted(value.keywords.items())}
        return f"partial:{_hash((sign(value.func), bound))}"
    if isinstance(value, OnDevices):
        return sign(value.table)
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"tensor:{tuple(value.shape)}:{value.dtype}:{hashlib.sha256(data).hexdigest()[:16]}"
    if isinstance(value, list | tuple | set | frozenset | bytes | PurePath) or _is_record(value):
        return f"{type(value).__qualname__}:{_hash(_each(value, sign))}"
    if isinstance(value, MethodType) and not any(value == outer for outer in within):
        return f"{sign(value.__func__)} of {sign(value.__self__)}"
    code = getattr(value, "__code__", None)
    if code is None:
        if isinstance(value, int | float | str | bool | None):
            return repr(value)
        name = type(value).__qualname__
        of_python = isinstance(inspect.getattr_static(type(value), "__call__", None), FunctionType)
        if not of_python or isinstance(value, torch.nn.Module) or any(value is outer for outer in within):
            return name
        return f"{name}:{_hash((sign(type(value)), _each(getattr(value, '__dict__', {}), sign)))}"
    if any(value is outer for outer in within):
        return str(value.__qualname__)
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    content = [_code(code), [sign(cell) for cell in cells], [sign(x) for x in value.__defaults__ or ()]]
    if value.__kwdefaults__:
        content.append({key: sign(x) for key, x in sorted(value.__kwdefaults__.items())})
    return f"{value.__qualname__}:{_hash(tuple(content))}"


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type) and not callable(value)


def _members(environment: Environment) -> dict[str, Any]:
    """The members of an environment that are not the library's: those of its own classes, and its attributes."""
    return _of(type(environment), vars(environment))


def _of(kind: type, attributes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The members of a class that are not the library's, and the attributes of an instance."""
    kinds = [each for each in reversed(kind.__mro__) if not _of_the_library(each)]
    members = {name: member for each in kinds for name, member in vars(each).items()}
    return {
        name: getattr(member, "__func__", getattr(member, "fget", member))  # of static methods and properties
        for name, member in {**members, **(attributes or {})}.items()
        if not (name.startswith("__") and name != "__init__")
    }


def _of_the_library(kind: type) -> bool:
    return kind is object or kind.__module__.startswith("tandemrl.")


def _each(value: Any, sign: Callable[[Any], str], within: tuple[Any, ...] = ()) -> Any:
    """The signatures of the values in an environment's member, such as its tools or rules, in nested collections.

    Of the library's config only the keys count that change what a search finds; the others are compared as part of the
    run's config.

    Args:
        sign: gives the signature of a single value.
        within: the collections that this value was found in, which end the recursion of one that contains itself.
    """
    if any(value is outer for outer in within):
        return type(value).__qualname__
    deeper = partial(_each, sign=sign, within=(*within, value))
    if isinstance(value, list | tuple):
        return [deeper(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(deeper(each)) for each in list(value))
    if isinstance(value, Mapping):
        return [(repr(key), deeper(each)) for key, each in list(value.items())]  # threads may fill it
    if is_dataclass(value) and not isinstance(value, type | Environment):
        names = {field.name for field in fields(value)}
        if isinstance(value, RetrievalConfig):
            names -= {*NO_PART_OF_A_SEARCH, *(() if value.parameters else ("parameters",))}
        elif type(value).__module__.startswith("tandemrl.config."):
            names = set()
        return type(value).__qualname__, [(name, deeper(getattr(value, name))) for name in sorted(names)]
    return repr(value) if isinstance(value, bytes | PurePath) else sign(value)


def _code(code: CodeType) -> Any:
    return code.co_code, code.co_names, [_constant(c) for c in code.co_consts]


def _constant(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return _code(constant)
    if isinstance(constant, frozenset):  # its own order is another one in each process
        return sorted(map(repr, constant))
    return repr(constant)


def _hash(content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]
