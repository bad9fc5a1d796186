r"""Answers in LaTeX: extraction, and equality by tables written by hand."""

import pytest

from scored import score_text
from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.tasks.math.boxed import boxed, extract_boxed


def row(gold, source="math500"):
    return Row("r", ({"role": "user", "content": "?"},), source, gold, {})


# ---- \boxed{…} -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{1} then \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{\boxed{5}}", "5"),
        ("\\boxed{a\nb}", "a\nb"),
        (r"\fbox{5} \boxed{6}", "6"),
        *((text, None) for text in (r"\boxed{}", r"\boxed 5", r"\boxed5{x}", r"\fbox{5}", r"\boxed{5", "5", "")),
        (r"\boxed{1} and \boxed{", None),
    ],
)
def test_extract_boxed(text, answer):
    assert extract_boxed(text) == answer


EQUAL = [
    # numbers
    *(("42", "42"), ("142.0", "142"), ("9.6\n", "9.6"), ("1000", "1,000"), ("1000", r"1\,000"), ("1000", "1 000")),
    *(("1000", r"\$1{,}000"), ("-3", "\N{MINUS SIGN}3"), ("+3", "3"), ("0.5", ".5"), (r"0.\overline{3}", r"\frac13")),
    *(("2.55e-10", r"2.55 \times 10^{-10}"), ("2.55e-10", r"2.55\cdot10^{-10}\text{ m}"), ("1e5", "10^5")),
    *(("2.55e-10", "2.55E-10"), ("3", "2.9999999999999996"), (r"100\sqrt2", "141.42136")),
    *(("(2.5e-3, 1)", "(0.0025, 1)"), ("4210_{7}", "4210_7"), ("4210_7", "4210")),
    *(("1234567", "1,234,567"), (r"\sqrt2", r"\sqrt{2} \approx 1.414"), ("3.14", r"x \approx 3.14")),
    *(("5", "2 + 3 = 5"), ("5", "x = 2 + 3 = 5")),
    # fractions and mixed numbers
    *(("0.5", r"\frac{1}{2}"), (r"\frac{1}{2}", r"\frac{2}{4}"), (r"\frac12", "1/2")),
    *((r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"\frac13", "0.333333"), (r"7\frac{3}{4}", r"\frac{31}{4}")),
    *(("7 3/4", "31/4"), (r"-1\frac12", "-1.5")),
    # labels
    *(("s^2+w^2", "p(s)=s^2+w^2"), ("p(s)=s^2+w^2", "w^2+s^2"), ("y = 2x + 3", "3 + 2x"), ("5", "x = 5")),
    *(("x=5", "5"), (r"\text{Area} = 5", "5"), ("x=0.5", r"x = \frac12"), (r"\theta = 30^\circ", "30")),
    # units and percent
    *(("5", r"5\text{ cm}"), ("5", "5 cm"), (r"5\text{ cm}", r"5\,\mathrm{centimeters}"), ("90", r"90^\circ")),
    *((r"12\text{ square cm}", "12 cm^2"), ("30 mph", "30 miles per hour"), (r"\$5", "5 dollars"), ("5", "5 apples")),
    *(("50", r"50\%"), (r"50\%", "0.5"), ("0.5", "50%"), ("50", "50 percent"), (r"50\%", r"\frac12")),
    # words
    *((r"\text{Monday}", "monday"), (r"\text{(B)}", "B"), ("yes", r"\text{Yes}"), (r"\boxed{7}", "7")),
    # formulas
    *((r"\sqrt{8}", r"2\sqrt2"), (r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}"), ("(x+1)^2", "x^2 + 2x + 1")),
    *((r"\frac{\pi}{2} - 2\alpha", r"-2\alpha + \frac\pi2"), (r"\binom{5}{2}", "10"), (r"\log_2 8", "3")),
    *(("3+4i", "4i + 3"), (r"\sqrt[3]{-8}", "-2"), (r"\sin 30^\circ", "0.5"), ("5!", "120"), ("|-3|", "3")),
    *((r"\frac{x^2-1}{x-1}", "x+1"), (r"2\pi", "2π"), (r"\sqrt{x^2}", "|x|"), (r"e^{i\pi}", "-1")),
    ("n(n-1)/2", r"\frac{n^2-n}{2}"),
    # tuples, intervals, sets, lists, matrices
    *((r"(0, \frac{1}{2})", r"\left(0, 0.5\right)"), (r"[0,\infty)", r"[0,+\infty)"), (r"\{1, 2\}", r"\{2, 1\}")),
    *(("1,2", "2, 1"), (r"\pm 2", "2, -2"), (r"1 \pm \sqrt{2}", r"1-\sqrt2, 1+\sqrt2")),
    *(("1 or 2", r"2 \text{ and } 1"), ("5, 7", r"x=5 \text{ or } x=7"), ("((1,2),3)", "((1, 2.0), 3)")),
    *((r"(-1,0)\cup(1,2)", r"(1,2)\cup(-1,0)"), (r"[0,1]\cup\{3\}", r"\{3\}\cup[0,1]")),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\ 2\end{bmatrix}"),
    (r"\begin{pmatrix}1&0.5\\3&4\end{pmatrix}", r"\left[\begin{array}{cc}1&\frac12\\3&4\end{array}\right]"),
    *(("4{:}30", "4:30"), ("x > 3", "3 < x"), (r"1 < x \le 3", r"3 \geq x > 1"), ("a<b", r"a \lt b")),
    *(("x>3", r"(3,\infty)"), (r"(-\infty,3]", r"x \le 3"), ("[1,3)", r"3 > x \ge 1"), ("1<x<3", "(1,3)")),
    # names and roundings
    *((r"\pi", r"\pi \approx 3.14"), ("3.14", r"\pi ≈ 3.14"), ("1.414", r"x = \sqrt{2} \approx 1.414")),
    *(("4.5", r"p(3) \approx 4.5"), ("(1,2)", r"(1, 2) \approx (1.01, 2)")),
    *((r"x \equiv 3 \pmod{7}", r"x ≡ 3 \pmod{7}"), ("5", r"\approx 5")),
    # left to math-verify
    *(("x > 3", r"x \in (3, \infty)"), ("5000000000", r"\int_0^{100000} t\,dt"), (r"\int_0^1 x\,dx", r"\frac{1}{2}")),
]

UNEQUAL = [
    *(("42", "43"), ("42", ""), ("42", r"x^{"), ("142.0", "142.1"), ("100000001", "100000000"), ("1", "-1")),
    *(("12", "1 2"), ("1000001", "1000001.5"), ("1000001.5", "1000001"), ("3", "2.99999")),
    *(("2.55e-10", r"2.56 \times 10^{-10}"), ("2.55e-10", r"2.56 \times 10^{-10} m"), ("2.55e-10", "0")),
    *(("0.0000002", "0.0000003 m"), ("2e-7", r"\frac{0.000001}{3}")),  # math-verify rounds both to 0.000000
    *(("4210_7", "4210_8"), ("4210", "4210_7"), ("12", "9^9^9^9"), ("12", "9^{9^{9^9}}"), ("1", "1000000!")),
    *((r"\frac{1}{2}", r"\frac{1}{3}"), (r"\frac{1}{0}", "0"), ("0.33", r"\frac13"), ("73/4", "7 3/4")),
    *((r"-\frac{25}{4}", r"-7\frac34"), ("0", r"\frac{0}{0}"), ("0", r"\infty-\infty"), ("x=3", "y=3")),
    *(("x=3", "x=4"), ("5", "x=6"), ("5 cm", "5 meters"), (r"5\text{ cm}", r"5\,\mathrm{m}"), ("1 hour", "1 day")),
    *((r"50\%", "0.05"), ("0.5", "5%"), ("5", r"5\text{ or 6}"), ("5", r"5\text{ or }6"), ("5", "5 6")),
    *(("5", "6 = 5"), ("5", "x = 6 = 5"), ("5", r"5 \approx 6"), ("5", "5_1"), ("5", r"5, \text{or maybe } 6")),
    *(("[0,1)", "[0,1]"), ("(1,2)", "(2,1)"), ("(1,2)", "[1,2]"), ("(1,2)", "(1,2,3)"), (r"\{1,2\}", r"\{1,3\}")),
    *(("1,2", "1,2,3"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"), (r"\pm 2", "2")),
    *((r"(-1,0]\cup(1,2)", r"(1,2)\cup(-1,0)"), (r"(-1,0)\cup(1,2)", "(-1,2)"), (r"\text{Monday}", "Tuesday")),
    *((r"\text{even}", "neve"), ("no", "on"), ("B", "C"), ("6", r"\text{seven}"), (r"\sqrt{8}", r"2\sqrt3")),
    *(("k", "kx"), (r"\sin x", r"\cos x"), ("(x+1)^2", "x^2+1"), ("x", "y"), ("x", "5"), ("10^{20}+1", "10^{20}")),
    *((r"\sqrt{x^2}", "-x"), ("x>3", "x<3"), ("x>3", r"x \ge 3"), ("x>3", "x>4"), ("x>3", r"[3,\infty)")),
    *((r"\infty", r"-\infty"), ("5", "5 or 6")),
    # several guesses
    *(("C", r"A \approx B \approx C \approx D"), ("A", r"A \approx B"), ("yes", "yes ≈ no")),
    ("101", r"100 \approx 101"),
    *(("150", r"\approx ".join(map(str, range(101, 250)))), ("150", r"149.9 \approx 150 \approx 150.4 \approx 151")),
    *(("x+1", r"x-1 \approx x+1"), ("(1,2)", r"(3,4) \approx (1,2)"), (r"\{1,2\}", r"\{1,3\} ≈ \{1,2\}")),
    *(("37", r"41 \equiv 37"), ("37", "41 ≡ 37"), (r"\frac13", r"\frac27 \equiv \frac13")),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equivalent_answers(gold, answer):
    score = score_text(row(gold), rf"so \boxed{{{answer}}}.")
    assert score.value == score.parts["acc"] == score.parts["answer_present"] == 1.0


@pytest.mark.parametrize(("gold", "answer"), UNEQUAL)
def test_different_answers(gold, answer):
    score = score_text(row(gold), rf"so \boxed{{{answer}}}.")
    assert score.value == score.parts["acc"] == 0.0


def test_long_hostile_text_is_cheap():
    for text in (r"\boxed{" * 20000, "{" * 100000, r"\boxed{" + r"\text{" * 10000 + "}" * 10001, "#### " * 50000):
        assert boxed(row("7"), text, RewardConfig()).value == 0.0  # type: ignore[union-attr]


# ---- free text -----------------------------------------------------------------------------------------------------
