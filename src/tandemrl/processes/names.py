"""Finds what ``module:name`` names, and makes a component of it."""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def import_object(path: str) -> Any:
    """The object that ``module:name`` names. Modules in the working directory are found, too.

    Raises:
        Exception: whatever importing it raises.
    """
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    return getattr(importlib.import_module(module), name)


def import_failure(path: str, problem: Exception) -> str:
    """Why ``module:name`` cannot be imported, and what to do if the file or the name in it is not there."""
    module, _, name = path.partition(":")
    fix = ""
    if isinstance(problem, ModuleNotFoundError) and problem.name == module.partition(".")[0]:
        close = difflib.get_close_matches(module, [file.stem for file in Path.cwd().glob("*.py")], n=1)
        mistyped = f"did you mean {close[0]}? " if close else ""
        fix = f"; {mistyped}A module is looked for in the working directory ({Path.cwd()}) and where Python finds it"
    elif isinstance(problem, AttributeError) and module in sys.modules and not hasattr(sys.modules[module], name):
        close = difflib.get_close_matches(name, [found for found in vars(sys.modules[module]) if found[0] != "_"], n=1)
        fix = f"; did you mean {close[0]}?" if close else f"; define {name} in it, or correct the name"
    return f"cannot be imported: {type(problem).__name__}: {problem}{fix}"


def function_named(path: str, where: str, error: type[Exception]) -> Callable[..., Any]:
    """The function or other callable that ``module:name`` names.

    Args:
        where: where the name comes from, such as the key of a config. The message begins with it.
        error: the class of the error to raise.

    Raises:
        error: there is no such object, importing it failed, or it cannot be called.
    """
    try:
        found = import_object(path)
    except Exception as problem:  # a user's module may raise anything
        raise error(f"{where}: {import_failure(path, problem)}") from problem
    if not callable(found):
        raise error(f"{where}: is a {type(found).__name__}, not a function")
    return found


def instantiate(
    path: str | Callable[..., Any],
    where: str,
    error: type[Exception],
    parameters: Mapping[str, Any] | None = None,
    **offered: Callable[[], Any],
) -> Any:
    """What a function or class, or the one that ``module:name`` names, returns for the user's parameters.

    Args:
        where: as in ``function_named``.
        error: the class of the error to raise.
        parameters: values by name, each of which must be a parameter.
        offered: functions that give what it gets if it has a parameter of this name and the user did not set it.

    Raises:
        error: it cannot be imported or called, a parameter is unknown or missing, or making it failed.
    """
    factory = function_named(path, where, error) if isinstance(path, str) else path
    parameters, starred = parameters or {}, (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    takes = {name: each for name, each in inspect.signature(factory).parameters.items() if each.kind not in starred}
    settable = [name for name in takes if name not in offered or name in parameters]
    for name in parameters:
        if name not in takes:
            close = difflib.get_close_matches(name, settable, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise error(f"{where}: has no parameter {name!r}; {hint}its own are: {', '.join(settable) or 'none'}")
    given = {name: make() for name, make in offered.items() if name in takes and name not in parameters}
    for name, each in takes.items():
        if each.default is each.empty and name not in given and name not in parameters:
            raise error(f"{where}: its parameter {name!r} has no value; give it one in the section's `parameters`")
    given |= parameters
    if isinstance(path, str) and path.startswith("tandemrl."):
        return factory(**given)
    try:
        return factory(**given)
    except error:
        raise
    except Exception as problem:
        raise error(f"{where}: making it failed: {type(problem).__name__}: {problem}") from problem
