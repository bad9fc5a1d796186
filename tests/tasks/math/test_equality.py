r"""Which answers are the ground truth, to the graders of rows that name no published one.

Each line of a table in ``tests/golden`` is ``ground truth :: answer | answer …``, several apart by ``;;``. Tables and
verdicts were written by hand. The truth of random answers comes from fractions, counters and integers, never from the
graders.
"""

import json
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrl.config import load
from tandemrl.data.rows import Row
from tandemrl.rewards.scoring import Scorer
from tandemrl.tasks.math.boxed import extract_boxed
from tandemrl.tasks.math.equality import equal
from tandemrl.tasks.math.rows import AMC_DROPS

GSM8K = Path(os.environ.get("TANDEMRL_DATA", Path(__file__).parents[4] / "shared" / "data")) / "gsm8k" / "test.jsonl"

GOLDEN = Path(__file__).parents[2] / "golden"
RIGHT, WRONG = ((GOLDEN / f"{name}_answers.txt").read_text(encoding="utf-8") for name in ("equal", "other"))


def cases(table: str) -> list[tuple[str, str]]:
    groups = [group.partition(" :: ") for line in table.strip().splitlines() for group in line.split("  ;;  ")]
    return [(gold, answer) for gold, _, answers in groups for answer in answers.split(" | ")]


def failed(items: Sequence[tuple[str, str]], right: float) -> list[tuple[str, str]]:
    rows = [(Row("r", (), "mine/x", gold, {}), rf"It is $\boxed{{{answer}}}$.") for gold, answer in items]
    with Scorer(load(overrides=["reward.scorers.mine/*=boxed", "reward.timeout_s=300"]).reward) as scorer:
        found = [(score.value, score.parts["acc"]) for score in scorer.score(rows)]
    return [item for item, score in zip(items, found, strict=True) if score != (right, right)]


@pytest.mark.parametrize(("table", "right"), [(RIGHT, 1.0), (WRONG, 0.0)])
def test_a_form_of_an_answer(table: str, right: float) -> None:
    assert failed(cases(table), right) == []


def test_every_answer_is_itself_and_no_neighbour_with_another_first_digit() -> None:
    golds = {gold for gold, _ in cases(RIGHT) + cases(WRONG)}.union(*AMC_DROPS.values())
    golds |= {r"I(0) e^{-\frac{t}{R C}}", "6 = 5", r"4 \text{ or more}", r"9 \text{ hours}"}
    for gold in map(str.strip, sorted(golds)):
        gold = extract_boxed(gold) or gold
        neighbour = re.sub(r"\d", lambda digit: str(int(digit[0]) % 9 + 1), gold, count=1)
        assert equal(gold, gold), gold
        assert equal(gold, f"{gold}."), gold
        assert neighbour == gold or not equal(gold, neighbour), gold
    assert not equal("", "")
    assert not equal("42", "")
    assert not equal("150", r"\approx ".join(map(str, range(101, 250))))


@pytest.mark.skipif(not GSM8K.is_file(), reason="no GSM8K files; set TANDEMRL_DATA to the folder above gsm8k/")
@pytest.mark.parametrize("words", [1, 2, 3])
def test_the_words_behind_how_many_are_no_part_of_the_number(words: int) -> None:
    forms = (r"%d \text{ %s}", r"%d~\mathrm{%s}", r"%d\ \textbf{%s}.", r"\text{%d %s}", r"%d %s")
    right, wrong = [], []
    for row in map(json.loads, GSM8K.read_text().splitlines()):
        gold = row["answer"].rpartition("####")[2].strip().replace(",", "")
        found = re.search(rf"[Hh]ow (?:many|much) ((?:[A-Za-z]+ ?){{1,{words}}})", row["question"])
        unit = found[1].strip() if found else "units"
        for form in forms if len(unit) > 1 else forms[:-1]:  # "762 M" is no count
            right.append((gold, form % (int(gold), unit)))
            wrong.append((gold, form % (int(gold) + 1, unit)))
    assert failed(right, 1.0) == failed(wrong, 0.0) == []


@pytest.mark.parametrize(
    "between", ["\u200b", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u2063", "\u202e", "\x00", "\x7f"]
)
def test_characters_that_are_not_seen_hide_nothing(between: str) -> None:
    assert not equal("42", f"7{between}42")
    assert not equal("42", f"42{between}7")
    assert equal("742", f"7{between}42") == (between in "\u200b\u200d\u2060\ufeff\u00ad")


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [",", ", ", "{,}", r"\,", " ", r",\!", r"\ "])
def test_groups_of_digits_are_a_number_only_if_they_are_well_formed(separator: str) -> None:
    """A number has a first group of 1 to 3 digits that does not begin with 0, and then groups of 3; a comma with a
    space separates entries."""
    rng = random.Random(separator)
    for _ in range(60):
        sizes = [rng.randint(1, 4), *(rng.choice((3, 3, 3, 2, 4)) for _ in range(rng.randint(1, 2)))]
        groups = ["".join(rng.choices("0123456789", k=size)) for size in sizes]
        number = str(int("".join(groups)))
        proper = sizes[0] <= 3 and groups[0][0] != "0" and set(sizes[1:]) == {3} and separator != ", "
        answer = separator.join(groups)
        assert equal(number, answer) == proper, (number, answer)


