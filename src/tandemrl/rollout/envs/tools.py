"""Tools, which are plain functions that authors call: how to describe them, check a call, and run it."""

import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
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
        signature, hints = inspect.signature(tool), get_type_hints(tool)
        parameters = [each for each in signature.parameters.values() if each.name not in FILLED_IN]
        shown.__name__, shown.__doc__ = tool.__name__, inspect.getdoc(tool)
        shown.__annotations__ = {each.name: hints[each.name] for each in parameters if each.name in hints}
        setattr(shown, "__signature__", inspect.Signature(parameters))  # noqa: B010 - mypy knows no such attribute
        return get_json_schema(shown)
    except Exception as error:  # a private exception of transformers, or whatever a type hint raises
        fix = "give every parameter a type hint, and say what it is in the docstring's `Args:`"
        raise ConfigError(f"tool {getattr(tool, '__name__', tool)}: {error}; {fix}") from error


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
    parameters = inspect.signature(tool).parameters
    state = copy.deepcopy(state) if "state" in parameters else state
    given = {name: value for name, value in (("row", row), ("state", state)) if name in parameters}
    result = tool(**arguments, **given)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False), state


# --------------------------------------------------------------------------------------------------------------------


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
        kinds = schema.get("prefixItems", [schema.get("items", {})] * len(value))
        if len(kinds) != len(value):
            return f"array of {len(kinds)}"
        inside, of = "array whose items are", zip(value, kinds, strict=True)
    elif isinstance(value, dict) and "additionalProperties" in schema:
        inside, of = "object whose values are", zip(value.values(), repeat(schema["additionalProperties"]))
    else:
        return None
    return next((f"{inside} {fault}" for item, kind in of if (fault := _value_fault(item, kind))), None)
