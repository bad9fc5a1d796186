"""Values as they are written in YAML and on the command line, until the type of their key says what they are.

YAML alone reads 0123 as 83 and yes as true. Here a scalar stays the text that was written (``Written``) until
``typed`` reads it as what its key takes.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml

from tandemrl.config.fields import ConfigError


class Written(str):
    """A scalar as it is written. plain: without quotes. commented: a # without a space after it ends it."""

    plain: bool
    commented: bool

    def __new__(cls, text: str, *, plain: bool, commented: bool = False) -> "Written":
        made = super().__new__(cls, text)
        made.plain, made.commented = plain, commented
        return made

    @property
    def null(self) -> bool:
        return self.plain and self in ("", "~", "null", "Null", "NULL")


Tree = Any
"""What a YAML text says: dicts and lists of `Written`, keys included."""


def read(text: str | bytes, where: str) -> Tree:
    """The tree of a YAML text, or of the bytes of a file.

    Raises:
        ConfigError: it is not YAML, or has a key twice in one mapping or a tag; the message begins with ``where``.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return Written("", plain=True) if node is None else _tree(node)
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark
        line = f", line {at.line + 1}" if at is not None and isinstance(text, bytes) else ""
        fix = "compare its indentation, brackets and quotes with the lines above; a text may need quotes"
        raise ConfigError(f"{where}{line}: not readable as YAML: {error.problem}; {fix}") from None
    except (yaml.YAMLError, RecursionError) as error:
        at = getattr(error, "position", None)
        line = f", line {text[:at].count(10) + 1}" if at is not None and isinstance(text, bytes) else ""
        why = getattr(error, "reason", None) or error
        fix = "save it as UTF-8, without control characters"
        raise ConfigError(f"{where}{line}: not readable as YAML in UTF-8: {why}; {fix}") from None


def _tree(node: yaml.Node) -> Tree:
    if not node.tag.startswith("tag:yaml.org,2002:"):
        raise yaml.MarkedYAMLError(problem=f"{node.tag} is a tag here", problem_mark=node.start_mark)
    if isinstance(node, yaml.ScalarNode):
        end = node.end_mark
        commented = node.style is None and re.match(r"[ \t]+#[^\s]", end.buffer[end.pointer :]) is not None
        return Written(node.value, plain=node.style is None, commented=commented)
    if isinstance(node, yaml.SequenceNode):
        return [_tree(each) for each in node.value]
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.value in seen:
            problem = f"the key {key.value} stands twice" if isinstance(key, yaml.ScalarNode) else "a key is no text"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        seen.add(key.value)
    yaml.constructor.SafeConstructor().flatten_mapping(node)  # `<<: *other`
    return {Written(key.value, plain=key.style is None): _tree(value) for key, value in node.value}


def tree_of(value: Any) -> Tree:
    """The tree of plain values, or of an OmegaConf config, whose interpolations are resolved."""
    if type(value).__module__.startswith("omegaconf."):
        from omegaconf import OmegaConf

        value = OmegaConf.to_container(value, resolve=True)  # which leaves ??? as it is
    if isinstance(value, Mapping):
        return {Written(str(key), plain=False): tree_of(each) for key, each in value.items()}
    if isinstance(value, str):
        return Written(value, plain=False)
    if isinstance(value, Sequence):
        return [tree_of(each) for each in value]
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return Written(text, plain=True)


def typed(value: Tree, kind: Any) -> Any:
    """A value of a tree as the type of its key reads it.

    Raises:
        ValueError: it is none of that type.
        ConfigError: the key takes anything, and the value could be read in two ways.
    """
    origin, kinds = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return typed(value, kinds[0])
    if kind is Any:
        return free(value)
    if origin in (Union, UnionType):
        if NoneType in kinds and isinstance(value, Written) and value.null:
            return None
        for each in sorted(set(kinds) - {NoneType}, key=lambda each: each is str):  # a text last
            try:
                return typed(value, each)
            except ValueError as error:
                refused = error
        raise refused
    if origin is tuple and kinds[0] is str and isinstance(value, Written) and not value.null:
        value = [value]  # one text may be written without the brackets
    if origin is tuple and isinstance(value, list):
        return tuple(typed(each, kinds[0]) for each in value)
    if origin is dict and isinstance(value, dict):
        return {str(key): typed(each, kinds[1]) for key, each in value.items()}
    if not isinstance(value, Written) or value.null:
        raise ValueError
    if origin is Literal and value in kinds:
        return str(value)
    if kind is str and not value.commented:
        return str(value)
    return {bool: _boolean, int: _whole, float: _number}.get(kind, _none)(value)


def _none(text: str) -> Any:
    raise ValueError


def _boolean(text: str) -> bool:
    if text.lower() not in (*(true := ("true", "yes", "on", "y", "1")), "false", "no", "off", "n", "0"):
        raise ValueError
    return text.lower() in true


def _whole(text: str) -> int:
    return int(text, 0)  # refuses 0123, which is 83 to some and 123 to others


def _number(text: str) -> float:
    if re.fullmatch(r"\s*[+-]?0[0-9_]+\s*", text):  # as in `_whole`
        raise ValueError
    return float(text)


_TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_DECIMAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")


def free(value: Tree) -> Any:
    """A value whose key takes anything: null, true, false and numbers as YAML 1.2 has them, and texts.

    Raises:
        ConfigError: YAML 1.1 reads it as a number or a truth value, and 1.2 as another, or as a text.
    """
    if isinstance(value, list):
        return [free(each) for each in value]
    if isinstance(value, dict):
        return {free(key): free(each) for key, each in value.items()}
    if not value.plain:
        return str(value)
    if value.null:
        return None
    if value in _TRUTHS:
        return _TRUTHS[value]
    if number := int if _WHOLE.fullmatch(value) else float if _DECIMAL.fullmatch(value) else None:
        return number(value)
    if _resolver().resolve(yaml.ScalarNode, str(value), (True, False)).rpartition(":")[2] in ("bool", "int", "float"):
        raise ConfigError(f"{value} can be read in two ways; put a text in quotes, or write true, false or digits only")
    if value.commented:
        raise ConfigError(f"{value} #…: a # begins a comment; put the text in quotes, or a space after the #")
    return str(value)


@cache
def _resolver() -> Any:
    return yaml.resolver.Resolver()


def written(tree: Any) -> str:
    """Plain values as YAML that ``read`` and ``typed`` read as the same values, as does any other reader."""
    style = {"allow_unicode": True, "width": float("inf"), "sort_keys": False, "default_flow_style": False}
    return str(yaml.dump(tree, Dumper=_Dumper, **style))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # no types
    def ignore_aliases(self, data: Any) -> bool:
        return True

    def text(self, value: str) -> yaml.Node:
        """A text, in quotes if it would be read as something else."""
        try:
            quoted = value == "???" or not isinstance(free(Written(value, plain=True)), str)
        except ConfigError:
            quoted = True
        style = '"' if not value.isprintable() else "'" if quoted else None
        return self.represent_scalar("tag:yaml.org,2002:str", str(value), style=style)


_Dumper.add_representer(str, _Dumper.text)
