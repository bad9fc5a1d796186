"""Tandem RL: GRPO on rollouts that a trainable senior and a frozen junior write together.

The public names are listed in ``__init__.pyi``, for type checkers and for this module alike. Each is imported on first
use, so ``import tandemrl`` is cheap and loads neither torch nor transformers.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

_LINE = re.compile(r"^from (tandemrl\S+) import (\w+) as \2$", re.MULTILINE)
_MODULES = {name: module for module, name in _LINE.findall(Path(__file__).with_suffix(".pyi").read_text())}
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("tandemrl")
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module 'tandemrl' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
