"""What authors may write, and what becomes of it. Nothing of it may raise, or take long."""

import json
import random
from typing import Any

import pytest
import tempers
from tempers import call
from worlds import tokenizer

from tandemrl.rollout.envs.parsing import parse_turn

SCHEMAS = {schema["function"]["name"]: schema for schema in tempers.World().tool_schemas()}


def parsed(text: str) -> dict[str, Any]:
    return dict(parse_turn(text, SCHEMAS))


def made(name: str, **arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_calls_and_what_is_said_around_them() -> None:
    text = f'First.\n{call("add", a=1)}\nThen.\n<tool_call>\n{{"name": "who"}}\n</tool_call>\n'
    assert parsed(text) == {
        "role": "assistant",
        "content": "First.\n\nThen.",
        "tool_calls": [made("add", a=1), made("who")],
    }
    assert parsed(" It is 7. ") == {"role": "assistant", "content": "It is 7."}
    assert parsed("") == {"role": "assistant", "content": ""}


def test_a_string_in_a_call_may_have_the_closing_tag() -> None:
    inner = call("add", a=1)
    message = parsed(f"{call('echo', text=inner)} and {inner}")
    assert message["tool_calls"] == [made("echo", text=inner), made("add", a=1)]
    assert message["content"] == "and"


def test_thoughts_are_apart_and_call_nothing() -> None:
    text = f"<think>\nI could {call('add', a=1)}.\n</think>\n\nNo: {call('add', a=2)}"
    assert parsed(text) == {
        "role": "assistant",
        "content": "No:",
        "reasoning_content": f"I could {call('add', a=1)}.",
        "tool_calls": [made("add", a=2)],
    }
    begun = f"<think>\nI {call('add', a=1)}"  # cut off
    assert parsed(begun) == {"role": "assistant", "content": "", "reasoning_content": begun[8:]}
    opened_by_template = f"I could {call('add', a=1)}.</think>{call('who')}"
    message = parse_turn(opened_by_template, SCHEMAS, prefix="<|im_start|>assistant\n<think>\n")
    assert message["tool_calls"] == [made("who")]


@pytest.mark.parametrize("prefix", ["", "<|im_start|>assistant\n<think>\n\n</think>\n\n"])
def test_an_argument_may_end_a_thought_that_was_not_begun(prefix: str) -> None:
    written = call("echo", text="the tag is </think>")
    assert parse_turn(written, SCHEMAS, prefix=prefix)["tool_calls"] == [made("echo", text="the tag is </think>")]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<tool_call>", "a <tool_call> is not closed by </tool_call>"),
        ("<tool_call>add(1)</tool_call>", "not valid JSON: Expecting value"),
        (call("add", a=1).replace("}}", "}}}"), "one JSON object between <tool_call> and </tool_call>"),
        ('<tool_call>{"name": ["add"], "arguments": {"a": 1}}</tool_call>', 'a call is {"name"'),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments of add must be an object"),
        (
            '<tool_call>{"name": "who", "parameters": {}}</tool_call>',
            "\"arguments\": {…}}, without the key 'parameters'",
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}, "b": 2}</tool_call>', "without the key 'b'"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>', "the key 'a' stands twice"),
        ('<tool_call>[{"name": "who", "arguments": {}}]</tool_call>', 'a call is {"name"'),
        (call("sub", a=1), "there is no tool 'sub'; known: add, note"),
        (call("add"), "add needs the argument 'a'"),
        (call("add", a=1, c=2), "add has no argument 'c'; known: a, b"),
        (call("add", a="1"), "argument 'a' of add must be integer"),
        ('<tool_call>{"name": "wait", "arguments": {"seconds": NaN}}</tool_call>', "not finite"),
        ('<tool_call>{"name": "echo", "arguments": {"text": "\\ud800"}}</tool_call>', "half of a surrogate pair"),
        (f'<tool_call>{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>', "not valid JSON"),
        (f'<tool_call>{{"name": "add", "arguments": {{"a": {"[" * 99_999}</tool_call>', "nested more than 32 deep"),
        (call("add", a=json.loads("[" * 50 + "]" * 50)), "nested more than 32 deep"),
    ],
)
def test_calls_that_cannot_be_made(text: str, fault: str) -> None:
    message = parsed(f"Well, {text}")
    assert message["content"] == "Well,"
    assert "tool_calls" not in message
    assert len(message["invalid_calls"]) == 1
    assert fault in message["invalid_calls"][0]
    assert len(message["invalid_calls"][0]) < 300
    json.dumps(message, allow_nan=False, ensure_ascii=False).encode()


