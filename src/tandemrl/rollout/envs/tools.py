"""Tools, which are plain functions that authors call: how to describe them, check a call, and run it."""

import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, get_type_hints

from tandemrl.config import ConfigError
from tandemrl.data.rows import Row

FILLED_IN = ("row", "state")
"""Names of the parameters that are filled in and not shown to the authors: the row of the episode, and its state."""

Tool = Callable[..., Any]
"""A function with type hints and a Google docstring. What it returns becomes text: a string as it is, anything else as
JSON. If it changes the ``state`` that it is given, the state of the episode changes, unless it raises."""

Schema = Mapping[str, Any]
"""The schema of a tool in the form that chat templates take:
``{"type": "function", "function": {"name", "description", "parameters"}}``."""


def schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool, made by ``transformers.utils.get_json_schema``.

    It says nothing about what the tool returns, since OpenAI's format has no place for it.

    Raises:
        ConfigError: a parameter has no type hint, or is missing in the docstring's ``Args:``; the message names the
            tool and the parameter.
    """
    from transformers.utils import get_json_schema  # it imports torch, which a process that runs tools can do without

    def shown() -> None: ...

    try:
        name = tool.__name__
        signature, hints = inspect.signature(tool), get_type_hints(tool)
        parameters = [each for each in signature.parameters.values() if each.name not in FILLED_IN]
        shown.__name__, shown.__doc__ = name, inspect.getdoc(tool)
        shown.__annotations__ = {each.name: hints[each.name] for each in parameters if each.name in hints}
        setattr(shown, "__signature__", inspect.Signature(parameters))  # noqa: B010 - mypy knows no such attribute
        return get_json_schema(shown)
    except Exception as error:  # a private exception of transformers, or whatever a type hint raises
        raise ConfigError(
            f"tool {getattr(tool, '__name__', tool)}: {error}. A tool is a function with a type hint for every "
            "parameter, and a docstring with an `Args:` section that says what each of them is"
        ) from error


def call_fault(name: Any, arguments: Any, schemas: Mapping[str, Schema]) -> str | None:
    """What is wrong with a call, in words for its author, or None if it can be made.

    Args:
        name: the name of the tool that is called.
        arguments: the arguments of the call.
        schemas: the schemas of the tools, by name.
    """
    if name not in schemas:
        return f"there is no tool {name!r:.100}; known: {', '.join(schemas) or 'none'}"
    if not isinstance(arguments, Mapping):
        return f"the arguments of {name} must be an object"
    parameters = schemas[name]["function"]["parameters"]
    known = parameters["properties"]
    if missing := [each for each in parameters.get("required", ()) if each not in arguments]:
        return f"{name} needs the argument {missing[0]!r}"
    for key, value in arguments.items():
        if key not in known:
            return f"{name} has no argument {key!r:.100}; known: {', '.join(known) or 'none'}"
        if fault := _value_fault(value, known[key]):
            return f"argument {key!r} of {name} must be {fault}"
    return None


def sample(schema: Schema) -> Any:
    """An example value for a JSON schema that ``get_json_schema`` writes. An object has all of its properties."""
    if options := schema.get("anyOf"):
        return sample(options[0])
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kind = kind if isinstance(kind, str) else kind[0]
    if kind == "object":
        return {name: sample(each) for name, each in schema.get("properties", {}).items()}
    if kind == "array":
        return [sample(each) for each in schema.get("prefixItems", [schema.get("items", {})])]
    return {"integer": 7, "number": 0.5, "boolean": True, "null": None}.get(kind, "some text")


def call_tool(tool: Tool, arguments: Mapping[str, Any], row: Row, state: Mapping[str, Any]) -> tuple[str, Any]:
    """Run a tool, and return its result as text and the state after it. The given ``state`` is not changed.

    Raises:
        Exception: whatever the tool raises, or a TypeError if its result is not a JSON value.
    """
    filled = _filled_in(tool)
    given: dict[str, Any] = {"row": row} if "row" in filled else {}
    if "state" in filled:
        given["state"] = state = copy.deepcopy(state)
    result = tool(**arguments, **given)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False), state


# --------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _filled_in(tool: Tool) -> frozenset[str]:
    return frozenset(FILLED_IN).intersection(inspect.signature(tool).parameters)


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def _value_fault(value: Any, schema: Mapping[str, Any]) -> str | None:
    """What a value would have to be to match a JSON schema that ``get_json_schema`` writes, or None if it matches."""
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema:
        faults = [_value_fault(value, option) for option in schema["anyOf"]]
        return None if None in faults else " or ".join(fault for fault in faults if fault)
    if "enum" in schema and value not in schema["enum"]:
        return f"one of {json.dumps(schema['enum'], ensure_ascii=False)}"
    if "type" in schema:
        names: Sequence[str] = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        allowed = tuple(kind for name in names for kind in _TYPES.get(name, (object,)))
        if not isinstance(value, allowed) or (isinstance(value, bool) and not {bool, object}.intersection(allowed)):
            return " or ".join(names)
    if isinstance(value, list):
        return _items_fault(value, schema)
    if isinstance(value, dict) and "additionalProperties" in schema:
        faults = [_value_fault(each, schema["additionalProperties"]) for each in value.values()]
        return next((f"object whose values are {fault}" for fault in faults if fault), None)
    return None


def _items_fault(items: list[Any], schema: Mapping[str, Any]) -> str | None:
    kinds = schema.get("prefixItems")
    if kinds is not None and len(kinds) != len(items):
        return f"array of {len(kinds)}"
    kinds = kinds if kinds is not None else [schema.get("items", {})] * len(items)
    faults = [_value_fault(item, kind) for item, kind in zip(items, kinds, strict=True)]
    return next((f"array whose items are {fault}" for fault in faults if fault), None)
