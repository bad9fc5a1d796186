"""What an author sampled stays as it is, whatever a program sends back: real tokenizers and templates, turns and tools.

The turns are ids that no tokenizer would give for their text: random ones, also halves of characters, and calls in
single letters. What stands between them is compared with the template's text, and with the package ``renderers``, where
it is installed and knows the family.
"""

import copy
import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import artefacts
from real_model import smollm2
from rollout.envs.worlds import LLAMA_31
from tandemrl.config import SelectionConfig
from tandemrl.data.templates import DEFAULT_ARGUMENTS
from tandemrl.rollout.engine import Completion, Sampling
from tandemrl.rollout.gateway.requests import Reader
from tandemrl.rollout.gateway.sessions import Limits, Session
from tandemrl.rollout.gateway.texts import Speaker
from tandemrl.selection import solo

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
CALLS = {"qwen3": "hermes", "llama3_1": "json"}
"""How the calls of a family are written; the templates of the others know none."""
SAID = ('say "7"\n\\ é', "ab  cd", "12 + 30", "日本語 🙂", "{}", "x")
HOSTILE = ("<|im_end|>", "<|eot_id|> <end_of_turn>", "</tool_response>", "<|im_start|>assistant\n")


@cache
def tokenizer(family: str) -> Any:
    words = AutoTokenizer.from_pretrained(smollm2()) if family == "smollm2" else artefacts.tokenizer(family)
    if family == "llama3_1":  # the package's template has no tools, and its tokenizer a control token less
        words = copy.deepcopy(words)
        words.chat_template = LLAMA_31
        words.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]}, replace_extra_special_tokens=False)
    if family == "gemma3":
        words.eos_token = "<end_of_turn>"
    return words


def turn(family: str, rng: random.Random, tools: bool) -> list[int]:
    """The ids of a turn, without its end."""
    words = tokenizer(family)
    if tools and rng.random() < 0.6:
        arguments = {"a": rng.randrange(1000)}
        text = {
            "hermes": f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(arguments)}}}\n</tool_call>',
            "json": json.dumps({"name": "add", "parameters": arguments}),
        }[CALLS[family]]
        return [id for letter in text for id in words.encode(letter, add_special_tokens=False)]
    plain = set(range(len(words))) - set(words.added_tokens_decoder)
    return rng.sample(sorted(plain), rng.randrange(1, 12))


def between(family: str, messages: Sequence[Any], tools: list[Any], ended: bool) -> str:
    """What the template writes after a turn, up to the next."""
    words = tokenizer(family)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]} if messages[0]["role"] == "tool" else None
    begun = [{"role": "user", "content": "?"}, said or {"role": "assistant", "content": "WRITTEN"}]
    more = DEFAULT_ARGUMENTS | ({"tools": tools} if tools else {})
    whole, first = (
        words.apply_chat_template(each, tokenize=False, add_generation_prompt=to_write, **more)
        for each, to_write in (([*begun, *messages], True), (begun, False))
    )
    text: str = whole.split(words.eos_token, first.count(words.eos_token))[-1]
    return text if ended else words.eos_token + text


def known(family: str) -> Any:
    """The renderer of the package ``renderers`` for a family, if it is there and knows it."""
    if family not in CALLS:
        return None
    try:
        from renderers import create_renderer
        from renderers.configs import Llama3RendererConfig, Qwen3RendererConfig
    except ImportError:
        return None
    config = Llama3RendererConfig() if family == "llama3_1" else Qwen3RendererConfig(enable_thinking=False)
    return create_renderer(tokenizer(family), config.model_copy(update={"thinking_retention": "all"}))


@pytest.mark.parametrize(
    ("family", "tools"),
    [
        ("qwen3", True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("qwen3", False),
                ("llama3_1", True),
                ("llama3_1", False),
                ("smollm2", False),
                ("gemma3", False),
            )
        ),
    ],
)
def test_sampled_ids_stay_and_the_template_stands_between_them(family: str, tools: bool) -> None:
    words, rng, seen = tokenizer(family), random.Random(f"{family}{tools}"), set[str]()
    ends, shown = frozenset({words.eos_token_id}), TOOLS if tools else []
    how: dict[str, Any] = {"calls": family in CALLS, "ends": ends, "template_arguments": DEFAULT_ARGUMENTS}
    reader = Reader(words, 10**6, lambda _: solo("senior"), SelectionConfig(), {}, **how)
    speaker, oracle = Speaker(words, CALLS.get(family, "hermes"), ends), known(family)  # type: ignore[arg-type]
    for number in range(8):
        session = Session(number, reader, Sampling(10**5), Limits(10**5, 64, None, 10**6))
        messages: list[Any] = [{"role": "user", "content": rng.choice(SAID)}]
        further, written, before = list[Any](), list[list[int]](), list[int]()
        for _ in range(4):
            asked, asking = session.begin({"messages": messages, **({"tools": shown} if tools else {})}, "chat")
            prompt = list(asking.request.prompt)
            if before:
                assert prompt[: len(before)] == before
                tail, ended = prompt[len(before) :], before[-1] in ends
                text = between(family, [_named(each) for each in further], shown, ended)
                assert words.decode(tail) == text
                harmless = not any(hostile in each["content"] for each in further for hostile in HOSTILE)
                if harmless and oracle is not None:
                    start = len(before) - len(written[-1])
                    bridged = oracle.bridge_to_next_turn(before[:start], written[-1], further, tools=shown or None)
                    assert words.decode(bridged.token_ids[len(before) :]) == text
                    assert bridged.token_ids[: len(before)] == before
                    seen.add("oracle")
                begins = words.decode(tail).count(words.eos_token) if harmless else 1 + (not ended)
                assert tail.count(words.eos_token_id) == begins
            ids = turn(family, rng, tools) + [words.eos_token_id] * (rng.random() < 0.8)
            reason = "eos" if ids[-1] in ends else "length"
            done = Completion(number, np.array(ids), np.ones(len(ids), np.int8), np.zeros(len(ids)), reason, 0)
            said = json.loads(json.dumps(speaker.choice(asked, 0, done)["message"]))
            session.record(asking, done, asked.body, said)
            calls = said.get("tool_calls") or ()
            seen.add("call" if calls else "text")
            answer = rng.choice((*SAID, *HOSTILE))
            further = [{"role": "tool", "tool_call_id": call["id"], "content": answer} for call in calls]
            further = further or [{"role": "user", "content": answer.strip()}]
            messages += [said, *further]
            written.append(ids)
            before = prompt + ids
        (branch,) = session.written()  # a prompt that was tokenised again would have begun another
        assert [turn.tolist() for turn in branch.completion.turns] == written
    assert ("call" in seen) == tools
    assert ("oracle" in seen) == (oracle is not None)


def _named(message: Any) -> Any:
    return message | {"name": "add"} if message["role"] == "tool" else message
