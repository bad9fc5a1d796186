"""The variables of chat templates: `data.template_arguments` on its way to a prompt."""

import copy
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from helpers import IDS, tokenizer
from tandemrl.config import ConfigError, load
from tandemrl.data.rows import Row, encode_prompts

BEGUN = "{% if enable_thinking is defined and enable_thinking is false %}.{% endif %}"
"""As Qwen3: an empty thought, here a full stop, if the model is not to think, and nothing if nobody says so."""
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}!" + BEGUN


def words(template: Any = THINKING) -> PreTrainedTokenizerFast:
    chat = copy.deepcopy(tokenizer())
    chat.chat_template = template
    return chat


def prompt(chat: PreTrainedTokenizerFast, *overrides: str, tools: Any = ()) -> list[int]:
    arguments = load(overrides=list(overrides)).data.template_arguments
    asked = Row("r", ({"role": "user", "content": "a"},), "math500", "1", {})
    ((_, tokens, _),), _ = encode_prompts([asked], chat, max_prompt_tokens=9, tools=tools, template_arguments=arguments)
    return list(tokens)


@pytest.mark.parametrize(
    ("override", "begun"),
    [
        ("", ["."]),  # a config that says nothing
        ("{enable_thinking: false}", ["."]),
        ("{enable_thinking: true}", []),
        ("{enable_thinking: null}", []),
        ("{}", ["."]),
    ],
)
def test_the_template_gets_the_arguments_of_the_config(override: str, begun: list[str]) -> None:
    tokens = prompt(words(), *([f"data.template_arguments={override}"] if override else []))
    assert tokens == [IDS[each] for each in ["a", "!", *begun]]


@pytest.mark.parametrize(
    ("template", "override", "reason"),
    [
        (
            THINKING,
            "{enable_thinkin: true}",
            r"\.enable_thinkin: .*reads no such variable.* it reads enable_thinking\.",
        ),
        ("{{ messages }}", "{enable_thinking: true}", r"\.enable_thinking: .* it reads none\."),
        (THINKING, "{tools: [a]}", r"\.tools: set by the library"),
        ({"default": THINKING, "tool_use": "{{ tools }}"}, "{enable_thinking: true}", r"\..*it reads none\."),
    ],
)
def test_an_argument_that_changes_nothing_is_refused_by_name(template: Any, override: str, reason: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}] if isinstance(template, dict) else []
    with pytest.raises(ConfigError, match=f"data.template_arguments{reason}"):
        prompt(words(template), f"data.template_arguments={override}", tools=tools)
