r"""What an answer claims, to the default graders: itself, a bare label at most, nothing hedged, hidden or beside it."""

import re

import pytest
from test_math import EQUAL

from scored import score_text
from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.tasks.math.boxed import extract_boxed
from tandemrl.tasks.math.rows import AMC_DROPS

PUBLISHED = tuple({gold for gold, _ in EQUAL}.union(*AMC_DROPS.values()))
NUMBERS = ("0", "7", "42", "600", "1024", "-3", "0.5", "70000", r"\frac{3}{4}")
"""Answers as the builders of GSM8K, the evaluation sets and the generated problems have them."""
GOLDS = sorted({*PUBLISHED, *NUMBERS, r"I(0) e^{-\frac{t}{R C}}", "6 = 5", r"4 \text{ or more}", r"9 \text{ hours}"})


def value(scorer, gold, text, **options):
    row = Row("r", (), "mine", gold, {})
    score = score_text(row, text, RewardConfig(scorers={"mine": scorer}, **options))
    return score.value


def answered(gold, answer):
    """What is in a box is the same to `boxed`."""
    return value("math", gold, rf"so \boxed{{{answer}}}.")


def wrong(gold, answer):
    assert answered(gold, answer) == 0.0, (gold, answer)


def right(gold, answer):
    assert answered(gold, answer) == 1.0, (gold, answer)


# ---- identity ------------------------------------------------------------------------------------------------------


def test_every_answer_is_itself_with_and_without_a_full_stop():
    for gold in GOLDS:
        inside = extract_boxed(gold) or gold.strip()
        right(gold, inside)
        right(gold, f"{inside}.")
        assert value("boxed", gold, rf"\boxed{{{inside}}}") == 1.0, gold


def test_no_answer_is_its_neighbour():
    """Its first digit is changed."""
    for gold in GOLDS:
        neighbour = re.sub(r"\d", lambda digit: str(int(digit[0]) % 9 + 1), gold, count=1)
        if neighbour != gold:
            wrong(gold, extract_boxed(neighbour) or neighbour)


# ---- equations -----------------------------------------------------------------------------------------------------

EQUATIONS = ("x + 3 = {}", "2x = {}", "xy = {}", "ab = {}", "x^2 = {}", r"\sin(x) = {}", "n(n+1) = {}", "{} = x + 3")
EQUATIONS += ("x = 8888 = {}", "x = y + {}", "f(x) + 1 = {}", "|x| = {}", "-x = {}", "x - y = {}", "x/2 = {}")
EQUATIONS += ("x! = {}", r"\text{twice } x = {}", r"\text{not } x = {}", r"\frac{x}{2} = {}")
EQUATIONS += (r"x \equiv {}", r"x \neq {}")
EQUATIONS += ("x > {}", r"x \le {}", "x = 7, y = {}", "x = 7, {}", "x = {}, 8888", "x = {} = 8888", "9999 = {}")
LABELS = ("x = {}", "a_1 = {}", "p(3) = {}", "f(x) = {}", r"\theta = {}", r"\text{Area} = {}", "AB = {}")
LABELS += ("total cost = {}",)
LABELS += (r"\angle ABC = {}", r"x_{\text{max}} = {}", r"\text{minimum value} = {}", r"S_{10} = {}")


@pytest.mark.parametrize("equation", EQUATIONS)
def test_no_equation_but_a_bare_label_is_a_number(equation):
    for gold in NUMBERS:
        wrong(gold, equation.replace("{}", gold))


@pytest.mark.parametrize("label", LABELS)
def test_a_bare_label_may_be_dropped(label):
    for gold in NUMBERS:
        right(gold, label.replace("{}", gold))
        right(label.replace("{}", gold), gold)


@pytest.mark.parametrize(
    ("gold", "answer", "score"),
    [
        *(("5", "2 + 3 = 5", 1), ("5", "x = 2 + 3 = 5", 1), ("0.333", r"\frac{1}{3} = 0.333", 1)),
        ("2", r"\sqrt4 = 2", 1),
        *(("600", "602 = 600", 0), ("600", "x = 602 = 600", 0), ("0.3", r"\frac{1}{3} = 0.4 = 0.3", 0)),
        ("3", "3.1 = 3", 0),
        *(("3.16", r"\pi = 3.16", 0), ("600.4", r"602 = 600 \approx 600.4", 0)),
    ],
)
def test_a_calculation_has_to_be_right(gold, answer, score):
    assert answered(gold, answer) == score


def test_labelled_lists_are_compared_by_label_or_in_order():
    right("x=5, y=6", "5, 6")
    right("5, 6", r"x=6 \text{ or } x=5")
    wrong("x=5, y=6", "6, 5")
    wrong("x=5", "y=5")


# ---- hedges, text, characters --------------------------------------------------------------------------------------

