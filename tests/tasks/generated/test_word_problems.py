"""Word problems: their solutions are right, their splits are disjoint, and both wordings earn the reward."""

import random
import re
from fractions import Fraction

import pytest

from tandemrl.data.rows import SOLUTION
from tandemrl.tasks.generated.word_problems import (
    DEFAULT_COUNTS,
    MAX_TOKENS,
    MAX_VALUE,
    PAIRS,
    TEMPLATES,
    draw,
    generate,
    split_of,
    uses_shorthand,
)

STEP = re.compile(r"(?:We get |Then )?(\d+) ?([-+*/−×:]) ?(\d+) ?[=→] ?(\d+)\.?")
MEANING = {"−": "-", "×": "*", ":": "/"}


def results(text: str) -> list[Fraction]:
    """The result of every step, by arithmetic on what the step says; it is what the step states, too."""
    *steps, answer = text.split("\n\n")
    found = []
    for step in steps:
        match = STEP.fullmatch(step)
        assert match is not None, step
        left, right = Fraction(match[1]), Fraction(match[3])
        operator = MEANING.get(match[2], match[2])
        value = {"+": left + right, "-": left - right, "*": left * right}.get(operator)
        value = left / right if value is None else value
        assert value == Fraction(match[4]), step
        found.append(value)
    assert answer == f"#### {found[-1]}"
    return found


@pytest.mark.parametrize("pair", PAIRS)
def test_solutions_compute_the_ground_truth(pair: str) -> None:
    rows = generate(pair, "train", 600, 0)
    for row in rows:
        found = results(row.extra_info[SOLUTION])
        assert str(found[-1]) == row.ground_truth
        assert len(found) == row.extra_info["steps"] in (1, 2)
        assert all(value.denominator == 1 and 0 <= value <= MAX_VALUE for value in found)
        assert uses_shorthand(row.extra_info[SOLUTION]) is pair.endswith("terse")
    assert {row.extra_info["steps"] for row in rows} == {1, 2}


def test_splits_are_disjoint_by_template_and_numbers() -> None:
    train, heldout = (generate("word_problems", split, DEFAULT_COUNTS[split], 0) for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == (DEFAULT_COUNTS["train"], DEFAULT_COUNTS["heldout"]) == (2048, 256)
    questions = {row.messages[0]["content"] for row in train}
    assert questions.isdisjoint(row.messages[0]["content"] for row in heldout)
    rng = random.Random(0)
    by_content: dict[tuple[int, tuple[int, ...]], set[str]] = {}
    for problem in (draw(rng) for _ in range(3000)):
        by_content.setdefault((problem.template, problem.numbers), set()).add(split_of(problem))
    assert {len(splits) for splits in by_content.values()} == {1}
    assert {index for index, _ in by_content} == set(range(len(TEMPLATES)))


@pytest.mark.parametrize("pair", PAIRS)
def test_every_solution_fits(pair: str) -> None:
    """In pieces as tokenizers make them that split numbers into digits, which is the longest way."""
    pieces = re.compile(r" ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\d|\s")
    rows = [row for split in ("train", "heldout") for row in generate(pair, split, DEFAULT_COUNTS[split], 0)]
    most = max(len(pieces.findall(row.extra_info[SOLUTION])) + 1 for row in rows)
    assert most <= MAX_TOKENS
