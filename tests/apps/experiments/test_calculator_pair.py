"""The tiny agent with a calculator: its tool, its episodes, and what the packaged pair does in the packaged config."""

import itertools
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandemrl.apps.experiments.agents import hops_tokenizer, lessons, solo_episodes
from tandemrl.apps.experiments.tiny import build_tiny_pair
from tandemrl.config import load
from tandemrl.tasks.countdown.grader import ExpressionError
from tandemrl.tasks.generated.calculator import calculator, generate
from tandemrl.tasks.generated.synthetic import GAIN_VERBS

WORDS = re.compile(r"\w+ has (\d+) \w+, (\w+) (\d+), (\w+) (\d+)\. How many\?")


def test_a_row_asks_for_what_its_words_say() -> None:
    train, heldout = (generate("calculator", split, 300, 0) for split in ("train", "heldout"))
    asked = [row.messages[0]["content"] for row in (*train, *heldout)]
    for row, question in zip((*train, *heldout), asked, strict=True):
        start, first, one, second, other = WORDS.fullmatch(question).groups()  # type: ignore[union-attr]  # all match
        value = int(start)
        for verb, number in ((first, one), (second, other)):
            value += int(number) if verb in GAIN_VERBS else -int(number)
            assert value >= 0
        assert (row.ground_truth, row.data_source) == (str(value), "synthetic/calculator")
    content = [{(row.extra_info["start"], *row.extra_info["deltas"]) for row in rows} for rows in (train, heldout)]
    assert content[0].isdisjoint(content[1])
    assert generate("calculator", "train", 300, 0) == train


def test_the_tool_works_out_a_sum_and_runs_no_code() -> None:
    assert calculator("(1 + 2) / 9") == "1/3"
    with pytest.raises(ExpressionError):
        calculator("__import__('os').getpid()")


def test_lessons_call_the_calculator_and_box_its_result() -> None:
    tokenizer = hops_tokenizer("calculator")
    texts = [tokenizer.decode(each.tokens) for each in itertools.islice(lessons(tokenizer, "calculator", 0), 200)]
    call = re.compile(r'"expression": "([\d +-]+)"\}\}.*tool\n(-?\d+)<.*\\boxed\{(-?\d+)\}<', re.DOTALL)
    called = [call.search(text) for text in texts]
    assert 120 <= sum(found is not None for found in called) <= 160  # of 200, seven in ten
    for found in filter(None, called):
        assert str(eval(found[1])) == found[2] == found[3]
    assert max(len(each.tokens) for each in itertools.islice(lessons(tokenizer, "calculator", 1), 200)) < 64


def test_the_packaged_senior_calls_it_in_most_episodes_and_is_graded(tmp_path: Path) -> None:
    manifest = build_tiny_pair(tmp_path / "pair", pair="calculator", progress=pytest.fail)
    senior = tmp_path / "pair" / "senior"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(senior), AutoTokenizer.from_pretrained(senior)
    rows = generate("calculator", "heldout", 64, 1)
    samples = solo_episodes(model, tokenizer, rows, 1, config=load("calculator"))
    called = [sample for sample in samples if "<tool_call>" in sample.text]
    assert len(called) > 32
    assert manifest["base"]["solo/pass@1"] == pytest.approx(sum(bool(each.correct) for each in samples) / 64, abs=0.2)
    guessed = [sample for sample in samples if sample not in called]
    right = [sum(bool(each.correct) for each in some) / len(some) for some in (called, guessed)]
    assert right[0] > right[1] + 0.2
