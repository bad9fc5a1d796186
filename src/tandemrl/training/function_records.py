"""Records in ``config.yaml`` of the Python functions that take the place of config keys.

A file cannot hold a function, but it can hold its name and signature. Whoever trains from the file alone is then told
what is missing, instead of training something else.
"""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tandemrl.config import Config, ConfigError, FunctionRecord
from tandemrl.losses import RECIPES, Recipe
from tandemrl.rollout.envs.environment import Environment
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
    """A short description of a function: where it was defined. For a recipe, it is the name and what differs from the
    library's recipe of that name.

    Examples:
        >>> describe(RECIPES["grpo"]._replace(clip_low=0.1))
        'recipe grpo with clip_low=0.1'
    """
    if isinstance(function, Recipe):
        fields = function._asdict()
        known = RECIPES[function.name]._asdict() if function.name in RECIPES else {}
        changed = [f"{key}={_brief(value)}" for key, value in fields.items() if key not in known or value != known[key]]
        return f"recipe {function.name}" + (f" with {', '.join(changed)}" if changed else "")
    if isinstance(function, Environment):
        return f"{type(function).__module__}.{type(function).__qualname__}"
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
