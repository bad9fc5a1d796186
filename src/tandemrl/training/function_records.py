"""Records in ``config.yaml`` of the Python functions that take the place of config keys.

A file cannot hold a function, but it can hold its name and signature. Whoever trains from the file alone is then told
what is missing, instead of training something else.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tandemrl.config import Config, ConfigError, FunctionRecord
from tandemrl.losses import Recipe
from tandemrl.rollout.signatures import signature


def with_records(config: Config, *, accepted: Collection[str] = (), **functions: Any) -> Config:
    """The config with a record of each function that takes the place of some of its keys.

    Args:
        accepted: whose code may have changed (``--accept-changed``).
        functions: the arguments of ``train`` that ``config.FunctionsConfig`` has a field for. None means not passed.

    Raises:
        ConfigError: the config is of a run that had a function, and this function is not passed.
    """
    records = {
        name: None if each is None else FunctionRecord(name=describe(each), signature=signature(each))
        for name, each in functions.items()
    }
    for name, now in records.items():
        before: FunctionRecord | None = getattr(config.functions, name)
        if before is not None and (now is None or (now.signature != before.signature and name not in accepted)):
            passed = "none" if now is None else f"{now.name} [{now.signature}]"
            raise ConfigError(
                f"functions.{name}: this config belongs to a run with {before.name} [{before.signature}]; "
                f"passed is {passed}. Pass that function in Python, train(load(CONFIG), {name}=FUNCTION), "
                f"or set functions.{name}=null to train another run"
            )
    return replace(config, functions=replace(config.functions, **records))


def describe(function: Any) -> str:
    """A short description of a function: its name, and that of the module that defines it.

    Examples:
        >>> describe({"mine": with_records})
        'mine=tandemrl.training.function_records.with_records'
    """
    if isinstance(function, Recipe):
        return f"recipe {function.name}"
    if isinstance(function, Mapping):
        return ", ".join(f"{name}={describe(each)}" for name, each in function.items())
    if isinstance(function, partial):
        return f"partial({describe(function.func)})"
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
