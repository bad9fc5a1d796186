import hashlib
import itertools
import random
import re

import pytest

from tandemrl.data.rows import DataError
from tandemrl.tasks.generated import synthetic
from tandemrl.tasks.generated.rows import generated_rows
from tandemrl.tasks.generated.synthetic import (
    DEFAULT_COUNTS,
    GAIN_VERBS,
    LOSS_VERBS,
    MAX_VALUE,
    PAIRS,
    examples,
    generate,
    jargon_solution,
    leaves_out,
    number_space,
    repairs,
    short_solution,
    slips,
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


@pytest.mark.parametrize("pair", PAIRS)
def test_every_pair_has_the_same_held_out_problems(pair):
    heldout = set(number_space("heldout"))
    assert {read_question(row.messages[0]["content"]) for row in generate(pair, "heldout", 256, 0)} <= heldout
    trained_on = {problem.numbers for problem, _ in itertools.islice(examples(pair, 0), 1000)}
    assert not trained_on & heldout


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


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_rows(split):
    rows = generated_rows("plain", split, None, 0)
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
        ("martian", "train", 4, "unknown synthetic pair 'martian'; known: plain, jargon, jargon_two"),
        ("plain", "test", 4, "unknown split 'test'; known: train, heldout"),
        ("plain", "heldout", 1_000_000, "distinct problems; asked for 1000000"),
        ("plain", "heldout", 0, "asked for 0"),
    ],
)
def test_errors_name_what_is_known(pair, split, count, message):
    with pytest.raises(DataError, match=re.escape(message)):
        generated_rows(pair, split, count, 0)


def test_solutions_carry_their_errors_forward_within_range():
    for problem, text in itertools.islice(examples("plain", 1), 2000):
        steps, boxed = read_steps(text)
        assert tuple(change for _, change, _, _ in steps) == problem.numbers.deltas
        values = [problem.numbers.start, *(result for *_, result in steps)]
        assert values[:-1] == [value for value, *_ in steps]
        assert values[-1] == boxed
        assert all(0 <= value <= MAX_VALUE for value in values)
        assert all(abs(result - value - change) <= 2 for value, change, _, result in steps)


def read_jargon(text):
    """(value, change, result) of each line and the boxed number."""
    *lines, last = text.split("\n\n")
    number = synthetic.JARGON_NUMBERS.index
    steps = []
    for line, opener in zip(lines, synthetic.JARGON_OPENERS, strict=True):
        said, value, verb, size, makes, result = line.removesuffix(".").split()
        assert (said, makes) == (opener, "rho")
        steps.append((number(value), number(size) * {"yab": 1, "nud": -1}[verb], number(result)))
    return steps, int(re.fullmatch(r"\\boxed\{(\d+)\}", last).group(1))


def test_jargon_says_the_same_steps_with_fewer_errors():
    rng, wrong = random.Random(0), []
    for numbers in number_space("train")[::20]:
        steps, boxed = read_jargon(jargon_solution(tell(numbers, rng), rng))
        assert tuple(change for _, change, _ in steps) == numbers.deltas
        values = [numbers.start, *(result for *_, result in steps)]
        assert values[:-1] == [value for value, *_ in steps]
        assert values[-1] == boxed
        wrong += [value + change != result for value, change, result in steps]
    assert sum(wrong) / len(wrong) == pytest.approx(0.01, abs=0.0033)  # four standard deviations of 15,200 steps


