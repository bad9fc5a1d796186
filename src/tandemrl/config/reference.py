"""The keys of a config one by one: their types in words, their ranges, and the strings under their fields."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from tandemrl.config.fields import Allowed
from tandemrl.config.schema import FunctionRecord


class Leaf(NamedTuple):
    """A key of a config that is not a section. ``allowed`` is its range, or None if every value of its type will do."""

    key: str
    section: type
    type: Any
    value: Any
    allowed: Allowed | None


def leaves(section: Any, prefix: str = "") -> Iterator[Leaf]:
    """Yield every leaf of a config, in the order of ``config.yaml``."""
    for name, annotation in get_type_hints(type(section), include_extras=True).items():
        value = getattr(section, name)
        if is_dataclass(annotation):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            parts = (annotation, *get_args(annotation))
            allowed = next((each for part in parts for each in getattr(part, "__metadata__", ())), None)
            yield Leaf(f"{prefix}{name}", type(section), annotation, value, allowed)


_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    NoneType: "null",
    dict[str, str]: "a mapping such as {a: b}",
    dict[str, float]: "a mapping such as {a: 1}",
    dict[str, Any]: "a mapping such as {a: true}",
    dict[str, dict[str, Any]]: "a mapping such as {a: {b: 1}}",
    FunctionRecord: "what train wrote",
}


def expected(annotation: Any) -> str:
    """The values that a field of this type takes, in words, or "" if there are no words for them."""
    kinds, origin = get_args(annotation), get_origin(annotation)
    if origin is Annotated:
        return expected(kinds[0])
    if origin is Literal:
        return f"one of {', '.join(kinds)}"
    if origin in (Union, UnionType):
        return " or ".join(filter(None, map(expected, kinds)))
    if origin is tuple:
        return f"a list such as [a, b], each {expected(kinds[0])}"
    return _KINDS.get(annotation, "")


def explanation(leaf: Leaf) -> str:
    """The string under a key's field, or "" if there is none; and what each component is that it can name."""
    text = _explanations(leaf.section).get(leaf.key.rpartition(".")[2], "")
    names = "; ".join(f"{name}: {says}" for name, says in (leaf.allowed.names if leaf.allowed else ()))
    return f"{text} {names}." if names else text


@cache
def _explanations(section: type) -> dict[str, str]:
    """The explanations by field, read from the source, since Python keeps no docstrings of fields."""
    [tree] = ast.parse(inspect.getsource(section)).body
    assert isinstance(tree, ast.ClassDef)
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