def bare(text: str) -> dict[str, Any]:
    return parse_turn(text, SCHEMAS, calls="json")


ADD = '{"name": "add", "parameters": {"a": 1}}'
WHO = '{"name": "who", "parameters": {}}'


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (ADD, [made("add", a=1)], ""),
        (f"\n<|python_tag|>{ADD}\n", [made("add", a=1)], ""),
        ('{ "type" : "function", "name": "add", "parameters": {"a": 1}}', [made("add", a=1)], ""),
        ('{"name": "add", "arguments": {"a": 1}}', [made("add", a=1)], ""),
        (f"{ADD}; {WHO}", [made("add", a=1), made("who")], ""),
        (f"{ADD};\n", [made("add", a=1)], ""),
        (f"I add.\n{ADD}\nDone.", [made("add", a=1)], "I add.\nDone."),
        ('{"name": "echo", "parameters": {"text": "{\\"name\\": 1}; é"}}', [made("echo", text='{"name": 1}; é')], ""),
        ("It is {1, 2}.", [], "It is {1, 2}."),
        ('{"name": "Ann", "age": 3}', [], '{"name": "Ann", "age": 3}'),
        (call("add", a=1).replace("name", "nam"), [], call("add", a=1).replace("name", "nam")),
        (f"<think>\n{ADD}\n</think>\n{WHO}", [made("who")], ""),
    ],
)
def test_bare_calls(text: str, calls: list[dict[str, Any]], content: str) -> None:
    message = bare(text)
    assert (message.get("tool_calls", []), message["content"]) == (calls, content)
    assert "invalid_calls" not in message


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"name": "add", "parameters": {"a": 1}', "not valid JSON"),
        ('{"name": ["add"], "parameters": {"a": 1}}', 'a call is {"name": the tool, "parameters"'),
        ('{"name": "add", "parameters": 1}', "the arguments of add must be an object"),
        ('{"name": "who", "parameters": {}, "arguments": {}}', "without the key 'arguments'"),
        ('{"name": "add", "parameters": {"a": 1}, "b": 2}', "\"parameters\": {…}}, without the key 'b'"),
        (f'{{"name": "add", "parameters": {"[" * 99_999}', "nested more than 32 deep"),
        ("; ".join([WHO] * 65), "no more than 64 calls can be made in a turn"),
    ],
)
def test_bare_calls_that_cannot_be_made(text: str, fault: str) -> None:
    (found,) = bare(text)["invalid_calls"]
    assert fault in found


def test_good_calls_beside_bad_ones_are_made() -> None:
    message = parsed(f"{call('add', a=1)}<tool_call>oops</tool_call>{call('who', x=1)}{call('echo', text='</think')}")
    assert message["tool_calls"] == [made("add", a=1), made("echo", text="</think")]
    assert len(message["invalid_calls"]) == 2
    assert message["invalid_after"] == [1, 1]


@pytest.mark.parametrize("unit", ["<tool_call>", "<tool_call></tool_call>", "<think>", "{", '"\\', '<tool_call>"'])
def test_hostile_text_is_read_in_linear_time(unit: str) -> None:
    """What is not linear would take hours."""
    assert parsed(unit * 50_000)["role"] == bare(unit * 50_000)["role"] == "assistant"


def test_random_text_is_no_error() -> None:
    pieces = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": ', '"add"', ', "arguments": {', "}", "["]
    rng = random.Random(0)
    for _ in range(2000):
        message = parsed("".join(rng.choices(pieces, k=rng.randint(0, 12))))
        assert message["role"] == "assistant"
        json.dumps(message, allow_nan=False)


# ---- a tokenizer's own response template ---------------------------------------------------------------------------

TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}


def test_the_tokenizers_own_template_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    words = tokenizer()
    monkeypatch.setattr(words, "response_template", TEMPLATE, raising=False)
    prefix = "<|im_start|>assistant\n"
    message = parse_turn(f"Hm.{call('add', a=1)}{call('sub', a=1)}", SCHEMAS, words, prefix)
    assert message["content"] == "Hm."
    assert message["tool_calls"] == [made("add", a=1)]
    assert "there is no tool 'sub'" in message["invalid_calls"][0]
    broken = parse_turn("Hm.<tool_call>oops</tool_call>", SCHEMAS, words, prefix)
    assert broken["content"] == "Hm.<tool_call>oops</tool_call>"
    assert "a call cannot be read" in broken["invalid_calls"][0]
