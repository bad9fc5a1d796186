"""What the settings of all rooms are made of: ranges, the names of components, and the error. No torch.

A section is a frozen dataclass with defaults. The string under a field explains it, its type says what values it takes,
and ``Allowed`` their range.
"""

import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple


class ConfigError(ValueError):
    """A key or value is not allowed. The message names the key, the allowed values and, if one is close, what was
    meant."""


class Allowed(NamedTuple):
    """Which values a field takes, in words and as a test. null is always allowed, without a test."""

    words: str
    holds: Callable[[Any], bool]
    names: tuple[tuple[str, str], ...] = ()
    """The library's components that the field can name, each with its explanation."""


def at_home(path: Any) -> Any:
    """A path, or several, with the home folder in place of a ``~`` or ``~user`` that begins it."""
    if isinstance(path, tuple | list):
        return tuple(map(at_home, path))
    return None if path is None else os.path.expanduser(path)


def is_own(name: str) -> bool:
    """Whether a component is the user's own, ``module:name``, and not one of the library's."""
    return ":" in name


def component(kinds: Mapping[str, Any]) -> Allowed:
    """The names that a key takes which names a component: those of a registry, or ``module:name``."""
    names = tuple((name, kind.says) for name, kind in kinds.items())
    return Allowed(f"one of {', '.join(kinds)}, or module:name", lambda name: name in kinds or is_own(name), names)


PositiveInt = Annotated[int, Allowed("at least 1", lambda n: n >= 1)]
NonNegativeInt = Annotated[int, Allowed("0 or positive", lambda n: n >= 0)]
DraftTokens = Annotated[int | str, Allowed("auto, 0 or positive", lambda n: n == "auto" or (type(n) is int and n >= 0))]
HostEvery = Annotated[int | str, Allowed("auto, or at least 1", lambda n: n == "auto" or (type(n) is int and n >= 1))]
PositiveFloat = Annotated[float, Allowed("positive", lambda x: x > 0)]
NonNegativeFloat = Annotated[float, Allowed("0 or positive", lambda x: x >= 0)]
Fraction = Annotated[float, Allowed("in [0, 1]", lambda x: 0 <= x <= 1)]
PositiveFraction = Annotated[float, Allowed("in (0, 1]", lambda x: 0 < x <= 1)]
FailureRate = Annotated[float, Allowed("in [0, 1)", lambda x: 0 <= x < 1)]
Address = Annotated[
    str, Allowed("an address such as http://localhost:8000/v1", lambda url: url.startswith(("http://", "https://")))
]