def test_a_shorthand_leaves_out_every_result_and_nothing_else():
    rng, wrong = random.Random(0), []
    for numbers in number_space("train")[::20]:
        *lines, last = (text := short_solution(tell(numbers, rng), rng)).split("\n\n")
        read = [re.fullmatch(r"(First|Next|Then|Last) (\d+) (plus|minus) (\d+)\.", line).groups() for line in lines]
        assert [opener for opener, *_ in read] == ["First", "Next", "Then", "Last"]
        assert tuple(int(size) * {"plus": 1, "minus": -1}[verb] for *_, verb, size in read) == numbers.deltas
        values = [int(value) for _, value, *_ in read] + [int(re.fullmatch(r"\\boxed\{(\d+)\}", last).group(1))]
        assert values[0] == numbers.start
        wrong += [a + change != b for (a, b), change in zip(itertools.pairwise(values), numbers.deltas, strict=True)]
        assert leaves_out(text)
    assert sum(wrong) / len(wrong) == pytest.approx(0.02, abs=0.0046)  # four standard deviations of 15,200 steps
    texts = [text for _, text in itertools.islice(examples("shorthand", 0, stage="senior"), 2000)]
    assert sum(map(leaves_out, texts)) / 2000 == pytest.approx(0.15, abs=0.032)
    assert not any(leaves_out(text) for _, text in itertools.islice(examples("shorthand", 0), 500))


CHECKED_LINE = re.compile(r"(\d+) (plus|minus) (\d+) (is|makes|about) (\d+) (first|next|then|last)\.")


def test_a_check_line_says_again_what_its_step_comes_to():
    checked, corrected = {True: [], False: []}, []
    for problem, text in itertools.islice(examples("repair", 0), 4000):
        *lines, last = text.split("\n\n")
        value, changes = problem.numbers.start, []
        right = result = None
        written = wrong = mended = 0
        for line, following in zip(lines, [*lines[1:], last], strict=True):
            if line.startswith("Check "):
                value = int(line.removeprefix("Check ").removesuffix("."))
                corrected.append(value == right)
                written += 1
                mended += value == right != result
                continue
            before, sign, size, _, result, _ = CHECKED_LINE.fullmatch(line).groups()
            assert int(before) == value  # the next step goes on from the corrected value
            changes.append(int(size) * (1 if sign == "plus" else -1))
            right, value = value + changes[-1], (result := int(result))
            wrong += value != right
            checked[value == right].append(following.startswith("Check "))
        assert tuple(changes) == problem.numbers.deltas
        assert last == f"\\boxed{{{value}}}"
        assert repairs(text) == written
        assert len(slips(text)) == wrong
        assert sum(slip.repaired for slip in slips(text)) == mended
    # Four standard deviations of 3,200 wrong and 12,800 right steps, and of 860 checks.
    assert sum(checked[False]) / len(checked[False]) == pytest.approx(0.15, abs=0.026)
    assert sum(checked[True]) / len(checked[True]) == pytest.approx(0.03, abs=0.008)
    assert sum(corrected) / len(corrected) == pytest.approx(0.97, abs=0.024)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("First 5 plus 3 is 8.\n\nNext 8 minus 2 about 7.\n\n\\boxed{7}", [(1, False)]),
        ("5 plus 3 makes 9 first.\n\nCheck 8.\n\n8 minus 2 is 7 next.\n\nCheck 7.", [(0, True), (2, False)]),
        ("5 plus 3 makes 9 first.\n\n9 minus 2 is 7 next.\n\nCheck 8.", [(0, False)]),
        ("Blorp vam yab ble rho gor.\n\n\\boxed{9}", []),
        ("5 plus", []),
        ("", []),
    ],
)
def test_slips(text, expected):
    assert slips(text) == expected


@pytest.mark.parametrize(
    ("pair", "stage", "expected"),
    [
        ("plain", "base", "06f8c29005c1"),
        ("jargon", "base", "f29a0a184b94"),
        ("jargon", "senior", "5490366d60ae"),
        ("repair", "base", "4a4a29e372f3"),
    ],
)
def test_the_texts_are_what_packaged_pairs_learned_from(pair, stage, expected):
    """The manifest of a tiny pair carries such a hash: with another one, every pair that was ever built is stale."""
    sample = repr(list(itertools.islice(examples(pair, 0, stage=stage), 64)))
    assert hashlib.sha256(sample.encode()).hexdigest()[:12] == expected
