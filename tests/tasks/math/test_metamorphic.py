r"""Changes of an answer that must keep or must break equality, over random answers. The truth comes from fractions,
decimals, counters and mpmath, never from the graders."""

import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_claims import right, value, wrong

from tandemrl.tasks.math.equality import equal

RNG_SEEDS = range(40)
SEPARATORS = (",", ", ", "{,}", r"\,", " ", r",\!", r"\ ")
WORD_MACROS = (
    *("text", "textnormal", "textrm", "textsf", "texttt", "textup", "textsl", "textsc", "textmd", "textit", "textbf"),
    *("mbox", "hbox", "emph", "operatorname", "operatorname*", "rm"),
)
MATHS_MACROS = ("mathrm", "mathsf", "mathit", "mathtt", "mathnormal")


# ---- thousands and lists -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", SEPARATORS)
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


def test_pairs_in_brackets_are_no_numbers() -> None:
    for opening, closing in (("(", ")"), ("[", "]"), (r"\{", r"\}"), ("(", "]")):
        for second in ("234", "000", "100"):
            pair = f"{opening}1,{second}{closing}"
            wrong(f"1{second}", pair)
            wrong(pair, f"1{second}")
            wrong(pair, f"1,{second}" if opening != "(" else f"1{second}")
    right("(1000, 2000)", "(1,000, 2,000)")
    right("1000, 2000", "2,000, 1,000")


def test_a_comma_in_braces_is_no_separator_of_a_list() -> None:
    wrong("12345", "1{,}2345")
    wrong("12345", r"1,\!2345")
    wrong("1, 23", "1{,}23")


# ---- exact numbers -------------------------------------------------------------------------------------------------


def written(number: Fraction) -> list[str]:
    over, under = number.as_integer_ratio()
    forms = [rf"\frac{{{over}}}{{{under}}}", f"{over}/{under}"]
    if number > 1 and under > 1:
        forms.append(rf"{over // under}\frac{{{over % under}}}{{{under}}}")
    return forms


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


def test_whole_numbers_and_roots_are_exact_to_every_grader_unless_published() -> None:
    for gold, answer in (
        *(("1000000", "1000001"), (r"\sqrt2", "1414214/1000000")),
        (r"\frac{\sqrt2}{1000000}", r"\frac{\sqrt2}{1000001}"),
        *((r"\pi", r"\frac{314}{100}"), (r"50\%", r"\frac{500001}{10000}\%"), ("1:3", "333333:1000000")),
    ):
        wrong(gold, answer)
    for gold, answer in (("1000000", "1000001"), ("1/3", "333333/1000000"), ("0.5", "50")):
        assert value("prime", gold, rf"\boxed{{{answer}}}") == 1.0


def test_decimals_that_differ_in_a_written_place_are_different() -> None:
    rng = random.Random(5)
    for _ in range(60):
        number = rng.randrange(10**8, 10**10)
        gold, answer = (f"{each // 10}.{each % 10}" for each in (number, number + rng.randint(1, 9)))
        assert not equal(gold, answer), (gold, answer)
        assert equal(gold, f"{gold}0")


# ---- tiny and huge -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [30, 50, 100, 400, 1000, 2900])
@pytest.mark.parametrize("base", [r"\sqrt{2}", r"\pi", "e^{100}", "7", r"\frac{2}{3}"])
def test_a_tiny_difference_is_one(base: str, size: int) -> None:
    tiny = rf"10^{{-{size}}}"
    for gold, answer in ((base, f"{base}+{tiny}"), ("0", rf"{base} \cdot {tiny}"), ("0", f"e^{{-{size}}}")):
        assert not equal(gold, answer), (gold, answer)
        assert not equal(answer, gold), (gold, answer)
    assert equal(f"{base}+{tiny}", f"{tiny}+{base}")


def test_products_and_roots_that_cancel_are_still_equal() -> None:
    for gold, answer in (
        *(("0", r"\sin\pi"), ("0", r"\sqrt2\cdot\sqrt2-2"), (r"\sqrt2", r"(10^{30}+\sqrt2)-10^{30}")),
        *((r"10^{-400}\sqrt8", r"2\sqrt2\cdot10^{-400}"), (r"e^{-1000}", r"\frac{1}{e^{1000}}"), ("0", r"\ln 1")),
    ):
        assert equal(gold, answer), (gold, answer)


def test_math_verify_does_not_round_tiny_numbers_away() -> None:
    assert not equal("10^{-5000}", "10^{-5001}")
    assert not equal(r"2 \cdot 10^{-9}", r"3 \cdot 10^{-9}")
    assert equal(r"2 \cdot 10^{-9}", r"\frac{1}{5 \cdot 10^8}")


# ---- arguments without braces --------------------------------------------------------------------------------------


