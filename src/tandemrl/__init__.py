"""Tandem RL: GRPO on rollouts that a trainable senior and a frozen junior write together.

The public names are listed in ``__init__.pyi``, for type checkers and for this module alike. Each is imported on first
use, so ``import tandemrl`` is cheap and loads neither torch nor transformers.
"""

from typing import Any

from tandemrl.lazy import exports as _exports

_MODULES, _get = _exports(__name__, __file__)
__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name != "__version__":
        return _get(name)
    from importlib.metadata import version

    return version("tandemrl")


def __dir__() -> list[str]:
    return sorted(__all__)
