r"""Answer extraction and equivalence, against tables written by hand."""

import importlib.util

import pytest

from tandemrl.data.rows import DataError, Row
from tandemrl.rollout.envs.math import (
    GraderError,
    Undecided,
    extract_boxed,
    gsm8k_answer,
    has_guillemets,
    normalise,
    quick_score,
    require_math_verify,
    score_text,
)


def row(gold, source="math500"):
    return Row("r", ({"role": "user", "content": "?"},), source, gold, {})


# ---- GSM8K ---------------------------------------------------------------------------------------------------------

LONG = "x" * 300


@pytest.mark.parametrize(
    ("text", "strict", "flexible", "tandem"),
    [
        ("so 9+9\n#### 18", "18", "18", "18"),
        ("#### 17\n#### 18", "18", "18", "18"),  # the last marker counts
        ("#### -1,234.5", "-1234.5", "-1,234.5", "-1234.5"),
        ("#### $18", None, "18", "18"),
        ("#### $1,000", None, "1,000", "1000"),
        ("####18", None, "18", None),
        ("#### 18.", "18.", "18.", "18."),
        ("#### 18 apples, not 20", "18", "20", "18"),
        ("#### about 18", None, "18", "18"),
        ("#### approx -18", None, "-18", "-18"),
        ("Answer: 300", None, "300", None),
        ("it is 18 .", None, "18", None),  # a lone "." is not a number
        ("nothing", None, None, None),
        ("", None, None, None),
        ("#### 18" + LONG, None, None, None),  # pushed out of the last 300 characters
        ("#### 18" + LONG[7:], "18", "18", "18"),
    ],
)
def test_gsm8k_extraction(text, strict, flexible, tandem):
    assert gsm8k_answer(text, "strict") == strict
    assert gsm8k_answer(text, "flexible") == flexible
    assert gsm8k_answer(text, "tandem") == tandem


@pytest.mark.parametrize(
    ("gold", "text", "mode", "value"),
    [
        ("18", "#### 18", "strict", 1.0),
        ("18", "#### 18.0", "strict", 0.0),  # strings are compared
        ("18", "#### 20", "strict", 0.0),
        ("1000", "#### $1,000", "tandem", 1.0),
        ("18", "#### 20", "tandem", 0.1),
        ("300", "Answer: 300", "tandem", 0.0),
        ("-5", "#### -5", "tandem", 1.0),
        ("2.5", "#### 2.5", "tandem", 1.0),
        ("300", "Answer: 300", "flexible", 1.0),
    ],
)
def test_gsm8k_scores(gold, text, mode, value):
    assert score_text(row(gold, "openai/gsm8k"), text, gsm8k=mode).value == value


def test_gsm8k_format_score_and_parts():
    wrong = score_text(row("18", "openai/gsm8k"), "<<4*5=20>> #### 20", format_score=0.25)
    assert wrong == (0.25, {"acc": 0.0, "answer_present": 1.0, "has_guillemets": 1.0}, "20")
    none = score_text(row("18", "openai/gsm8k"), "18", format_score=0.25)
    assert none == (0.0, {"acc": 0.0, "answer_present": 0.0, "has_guillemets": 0.0}, None)
    assert score_text(row("18", "openai/gsm8k"), "#### 20", gsm8k="tandem", format_score=0.0).value == 0.0


def test_guillemets():
    assert has_guillemets("<<48/2=24>>24")
    assert has_guillemets("24>>")
    assert not has_guillemets("48 > 24 < 50")


# ---- \boxed{…} -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{1} then \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        ("\\boxed{a\nb}", "a\nb"),
        (r"\boxed{}", None),
        (r"\boxed 5", None),
        (r"\fbox{5}", None),
        (r"\boxed{5", None),
        (r"\boxed{1} and \boxed{", None),
        ("5", None),
        ("", None),
    ],
)
def test_extract_boxed(text, answer):
    assert extract_boxed(text) == answer


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        (r" \dfrac12 ", r"\frac{1}{2}"),
        (r"\tfrac{1}2", r"\frac{1}{2}"),
        (r"\frac\pi2", r"\frac{\pi}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\left( 1,\, 2 \right)", "(1,2)"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"\$ 5", "5"),
        (r"$5$", "5"),
        (r"50\%", "50"),
        (r".5", "0.5"),
        (r"{.5}", "{0.5}"),
        (r"5 \text{ cm}^2", "5"),
        (r"\text{Monday}", "Monday"),
        (r"4{:}30", "4:30"),
        (r"1{,}000", "1,000"),
        (r"5.", "5"),
        (r"a \rightarrow b", r"a\rightarrowb"),
    ],
)
def test_normalise(answer, normal):
    assert normalise(answer) == normal


