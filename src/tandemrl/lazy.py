"""Packages whose names are imported on first use, so that the torch-free modules inside them load without torch."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

_LINE = re.compile(r"^from (tandemrl\S+) import (\w+) as \2$", re.MULTILINE)


def exports(package: str, file: str) -> tuple[dict[str, str], Callable[[str], Any]]:
    """The names that a package exports, with their modules, and its ``__getattr__``, which imports them.

    Args:
        package: the package's ``__name__``.
        file: its ``__file__``. The ``.pyi`` beside it lists the names, for type checkers and for us alike.
    """
    modules = {name: module for module, name in _LINE.findall(Path(file).with_suffix(".pyi").read_text())}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = vars(import_module(package))[name] = getattr(import_module(modules[name]), name)
        return value

    return modules, get
