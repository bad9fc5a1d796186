"""Rows: one schema for every data set, whatever file or hub it comes from. The module does not import torch."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

from tandemrl.data.controls import END_OF_THOUGHT, THOUGHT, Controls, controls_of
from tandemrl.data.messages import THOUGHTS, Message, text_of
from tandemrl.data.templates import DEFAULT_ARGUMENTS, template_of, template_variables

GSM8K = "openai/gsm8k"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""verl's GSM8K instruction, which follows the question and a space."""

RENDERED = "rendered"
"""The ``extra_info`` key of a row whose one message is the whole prompt with chat markup. It gets no chat template."""

SOLUTION = "answer"
"""The ``extra_info`` key of a worked solution, where verl's GSM8K has it. A warm start learns from it."""


class DataError(ValueError):
    """Data cannot be used. The message names the file, the line (counted from 1), the field, and the fix."""


@dataclass(frozen=True, slots=True)
class Row:
    """One problem.

    ``data_source`` or ``ability`` decides which scorer compares a response with ``ground_truth``. raw_ground_truth: the
    ground truth as the file has it, if that is a number or a structure rather than text.
    """

    example_id: str
    messages: tuple[Message, ...]
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, Any]
    ability: str = ""
    raw_ground_truth: Any = None

    def __getitem__(self, name: object) -> NoReturn:
        """Refuse ``row["name"]``, the way of other libraries, with what is written here."""
        raise TypeError(f"a row has attributes, not {name!r} as a key: row.ground_truth, row.extra_info['level']")


class Prompt(NamedTuple):
    """A row and the token ids of its prompt, with the chat template applied. junior: those of the prompt as a junior
    with a vocabulary and a chat template of its own reads it."""

    row: Row
    tokens: tuple[int, ...]
    junior: tuple[int, ...] = ()


def object_of(record: Any, where: str) -> Mapping[str, Any]:
    """A record that is a JSON object.

    Raises:
        DataError: it is something else; the message begins with ``where``.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: expected an object, found {type(record).__name__}")
    return record


def record_of(
    data_source: str, prompt: Sequence[Message], ability: str, truth: Any, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """A row in verl's schema, as it is stored: ``prompt`` has the messages, and ``truth`` is the ground truth."""
    return {
        "data_source": data_source,
        "prompt": prompt,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra,
    }


def record_of_row(row: Row) -> dict[str, Any]:
    """The record of a row of mathematics; see `record_of`."""
    prompt = [dict(message) for message in row.messages]
    return record_of(row.data_source, prompt, "math", row.ground_truth, dict(row.extra_info))


def encode_prompts(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    suffix: str = "",
    opening: Callable[[Row], Sequence[Message]] | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    template_arguments: Mapping[str, Any] = DEFAULT_ARGUMENTS,
    junior: Any = None,
) -> tuple[list[Prompt], int]:
    """The prompts of rows, and how many rows were dropped since they are longer than ``max_prompt_tokens``.

    The chat template is applied to every row that is not `RENDERED` already. What an environment says later becomes ids
    in ``rollout.envs.rendering``.

    Args:
        suffix: text to append to the last user message of every row, unless the message already ends with it. One space
            goes before it, unless it begins with white space.
        opening: gives the messages that an environment begins with. None means the row's own messages.
        tools: the schemas of the tools, for the chat template.
        template_arguments: further variables of the chat template (``data.template_arguments``).
        junior: the tokenizer of a junior with a vocabulary of its own. Its template gets the default arguments.

    Raises:
        ConfigError: the chat template does not read one of these variables.
        DataError: the tokenizer has no chat template, or lacks the chat markup of a rendered row; a row has no user
            message for the suffix; a rendered row would need a suffix or an opening, which it cannot have; or no row is
            left.
    """
    prompts = []
    for row in rows:
        read: Sequence[int] = ()
        if row.extra_info.get(RENDERED):
            refusals = {
                "the junior has another chat template": junior is not None,
                "an environment (rollout.environment) cannot begin with it": opening is not None,
                "data.prompt_suffix is not empty": bool(suffix),
            }
            tokens = _encode_rendered(row, tokenizer, refusals)
        else:
            messages = row.messages if opening is None else opening(row)
            asked = with_suffix(row, messages, suffix)
            tokens = chat_tokens(tokenizer, asked, f"row {row.example_id}", template_arguments, tools)
            if junior is not None:
                read = chat_tokens(junior, asked, f"row {row.example_id}", DEFAULT_ARGUMENTS, tools)
        if len(tokens) <= max_prompt_tokens:
            prompts.append(Prompt(row, tuple(tokens), tuple(read)))
    if rows and not prompts:
        raise DataError(
            f"all {len(rows)} prompts are longer than {max_prompt_tokens} tokens; raise data.max_prompt_tokens"
        )
    return prompts, len(rows) - len(prompts)


