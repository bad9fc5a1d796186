"""Parses what an author wrote in a turn to a message. Parsing is fast and raises no error, whatever the text is."""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from tandemrl.data.controls import CALL, END_OF_CALL, END_OF_THOUGHT, THOUGHT
from tandemrl.data.messages import Message
from tandemrl.files import each_key_once
from tandemrl.rollout.envs.environment import Schema, call_fault

MAX_DEPTH = 32
"""How deep objects and arrays may be nested in the arguments of a call."""
MAX_CALLS = 64
"""How many calls a turn may make."""
CallFormat = Literal["hermes", "json"]
"""How calls are written.

hermes: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Qwen's templates write them. json: the bare object
``{"name": …, "parameters": {…}}``, as Llama's do.
"""
CALL_FORMATS: tuple[CallFormat, ...] = get_args(CallFormat)


_JSON = json.JSONDecoder(object_pairs_hook=each_key_once)
_BEGIN = {
    "hermes": re.compile(rf"{CALL}\s*(?P<call>)"),
    "json": re.compile(r'(?:<\|python_tag\|>\s*)?(?P<call>{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:)'),
}
"""Where a call begins. Llama's models may write their tag of tools in front, and a type that nobody asked for."""
_END = {"hermes": re.compile(rf"\s*{END_OF_CALL}"), "json": re.compile(r"\s*;?\s*")}
"""What follows the JSON of a call."""


def call_format_of(chat_template: str) -> CallFormat | None:
    """How a chat template writes tool calls; None if it knows no tools. Llama's writes bare calls with parameters."""
    bare = '"parameters": ' in chat_template and "<tool_call>" not in chat_template
    return None if re.search(r"\btools\b", chat_template) is None else "json" if bare else "hermes"


def parse_turn(
    text: str,
    schemas: Mapping[str, Schema],
    tokenizer: Any = None,
    prefix: str = "",
    calls: CallFormat = "hermes",
) -> Message:
    """Parse the text of a turn to a message of the role ``assistant``.

    A tokenizer with a response template of its own parses the turn. Without one, calls are expected in the format
    ``calls``.

    Args:
        text: what the author wrote, without the end of the turn.
        schemas: the schemas of the tools, by name. Without any, the whole text is content.
        tokenizer: the tokenizer, which may have a response template.
        prefix: what the chat template wrote in front of the turn, where a thought may begin.

    Returns:
        The message. It has ``content``, and if there are any, ``reasoning_content``, the ``tool_calls`` that can be
        made, and ``invalid_calls``, which tell the author why other calls cannot be made. Where one of these stands
        before a call that can be made, ``invalid_after`` says for each how many such calls stand before it.
    """
    if not schemas:  # nobody was told of calls: what looks like one is text
        return {"role": "assistant", "content": text.strip()}
    if getattr(tokenizer, "response_template", None) is not None:
        return checked_turn(_by_template(text, list(schemas.values()), tokenizer, prefix), schemas)
    return checked_turn(_written(text, prefix, calls), schemas)


def checked_turn(written: Mapping[str, Any], schemas: Mapping[str, Schema]) -> Message:
    """Sort the calls of a parsed message, which may be malformed, into ``tool_calls`` and ``invalid_calls``.

    See `parse_turn` for the message that this returns.
    """
    message = dict(written)
    calls, faults = list[Message](), list[tuple[str, int]]()
    for call in message.pop("tool_calls", ()):
        if fault := _call_fault(call, schemas):
            faults.append((fault, len(calls)))
        else:
            name, arguments = call["function"]["name"], call["function"].get("arguments", {})
            calls.append({"type": "function", "function": {"name": name, "arguments": dict(arguments)}})
    if calls:
        message["tool_calls"] = calls
    if faults:
        message["invalid_calls"], after = map(list, zip(*faults, strict=True))
        message |= {"invalid_after": after} if after[0] < len(calls) else {}
    return message


def _call_fault(call: Any, schemas: Mapping[str, Schema]) -> str | None:
    """Why a call cannot be made, or None."""
    if isinstance(call, _Fault):
        return str(call)
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return 'a call is {"name": the tool, "arguments": {…}}'
    arguments = function.get("arguments", {})
    if other := _other_key(function, "arguments"):
        return f'a call is {{"name": the tool, "arguments": {{…}}}}, without the key {other!r:.100}'
    return _json_fault(arguments) or call_fault(function["name"], arguments, schemas)


def _other_key(call: Mapping[str, Any], under: str) -> str | None:
    """A key of a call beside its name and its arguments, which might be meant as an argument; or None."""
    known = {"name", under} | ({"id"} if under in call else set())  # some models number their calls
    return next((key for key in call if key not in known and (key, call[key]) != ("type", "function")), None)


