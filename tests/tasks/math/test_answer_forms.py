r"""Forms of a right answer and neighbours that are wrong, by the graders of rows that name no published one.

A line of a table is ``ground truth :: answer | answer …``; what stands in the boxes was written by hand, and so were
the verdicts.
"""

import json
import os
import re
from pathlib import Path

import pytest

from tandemrl.config import load
from tandemrl.data.rows import Row
from tandemrl.rewards.scoring import Scorer

GSM8K = Path(os.environ.get("TANDEMRL_DATA", Path(__file__).parents[4] / "shared" / "data")) / "gsm8k" / "test.jsonl"

RIGHT = r"""
5 :: 5 \text{ more apples} | 5 more apples | \text{5 more apples} | 5 \text{ fewer songs} | 5 \text{ apples}.
5 :: 5\ \text{apples per day} | 5 apples in total | 5 \textbf{ apples} | 5~\mathrm{apples} | 5 \mbox{ apples}
5 :: x = 5 \text{ apples} | \text{Total} = 5 \text{ more apples} | 5 \text{ red balls left over}
5 :: 5 \text{ 30-minute episodes} | 5 \text{ quarters} | 5 \text{ right angles} | 5 \text{ correct answers}
5 :: 5 \text{ root vegetables} | 5 \text{ power plants} | 5 \text{ prime numbers} | 5 \text{ double rooms}
5 :: 5 \text{ kilograms} | 5 \text{ square feet} | 5 \text{ tenth graders} | 5 \text{ two-digit numbers}
5 :: 5 \text{ dozens of eggs} | 5 \text{ fifth graders} | 5 \text{ girls are not in the club} | 5 \text{ times}
5 :: 5 times | 5 \text{ minutes and seconds} | 5 \text{ years old} | 5 kids | 5 men | 5 \text{ km/h}
5 :: 5 \text{ (apples)} | +5 | = 5 | x=5 | x = 5. | \approx 5 | ≈ 5 | 5. | 5, | 5; | 5。 | 5\, | 5\! | 5\  | 5\\
5 :: \;5 | \quad 5 | 5\quad | ~5~ | {5} | ( 5 ) | \left(5\right) | \bigl(5\bigr) | \(5\) | \[5\] | $$5$$
5 :: \displaystyle 5 | \textstyle 5 | \large 5 | \bf 5 | {\bf 5} | \mathbf{5} | \boldsymbol{5} | \bm{5} | \bold{5}
5 :: \textbf{5} | \textit{5} | \emph{5} | \text{5} | \mathrm{5} | \underline{5} | \boxed{5} | \color{red}{5}
5 :: \color{red} 5 | {\color{blue}5} | \textcolor{red}{5} | \color[rgb]{1,0,0}{5} | \mathbf{5}\text{ cm}
5 :: \text{5}\text{ cm} | **5** | *5* | __5__ | `5` | **5** apples | "5" | “5” | ​5 | 5﻿
4 :: 4^{\text{th}} | 4^\text{th}
6 :: \text{6 p.m.}
7 :: \text{seven} | Seven | €7 | 7€ | 7 € | £7 | ¥7 | ₹7 | ₩7 | ₿7 | ￥7 | ¢7 | 7¢ | USD 7 | US\$7 | US$7 | 7 USD
7 :: 7 EUR | EUR 7 | Rs. 7 | \$7 | $7$ | 7\$ | \$7.00 | 7 dollars | 7 \text{ euros} | \text{€}7 | \euro 7 | \pounds7
\text{seven} :: 7
2.5 :: 2.5 \text{ more hours}
1000 :: 1,000 \text{ more people} | 1,000 | 1{,}000 | 1\,000 | 1\ 000 | 1~000 | 1,\!000 | 1\!000 | 1 000 | 1 000
3_{10} :: 3 | 3_{10}
4210_7 :: 4210 | 4210_{7}
1000 :: 1 000
\frac{1}{2} :: \frac{1}{2} \text{ of the cake}
1/2 :: 1/2 \text{ cup of sugar} | ½
5 \text{ apples} :: 5 \text{ more apples} | 5
5 apples :: 5 \text{ apples}
1250 :: €1,250
-7 :: -\$7 | \$-7 | −€7 | €-7
1234567 :: 1,234,567.0
1,000 :: 1000 | 1{,}000
12 :: 𝟏𝟐 | １２ | 𝟭𝟮 | 𝟙𝟚
3.5 :: ３．５
-5 :: −5 | –5 | ‐5 | ‑5 | －5 | ﹣5 | \text{-}5 | $-5$ | - 5 | -5.0
50 :: 50\% | 50% | 50 percent | 50％
90 :: 90° | 90º | 90^\circ | 90\degree
90^\circ :: 90 degrees
\frac{1}{3} :: ⅓
\frac{3}{4} :: ¾
\frac{5}{8} :: ⅝
\frac{5}{6} :: 5/6 | 5⁄6 | 5∕6 | 5÷6 | \cfrac{5}{6} | \frac{10}{12}
\frac{3}{2} :: 1½ | 1 1/2 | 1\frac12 | 1\ \frac{1}{2} | 1.5
0.5 :: .5 | 1/2 | \frac{1}{2} | 0.50
5.00 :: 5
5000 :: 5e3 | 5E3 | 5 \times 10^3 | 5×10³ | 5·10^{3} | 5 thousand | 5 \text{ thousand}
500 :: 5 hundred
5000000 :: 5 million | 5 \text{ million} | \$5 \text{ million}
5000000000 :: 5 billion
60 :: 5 dozen
10^{-3} :: 10⁻³
2^{10} :: 2¹⁰
x^{n} :: xⁿ
x^2+1 :: x²+1
x^{12} :: x¹²
a_{10} :: a₁₀
x_1+x_2 :: x₁+x₂
1.5\times10^{-3} :: 1.5×10⁻³
1 < x < 3 :: 3 > x > 1
1011_2 :: 1011₂
\log_2 8 :: log₂ 8
25 \text{ cm}^2 :: 25 cm²
25 :: 25 \text{ cm²}
\sqrt{2} :: √2 | √(2) | √{2}
\sqrt{x+1} :: √(x+1)
2\sqrt{3} :: 2√3
\sqrt[3]{2} :: ∛2
2\pi :: 2π
\frac{\pi}{2} :: π/2
\theta :: θ | 𝜃
\alpha+\beta :: α+β
\phi :: φ | ϕ
\mu :: µ
x+y :: 𝑥+𝑦
\emptyset :: ∅ | \varnothing | \{\} | \text{empty set}
\mathbb{R} :: ℝ | \mathbb R | \Bbb{R} | \text{all real numbers}
x\in\mathbb{R} :: x∈ℝ
(1,2)\cup(3,4) :: (1,2)∪(3,4) | (3,4)∪(1,2)
(-\infty,3) :: (−∞,3)
(-\infty,3)\cup(3,\infty) :: (−∞, 3) ∪ (3, +∞)
[1,2] :: [1; 2]
[0,\infty) :: [0,∞) | [0, infinity)
\infty :: ∞ | infinity | \text{infinity} | +\infty
-\infty :: -∞ | −∞
\{1,2\} :: {1, 2} | \{2, 1\} | \lbrace 1,2 \rbrace | \left\{1, 2\right\} | 1, 2
(1,2) :: (1, 2) | （1，2） | \left( 1 , 2 \right) | (1,\ 2)
x \le 3 :: x ≤ 3 | x ⩽ 3
x \ge 3 :: x ≥ 3
x \neq 3 :: x ≠ 3
\pm 3 :: ±3
1,2 :: 1 \text{ and } 2 | x=1 \text{ or } x=2
5:30 :: 5{:}30
2:3 :: 2∶3
2\cdot 3 :: 6
2x\cdot y :: 2x·y
x-1 :: x − 1 | x – 1
\text{no solution} :: \text{No solution} | no solution
\text{Yes} :: yes
\text{Monday} :: \textbf{Monday}
A :: \text{A} | (A) | \textbf{A} | \mathrm{A} | **A**
4\text{2} :: 4\text{2}
"""