def chat_tokens(
    tokenizer: Any,
    messages: Sequence[Message],
    where: str,
    arguments: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    to_answer: bool = True,
    continued: bool | None = None,
) -> Sequence[int]:
    """The token ids of messages under the tokenizer's chat template, up to where the answer begins.

    Only the template writes control tokens: in contents, names, arguments of calls and tools they become text, as in
    what an environment says (``rollout.envs.rendering``). Everything else is tokenised as the template's whole text is.

    Args:
        where: whose messages they are, for an error.
        arguments: further variables of the template; see `template_variables`.
        tools: the schemas of the tools.
        to_answer: whether the beginning of an answer follows the messages.
        continued: whether the answer continues the last message. None: it does if that is of the assistant.

    Raises:
        ConfigError: the template does not read one of the arguments.
        DataError: there is no template, it fails, or something of the messages is not in what it writes. A template is
            a program that came with a model, so it may raise anything.
    """
    name = f"the chat template of tokenizer {getattr(tokenizer, 'name_or_path', '')!r}"
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; use an instruction-tuned "
            "model's folder, or set `chat_template` in its tokenizer_config.json"
        )
    if continued is None:
        continued = to_answer and bool(messages) and messages[-1].get("role") == "assistant"
    if continued and (messages[-1].get("tool_calls") or not str(messages[-1].get("content") or "").strip()):
        raise DataError(f"{where}: its last message, of the assistant, has no text to continue; leave it out")
    template = template_of(tokenizer, tools)
    variables = template_variables(tokenizer, arguments, tools)

    def render(chat: Sequence[Message], told: Sequence[Any]) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    [dict(message) for message in chat],
                    add_generation_prompt=to_answer and not continued,
                    continue_final_message=continued,
                    tokenize=False,
                    **variables,
                    **({"tools": list(told)} if told else {}),
                )
            )
        except Exception as error:
            raise DataError(f"{where}: {name} failed: {type(error).__name__}: {error}") from error

    def encode(text: str) -> Sequence[int]:
        # too long a prompt is ours to report
        ids: Sequence[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    plain = render(messages, tools)
    _check_shown(messages, plain, template, where, name)
    controls = controls_of(tokenizer, template)
    for role in {message["role"] for message in messages} - _USUAL:
        named = f"'{role}'" in template or f'"{role}"' in template
        if controls.occur(role) or (controls.may_join(role) and not named):
            raise DataError(f"{where}: the role {role!r} may become a control token; write one that {name} knows")
    texts = {*_texts([messages, tools])}
    if not any(controls.occur(text) or controls.may_join(text) for text in texts - _USUAL):
        return encode(plain)
    mark = chr(min({*range(0xE000, 0xF900)} - {*map(ord, plain.join(texts))}))

    def tokens(**how: bool) -> tuple[str, list[int]]:
        """What the template writes, and its ids if it is cut where the contents are."""
        pieces = render(*(_cut([*each], mark, controls, **how) for each in (messages, tools))).split(mark)
        return "".join(pieces), [token for piece in controls.apart(pieces, encode) for token in piece]

    said, ids = tokens()
    thoughts = said != plain  # the template looks for the thoughts of the assistant
    if thoughts:
        ids = tokens(thoughts=True)[1]
    apart = tokens(thoughts=thoughts, borders=True)[1]
    joined = sum(token in controls.ids for token in ids) > sum(token in controls.ids for token in apart)
    return apart if joined else ids


def gsm8k_row(question: str, answer: str, *, split: str, index: int) -> Row:
    """A GSM8K problem as a row; the ground truth is the number after ``####`` without commas.

    Raises:
        DataError: ``answer`` has no ``#### N``.
    """
    marked = re.search(r"#### (-?[0-9.,]+)", answer)
    if marked is None:
        raise DataError(f"no '#### N' in {answer[-80:]!r}")
    return Row(
        example_id=f"{GSM8K}/{split}/{index}",
        messages=({"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"},),
        data_source=GSM8K,
        ground_truth=marked.group(1).replace(",", ""),
        extra_info={"split": split, "index": index, "question": question, SOLUTION: answer},
        ability="math",
    )


def messages_of(prompt: Any, where: str, field: str = "prompt") -> tuple[Message, ...]:
    """A row's ``prompt`` as messages. A text becomes one user message, a content of text parts a text.

    Beside role and content, messages keep thoughts, the fields of a tool's message and the calls of tools. Arguments of
    calls that are JSON text are parsed.

    Raises:
        DataError: it is not a list of messages with a role and a content, holds more than text, is JSON text of a list,
            or a call names no function.
    """
    if isinstance(prompt, str) and prompt:
        if re.match(r"""\s*\[?\s*\{\s*["'](role|content|from|value|messages|conversations)["']\s*:""", prompt):
            raise DataError(f"{where}, field {field!r}: messages as JSON text; write the list of messages itself")
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, Sequence) or not prompt:
        raise DataError(
            f"{where}, field {field!r}: expected a non-empty string or a list of messages, found {prompt!r}"
        )
    return tuple(_message(message, f"{where}, field '{field}[{number}]") for number, message in enumerate(prompt))