class _Fault(str):
    """What is wrong with a call that cannot be parsed. It takes the place of the call."""


def _written(text: str, prefix: str, calls: CallFormat) -> dict[str, Any]:
    """Parse a turn in one of the formats of calls.

    Calls inside a thought at the start of the turn are not made. A thought that does not end takes up the whole turn.
    Of bare calls, several may have ``;`` between them. An object with a name but without parameters is no call, but
    part of the content. What cannot be read takes up the rest of the turn.
    """
    thought, rest = _after_thought(text, prefix)
    said, found, here, seen = [], list[Any](), 0, 0
    while at := _BEGIN[calls].search(rest, seen):
        if len(found) == MAX_CALLS:
            call, seen = _Fault(f"no more than {MAX_CALLS} calls can be made in a turn"), len(rest)
        else:
            call, seen = _read_call(rest, at.start("call"), calls)
        if call is not None:
            said.append(rest[here : at.start()])
            found.append(call)
            here = seen
    return thought | {"content": "".join([*said, rest[here:]]).strip(), "tool_calls": found}


def _read_call(text: str, start: int, calls: CallFormat) -> tuple[Any, int]:
    """The call whose JSON begins at ``start``, and the index of the first character after it; None if it is no call."""
    bare = calls == "json"
    try:
        written, end = _JSON.raw_decode(text, start)  # strings in it may have the closing tag
        if bare and not {"parameters", "arguments"} & written.keys():
            return None, end
        if after := _END[calls].match(text, end):
            return (_bare(written) if bare else {"type": "function", "function": written}), after.end()
        fault = f"a call is one JSON object between {CALL} and {END_OF_CALL}"
    except RecursionError:
        fault = f"the arguments are nested more than {MAX_DEPTH} deep"
    except ValueError as error:
        fault = f"a call is not valid JSON: {error}"
    closed = -1 if bare else text.find(END_OF_CALL, start)
    if closed < 0:
        return _Fault(fault if bare else f"a {CALL} is not closed by {END_OF_CALL}"), len(text)
    return _Fault(fault), closed + len(END_OF_CALL)


def _bare(written: Mapping[str, Any]) -> Any:
    """The call that a bare object is."""
    under = "parameters" if "parameters" in written else "arguments"
    if not isinstance(written["name"], str):
        return _Fault('a call is {"name": the tool, "parameters": {…}}')
    if other := _other_key(written, under):
        return _Fault(f'a call is {{"name": the tool, "parameters": {{…}}}}, without the key {other!r:.100}')
    return {"type": "function", "function": {"name": written["name"], "arguments": written[under]}}


def _after_thought(text: str, prefix: str) -> tuple[dict[str, Any], str]:
    """A message with the thought that a turn begins with, if there is one, and the text after it."""
    thinks = text.lstrip().startswith(THOUGHT) or prefix.rstrip().endswith(THOUGHT)
    thought, _, rest = text.partition(END_OF_THOUGHT) if thinks else ("", "", text)
    thought = thought.strip().removeprefix(THOUGHT).strip()
    return {"role": "assistant", "content": ""} | ({"reasoning_content": thought} if thought else {}), rest


def _by_template(text: str, schemas: list[Schema], tokenizer: Any, prefix: str) -> dict[str, Any]:
    try:
        parsed = tokenizer.parse_response(text, prefix=prefix, tools=schemas or None)
        calls = parsed.get("tool_calls") or []
    except Exception as error:  # it is a program that came with a model
        fault = _Fault(f"a call cannot be read: {error}"[:200])
        return {"role": "assistant", "content": text, "tool_calls": [fault]}
    kept = {key: parsed[key] for key in ("content", "reasoning_content") if isinstance(parsed.get(key), str)}
    return {"role": "assistant", "content": ""} | kept | {"tool_calls": calls if isinstance(calls, list) else [calls]}


def _json_fault(value: Any) -> str | None:
    """Why a parsed value cannot be written as JSON and read again, or None if it can.

    Python's parser accepts more than valid JSON.
    """
    try:
        if _depth(value) > MAX_DEPTH:
            raise RecursionError
        json.dumps(value, ensure_ascii=False, allow_nan=False, default=str).encode()
    except RecursionError:
        return f"the arguments are nested more than {MAX_DEPTH} deep"
    except UnicodeEncodeError:
        return "the arguments have half of a surrogate pair"
    except ValueError:
        return "the arguments have a number that is not finite"
    return None


def _depth(value: Any) -> int:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(_depth, inside), default=0)