@given(st.integers(0, 9), st.integers(0, 999))
@settings(max_examples=60)
def test_a_list_that_begins_with_0_is_no_number(first: int, second: int) -> None:
    for text in (f"0,{second:03}", f"0, {second:03}", f"00,{second:03}", f"-0,{second:03}", f"0,{first}00,{second:03}"):
        digits = str(int(text.replace(",", "").replace(" ", "")))
        assert not equal(digits, text), text
        assert not equal(text, digits), text


def written(number: Fraction) -> list[str]:
    over, under = number.as_integer_ratio()
    mixed = [rf"{over // under}\frac{{{over % under}}}{{{under}}}"] if number > 1 and under > 1 else []
    return [rf"\frac{{{over}}}{{{under}}}", f"{over}/{under}", *mixed]


@given(st.fractions(Fraction(1, 10**6), 10**9, max_denominator=10**6), st.integers(6, 30))
@settings(max_examples=80)
def test_fractions_are_equal_only_if_they_are(number: Fraction, places: int) -> None:
    """However near the other one is."""
    near = Fraction(round(number * 10**places), 10**places)
    for gold in written(number):
        for answer in written(near):
            if number.denominator > 1 and near.denominator > 1:
                assert equal(gold, answer) == (number == near), (gold, answer)
            assert equal(f"({gold}, x)", f"({answer}, x)") == (number == near)


def test_decimals_that_differ_in_a_written_place_are_different() -> None:
    rng = random.Random(5)
    for _ in range(60):
        number = rng.randrange(10**8, 10**10)
        gold, answer = (f"{each // 10}.{each % 10}" for each in (number, number + rng.randint(1, 9)))
        assert not equal(gold, answer), (gold, answer)
        assert equal(gold, f"{gold}0")


@pytest.mark.parametrize("size", [30, 50, 100, 400, 1000, 2900])
@pytest.mark.parametrize("base", [r"\sqrt{2}", r"\pi", "e^{100}", "7", r"\frac{2}{3}"])
def test_a_tiny_difference_is_one(base: str, size: int) -> None:
    tiny = rf"10^{{-{size}}}"
    for gold, answer in ((base, f"{base}+{tiny}"), ("0", rf"{base} \cdot {tiny}"), ("0", f"e^{{-{size}}}")):
        assert not equal(gold, answer), (gold, answer)
        assert not equal(answer, gold), (gold, answer)
    assert equal(f"{base}+{tiny}", f"{tiny}+{base}")


def test_digits_behind_an_argument_make_no_value() -> None:
    r"""In ``\frac123``, TeX takes one digit for each argument, and the author may have meant more."""
    rng = random.Random(7)
    for _ in range(8):
        a, b, c = (rng.randint(1, 9) for _ in range(3))
        for answer in (rf"\frac{a}{b}{c}", rf"\frac{{{a}}}{b}{c}", rf"\frac{{{a}}}{{{b}}}{c}"):
            for gold in (Fraction(a * c, b), Fraction(a, 10 * b + c), Fraction(10 * a + b, c)):
                assert not equal(rf"\frac{{{gold.numerator}}}{{{gold.denominator}}}", answer), (gold, answer)
        for gold in (rf"{c}\sqrt{{{a}}}", rf"\sqrt{{{a}{c}}}"):
            assert not equal(gold, rf"\sqrt{a}{c}")
            assert not equal(gold, rf"\sqrt {a}{c}")
        for gold, answer in ((rf"\frac{{{a}}}{{{b}}}", rf"\frac{a}{b}"), (rf"\sqrt{{{a}}}", rf"\sqrt{a}")):
            assert equal(gold, answer)
        assert equal(rf"\sqrt{{{a}{c}}}", f"√{a}{c}")


# ---- lists and words -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_lists_are_equal_as_often_as_counters_are(seed: int) -> None:
    rng = random.Random(seed)
    entries = ("1", "2", "-3", r"\frac{1}{2}", r"\sqrt{2}", "x^2", "(1, 2)", "[0, 1)")
    gold = rng.choices(entries, k=rng.randint(2, 4))
    answer = rng.choice((rng.sample(gold, len(gold)), rng.choices(gold, k=rng.randint(2, 5))))
    for opening, closing in (("", ""), (r"\{", r"\}")):
        left, right = (opening + ", ".join(side) + closing for side in (gold, answer))
        assert equal(left, right) == (Counter(gold) == Counter(answer)), (left, right)
    assert equal(f"({', '.join(gold)})", f"({', '.join(answer)})") == (gold == answer)


def test_any_macro_for_words_reads_as_text() -> None:
    macros = [f"text{end}" for end in ("normal", "rm", "sf", "tt", "up", "sl", "sc", "md", "it", "bf")]
    for macro in (*macros, "mbox", "hbox", "emph", "operatorname", "operatorname*", "rm", "mathrm", "mathsf", "mathit"):
        for words in (r"5\text{ cm}", r"\text{Monday}", r"5\,\text{cm}^2", r"\text{not }5", r"5\text{ or more}"):
            for gold in ("5", r"5\text{ cm}", r"5\text{ m}", "Monday"):
                assert equal(gold, words.replace("text", macro)) == equal(gold, words), (gold, words, macro)
        assert equal(r"125\text{ miles}", rf"125\{macro}{{ miles}}")