# --------------------------------------------------------------------------------------------------------------------

_CHATML = "<|im_start|>"
_USUAL = {
    *("system", "developer", "user", "assistant", "tool", "role", "content", "name", "tool_calls", "id"),
    *("tool_call_id", "description", "parameters", "properties", "required", "items", "enum"),
    *("type", "function", "arguments", "object", "array", "string", "integer", "number", "boolean", "null"),
    *THOUGHTS,
}
"""Words of messages and schemas that templates look for: parts of control tokens they may be, such as <|user|>."""


def _texts(value: Any) -> Iterator[str]:
    """All texts of a JSON value, with the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield str(name)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _cut(value: Any, mark: str, controls: Controls, *, thoughts: bool = False, borders: bool = False) -> Any:
    """A JSON value in which a mark stands wherever its texts have to be cut so that no control token is in them.

    Args:
        thoughts: without the tags of the thought in a message of the assistant, which the template reads.
        borders: also around texts that may be one control token with what is beside them.
    """
    inner = partial(_cut, mark=mark, controls=controls, thoughts=thoughts, borders=borders)
    if isinstance(value, Mapping):
        cut = {inner(name): inner(each) for name, each in value.items()}
        text = value.get("content")
        if thoughts and value.get("role") == "assistant" and isinstance(text, str) and END_OF_THOUGHT in text:
            before, tag, after = text.rpartition(END_OF_THOUGHT)
            outside, begun, thought = before.partition(THOUGHT)
            cut["content"] = inner(outside) + begun + inner(thought) + tag + inner(after)
        return cut
    if isinstance(value, list | tuple):
        return [inner(each) for each in value]
    if not isinstance(value, str):
        return value
    splits = [0, *controls.splits(value), len(value)]
    border = mark if borders and value not in _USUAL and controls.may_join(value) else ""
    return border + mark.join(value[a:b] for a, b in pairwise(splits)) + border


def _check_shown(messages: Sequence[Message], text: str, template: str, where: str, name: str) -> None:
    """Check that what the messages say is in the text that the template made of them.

    Raises:
        DataError: it is not; the message names what is missing.
    """
    said: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        role, at = message.get("role"), f"{where}, message {number} (role {message.get('role')!r})"
        if unread := next((field for field in THOUGHTS if message.get(field) and field not in template), None):
            raise DataError(f"{at}: {name} reads no {unread}; leave it out")
        content = text_of(message) or ""
        parts = [content.rpartition(END_OF_THOUGHT)[2] if role == "assistant" else content]
        parts += [str(message.get("name") or "")] if role != "tool" else []
        parts += [call["function"]["name"] for call in message.get("tool_calls") or ()]
        said += [(at, part.strip()) for part in parts if part.strip()]
    whole = "\0".join(part for _, part in said)
    for at, part in dict.fromkeys(said):
        written = json.dumps(part, ensure_ascii=False)[1:-1]
        if text.count(part) + (written != part and text.count(written)) < whole.count(part):
            raise DataError(
                f"{at}: {name} does not show {part[:60]!r} as it is; use a role and fields that it knows, or another "
                "model"
            )


def _message(message: Any, where: str) -> Message:
    """One message of a prompt.

    Args:
        where: the beginning of an error message, which ends in the field's name without its closing quotation mark.
    """
    if not isinstance(message, Mapping):
        raise DataError(f"{where}': expected an object, found {message!r}")
    calls = message.get("tool_calls") or ()
    try:
        content = text_of(message)
    except ValueError as error:
        raise DataError(f"{where}.content': {error}") from None
    content = "" if calls and content is None else content  # as OpenAI writes it
    for key, value in (("role", message.get("role")), ("content", content)):
        if not isinstance(value, str):
            raise DataError(f"{where}.{key}': expected a string, found {value!r}")
    if message["role"] == "user" and not (content and content.strip()):
        raise DataError(f"{where}.content': empty; write what the user says, or leave the message out")
    kept = {key: message[key] for key in ("name", "tool_call_id", *THOUGHTS) if message.get(key) is not None}
    if not isinstance(calls, list | tuple):
        raise DataError(f"{where}.tool_calls': expected a list, found {calls!r:.200}")
    if calls:
        kept["tool_calls"] = [_call(call, f"{where}.tool_calls[{number}]'") for number, call in enumerate(calls)]
    return {"role": message["role"], "content": content, **kept}


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        arguments = None
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str) and isinstance(arguments, Mapping)):
        raise DataError(
            f'{where}: expected {{"type": "function", "function": {{"name": …, "arguments": {{…}}}}}}, '
            f"found {repr(call)[:200]}"
        )
    identity = {"id": call["id"]} if call.get("id") is not None else {}
    return {"type": "function", **identity, "function": {"name": function["name"], "arguments": dict(arguments)}}


def _encode_rendered(row: Row, tokenizer: Any, refusals: Mapping[str, bool]) -> Sequence[int]:
    text, count = "".join(str(each["content"]) for each in row.messages), len(row.messages)
    lacks = _CHATML in text and tokenizer.convert_tokens_to_ids(_CHATML) in (None, tokenizer.unk_token_id)
    name = getattr(tokenizer, "name_or_path", "")
    refusals = {**refusals, f"has {count} messages": count != 1, f"tokenizer {name!r} has no {_CHATML}": lacks}
    if why := next((why for why, holds in refusals.items() if holds), None):
        raise DataError(f"row {row.example_id}: its prompt is rendered, but {why}; build it with `--template chat`")
    return tokenizer.encode(text, verbose=False)  # too long a prompt is ours to report


def with_suffix(row: Row, messages: Sequence[Message], suffix: str) -> Sequence[Message]:
    """The messages with ``suffix`` at the end of the last user message; see `encode_prompts`.

    Raises:
        DataError: there is no user message.
    """
    if not suffix:
        return messages
    copies = [dict(message) for message in messages]
    last_user = next((message for message in reversed(copies) if message["role"] == "user"), None)
    if last_user is None:
        raise DataError(f"row {row.example_id}: no user message for the prompt suffix")
    ending = suffix.strip()
    if not (ending and last_user["content"].endswith(ending)):
        last_user["content"] += suffix if suffix[0].isspace() else f" {suffix}"
    return copies
