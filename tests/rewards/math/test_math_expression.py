r"""Values of formulas: what is read, what is refused, what is equal, and that nothing is ever large."""

import random
import time
from fractions import Fraction

import pytest
import sympy

from tandemrl.rewards.math.expression import same
from tandemrl.rewards.math.formula import read
from tandemrl.rewards.math.notation import clean

SAME = [
    *(("2+3", "5"), ("2 - -3", "5"), ("2*3+4", "10"), ("2+3*4", "14"), ("(2+3)*4", "20"), ("-2^2", "-4")),
    *(("2^-1", "0.5"), ("2**10", "1024"), (r"2^{10}", "1024"), ("6/2/3", "1"), (r"6 \div 2", "3")),
    *((r"2 \cdot 3 \times 4", "24"), (r"\frac{1}{3} + \frac{1}{6}", "1/2"), (r"\frac12", "0.5")),
    *((r"1\frac12", "3/2"), (r"0.1\overline{6}", "1/6"), (r"\sqrt{8}", r"2\sqrt2"), (r"\sqrt[3]{-27}", "-3")),
    *(("(-8)^{1/3}", "-2"), ("(-8)^{2/3}", "4"), ("sqrt(3)/3", "1/sqrt{3}")),
    *((r"\sqrt{2+\sqrt3}", r"\frac{\sqrt6+\sqrt2}{2}"), (r"\frac{-1+\sqrt{5}}{2}", r"\frac{2}{1+\sqrt5}")),
    *(("√2", "2^{0.5}"), (r"\sin 2x", r"2\sin x\cos x"), (r"\sin^2 x + \cos^2 x", "1")),
    *((r"\tan x", r"\frac{\sin x}{\cos x}"), (r"\cos\pi", "-1"), (r"\sin 30^\circ", r"\frac{1}{2}")),
    *((r"\arctan 1", r"\pi/4"), (r"\sin(\arcsin 0.3)", "0.3"), (r"\sec x\cos x", "1"), (r"\ln e^2", "2")),
    *((r"\log_2 8", "3"), (r"\log_{10} 1000", "3"), (r"\lg 100", "2"), (r"e^{\ln 5}", "5"), (r"e^{i\pi}", "-1")),
    *(("(x+1)^2", "x^2+2x+1"), (r"\frac{x^2-1}{x-1}", "x+1"), ("xy", "yx"), ("x_1 x_2", "x_2 x_{1}")),
    *(("2πr", r"2\pi r"), (r"\alpha + \beta", r"\beta+\alpha"), ("|x|", r"\sqrt{x^2}"), ("5!", "120")),
    *((r"\binom{5}{2}", "10"), ("i^2", "-1"), ("1/3", "0.333333"), (r"\pi", "3.141593"), ("2.5e-3", "0.0025")),
    *((r"\infty", "+oo"), (r"\sinh x", r"\frac{e^x-e^{-x}}{2}")),
    # products with a sum, and functions
    *(("n(n-1)/2", r"\frac{n^2-n}{2}"), (r"y(1+\sqrt2)", r"y+\sqrt2 y"), ("g(m+M)", "gm+gM"), ("x^2(x+1)", "x^3+x^2")),
    *(
        ("f(x+1)", "f(1+x)"),
        ("2f(x)", "f(x)+f(x)"),
        (r"I(0)e^{-t}", r"\frac{I(0)}{e^t}"),
        (r"h(\sqrt8)", r"h(2\sqrt2)"),
    ),
]
DIFFERENT = [
    *(("5", "6"), ("-2^2", "4"), ("x", "y"), ("x+1", "x-1"), ("(x+1)^2", "x^2+1"), (r"\sin x", r"\cos x")),
    *(("a_1", "a_2"), (r"\sqrt2", "1.41"), ("10^{20}+1", "10^{20}"), (r"\sqrt2 + 10^{-20}", r"\sqrt2")),
    *(("1/3", "0.33"), (r"\infty", r"-\infty"), ("9^{9^{9^9}}", "1"), ("1000000!", "1"), ("(9!)!", "2")),
    *(("2^x", "x^2"), ("x^{10}", "x^9"), (r"\pi", "22/7")),
    *(("x+70000.5", "70000.5"), ("x+5000000.5", "2x+5000000.5")),
    # functions are no factors
    *(("f(0)", "0"), ("f(0)+1", "1"), (r"I(0) e^{-\frac{t}{R C}}", "0"), (r"\Phi(0)", "0"), ("y_1(0)", "0")),
    *(("f(2x)", "2f(x)"), ("f(x+y)", "f(x)+f(y)"), ("P(-1)", "-P(1)"), ("f(1)", "f"), ("g(x)", "x g(1)")),
]
UNCLEAR = [
    *((r"\sqrt{x^2}", "x"), (r"\ln x^2", r"2\ln x"), ("1/0", "0"), (r"\log 2", "0.5"), ("kx", "k")),
    *(("9^{9^{9}}", "9^{9^{9}}+1"), (r"9^{9^{9^9}} - 9^{9^{9^9}}", "0")),
    (r"\binom{10000}{5000}", r"\binom{10000}{5000}"),
]
UNREADABLE = [
    *(
        "",
        "+",
        "1 +",
        "x = 5",
        "x < 5",
        "1/2x",
        "a/bc",
        "2 3",
        "1 2/3x5 6",
        "(1",
        "1)",
        "{1",
        "(1]",
        "|x",
        "hello",
        "sinx",
    ),
    *(
        r"\text{five}",
        r"\int x dx",
        r"\sum_{k=1}^n k",
        r"\lim_{x\to 0} x",
        r"\frac{1}",
        r"\sqrt",
        r"\foo",
        r"\sin^{-1} x",
    ),
    *(r"\infty - \infty", r"2\infty", "a, b", "1,000", "50%", "x'", "f: x", "1..2", "x^", "_1", "x__1", "x_{a", "²³"),
    *("(" * 500 + "1" + ")" * 500, "1+" * 500 + "1", "9" * 5000, "1e99999", "-" * 1000, "^" * 1000, r"\frac" * 1000),
    *("f^{-1}(0)", "x^2(0)", "f(x", "٣", "x\x00y", "𝑥", "eval(1)", "__import__('os')", "x.real", "#", "\\", "!", "!!1"),
]


