"""The fields of the requests that our web servers get: what their values may be."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from tandemrl.config import SelectionConfig


class Refused(ValueError):
    """A request asks for something that cannot be done. The client gets the message."""


class Kind(NamedTuple):
    """What a field may be: a test of its value, and how the message says it."""

    holds: Callable[[Any], bool]
    allowed: str


def whole(low: int, high: int) -> Kind:
    """Whole numbers. "3" and true are none."""
    return Kind(lambda value: type(value) is int and low <= value <= high, f"a whole number from {low} to {high}")


def one_of(*allowed: str) -> Kind:
    return Kind(lambda value: value in allowed, f"one of {', '.join(allowed)}")


def list_of(kind: Kind) -> Kind:
    return Kind(lambda value: isinstance(value, list) and all(map(kind.holds, value)), f"a list, each {kind.allowed}")


FLAG = Kind(lambda value: type(value) is bool, "true or false")
NUMBER = Kind(lambda value: type(value) in (int, float) and abs(value) < 1e300, "a number")
OBJECT = Kind(lambda value: isinstance(value, dict), "an object")
AUTHOR = one_of("senior", "junior")
SELECTION = {
    "prob_senior": NUMBER,
    "max_gap_tokens": whole(1, 2**31),  # workers compute with 64 bits and die of more
    "chunk_size": whole(1, 2**31),
    "first": AUTHOR,
}
"""What a request may say of who writes, beside the strategy. The strategies themselves know which values they take."""


def stated(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are there: null stands for one that is missing."""
    return {name: value for name, value in values.items() if value is not None}


def check(values: Mapping[str, Any], kinds: Mapping[str, Kind], where: str = "", *, only: bool = False) -> None:
    """Refuse fields that are of another kind. Those that are missing or null are not there.

    Args:
        where: what stands before the names of the fields.
        only: refuse other fields, too.

    Raises:
        Refused: names the field.
    """
    if unknown := [name for name in values if only and name not in kinds]:
        raise Refused(f"{where}{unknown[0]}: unknown field; known: {', '.join(kinds)}")
    for name, kind in kinds.items():
        if (value := values.get(name)) is not None and not kind.holds(value):
            raise Refused(f"{where}{name}: expected {kind.allowed}, got {json.dumps(value):.200}")


def with_selected(selection: SelectionConfig, given: Mapping[str, Any]) -> SelectionConfig:
    """A selection with the values that a request gives."""
    floats = {name: float(value) for name, value in given.items() if name == "prob_senior"}
    return replace(selection, **{**given, **floats})