def test_digits_behind_an_argument_make_no_value() -> None:
    r"""In ``\frac123``, TeX takes one digit for each argument, and the author may have meant more."""
    rng = random.Random(7)
    for _ in range(8):
        a, b, c = (rng.randint(1, 9) for _ in range(3))
        for golds, answer in (
            ((Fraction(a * c, b), Fraction(a, 10 * b + c), Fraction(10 * a + b, c)), rf"\frac{a}{b}{c}"),
            ((Fraction(a * c, b), Fraction(a, 10 * b + c)), rf"\frac{{{a}}}{b}{c}"),
            ((Fraction(a * c, b), Fraction(a, 10 * b + c)), rf"\frac{{{a}}}{{{b}}}{c}"),
        ):
            for gold in golds:
                wrong(rf"\frac{{{gold.numerator}}}{{{gold.denominator}}}", answer)
        for gold in (rf"{c}\sqrt{{{a}}}", rf"\sqrt{{{a}{c}}}"):
            wrong(gold, rf"\sqrt{a}{c}")
            wrong(gold, rf"\sqrt {a}{c}")
        right(rf"\frac{{{a}}}{{{b}}}", rf"\frac{a}{b}")
        right(rf"\sqrt{{{a}}}", rf"\sqrt{a}")
        right(rf"\sqrt{{{a}{c}}}", f"√{a}{c}")
    for gold, answer in (("30", r"\binom523"), ("0", r"\sqrt10"), ("2x", "x2"), ("3", r"\sqrt[3]27")):
        wrong(gold, answer)
    right("72", "2^{3}3^{2}")


# ---- how often -----------------------------------------------------------------------------------------------------

ENTRIES = ("1", "2", "-3", r"\frac{1}{2}", r"\sqrt{2}", "x^2", "(1, 2)", "[0, 1)")


@pytest.mark.parametrize("seed", RNG_SEEDS)
def test_lists_are_equal_as_often_as_counters_are(seed: int) -> None:
    rng = random.Random(seed)
    gold = rng.choices(ENTRIES, k=rng.randint(2, 4))
    answer = rng.choice((rng.sample(gold, len(gold)), rng.choices(gold, k=rng.randint(2, 5))))
    same = Counter(gold) == Counter(answer)
    for opening, closing in (("", ""), (r"\{", r"\}")):
        left, right_ = (opening + ", ".join(side) + closing for side in (gold, answer))
        assert equal(left, right_) == same, (left, right_)
    assert equal(f"({', '.join(gold)})", f"({', '.join(answer)})") == (gold == answer)


def test_a_styled_letter_or_a_power_of_nothing_is_no_unit() -> None:
    for answer in (
        *(r"5\mathit{x}", r"5\mathsf{x}", r"5\mathtt{x}", r"5{\it x}", r"5\emph{x}", r"5\operatorname{x}"),
        *(r"5\mathrm{x}", r"5\text{}^2", r"5{\rm }^2", r"5\operatorname{}^2", r"5\text{!}", r"5\text{½}"),
        *(r"5\text{²}", r"5\text{+x}", r"5\text{x}^2", r"5\text{apples}^2"),
    ):
        assert not equal("5", answer), answer
        assert not equal(answer, "5"), answer
    assert not equal("(x+1)", r"(x+1)\text{}^2")
    for answer in (r"5\text{ m}", r"5\mathrm{cm}^2", r"5\textnormal{ miles}", r"5\text{ in}^2", r"5\text{ sq. ft}"):
        right("5", answer)
    assert equal("20", r"20^\circ\text{C}")


def test_what_a_ground_truth_says_behind_a_number_counts() -> None:
    for words in ("thousand", "hundred", "dozen", "squared", "lakh", "or more"):
        wrong(rf"5\text{{ {words}}}", "5")
        assert equal(rf"5\text{{ {words}}}", rf"5\text{{ {words}}}")
    right(r"5\text{ feet squared}", "5")


# ---- macros for words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("macro", WORD_MACROS + MATHS_MACROS)
def test_any_macro_for_words_reads_as_text(macro: str) -> None:
    for answer in (
        r"5\text{ cm}",
        r"\text{Monday}",
        r"5\,\text{cm}^2",
        r"\text{not }5",
        r"5\text{ or more}",
        r"\text{(B)}",
    ):
        for gold in ("5", r"5\text{ cm}", r"5\text{ m}", "Monday", "B"):
            assert equal(gold, answer.replace("text", macro)) == equal(gold, answer), (gold, answer)
    right(r"125\text{ miles}", rf"125\{macro}{{ miles}}")


@pytest.mark.parametrize(
    "line",
    [
        *("-$5$", "−$5$", "√$5$", "e^$5$", "≠ $5$", "> $5$", "±$5$", "x$5$", "log $5$", "sin $5$", "½ of $5$"),
        *("square root of $5$", "a multiple of $5$", "x or $5$", "$5$x", "$5$ x", "-$5$ apples", "$5$ or x"),
    ],
)
def test_what_stands_around_a_formula_may_change_it(line: str) -> None:
    assert value("math", "5", f"So the answer is {line}") == 0.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        *(("5 cm", r"5\%"), (r"90^\circ", r"90\%"), (r"5\text{ km/h}", r"5\text{ h/km}"), ("5 km/h", "5 hours per km")),
        *(("ABC", "BAC"), ("AB", "BA"), ("3", "(3]")),
        ("5", r"5\text{ million}"),
        (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ],
)
def test_what_looks_alike_is_not_alike(gold: str, answer: str) -> None:
    wrong(gold, answer)


def test_an_improper_fraction_behind_a_number_is_neither_a_sum_nor_a_product() -> None:
    for gold in ("11/3", "10/3"):
        wrong(gold, r"2\frac{5}{3}")
    right("8/3", r"2\frac{2}{3}")
