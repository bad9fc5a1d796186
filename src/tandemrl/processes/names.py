"""Finds what ``module:name`` names."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def named(path: str) -> Any:
    """The object that ``module:name`` names. Modules in the working directory are found, too.

    Raises:
        Exception: whatever importing it raises.
    """
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    return getattr(importlib.import_module(module), name)


def function_named(path: str, where: str, error: type[Exception]) -> Callable[..., Any]:
    """The function or other callable that ``module:name`` names.

    Args:
        where: where the name comes from, such as the key of a config. The message begins with it.
        error: the class of the error to raise.

    Raises:
        error: there is no such object, importing it failed, or it cannot be called.
    """
    try:
        found = named(path)
    except Exception as problem:  # a user's module may raise anything
        raise error(f"{where}: cannot be imported: {type(problem).__name__}: {problem}") from problem
    if not callable(found):
        raise error(f"{where}: is a {type(found).__name__}, not a function")
    return found
