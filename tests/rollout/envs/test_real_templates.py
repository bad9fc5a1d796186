"""Chat templates of published models: prompts and episodes have the ids that the template gives them.

The expected texts are written by hand and tokenised with the file of the tokenizer alone.
"""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import tempers
from tempers import row
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from worlds import ScriptedEngine

import artefacts
from real_model import smollm2
from tandemrl.config import ConfigError, load
from tandemrl.data.rows import encode_prompts
from tandemrl.rollout.engine import Completion, check_completion
from tandemrl.rollout.envs.environment import Environment
from tandemrl.rollout.envs.episodes import EpisodeRunner, make_episode_runner

NAME = "row <|im_end|>"
QUESTION = "What is 12 + 30?  Say it in one word.\n"
SMOLLM2 = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
TOOLS = tempers.World().tool_schemas()
QWEN3_TOOLS = (
    "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
    + "".join("\n" + json.dumps(tool) for tool in TOOLS)
    + "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)
NO_THOUGHT = "<think>\n\n</think>\n\n"
PROMPTS = [
    ("smollm2", {}, SMOLLM2 + f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"),
    ("qwen3", {}, f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{NO_THOUGHT}"),
    ("qwen3", {"enable_thinking": True}, f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"),
    (
        "llama3_1",
        {},
        f"<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n{QUESTION.strip()}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    ("gemma3", {}, f"<bos><start_of_turn>user\n{QUESTION.strip()}<end_of_turn>\n<start_of_turn>model\n"),
]


def folder(name: str) -> Any:
    return smollm2() if name == "smollm2" else artefacts.tokenizer_folder(name)


def tokenizer(name: str) -> Any:
    return AutoTokenizer.from_pretrained(smollm2()) if name == "smollm2" else artefacts.tokenizer(name)


def ids_of(name: str, text: str) -> list[int]:
    """The ids of a text by the tokenizer's file alone."""
    return Tokenizer.from_file(str(folder(name) / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def asked(name: str, template_arguments: dict[str, Any], tools: Sequence[Any] = ()) -> list[int]:
    """The ids of the prompt of `QUESTION`."""
    told = {"template_arguments": template_arguments} if template_arguments else {}
    [prompt], _ = encode_prompts([row(question=QUESTION)], tokenizer(name), max_prompt_tokens=2000, tools=tools, **told)
    return list(prompt.tokens)


def played(name: str, environment: Environment, script: list[str], *overrides: str) -> tuple[Completion, list[str]]:
    """An episode whose turns are scripted, and the texts of its turns."""
    words = tokenizer(name)
    episode_runner = make_episode_runner(load(None, overrides), words, environment=environment)
    assert isinstance(episode_runner, EpisodeRunner)
    with episode_runner:
        [done] = ScriptedEngine(words).play([script], [row(NAME, QUESTION)], episode_runner.episodes())
    check_completion(done)
    return done, [words.decode(turn) for turn in done.turns]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [pytest.param(*each, marks=[] if each[0] == "qwen3" else [pytest.mark.slow]) for each in PROMPTS],
)
def test_a_prompt_is_the_templates(name: str, arguments: dict[str, Any], text: str) -> None:
    ids = asked(name, arguments)
    assert ids == ids_of(name, text)
    variables = {"enable_thinking": False} | arguments  # the default of data.template_arguments
    message = [{"role": "user", "content": QUESTION}]
    plain = tokenizer(name).apply_chat_template(message, add_generation_prompt=True, return_dict=False, **variables)
    assert ids == plain


def test_tools_are_told_of_as_qwen3_has_it() -> None:
    text = f"{QWEN3_TOOLS}<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n{NO_THOUGHT}"
    assert asked("qwen3", {}, TOOLS) == ids_of("qwen3", text)


# ---- Qwen3's turns -------------------------------------------------------------------------------------------------

CALLS = [("add", {"a": 12, "b": 30}), ("note", {"text": 'forty "two"\n'}), ("who", {})]
RESULTS = ["42", "noted: ['forty \"two\"\\n']", NAME]


def agents_turns() -> tuple[list[str], list[dict[str, Any]]]:
    """Three turns with calls and a last one: as they are written, and the messages that the template gets."""
    written, conversation = [], [{"role": "user", "content": QUESTION}]
    for (name, arguments), result in zip(CALLS, RESULTS, strict=True):
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        written.append(f"I call {name}.\n<tool_call>\n{call}\n</tool_call>")
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        conversation.append({"role": "assistant", "content": f"I call {name}.", "tool_calls": calls})
        conversation.append({"role": "tool", "name": name, "content": result})
    return [*written, "It is 42."], [*conversation, {"role": "assistant", "content": "It is 42."}]


@pytest.mark.slow
def test_qwen3_without_thoughts_keeps_four_tokens_more_a_turn() -> None:
    """An empty thought, which its template leaves out of the turns before the last one."""
    script, conversation = agents_turns()
    with pytest.raises(ConfigError, match=r"(?s)rewrites a turn once .*Set rollout\.keep_turns=true"):
        played("qwen3", tempers.World(), script)
    done, turns = played("qwen3", tempers.World(), script, "rollout.keep_turns=true")
    assert turns == [turn + "<|im_end|>" for turn in script]
    whole = [*asked("qwen3", {}, TOOLS), *done.tokens.tolist()]
    text = tokenizer("qwen3").decode(whole) + "\n"
    assert text.count(NO_THOUGHT) == 4
    last = text.rindex(NO_THOUGHT)
    expected = tokenizer("qwen3").apply_chat_template(conversation, tokenize=False, tools=TOOLS)
    assert text[:last].replace(NO_THOUGHT, "") + text[last:] == expected
    assert len(ids_of("qwen3", NO_THOUGHT)) == 4
    assert len(ids_of("qwen3", text)) == len(ids_of("qwen3", expected)) + 3 * 4
    # What a tool says is no end of a message: the system's and one of each message of the conversation are.
    assert text.count("<|im_end|>") == len(conversation) + 2
    assert whole.count(tokenizer("qwen3").eos_token_id) == len(conversation) + 1
