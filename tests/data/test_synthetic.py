import itertools
import random
import re
import subprocess
import sys

import pytest

from tandemrl.data.rows import DataError
from tandemrl.data.synthetic import (
    DEFAULT_COUNTS,
    GAIN_VERBS,
    LOSS_VERBS,
    MAX_VALUE,
    examples,
    generate,
    number_space,
    solution,
    split_of,
    tell,
)

LINE = re.compile(r"(First|Next|Then|Last) (\d+) (plus|minus) (\d+) (is|makes|about) (\d+)\.")


def read_question(question):
    """The numbers of a problem from its words alone."""
    story, ask = question.split(". ")
    assert ask == "How many?"
    has, *events = story.split(", ")
    start = int(has.split()[2])
    sign = dict.fromkeys(GAIN_VERBS, 1) | dict.fromkeys(LOSS_VERBS, -1)
    return start, tuple(sign[verb] * int(size) for verb, size in map(str.split, events))


def read_steps(text):
    """(value, change, word, result) of each line, and the boxed number."""
    *lines, last = text.split("\n\n")
    steps = []
    for line in lines:
        _, value, sign, size, word, result = LINE.fullmatch(line).groups()
        steps.append((int(value), int(size) * (1 if sign == "plus" else -1), word, int(result)))
    return steps, int(re.fullmatch(r"\\boxed\{(\d+)\}", last).group(1))


def test_splits_are_disjoint_by_numbers_whatever_the_seed():
    def contents(split):
        return {
            read_question(row.messages[0]["content"]) for seed in (0, 1) for row in generate("plain", split, None, seed)
        }

    assert not contents("train") & contents("heldout")


def test_number_space_is_every_problem_in_range_once():
    spaces = {split: set(number_space(split)) for split in ("train", "heldout")}
    changes = [*range(-6, 0), *range(1, 7)]
    brute = set()
    for start, *deltas in itertools.product(range(13), *[changes] * 4):
        values = [start + sum(deltas[:k]) for k in range(5)]
        if min(values) >= 0 and max(values) <= 12:
            brute.add((start, tuple(deltas)))
    assert spaces["train"] | spaces["heldout"] == brute
    assert len(number_space("train")) + len(number_space("heldout")) == len(brute) > 80_000
    assert len(spaces["heldout"]) / len(brute) == pytest.approx(1 / 8, abs=0.005)


def test_split_of_is_stable_across_versions():
    small = {(start, deltas) for start, deltas in number_space("heldout") if start == 0 and max(deltas) <= 1}
    assert small == {(0, (1, 1, -1, 1))}


def test_rows_are_deterministic_and_seeded():
    rows = generate("plain", "train", 50, 3)
    assert rows == generate("plain", "train", 50, 3)
    assert rows != generate("plain", "train", 50, 4)
    assert len({row.example_id for row in rows}) == 50


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_rows(split):
    rows = generate("plain", split, None, 0)
    assert len(rows) == DEFAULT_COUNTS[split]
    contents = [read_question(row.messages[0]["content"]) for row in rows]
    assert len(set(contents)) == len(rows)
    for row, (start, deltas) in zip(rows, contents, strict=True):
        assert row.data_source == "synthetic/plain"
        assert [message["role"] for message in row.messages] == ["user"]
        assert row.ground_truth == str(start + sum(deltas))
        assert row.extra_info["start"] == start
        assert tuple(row.extra_info["deltas"]) == deltas
        assert row.extra_info["split"] == split


@pytest.mark.parametrize(
    ("pair", "split", "count", "message"),
    [
        ("martian", "train", 4, "unknown synthetic pair 'martian'; known: plain"),
        ("plain", "test", 4, "unknown split 'test'; known: train, heldout"),
        ("plain", "heldout", 1_000_000, "distinct problems; asked for 1000000"),
        ("plain", "heldout", 0, "asked for 0"),
    ],
)
def test_errors_name_what_is_known(pair, split, count, message):
    with pytest.raises(DataError, match=re.escape(message)):
        generate(pair, split, count, 0)


def test_examples_are_of_the_train_split_and_deterministic():
    first = list(itertools.islice(examples("plain", 0), 300))
    assert first == list(itertools.islice(examples("plain", 0), 300))
    assert first != list(itertools.islice(examples("plain", 1), 300))
    assert {split_of(problem.numbers) for problem, _ in first} == {"train"}


def test_solutions_carry_their_errors_forward_within_range():
    for problem, text in itertools.islice(examples("plain", 1), 2000):
        steps, boxed = read_steps(text)
        assert tuple(change for _, change, _, _ in steps) == problem.numbers.deltas
        values = [problem.numbers.start, *(result for *_, result in steps)]
        assert values[:-1] == [value for value, *_ in steps]
        assert values[-1] == boxed
        assert all(0 <= value <= MAX_VALUE for value in values)
        assert all(abs(result - value - change) <= 2 for value, change, _, result in steps)


def test_sloppiness_is_in_the_steps_that_say_about():
    steps = [step for _, text in itertools.islice(examples("plain", 2), 4000) for step in read_steps(text)[0]]
    wrong = {True: [], False: []}
    for value, change, word, result in steps:
        wrong[word == "about"].append(value + change != result)
    # Four standard deviations of 16,000 steps; a slip that finds no room is left out, which costs under a hundredth.
    assert len(wrong[True]) / len(steps) == pytest.approx(0.30, abs=0.015)
    assert sum(wrong[True]) / len(wrong[True]) == pytest.approx(0.60, abs=0.031)
    assert sum(wrong[False]) / len(wrong[False]) == pytest.approx(0.03, abs=0.008)


def test_solution_without_sloppiness_is_right():
    rng = random.Random(0)
    for numbers in number_space("heldout")[:200]:
        text = solution(tell(numbers, rng), rng, about_error=0.0, plain_error=0.0)
        assert read_steps(text)[1] == numbers.start + sum(numbers.deltas)


def test_importing_it_needs_no_torch():
    code = "import sys, tandemrl.data.synthetic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
