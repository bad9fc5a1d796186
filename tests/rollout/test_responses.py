"""What rewards read of token ids: the turn as written, without its end, and what the chat template opened."""

import copy
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from helpers import tokenizer
from scored import score_text
from tandemrl.data.rows import RENDERED, Row, chat_tokens
from tandemrl.rollout.engine import Completion
from tandemrl.rollout.groups import ResponseReader
from tandemrl.tasks.rubric.judge import grade_score
from tandemrl.types import Response, Transcript

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ opened | default('') }}{% endif %}"
)


@pytest.fixture
def thinker() -> PreTrainedTokenizerFast:
    made = copy.deepcopy(tokenizer())
    made.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|im_start|>", "<|im_end|>"]})
    made.add_tokens(["<done>"])
    made.chat_template = CHATML
    return made


def completion(ids: list[int], author: list[int], stop: Any = "eos", transcript: Any = None) -> Completion:
    return Completion(0, np.array(ids), np.array(author), np.zeros(len(ids)), stop, transcript=transcript)


def test_special_tokens_stay_and_the_ends_of_both_authors_go(thinker: PreTrainedTokenizerFast) -> None:
    end, close, done = thinker.eos_token_id, *thinker.convert_tokens_to_ids(["</think>", "<done>"])
    a, b = thinker.convert_tokens_to_ids(["a", "b"])
    reader = ResponseReader(thinker, ends=[done])
    for last in (end, done):  # the senior's, the junior's
        assert reader.of(completion([a, close, b, last], [1] * 4)) == Response(
            "a</think>b", "ab", "", (a, close, b, last)
        )
    assert reader.of(completion([a, close], [1] * 2, "length")).text == "a</think>"
    assert ResponseReader(thinker).of(completion([a, done], [1, 0])).text == "a"  # known from the completion
    turns = completion([a, done, b, b, close, end], [1, 0, -1, 1, 1, 1], transcript=Transcript(()))
    assert reader.of(turns) == Response("a\nb</think>", "a\nb", "", tuple(turns.tokens))


@pytest.mark.parametrize("opened", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_what_the_template_opens_is_told(thinker: PreTrainedTokenizerFast, opened: str) -> None:
    asked = [{"role": "user", "content": "a\nAssistant: b"}, {"role": "assistant", "content": "a"}]
    ids = chat_tokens(thinker, [*asked, asked[0]], "row", {"opened": opened})
    assert ResponseReader(thinker).opened(ids) == opened
    text = "User: a\nAssistant: b.\n<think>"
    rendered = Row("r", ({"role": "user", "content": text},), "x", "1", {RENDERED: True})
    assert ResponseReader(thinker).opened(thinker.encode(text, add_special_tokens=False), rendered) == " b.\n<think>"


def test_a_trained_judge_s_thought_that_the_template_opens_may_not_be_over() -> None:
    row = Row("r", (), "grade", "0.7", {})
    cut = Response("Total Score: 7/10", "Total Score: 7/10", "<think>\n")
    assert grade_score(row, cut.text).value == 1.0
    assert score_text(row, cut).value == 0.0  # cut off before its end
    whole = "It is 3/10?</think>Total Score: 7/10"
    assert score_text(row, Response(whole, whole.replace("</think>", ""), "<think>\n")).value == 1.0