WRONG = r"""
5 :: −5 | –5 | －5 | \text{-}5 | 5/6 | 5⁄6 | 5 or 6 | 5 \text{ or } 6 | 5 \text{ and } 6 | 5, 6 | 5; 6 | 5 6 | 5,6
5 :: 5-6 | 5–6 | 5 to 6 | 5 \text{ to } 6 | 5 to six | 5 \text{ to six} | 5 \text{ or six} | 5 \text{ apples or 6}
5 :: 5 \text{ apples or six} | 5 \text{ apples and six pears} | 5 \text{ apples and 6 pears}
5 :: 5 \text{ apples, 6 pears} | 5 \text{ apples and a half} | 5 \text{ and a half} | 5 and a half | 5\frac12 | 5½
5 :: 5 1/2 | 5e3 | 5E-3 | 5 million | 5 \text{ million} | 5 \text{ million dollars} | 5 million dollars
5 :: 5 \text{ thousand} | 5 thousand people | 5 \text{ hundred apples} | 5 dozen | 5 \text{ dozen eggs}
5 :: 5 \text{ more dozen} | 5k | 5K | 5M | 5 \text{k} | 5 \text{ lakh} | 5² | 5^2 | 5₂ | 5! | 5°5 | 5:30 | 5 : 6
5 :: 5 \times 10^3 | 5×10³ | 5 × 6 | 5 \cdot 6 | 5x | 5 x | 5 xy | 5xy | 5π | 5 pi | 5√2 | 5 sqrt 2
5 :: 5 \text{ squared} | 5 \text{ cubed} | 5 squared | 5 \text{ factorial} | 5 \text{ halves} | 5 \text{ thirds}
5 :: 5 \text{ tenths} | 5 \text{ half-hours} | 5 \text{ twenty-five} | 5 \text{ plus six} | 5 \text{ minus one}
5 :: 5 \text{ times six} | 5 \text{ point six} | 5 \text{ over six} | 5 \text{ of six} | 5 of 6 | 5 \text{ or more}
5 :: 5 or more | 5 \text{ or fewer apples} | 5 \text{ at least} | 5 \text{ apples at most} | \text{at least } 5
5 :: about 5 | \text{not } 5 | not 5 | \neg 5 | 5 \text{ is wrong} | 5 \text{ pi} | 5 \text{ grand} | 5 \text{ kilo}
5 :: 5 \text{ mega} | 5 \text{ giga} | 5 \text{ milli} | 5 \text{ micro} | 5 \text{ hecto} | 5 \text{ centi}
5 :: 5 \text{ quarter hours} | 5 \text{ quarter-hours} | 5 \text{ quarter of the cake}
5 :: 5 \text{ quarters of the cake} | 5 \text{ half hours} | 5 \text{ twelfths} | 5 \text{ three-quarters}
5 :: 5 \text{ th power} | 5 \text{ tenth power} | 5 \text{ to the fifth} | 5 \text{ to the power of two}
5 :: 5 \text{ th of the cake} | 5 \text{ th root} | 5 \text{ square root} | 5 \text{ cube root of two}
5 :: 5 \text{ root} | 5 \text{ log of two} | 5 \text{ logarithm} | 5 \text{ factorials} | 5 \text{ reciprocals}
5 :: 5 \text{ conjugate} | 5 \text{ base two} | 5 \text{ in binary} | 5 \text{ hexadecimal}
5 :: 5 \text{ remainder two} | 5 \text{ repeating} | 5 \text{ dot five} | 5 \text{ choose two}
5 :: 5 \text{ in the red} | 5 \text{ in the hole} | 5 \text{ below zero} | 5 \text{ degrees below zero}
5 :: 5 \text{ overdrawn} | 5 \text{ cannot be} | 5 \text{ is never} | 5 \text{ is unlikely} | 5 \text{ quadrillion}
5 :: 5 \text{ crores} | 5 \text{ score years} | 5 \text{ thousandfold} | 5 \text{ basis points} | 5 \text{ prime}
5 :: 5 \text{ ish} | 5 \text{ and counting} | 5 th power | 5 square root | 5 kilo | 5 mega | 5 quarter hours
5 :: 5 in the red | 4^{\text{th}} | 5 gross | 5 is wrong | 5 \text{ is not the answer} | 5 \text{ isn't right}
5 :: 5 \text{ (wrong)} | 5 \text{ (not 6)} | 5 \text{ (or 6)} | 5 \text{ maybe} | 5 \text{ excluded}
5 :: \text{anything but } 5 | 5 \text{ apples } 6 | 5 \text{ 6} | 5\text{6} | \text{5}\text{6} | \mathbf{5}6
5 :: 5\mathbf{6} | \color{red}{5}6 | 5\color{white}{6} | \phantom{5} | 5\phantom{6} | \cancel{5} | \sout{5} | ~~5~~
5 :: <s>5</s> | <del>5</del> 6 | 5<sup>2</sup> | \boxed{5} \boxed{6} | \boxed{5} or \boxed{6} | 5\boxed{6}
5 :: **5** or **6** | **5** **6** | x = 5 = 6 | 6 = 5 | x = 5, y = 6 | x > 5 | x ≥ 5 | x \ne 5 | x ≠ 5 | 2x = 5
5 :: 5 < 6 | 5? | ?5 | 5... | 5… | 5+ | 5' | 5'' | 5\%5 | 5%6 | 0.05 | 0.5 | .5 | 50 | 5.1 | 5,000 | 5_000 | 5'000
5 :: 5.5.5 | ٥٦ | ６ | 𝟓𝟔 | ⅕ | ٪5 6 | 5 feet 6 inches | 5'6 | 5 hours 30 minutes | 5 \text{ hours and 30 minutes}
5 :: 5 hours and thirty minutes | €5 or €6 | €56 | 5€6 | \$5/6 | \$5 \text{ to } \$6 | 5 ‮6 | 5⁣6 | 7​5 | 5​7 | 5
 6
5 :: \binom{5}{6} | [5, 6] | \{5, 6\} | (5, 6) | (5, ∞) | \pm 5 | ±5 | i5 | 5i | 5 mod 6 | 5 \pmod 6
5 :: 5 \text{ (mod 6)} | \sqrt{5} | |5 | 5|6 | 5 \cup 6 | 5∪6
56 :: 5,6
1 :: 1 \text{ third} | 1 third | 1 \text{ third of the cake}
7 :: \text{6 p.m.} | 7 \text{ (six)}
6 :: \text{seven} | 7 \text{ (six)}
3 :: 10_2 | 3_2
4210_7 :: 4210_8 | 1470
1000 :: 1,0000 | 1.000 | 10,00 | 1, 000 | 1_00 | 1'00 | 1000 \text{ thousand}
12 :: 𝟏 𝟐
-5 :: 5 | (5) | €5 | --5
\frac{1}{3} :: ⅔ | 1⅓ | 0.3
\frac{5}{6} :: 5 | 6/5
10^{-3} :: 10³ | 10-3
2^{10} :: 210 | 2₁₀
x^2 :: x2 | x₂
x_1 :: x1 | x¹ | x₂
x^{n} :: xn
1.5\times10^{-3} :: 1.5×10³
\sqrt[3]{2} :: √2 | 3√2
2 :: 2t | 2d | 2h | 2st
x^2 :: x^2 t | x^2 c
1 < x < 3 :: 1 < y < 3 | 3 < x < 1 | 1 < x \le 3
\sqrt{2} :: ∛2
\theta :: φ | \alpha
\alpha+\beta :: α-β | αβ
\pi :: p | 3.14
\emptyset :: 0 | \{0\} | \{\emptyset\}
\mathbb{R} :: ℤ | R | ℂ
x\in\mathbb{R} :: x∉ℝ
(1,2)\cup(3,4) :: (1,2)∩(3,4) | (1,2)∪[3,4) | (1,2)
(-\infty,3) :: (−∞,3] | (∞,3)
[0,\infty) :: [0,−∞)
\infty :: -∞ | 8
-\infty :: infinity
\{1,2\} :: {1, 2, 3}
(1,2) :: (2,1) | [1,2] | 1.2
x \le 3 :: x ≥ 3 | x < 3
x \neq 3 :: x = 3
\pm 3 :: 3 | ∓3 or 4
2:3 :: 3∶2
x-1 :: x + 1 | 1 − x
7 \text{ cm} :: 7 \text{ m} | 7 km
25 \text{ cm}^2 :: 25 cm³
\$7 :: 7 \text{ cents}
50\% :: 5\% | 0.05
90^\circ :: 90 \text{ radians}
\text{no solution} :: 0
\text{Yes} :: no
A :: B | A \text{ or } B | \text{not A} | AB
"""


