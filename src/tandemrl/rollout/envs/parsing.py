"""Parses what an author wrote in a turn to a message. Parsing is fast and raises no error, whatever the text is."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from tandemrl.messages import Message
from tandemrl.rollout.envs.tools import Schema, call_fault

CALL, END_OF_CALL = "<tool_call>", "</tool_call>"
THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
MAX_DEPTH = 32
"""How deep objects and arrays may be nested in the arguments of a call."""
MAX_CALLS = 64
"""How many calls a turn may make."""
_JSON, _SPACES = json.JSONDecoder(), re.compile(r"\s*")


def parse_turn(text: str, schemas: Mapping[str, Schema], tokenizer: Any = None, prefix: str = "") -> Message:
    """Parse the text of a turn to a message of the role ``assistant``.

    A tokenizer with a response template of its own parses the turn. Without one, calls are expected in the Hermes
    format, ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``.

    Args:
        text: what the author wrote, without the end of the turn.
        schemas: the schemas of the tools, by name. Without any, the whole text is content.
        tokenizer: the tokenizer, which may have a response template.
        prefix: what the chat template wrote in front of the turn, where a thought may begin.

    Returns:
        The message. It has ``content``, and if there are any, ``reasoning_content``, the ``tool_calls`` that can be
        made, and ``invalid_calls``, which tell the author why other calls cannot be made.
    """
    if not schemas:  # nobody was told of calls: what looks like one is text
        return {"role": "assistant", "content": text.strip()}
    if getattr(tokenizer, "response_template", None) is not None:
        return checked_turn(_by_template(text, list(schemas.values()), tokenizer, prefix), schemas)
    return checked_turn(_hermes(text, prefix), schemas)


def checked_turn(written: Mapping[str, Any], schemas: Mapping[str, Schema]) -> Message:
    """Sort the calls of a parsed message, which may be malformed, into ``tool_calls`` and ``invalid_calls``.

    See `parse_turn` for the message that this returns.
    """
    message = dict(written)
    calls, faults = [], []
    for call in message.pop("tool_calls", ()):
        if isinstance(call, _Fault):
            faults.append(str(call))
            continue
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            faults.append('a call is {"name": the tool, "arguments": {…}}')
            continue
        name, arguments = function["name"], function.get("arguments", {})
        if fault := _json_fault(arguments) or call_fault(name, arguments, schemas):
            faults.append(fault)
        else:
            calls.append({"type": "function", "function": {"name": name, "arguments": dict(arguments)}})
    if calls:
        message["tool_calls"] = calls
    if faults:
        message["invalid_calls"] = faults
    return message


class _Fault(str):
    """What is wrong with a call that cannot be parsed. It takes the place of the call."""


def _hermes(text: str, prefix: str) -> dict[str, Any]:
    """Parse a turn in the Hermes format.

    Calls inside a thought at the start of the turn are not made. A thought that does not end takes up the whole turn.
    """
    thinks = text.lstrip().startswith(THOUGHT) or prefix.rstrip().endswith(THOUGHT)
    thought, _, rest = text.partition(END_OF_THOUGHT) if thinks else ("", "", text)
    said, calls, here = [], list[Any](), 0
    while (start := rest.find(CALL, here)) >= 0:
        said.append(rest[here:start])
        if len(calls) == MAX_CALLS:
            calls.append(_Fault(f"no more than {MAX_CALLS} calls can be made in a turn"))
            here = len(rest)
            break
        call, here = _hermes_call(rest, start + len(CALL))
        calls.append(call)
    message: dict[str, Any] = {"role": "assistant", "content": "".join([*said, rest[here:]]).strip()}
    if thought := thought.strip().removeprefix(THOUGHT).strip():
        message["reasoning_content"] = thought
    return message | {"tool_calls": calls}


def _hermes_call(text: str, start: int) -> tuple[Any, int]:
    """The call whose JSON begins at ``start``, and the index of the first character after the call."""
    try:
        call, end = _JSON.raw_decode(text, _after_spaces(text, start))  # strings in it may have the closing tag
    except RecursionError:
        fault = f"the arguments are nested more than {MAX_DEPTH} deep"
    except ValueError as error:
        fault = f"a call is not valid JSON: {error}"
    else:
        if text.startswith(END_OF_CALL, end := _after_spaces(text, end)):
            return {"type": "function", "function": call}, end + len(END_OF_CALL)
        fault = f"a call is one JSON object between {CALL} and {END_OF_CALL}"
    closed = text.find(END_OF_CALL, start)
    if closed < 0:
        return _Fault(f"a {CALL} is not closed by {END_OF_CALL}"), len(text)
    return _Fault(fault), closed + len(END_OF_CALL)


def _after_spaces(text: str, start: int) -> int:
    found = _SPACES.match(text, start)
    assert found is not None
    return found.end()


def _by_template(text: str, schemas: list[Schema], tokenizer: Any, prefix: str) -> dict[str, Any]:
    try:
        parsed = tokenizer.parse_response(text, prefix=prefix, tools=schemas or None)
        calls = parsed.get("tool_calls") or []
    except Exception as error:  # it is a program that came with a model
        fault = _Fault(f"a call cannot be read: {error}"[:200])
        return {"role": "assistant", "content": text, "tool_calls": [fault]}
    kept = {key: parsed[key] for key in ("content", "reasoning_content") if isinstance(parsed.get(key), str)}
    return {"role": "assistant", "content": ""} | kept | {"tool_calls": calls if isinstance(calls, list) else [calls]}


def _json_fault(value: Any, depth: int = 0) -> str | None:
    """Why a parsed value cannot be written as JSON and read again, or None if it can.

    Python's parser accepts more than valid JSON.
    """
    if depth > MAX_DEPTH:
        return f"the arguments are nested more than {MAX_DEPTH} deep"
    if isinstance(value, str):
        return None if value.isascii() or _encodable(value) else "the arguments have half of a surrogate pair"
    if isinstance(value, float):
        return None if math.isfinite(value) else "the arguments have a number that is not finite"
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return next((fault for each in value if (fault := _json_fault(each, depth + 1))), None)
    return None


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