EQUAL = [
    ("42", "42"),
    ("142.0", "142"),
    ("9.6\n", "9.6"),
    ("1000", "1,000"),
    ("1000", r"1\,000"),
    ("1000", r"\$1{,}000"),
    ("-3", "\N{MINUS SIGN}3"),
    ("0.5", ".5"),
    ("0.5", r"\frac{1}{2}"),
    (r"\frac{1}{2}", r"\frac{2}{4}"),
    (r"\frac12", "1/2"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac13", "0.333333"),
    ("2.55e-10", r"2.55 \times 10^{-10}"),
    ("2.55e-10", r"2.55\cdot10^{-10}\text{ m}"),
    ("(2.5e-3, 1)", "(0.0025, 1)"),
    ("1e5", "10^5"),
    ("s^2+w^2", "p(s)=s^2+w^2"),
    ("p(s)=s^2+w^2", "w^2+s^2"),
    ("y = 2x + 3", "3 + 2x"),
    ("5", "x = 5"),
    ("x=5", "5"),
    (r"\text{Area} = 5", "5"),
    ("5", r"5\text{ cm}"),
    ("90", r"90^\circ"),
    ("50", r"50\%"),
    (r"50\%", "0.5"),
    (r"\text{Monday}", "monday"),
    (r"\text{(B)}", "B"),
    (r"\boxed{7}", "7"),
    (r"\sqrt{8}", r"2\sqrt2"),
    (r"\frac{1}{\sqrt2}", r"\frac{\sqrt{2}}{2}"),
    (r"\frac{\pi}{2} - 2\alpha", r"-2\alpha + \frac\pi2"),
    ("(x+1)^2", "x^2 + 2x + 1"),
    (r"7\frac{3}{4}", r"\frac{31}{4}"),
    (r"(0, \frac{1}{2})", r"\left(0, 0.5\right)"),
    (r"[0,\infty)", r"[0,+\infty)"),
    (r"\{1, 2\}", r"\{2, 1\}"),
    ("1,2", "2, 1"),
    (r"\pm 2", "2, -2"),
    (r"(-1,0)\cup(1,2)", r"(1,2)\cup(-1,0)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    (r"\binom{5}{2}", "10"),
    (r"\log_2 8", "3"),
    ("3+4i", "4i + 3"),
    ("4{:}30", "4:30"),
    ("x > 3", "3 < x"),
]

UNEQUAL = [
    ("42", "43"),
    ("42", ""),
    ("42", r"x^{"),
    ("142.0", "142.1"),
    ("100000001", "100000000"),
    ("2.55e-10", r"2.56 \times 10^{-10}"),
    ("2.55e-10", r"2.56 \times 10^{-10} m"),
    ("2.55e-10", "0"),
    ("0.0000002", "0.0000003 m"),  # math-verify rounds both to 0.000000
    ("2e-7", r"\frac{0.000001}{3}"),
    (r"\frac{1}{2}", r"\frac{1}{3}"),
    (r"\frac{1}{0}", "0"),
    ("0.33", r"\frac13"),
    ("x=3", "y=3"),
    ("x=3", "x=4"),
    ("[0,1)", "[0,1]"),
    ("(1,2)", "(2,1)"),
    (r"\sqrt{8}", r"2\sqrt3"),
    (r"\text{Monday}", "Tuesday"),
    (r"\text{even}", "neve"),  # not a product of letters
    ("B", "C"),
    ("k", "kx"),
    ("1", "-1"),
    (r"\sin x", r"\cos x"),
    ("(x+1)^2", "x^2+1"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equivalent_answers(gold, answer):
    score = score_text(row(gold), rf"so \boxed{{{answer}}}.")
    assert score.value == score.parts["acc"] == score.parts["answer_present"] == 1.0


@pytest.mark.parametrize(("gold", "answer"), UNEQUAL)
def test_different_answers(gold, answer):
    score = score_text(row(gold), rf"so \boxed{{{answer}}}.")
    assert score.value == score.parts["acc"] == 0.0


def test_the_answer_must_be_boxed():
    assert score_text(row("42"), "The answer is 42.") == (0.0, {"acc": 0.0, "answer_present": 0.0}, None)


@pytest.mark.parametrize("answer", ["7", "8", r"\frac{7}{1}", "7.0", "x=7", r"7\text{ apples}", "1e9", r"7" * 5000])
def test_numbers_never_need_math_verify(answer):
    assert not isinstance(quick_score(row("7"), rf"\boxed{{{answer}}}"), Undecided)


def test_quick_path_is_fast_on_long_hostile_text():
    for text in (r"\boxed{" * 20000, "{" * 100000, r"\boxed{" + r"\text{" * 10000 + "}" * 10001, "#### " * 50000):
        assert quick_score(row("7"), text).value == 0.0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "source",
    [
        *("synthetic/plain", "deepscaler", "aime24", "AIME", "amc23_25", "math500", "minerva", "olympiad"),
        *("OLYMPIAD_BENCH", "lighteval/MATH", "HuggingFaceH4/MATH-500", "EleutherAI/hendrycks_math"),
        "math-ai/minervamath",
    ],
)
def test_boxed_data_sources(source):
    assert score_text(row("7", source), r"\boxed{7}").value == 1.0


def test_unknown_data_source_lists_the_known_ones():
    with pytest.raises(DataError, match=r"row r: no scorer for data_source 'codeforces'.*openai/gsm8k"):
        score_text(row("7", "codeforces"), "7")


def test_missing_math_verify_is_an_error_with_the_install_hint(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "latex2sympy2_extended" else object())
    with pytest.raises(GraderError, match=r"latex2sympy2_extended.*pip install 'math-verify"):
        require_math_verify()