BEFORE = (r"\text{not }{}", "not {}", r"\mathrm{not}\,{}", "at least {}", r"\text{about }{}", r"\neg {}", "~5 or {}")
BEFORE += (r"\text{either 5 or }{}", "between 5 and {}", "5, {}", "5 or {}", r"5 \\ {}", "7&{}", "7|{}", "7#{}")
AFTER = (r"{} \text{ or more}", r"{} \text{ or }", "{} or 5", "{} or more", r"{}\text{ dozen}", r"{}\text{ thousand}")
AFTER += (r"{}\text{ fifths}", r"{}\text{ (wrong)}", "{}, 5", "{}&7", "{}|7", "{}?", "{}...", r"{}\ldots", "{}'", "{}†")
AFTER += ("{}/", "{}+", "{}^", "{}_", "({}", "{})", "{} = 5", r"{} \neq 5", "{} to 5", r"{} \% 5", r"{}\cancel{5}")
AFTER += (r"\phantom{{}}", r"\sout{{}}", r"\boxed{{}} or 5", r"\text{{}}\text{5}", r"[{}, {}]", r"\binom{{}}", "{}{5}")


@pytest.mark.parametrize("hedge", BEFORE + AFTER)
def test_what_stands_beside_a_number_is_not_passed_over(hedge):
    for gold in ("4", "42", "600"):
        wrong(gold, hedge.replace("{}", gold))


@pytest.mark.parametrize(
    "between", ["\u200b", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u2063", "\u202e", "\x00", "\x7f"]
)
def test_characters_that_are_not_seen_hide_nothing(between):
    for gold in ("42", "600"):
        wrong(gold, f"7{between}{gold}")
        wrong(gold, f"{gold}{between}7")
    assert answered("742", f"7{between}42") == float(between in "\u200b\u200d\u2060\ufeff\u00ad")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("f(0)", "0"),
        ("0", "f(0)"),
        ("f(0)+1", "1"),
        (r"I(0) e^{-\frac{t}{R C}}", "0"),
        ("f(2x)", "2f(x)"),
        ("0", "g^{-1}(0)"),
    ],
)
def test_a_function_is_no_factor_to_any_scorer(gold, answer):
    wrong(gold, answer)


# ---- natural answers -----------------------------------------------------------------------------------------------

NATURAL = r"""
5 :: 5 \, \text{cm} | 5 \; \text{cm} | 5 \ \text{cm} | 5 \, \mathrm{cm} | 5 \, \text{cm}^2 | 5 \, \text{km/h}
5 :: 5\text{ meters per second squared} | \textbf{(C) } 5 | \text{(C)}\ 5 | (C) 5
10 :: 10 \, \text{dollars} | 10 \, \text{cm}^3 | 10 \text{ two-digit numbers} | 10 \text{ one-dollar bills}
10 :: m+n = 10 | m + n = 3 + 7 = 10 | a+b+c = 10 | \alpha + \beta = 10 | \frac{m}{n} = 10 | [ABC] = 10 | [ABCD] = 10
10 :: a_{n+1} = 10 | \det(A) = 10 | \det A = 10 | \max = 10 | f(f(2)) = 10 | f(g(2)) = 10 | \underline{10} | **10**
10 :: x \approx 10
1500 :: 1,500 \text{ meters} | 1,500\text{ m} | 1,500 cm | 1,500^\circ | 1,500 \text{ dollars}
1500 :: \$1,500 \text{ per year} | 1{,}500\,\text{m} | 1,\!500 \text{ cm}^2 | x = 1,500 \text{ m}
1,500\text{ m} :: 1500
(3,4) :: (x, y) = (3, 4) | (a,b) = (3,4) | x = 3, y = 4
(3,\frac{\pi}{2}) :: (r,\theta) = \left( 3, \frac{\pi}{2} \right)
x=2,y=-1 :: (2,-1)
(2,-1) :: x=2, \; y=-1 | x=2 \text{ and } y=-1
(3,4),(5,6) :: (x,y) = (3,4), (5,6) | (x,y) = (3,4) \text{ or } (5,6)
\begin{pmatrix}2\\-1\\3\end{pmatrix} :: \vec{v} = \begin{pmatrix}2\\-1\\3\end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} :: \mathbf{A} = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} :: \left( \begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array} \right)
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix} :: \begin{pmatrix} -\dfrac{1}{3} \\[6pt] \dfrac{2}{3} \end{pmatrix}
2:3 :: \frac{2}{3}
3:4 :: 3/4
\frac{1}{2} :: 1:2
\emptyset :: \varnothing
\mathbb{R} :: (-\infty, \infty)
(-\infty,\infty) :: \mathbb{R}
x\neq 0 :: x \ne 0
\frac{14}{3} :: \frac{14}{3} \approx 4.67
33.3 :: \frac{100}{3} \approx 33.3
\sqrt{2} :: \sqrt{2} \approx 1.414
12300 :: 12345.6 \approx 12300
"""
"""Ground truth :: answer | answer …, as models write them."""