@pytest.mark.parametrize(("a", "b"), SAME)
def test_equal_values(a, b):
    left, right = read(a), read(b)
    assert left is not None
    assert right is not None
    assert same(left, right) is True
    assert same(right, left) is True


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_different_values(a, b):
    assert same(read(a), read(b)) is False
    assert same(read(b), read(a)) is False


@pytest.mark.parametrize(("a", "b"), UNCLEAR)
def test_where_values_prove_nothing(a, b):
    assert same(read(a), read(b)) is None


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_is_no_formula_is_refused_at_once(text):
    begin = time.perf_counter()
    assert read(text) is None
    assert time.perf_counter() - begin < 0.2


def test_a_tolerance_can_be_given():
    a, b = read("1"), read("1.001")
    assert same(a, b) is False
    assert same(a, b, tolerance=Fraction(1, 100)) is True
    assert same(read(r"\sqrt2"), read("1.41421356"), tolerance=Fraction(0)) is False


@pytest.mark.parametrize(
    "text",
    [
        *("9^{9^{9^{9}}}", "((((9!)!)!)!)!", r"\binom{999}{500}^{999}", "2^{-9^{9^9}}", r"e^{e^{e^{e^e}}}"),
        *(r"\tan 10^{3000}", r"\exp(10^{5})", "(1+10^{-3000})^{10^{3000}}", "x^{x^{x^{x^{x^x}}}}", "0^{-1}", "0^0"),
        r"\sin " * 30 + "x",
        "(" * 30 + "2" + ")^9" * 30,
        "+".join(["x^{99}"] * 60),
    ],
)
def test_computing_is_bounded(text):
    formula = read(text)
    begin = time.perf_counter()
    if formula is not None:
        assert same(formula, read("7")) is not True
    assert time.perf_counter() - begin < 2


def random_expression(rng, depth):
    """A formula as a sympy object, whose LaTeX and rearrangements are somebody else's work."""
    x, y, alpha = sympy.symbols("x y alpha", positive=True)
    if depth == 0:
        return rng.choice(
            [x, y, alpha, sympy.pi, sympy.Integer(rng.randint(1, 12)), sympy.Rational(rng.randint(1, 9), 7)]
        )
    a, b = random_expression(rng, depth - 1), random_expression(rng, rng.randint(0, depth - 1))
    return rng.choice(
        [
            a + b,
            a - b,
            a * b,
            a * b,
            a / b,
            a**2,
            b**3,
            sympy.sqrt(a * a + 1),
            sympy.sin(a),
            sympy.exp(b / 5),
            sympy.log(a * a),
        ]
    )


def test_formulas_against_sympy():
    """Rearranged formulas are equal, altered ones are not; sympy rearranges and writes them."""
    rng = random.Random(0)
    decided = 0
    for _ in range(60):
        formula = random_expression(rng, 3)
        gold = read(clean(sympy.latex(formula)))
        for other in (sympy.expand(formula), sympy.together(formula), sympy.factor(formula)):
            answer = read(clean(sympy.latex(other)))
            verdict = None if gold is None or answer is None else same(gold, answer)
            assert verdict is not False, (sympy.latex(formula), sympy.latex(other))
            decided += bool(verdict)
        for other in (formula + 1, formula * 2, -formula):
            answer = read(clean(sympy.latex(other)))
            if gold is not None and answer is not None and other != formula:
                assert same(gold, answer) is not True, (sympy.latex(formula), sympy.latex(other))
    assert decided > 155  # the others hold for positive variables only, and the reader does not know that
