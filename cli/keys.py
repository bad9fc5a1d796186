"""Config keys as arguments of a command."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from tandemrl.config import Config


def keys(about: str) -> Any:
    """The argument of a command that takes ``KEY=VALUE`` of the config."""
    return typer.Argument(metavar="[KEY=VALUE]...", help=about)


def config_of(overrides: Sequence[str] | None, read: tuple[str, ...], before: Sequence[str] = ()) -> "Config":
    """The config of a command that reads some keys only, with what comes before the user's assignments.

    Raises:
        ConfigError: another key is assigned.
    """
    from tandemrl.config import ConfigError, load

    if unread := next((each for each in overrides or () if not each.startswith(read)), None):
        names = ", ".join(f"{name}*" if name.endswith(".") else name for name in read)
        raise ConfigError(f"{unread!r} has no effect here: the keys that are read are {names}")
    return load(overrides=[*before, *(overrides or ())])