def lines(table):
    rows = [line.split(" :: ") for line in re.split(r"\n(?=[^\n]* :: )", table.strip("\n"))]
    return [(gold, answer) for gold, answers in rows for answer in answers.split(" | ")]


def scores(name, items, *options):
    with Scorer(load(overrides=[f"reward.scorers.mine/*={name}", *options]).reward) as scorer:
        return scorer.score([(Row(str(i), (), "mine/x", gold, {}), text) for i, (gold, text) in enumerate(items)])


@pytest.mark.parametrize(("table", "right"), [(RIGHT, 1.0), (WRONG, 0.0)])
def test_a_form_of_an_answer(table, right):
    cases = lines(table)
    found = scores("boxed", [(gold, rf"So it is $\boxed{{{answer}}}$.") for gold, answer in cases])
    assert [case for case, score in zip(cases, found, strict=True) if score.parts["acc"] != right] == []


# ---- GSM8K ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not GSM8K.is_file(), reason="no GSM8K files; set TANDEMRL_DATA to the folder above gsm8k/")
@pytest.mark.parametrize("words", [1, 2, 3])
def test_the_words_behind_how_many_are_no_part_of_the_number(words):
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    units = [re.search(rf"[Hh]ow (?:many|much) ((?:[A-Za-z]+ ?){{1,{words}}})", row["question"]) for row in rows]
    for form in (
        r"\boxed{%d \text{ %s}}",
        r"\boxed{%d~\mathrm{%s}}",
        r"\boxed{%d\ \textbf{%s}.}",
        r"\boxed{\text{%d %s}}",
        r"\boxed{%d %s}",
    ):
        right, wrong = [], []
        for row, unit in zip(rows, units, strict=True):
            gold = row["answer"].rpartition("####")[2].strip().replace(",", "")
            unit = unit[1].strip() if unit else "units"
            if len(unit) > 1 or " %s" not in form:  # "762 M" is no count
                right.append((gold, form % (int(gold), unit)))
                wrong.append((gold, form % (int(gold) + 1, unit)))
        assert [case for case, score in zip(right, scores("boxed", right), strict=True) if score.value != 1] == []
        assert [case for case, score in zip(wrong, scores("boxed", wrong), strict=True) if score.value != 0] == []


