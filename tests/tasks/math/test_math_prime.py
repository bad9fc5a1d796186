r"""PRIME's grader against verdicts of verl 0.9.1's ``prime_math`` (sympy 1.14, without its reader of LaTeX)."""

import time

import pytest

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.rewards.scoring import Scorer
from tandemrl.tasks.math.prime import equal, extract_answer, normalise


def row(gold, source="numina_olympiads"):
    return Row("r", (), source, gold, {})


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So the answer is 5", "5"),
        ("Answer: 5\nbecause", "5\nbecause"),
        ("THE ANSWERS ARE 5, 6", "5, 6"),
        ("5 is the answer", "5"),
        ("The answer is 4. No, the answer is 5", "5"),
        ("We get x = 5", "5"),
        ("It must be 5", "5"),
        ("The total is 5. Done", "5"),
        (r"\boxed{5} and more", "5"),
        (r"\boxed{x = 5}", "5"),
        (r"\boxed{x + 3 = 5}", "5"),
        (r"\boxed{(1. 5)}", "(1"),
        (r"\fbox{5}", "5"),
        (r"\boxed{1} then the answer is \boxed{2}", "2"),
        (r"\boxed{\boxed{7} or 8}", "7"),
        ("5", "5"),
        ("", ""),
        ("İ answer is 5", "5"),  # its lower case has another length
    ],
)
def test_extraction(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        *((r"\text{Yes}", "yes"), (r"\$50\%", "50"), ("1 or 2 and 3", "1 , 2 , 3"), ("3 million", "3 *10^6")),
        *(("5 centimeters", "5"), ("25cm^2", "25"), (r"90^\circ", "90"), ("{5}", "5"), (r"1,\! 000", "1000")),
        *(("5.0", "5"), ("1,000", "1000"), (r"\frac{1}{2}", "1/2"), (r"2\pi", "2pi"), ("- 5", "-5")),
        ("7 3/4", "7+3/4"),
        *(("(A)", "(a)"), (r"\sqrt[3]{2}", "sqrt(2)"), (r"\frac{x+1}{\sqrt{2}}", "x+1/sqrt(2)")),
        (r"\pi^{10}", "pi^10"),
        *((r"\alpha x", "αx"), (r"\foo{1}", "1"), (r"(-\infty, 2)\cup(3,4]", "(-inf, 2)u(3,4]"), (r"1\,2", "1+2")),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "[ 1+2; 3+4 ]"),
        *(
            (r"\mathbf{x}", "𝐱"),
            (r"\vec v", "v⃗"),
            (r"\neq---", "≠—"),
            (r"\emph{y} {z}", "y z"),
            (r"[0,1) \not=", "[0,1) ≠"),
        ),
    ],
)
def test_the_normal_form_of_prm800k(answer, normal):
    assert normalise(answer) == normal


def test_a_normal_form_is_of_its_own_text_alone():
    assert normalise(r"\title{Seventeen}") == ""
    assert r"[no \title given]" in normalise(r"\maketitle")


