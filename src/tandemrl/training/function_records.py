"""Python functions that take the place of config keys: how they are told apart, and their record in ``config.yaml``.

A file cannot hold a function. Its name and signature it can, so that whoever trains from the file alone is told what is
missing instead of training something else.
"""

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from tandemrl.config import Config, ConfigError, FunctionRecord
from tandemrl.losses import RECIPES, Recipe


def with_records(config: Config, **functions: Any) -> Config:
    """The config with a record of each function that takes the place of some of its keys.

    Args:
        functions: the arguments of ``train`` that ``config.FunctionsConfig`` has a field for; None = not passed.

    Raises:
        ConfigError: the config is that of a run with a function, and this function is not passed.
    """
    records = {name: None if value is None else record(value) for name, value in functions.items()}
    for name, now in records.items():
        before: FunctionRecord | None = getattr(config.functions, name)
        if before is not None and (now is None or now.signature != before.signature):
            passed = "none" if now is None else f"{now.name} [{now.signature}]"
            raise ConfigError(
                f"functions.{name}: this config belongs to a run with {before.name} [{before.signature}]; "
                f"passed is {passed}. Pass that function in Python, train(load(CONFIG), {name}=FUNCTION), "
                f"or set functions.{name}=null to train another run"
            )
    return replace(config, functions=replace(config.functions, **records))


def record(function: Any) -> FunctionRecord:
    """Name and signature of a function, of several by name, or of a recipe."""
    return FunctionRecord(name=describe(function), signature=signature(function))


def describe(function: Any) -> str:
    """Where a function was defined. Of a recipe: its name, and what differs from the library's recipe of that name.

    Example:
        >>> describe(RECIPES["grpo"]._replace(clip_low=0.1))
        'recipe grpo with clip_low=0.1'
    """
    if isinstance(function, Recipe):
        fields = function._asdict()
        known = RECIPES[function.name]._asdict() if function.name in RECIPES else {}
        changed = [f"{key}={_brief(value)}" for key, value in fields.items() if key not in known or value != known[key]]
        return f"recipe {function.name}" + (f" with {', '.join(changed)}" if changed else "")
    if isinstance(function, Mapping):
        return ", ".join(f"{name}={_brief(each)}" for name, each in function.items())
    return _brief(function)


def _brief(value: Any) -> str:
    if not callable(value):
        return repr(value)
    if isinstance(value, partial):
        return f"partial({_brief(value.func)})"
    named = value if hasattr(value, "__qualname__") else type(value)
    code = getattr(inspect.unwrap(value), "__code__", None)
    where = "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"
    return f"{named.__module__}.{named.__qualname__}{where}"


def signature(value: Any) -> str:
    """Tells two functions apart by their code, constants, defaults and the plain values that they close over.

    Recipes are told apart by their fields, the library's own functions by their names.
    """
    return _signature(value, ())


def _signature(value: Any, within: tuple[Any, ...]) -> str:
    """``within``: the functions that this value was found in; one that closes over itself ends there."""
    if getattr(value, "__module__", None) and value.__module__.startswith("tandemrl.") and callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    sign = partial(_signature, within=(*within, value))
    if isinstance(value, Recipe):
        return f"{value.name}:{_hash({key: sign(field) for key, field in value._asdict().items()})}"
    if isinstance(value, Mapping):
        return f"mapping:{_hash([(repr(key), sign(each)) for key, each in value.items()])}"
    if isinstance(value, partial):
        bound = [sign(x) for x in value.args], {key: sign(x) for key, x in sorted(value.keywords.items())}
        return f"partial:{_hash((sign(value.func), bound))}"
    code = getattr(value, "__code__", None)
    if code is None:
        return repr(value) if isinstance(value, int | float | str | bool | None) else type(value).__qualname__
    if any(value is outer for outer in within):
        return str(value.__qualname__)
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    content = [_code(code), [sign(cell) for cell in cells], [sign(x) for x in value.__defaults__ or ()]]
    if value.__kwdefaults__:
        content.append({key: sign(x) for key, x in sorted(value.__kwdefaults__.items())})
    return f"{value.__qualname__}:{_hash(tuple(content))}"


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