STATED = r"""
-5 :: #### −5 | #### $-5 | #### -$5 | #### -5 | It is −5.
5 :: #### +5 | #### $5 | #### €5 | #### **5** | ####5 | **#### 5** | *#### 5* | #### \boxed{5} | #### $\boxed{5}$
5 :: #### $5$ | #### 5. | #### 5.00 | #### 5 apples | #### 5 more apples | #### x = 5 | ####  5   | ####␤5
5 :: #### 5␍Done | #### 5␤That is 6 less. | #### The answer is 5 | #### Answer: 5 | #### 5 dollars. | #### 5 USD
5 :: #### ５ | #### `5` | #### 6␤#### 5 | ##### 5 | ### 6␤#### 5 | #### it must be 5 | It is 5. | 20 - 15 = 5 | 20-15
5 :: #### 5␤6 were left
0.5 :: #### .5
1000 :: #### 1,000 | #### $1,000.00 | so $1,000.
50 :: #### 50% | #### 50 percent
5000 :: #### 5e3 | #### 5 thousand
5000000 :: #### 5 million
1,000 :: #### 1,000 | #### 1000
7.0 :: #### 7
5  :: #### 5
$5 :: #### 5
300 :: Answer: 300
"""
NOT_STATED = r"""
5 :: #### −5 | **#### 6** | #### \boxed{6} | #### 5! | #### 5␤#### 6 | #### 5 or 6 | #### 5/6 | #### 5e3
5 :: #### 5 million | #### 5, 6 | #### 5-6 | #### 5 to 6 | #### 5 dozen | #### 5k | #### not 5 | #### 5 x 6
5 :: #### 5^2 | #### 5:30 | #### 5.5 | #### 5 (not 6) | ####  | #### five or 6 | #### 1 5 |  | #### square root of 5
5 :: #### the log of 5 | #### it cannot be 5 | #### it can't be 5 | #### it should not be 5 | #### 5 (six)
5 :: #### 5 kilo | #### 5 in the red | It is −5. | It is 5 million | 5 then 6 | 5e3 | it cannot be 5 | nothing
56 :: #### 5,6
15 :: 20-15
6 :: It is 5/6 | 5 or 6
"""
"""``␤`` stands for the end of a line."""
LATER = "\nSo that is how many there are." * 12


def test_the_answer_of_gsm8k_without_a_box():
    cases = [
        (gold, text.replace("␤", "\n").replace("␍", "\r\n"), value)
        for table, value in ((STATED, 1.0), (NOT_STATED, 0.0))
        for gold, text in lines(table)
    ]
    cases += [("42", f"#### 42{LATER}", 1.0), ("42", f"#### 43{LATER}", 0.0)]
    found = scores("math", [case[:2] for case in cases])
    assert [case for case, score in zip(cases, found, strict=True) if score.parts["acc"] != case[2]] == []