@pytest.mark.parametrize(("gold", "answers"), [line.split(" :: ") for line in NATURAL.strip().splitlines()])
def test_natural_forms_of_a_right_answer(gold, answers):
    for answer in answers.split(" | "):
        right(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        *(("10", "m + n = 7 = 10"), ("10", "m + n = 7, 10"), ("10", "m + 7 = 10"), ("10", "m + n = p - q = 10")),
        *(("10", r"\frac{m}{2} = 10"), ("10", "[ABC] = 7 = 10"), ("10", "f(f(2)) + 1 = 10")),
        *(("x + y = 10", "10"), ("4", "4:1"), ("4", r"\mathbb{R} = 4"), (r"\frac{x}{y} = 10", "10")),
        *(("(3,4)", "(x, y) = (4, 3)"), ("(3,4)", "y = 3, x = 4")),
        *(("2:40", "1:20"), ("3:15", "0.2"), ("2:3", "3:2"), ("1500", "1,500 thousand"), ("4", r"4\text{ half-hours}")),
        *(("4", r"4\text{ two-dozen}"), ("4", r"4\text{ twenty-five}"), ("4", r"\text{not-so }4")),
        *(("(A) 5", "(B) 5"), ("6", "(C) 5"), ("4", r"4\text{ squared}"), ("4", r"4\text{ doubled}")),
        *(("4", r"4\text{ is excluded}"), ("4", r"\text{cannot be } 4"), ("4", r"4\text{ twelve}")),
    ],
)
def test_natural_forms_open_no_other_answer(gold, answer):
    wrong(gold, answer)


@pytest.mark.parametrize(
    ("answer", "right_golds", "wrong_golds"),
    [
        (r"600^1 \approx 605", ("600",), ("605",)),
        (r"\sqrt{360000} \approx 601", ("600",), ("601",)),
        (r"600.0000001 \approx 605", ("600.0000001",), ("605",)),
        (r"7.0000001 \approx 7.07", ("7.0000001",), ("7.07",)),
        (r"\frac{2}{3} \approx 0.66", (r"\frac{2}{3}",), ("0.66",)),
        (r"\frac{2}{3} \approx 0.67", (r"\frac{2}{3}", "0.67"), ("0.66",)),
        ("5.04 = 5.0", (), ("5.04", "5")),
        (r"\frac{504}{100} = 5.0", (), ("5",)),
        (r"\frac{1}{3} = 0.333", (r"\frac{1}{3}", "0.333"), ("0.334",)),
    ],
)
def test_a_rounding_is_within_half_a_unit_of_its_last_digit(answer, right_golds, wrong_golds):
    for gold in right_golds:
        right(gold, answer)
    for gold in wrong_golds:
        wrong(gold, answer)


# ---- free text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        *(("4", ".4", 0), ("0.4", ".4", 1), ("2", "AZYUK2A", 0), ("2", "H2O", 0), ("42", "version42", 0)),
        *(("n", "nothing", 0), ("n", "then n", 0), ("n", "the answer is n", 1), ("4", "the answer is not 4", 0)),
        *(("4", "it is 5 or 4.", 0), ("5", "$x = 7, y = 5$", 0), ("5", "x + 3 = 5", 0)),
        ("16", "As $x^2 = 16$, x is 4.", 0),
        *(("4", "As $x^2 = 16$, x is 4.", 1), ("12", "that is 3 * 4", 1), ("7", "3 * 4 = 7", 0), ("1000", "1,000", 1)),
    ],
)
def test_math_reads_no_scraps(gold, text, score):
    assert value("math", gold, text) == score


@pytest.mark.parametrize(
    ("gold", "text"),
    [
        *(
            ("5", "Therefore, Tom has 5 apples."),
            ("5", "It costs $5."),
            ("1.5", "It takes 1.5 hours."),
            ("5", "#### 5"),
        ),
        *(("12", "<answer>12</answer>"), ("1000", "She needs 1,000 steps"), ("5", "The answer is indeed 5.")),
        *(("5", "The answer is:\n\\[\n5\n\\]"), ("5", "The answer is\n$$\nx = 5.\n$$"), ("5 km", "He ran 5 km.")),
    ],
)
def test_math_takes_the_only_number_of_prose(gold, text):
    assert value("math", gold, text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        *("Tom has about 5 apples.", "Tom doesn't have 5 apples.", "He cannot have 5 apples."),
        "Tom has 5 dozen apples.",
        *("Tom has 5 apples or 6.", "Tom has 5 or", "Tom has 5 apples?", "Look at step 5.", "Tom has 5 of 6."),
        "Chapter 5",
        *("Tom ran 5 m.", "He eats 5 to ten apples.", "It costs 5 + x.", "He wrongly counts 5 apples."),
    ],
)
def test_no_number_is_taken_out_of_what_qualifies_it(text):
    assert value("math", "5", text) == 0.0


def test_a_box_in_a_box_is_part_of_it():
    assert extract_boxed(r"\boxed{\boxed{7} or 8}") == "{7} or 8"
    assert extract_boxed(r"\boxed{\boxed{7} or \boxed{8}}") == "{7} or {8}"
    assert extract_boxed(r"\boxed{\boxed{\boxed{7}}}") == "7"
    assert extract_boxed(r"\boxed{\boxed{7} or {8}}") == "{7} or {8}"
    assert extract_boxed(r"\boxed{" * 500 + "7" + "}" * 500) == "7"
    assert extract_boxed(r"{ \boxed{1} and \boxed{2} }") == "2"