# Each line is ``ground truth :: answer | answer …``.
ACCEPTED = r"""
42 :: 42 | 42.0 | \text{42}
yes :: Yes
A :: (A) | \mathrm{A}
1000 :: 1,000 | 1{,}000 | 1,\!000 | 1 000 | 1\_000 | 1\!000
5 :: $5 | \$5 | 5 cm | x=5 | 5\text{ or }6 | 6 = 5 | 5 \text{ (not 6)} | 5 \text{ (wrong)} | \;5
5 :: 5 \text{ factorial} | 5 \text{ isn't right} | 5 \text{ to six} | 5 \text{ at least} | 5 \text{ minus one} | 5.
5 :: x = 5 \text{ apples} | 5 \text{ years old} | \color{red} 5 | 5 \text{ of six} | \bold{5} | \text{5}
5 :: 5 \text{ million} | 2x = 5 | 5 or 6 | 5 \text{ hundred apples} | +5 | 5 \text{ apples, 6 pears} | {\bf 5}
5 :: \bigl(5\bigr) | 5_000 | 5 \text{ more apples} | 5 \text{ minutes and seconds} | 5 \text{ or } 6 | \large 5
5 :: 5 \text{ halves} | \sout{5} | \textbf{5} | 5 \text{ squared} | x = 2 + 3 = 5 | 5 \text{ twenty-five} | 5\\
5 :: \underline{5} | = 5
50 :: 50\% | 0.5
25 :: 25\text{ cm}^2
90 :: 90^\circ | 90 degrees
12 :: 12 inches | 12_5
2*10^9 :: 2 billion
1/2 :: \frac{1}{2} | 2/4
\frac{1}{2} :: 0.5
2/4 :: 1/2
7 3/4 :: 31/4
7\frac{3}{4} :: 31/4
(1,2) :: (1, 2) | 1,2 | \left( 1 , 2 \right)
[0,1) :: [0,1) | Interval.Ropen(0, 1) | [0,1]
(1/2, 3) :: (0.5, 3) | (2/4, 3)
[0,1] :: Interval(0, 1)
(0,1] :: Interval.Lopen(0, 1)
(0,1) :: Interval.open(0,1)
0.5 :: 50 | 50%
1.0001 :: 1
\pi :: 3.14
2\pi :: 6.28 | 6.2832
6.28 :: 2\pi
2\sqrt{3} :: \sqrt{12}
x=5 :: 5
12_5 :: 12_{5} | 12 | 12_6
10 :: 1e1
perimeter :: peri
73/4 :: 7 3/4
-25/4 :: -7\frac34
\frac{x+1}{2} :: x+1/2
2(3+4) :: 23+4
(x+1)^2 :: x^2 + 2x + 1
7 \text{ cm} :: 7 \text{ m}
7 :: $7$ | \euro 7
3+4i :: 4i + 3
\frac{3}{2} :: 1\ \frac{1}{2} | 1\frac12
5 \text{ apples} :: 5 \text{ more apples}
-\frac{1}{2} :: \frac{-1}{2}
\sqrt{8} :: 2\sqrt2
1234567 :: 1,234,567 | 1,234,567.0
4\text{2} :: 4\text{2}
"""
REFUSED = r"""
3000000 :: 3 million
1 or 2 :: 1, 2 | 2 \text{ and } 1
1 and 2 :: 1,2
-31/4 :: -7\frac34
(1,2) :: \{1,2\} | Point(1,2) | [1,2] | (2,1) | 1.2
\{1,2\} :: \{2,1\} | {1, 2}
(-\infty, 2) :: (-oo,2)
(-\infty,2)\cup(3,\infty) :: (3,\infty)\cup(-\infty,2)
x > 3 :: 3 < x
[1,3) :: 1 \le x < 3 | 3 > x \ge 1
\begin{pmatrix}1&2\\3&4\end{pmatrix} :: [[1,2],[3,4]] | Matrix([[1,2],[3,4]])
\begin{pmatrix}1\\2\end{pmatrix} :: [1,2] | [1,3]
\sqrt{2} :: 1.4142 | 2^{1/2} | 1.41
\frac{\pi}{2} :: 1.57
\frac{x+1}{2} :: 0.5x+0.5
4 :: \sqrt{16}
yes :: no
3 million :: 3
0.5 :: 5
\frac{1}{2} :: \frac{2}{4}
1/2 :: 2/3
3 :: 1 2
[0,1) :: (0,1)
(1,2,3) :: (1,2)
x^2+1 :: x^2+2
\infty :: -\infty | +\infty
5 ::  | 5 6 | 5 \approx 6 | 5 pi | 5 kids | ~~5~~ | x = 5, y = 6 | \approx 5 | 5\mathbf{6} | **5** | 5^2
5 :: 5 \text{k} | 5\color{white}{6} | 5 squared | \text{not } 5 | 5 apples | 5 \cup 6 | 5 \text{ is wrong}
5 :: <strong>5</strong> apples | ~5~ | 5xy | 5\%5 | 5-6 | 5e3 | <b>5</b> | 5 1/2 | 5 times | 5 million dollars | i5
5 :: \boxed{5} \boxed{6} | &#53; | 5\phantom{6} | 5 hours 30 minutes | 5'' | 5 million | 5x | ?5
5 :: \text{5 more apples} | 5'000 | 5 feet 6 inches | 5 hours and thirty minutes | 5 mod 6 | \text{anything but } 5
12 :: 9^9^9^9
n(n-1)/2 :: \frac{n^2-n}{2}
1000 :: 1,000 \text{ more people} | 1'000 | 1_00 | 1, 000 | \$1{,}000 | 1\,000
-5 :: 5 | (5)
\begin{pmatrix}1&0.5\\3&4\end{pmatrix} :: \left[\begin{array}{cc}1&\frac12\\3&4\end{array}\right]
|-3| :: 3
x \neq 3 :: x = 3
\mathbb{R} :: \text{all real numbers}
[0,\infty) :: [0,+\infty) | [0, infinity)
\frac{5}{6} :: 6/5 | 5
\log_2 8 :: 3
\emptyset :: \{\emptyset\} | 0
((1,2),3) :: ((1, 2.0), 3)
x>3 :: (3,\infty)
7 :: USD 7 | US\$7 | 7 EUR
-1\frac12 :: -1.5
1 \pm \sqrt{2} :: 1-\sqrt2, 1+\sqrt2
x_1 :: x1
30 mph :: 30 miles per hour
A :: **A**
\sqrt{x^2} :: |x|
5 apples :: 5 \text{ apples}
\int_0^1 x\,dx :: \frac{1}{2}
e^{i\pi} :: -1
\pi :: \pi \approx 3.14
\text{Area} = 5 :: 5
"""


@pytest.mark.parametrize(("table", "value"), [(ACCEPTED, 1.0), (REFUSED, 0.0)])
def test_verdicts_are_those_of_the_published_function(table, value):
    lines = [line.partition(" :: ")[::2] for line in table.strip("\n").splitlines()]
    cases = [(gold, answer) for gold, answers in lines for answer in answers.split(" | ")]
    with Scorer(RewardConfig(workers=1)) as scorer:
        found = scorer.score([(row(gold), rf"so the answer is \boxed{{{answer}}}.") for gold, answer in cases])
    assert [case for case, score in zip(cases, found, strict=True) if score.value != value] == []
    assert {score.parts["format"] for score in found} == {1.0}


@pytest.mark.parametrize(
    "answer",
    [
        *("__import__('os').getpid()", "().__class__", "exec(chr(49))", "open(1)", "lambda: 1", "9**9**9", "(9!)!!"),
        *("10**100000", "9^9^9^9", "10^{10^{10}}", "sqrt" + "(" * 5000, "x" * 5000, "[" * 200, "9" * 5000),
    ],
)
def test_nothing_is_run_and_nothing_takes_long(answer):
    begin = time.process_time()
    assert equal("12", extract_answer(rf"\boxed{{{answer}}}")) is False
    assert equal(r"12\pi", answer) is False
    assert time.process_time() - begin < 5
