r"""Which answers are the ground truth, to the graders of rows that name no published one.

Each line of a table is ``ground truth :: answer | answer …``, several apart by ``;;``. Tables and verdicts were written
by hand. The truth of random answers comes from fractions, counters and integers, never from the graders.
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

RIGHT = r"""
5 :: 5 \text{ more apples} | 5 more apples | \text{5 more apples} | 5 \text{ fewer songs} | 5 \text{ apples}.
5 :: 5\ \text{apples per day} | 5 apples in total | 5 \textbf{ apples} | 5~\mathrm{apples} | 5 \mbox{ apples}
5 :: x = 5 \text{ apples} | \text{Total} = 5 \text{ more apples} | 5 \text{ red balls left over}
5 :: 5 \text{ 30-minute episodes} | 5 \text{ quarters} | 5 \text{ right angles} | 5 \text{ correct answers}
5 :: 5 \text{ root vegetables} | 5 \text{ power plants} | 5 \text{ prime numbers} | 5 \text{ double rooms}
5 :: 5 \text{ kilograms} | 5 \text{ square feet} | 5 \text{ tenth graders} | 5 \text{ two-digit numbers}
5 :: 5 \text{ dozens of eggs} | 5 \text{ fifth graders} | 5 \text{ girls are not in the club} | 5 \text{ times}
5 :: 5 times | 5 \text{ minutes and seconds} | 5 \text{ years old} | 5 kids | 5 men | 5 \text{ km/h}
5 :: 5 \text{ (apples)} | +5 | = 5 | x=5 | x = 5. | \approx 5 | ≈ 5 | 5. | 5, | 5; | 5。 | 5\, | 5\! | 5\\ | \;5
5 :: \quad 5 | 5\quad | ~5~ | {5} | ( 5 ) | \left(5\right) | \bigl(5\bigr) | \(5\) | \[5\] | $$5$$ | \displaystyle 5
5 :: \textstyle 5 | \large 5 | \bf 5 | {\bf 5} | \mathbf{5} | \boldsymbol{5} | \bm{5} | \bold{5} | \textbf{5}
5 :: \textit{5} | \emph{5} | \text{5} | \mathrm{5} | \underline{5} | \boxed{5} | \color{red}{5} | \color{red} 5
5 :: {\color{blue}5} | \textcolor{red}{5} | \color[rgb]{1,0,0}{5} | \mathbf{5}\text{ cm} | \text{5}\text{ cm} | **5**
5 :: *5* | __5__ | `5` | **5** apples | "5" | “5” | ​5 | 5﻿ | 2 + 3 = 5 | x = 2 + 3 = 5 | x = 5 | 5\text{ cm} | 5 cm
5 :: 5 apples | 5 \, \text{cm} | 5 \; \text{cm} | 5 \ \text{cm} | 5 \, \mathrm{cm} | 5 \, \text{cm}^2
5 :: 5 \, \text{km/h} | 5\text{ meters per second squared} | \textbf{(C) } 5 | \text{(C)}\ 5 | (C) 5 | 5\text{ m}
5 :: 5\mathrm{cm}^2 | 5\textnormal{ miles} | 5\text{ in}^2 | 5\text{ sq. ft}  ;;  4 :: 4^{\text{th}} | 4^\text{th}
6 :: \text{6 p.m.}  ;;  7 :: \text{seven} | Seven | €7 | 7€ | 7 € | £7 | ¥7 | ₹7 | ₩7 | ₿7 | ￥7 | ¢7 | 7¢ | USD 7
7 :: US\$7 | US$7 | 7 USD | 7 EUR | EUR 7 | Rs. 7 | \$7 | $7$ | 7\$ | \$7.00 | 7 dollars | 7 \text{ euros} | \text{€}7
7 :: \euro 7 | \pounds7 | x = 7 | a_1 = 7 | p(3) = 7 | f(x) = 7 | \theta = 7 | \text{Area} = 7 | AB = 7
7 :: total cost = 7 | \angle ABC = 7 | x_{\text{max}} = 7 | \text{minimum value} = 7 | S_{10} = 7
\text{seven} :: 7  ;;  2.5 :: 2.5 \text{ more hours}  ;;  1000 :: 1,000 \text{ more people} | 1,000 | 1{,}000 | 1\,000
1000 :: 1\ 000 | 1~000 | 1,\!000 | 1\!000 | 1 000 | \$1{,}000  ;;  3_{10} :: 3 | 3_{10}  ;;  4210_7 :: 4210 | 4210_{7}
\frac{1}{2} :: \frac{1}{2} \text{ of the cake} | \frac{2}{4} | 1:2  ;;  1/2 :: 1/2 \text{ cup of sugar} | ½
5 \text{ apples} :: 5 \text{ more apples} | 5  ;;  5 apples :: 5 \text{ apples}  ;;  1250 :: €1,250  ;;  -7 :: -\$7
-7 :: \$-7 | −€7 | €-7  ;;  1234567 :: 1,234,567.0 | 1,234,567  ;;  1,000 :: 1000 | 1{,}000  ;;  12 :: 𝟏𝟐 | １２ | 𝟭𝟮
12 :: 𝟙𝟚  ;;  3.5 :: ３．５  ;;  -5 :: −5 | –5 | ‐5 | ‑5 | －5 | ﹣5 | \text{-}5 | $-5$ | - 5 | -5.0  ;;  50 :: 50\%
50 :: 50% | 50 percent | 50％  ;;  90 :: 90° | 90º | 90^\circ | 90\degree  ;;  90^\circ :: 90 degrees
\frac{1}{3} :: ⅓ | \frac{1}{3} = 0.333  ;;  \frac{3}{4} :: ¾  ;;  \frac{5}{8} :: ⅝  ;;  \frac{5}{6} :: 5/6 | 5⁄6 | 5∕6
\frac{5}{6} :: 5÷6 | \cfrac{5}{6} | \frac{10}{12}  ;;  \frac{3}{2} :: 1½ | 1 1/2 | 1\frac12 | 1\ \frac{1}{2} | 1.5
0.5 :: .5 | 1/2 | \frac{1}{2} | 0.50 | 50%  ;;  5.00 :: 5  ;;  5000 :: 5e3 | 5E3 | 5 \times 10^3 | 5×10³ | 5·10^{3}
5000 :: 5 thousand | 5 \text{ thousand}  ;;  500 :: 5 hundred  ;;  5000000 :: 5 million | 5 \text{ million}
5000000 :: \$5 \text{ million}  ;;  5000000000 :: 5 billion | \int_0^{100000} t\,dt  ;;  60 :: 5 dozen
10^{-3} :: 10⁻³  ;;  2^{10} :: 2¹⁰  ;;  x^{n} :: xⁿ  ;;  x^2+1 :: x²+1  ;;  x^{12} :: x¹²  ;;  a_{10} :: a₁₀
x_1+x_2 :: x₁+x₂  ;;  1.5\times10^{-3} :: 1.5×10⁻³  ;;  1011_2 :: 1011₂  ;;  \log_2 8 :: log₂ 8 | 3
25 \text{ cm}^2 :: 25 cm²  ;;  25 :: 25 \text{ cm²}  ;;  \sqrt{2} :: √2 | √(2) | √{2} | \sqrt{2} \approx 1.414
\sqrt{x+1} :: √(x+1)  ;;  2\sqrt{3} :: 2√3  ;;  \sqrt[3]{2} :: ∛2  ;;  2\pi :: 2π  ;;  \frac{\pi}{2} :: π/2
\theta :: θ | 𝜃  ;;  \alpha+\beta :: α+β  ;;  \phi :: φ | ϕ  ;;  \mu :: µ  ;;  x+y :: 𝑥+𝑦  ;;  \emptyset :: ∅
\emptyset :: \varnothing | \{\} | \text{empty set}  ;;  \mathbb{R} :: ℝ | \mathbb R | \Bbb{R}
\mathbb{R} :: \text{all real numbers} | (-\infty, \infty)  ;;  x\in\mathbb{R} :: x∈ℝ
(1,2)\cup(3,4) :: (1,2)∪(3,4) | (3,4)∪(1,2)  ;;  (-\infty,3) :: (−∞,3)
(-\infty,3)\cup(3,\infty) :: (−∞, 3) ∪ (3, +∞)  ;;  [1,2] :: [1; 2]  ;;  [0,\infty) :: [0,∞) | [0, infinity)
[0,\infty) :: [0,+\infty)  ;;  \infty :: ∞ | infinity | \text{infinity} | +\infty  ;;  -\infty :: -∞ | −∞
\{1,2\} :: {1, 2} | \{2, 1\} | \lbrace 1,2 \rbrace | \left\{1, 2\right\} | 1, 2  ;;  (1,2) :: (1, 2) | （1，2）
(1,2) :: \left( 1 , 2 \right) | (1,\ 2) | (1, 2) \approx (1.01, 2)  ;;  x \le 3 :: x ≤ 3 | x ⩽ 3  ;;  x \ge 3 :: x ≥ 3
x \neq 3 :: x ≠ 3  ;;  \pm 3 :: ±3  ;;  1,2 :: 1 \text{ and } 2 | x=1 \text{ or } x=2 | 2, 1  ;;  5:30 :: 5{:}30
2:3 :: 2∶3 | \frac{2}{3}  ;;  2\cdot 3 :: 6  ;;  2x\cdot y :: 2x·y  ;;  x-1 :: x − 1 | x – 1
\text{no solution} :: \text{No solution} | no solution  ;;  \text{Yes} :: yes  ;;  \text{Monday} :: \textbf{Monday}
\text{Monday} :: monday  ;;  A :: \text{A} | (A) | \textbf{A} | \mathrm{A} | **A**  ;;  4\text{2} :: 4\text{2}
42 :: 42  ;;  142.0 :: 142  ;;  -3 :: −3  ;;  +3 :: 3  ;;  0.\overline{3} :: \frac13
2.55e-10 :: 2.55 \times 10^{-10} | 2.55\cdot10^{-10}\text{ m} | 2.55E-10  ;;  1e5 :: 10^5  ;;  3 :: 2.9999999999999996
100\sqrt2 :: 141.42136  ;;  (2.5e-3, 1) :: (0.0025, 1)  ;;  4210_{7} :: 4210_7  ;;  \sqrt2 :: \sqrt{2} \approx 1.414
\sqrt2 :: (10^{30}+\sqrt2)-10^{30}  ;;  3.14 :: x \approx 3.14 | \pi ≈ 3.14  ;;  \frac12 :: 1/2
-\frac{1}{2} :: \frac{-1}{2}  ;;  \frac13 :: 0.333333  ;;  7\frac{3}{4} :: \frac{31}{4}  ;;  7 3/4 :: 31/4
-1\frac12 :: -1.5  ;;  s^2+w^2 :: p(s)=s^2+w^2  ;;  p(s)=s^2+w^2 :: w^2+s^2  ;;  y = 2x + 3 :: 3 + 2x  ;;  x=5 :: 5
\text{Area} = 5 :: 5  ;;  x=0.5 :: x = \frac12  ;;  \theta = 30^\circ :: 30
5\text{ cm} :: 5\,\mathrm{centimeters}  ;;  12\text{ square cm} :: 12 cm^2  ;;  30 mph :: 30 miles per hour
\$5 :: 5 dollars  ;;  50\% :: 0.5 | \frac12  ;;  \text{(B)} :: B  ;;  yes :: \text{Yes}  ;;  \boxed{7} :: 7
\sqrt{8} :: 2\sqrt2  ;;  \frac{1}{\sqrt2} :: \frac{\sqrt{2}}{2}  ;;  (x+1)^2 :: x^2 + 2x + 1
\frac{\pi}{2} - 2\alpha :: -2\alpha + \frac\pi2  ;;  \binom{5}{2} :: 10  ;;  3+4i :: 4i + 3  ;;  \sqrt[3]{-8} :: -2
\sin 30^\circ :: 0.5  ;;  5! :: 120  ;;  |-3| :: 3  ;;  \frac{x^2-1}{x-1} :: x+1  ;;  \sqrt{x^2} :: |x|
e^{i\pi} :: -1  ;;  n(n-1)/2 :: \frac{n^2-n}{2}  ;;  (0, \frac{1}{2}) :: \left(0, 0.5\right)  ;;  \{1, 2\} :: \{2, 1\}
\pm 2 :: 2, -2  ;;  1 \pm \sqrt{2} :: 1-\sqrt2, 1+\sqrt2  ;;  1 or 2 :: 2 \text{ and } 1
5, 7 :: x=5 \text{ or } x=7  ;;  ((1,2),3) :: ((1, 2.0), 3)  ;;  (-1,0)\cup(1,2) :: (1,2)\cup(-1,0)
[0,1]\cup\{3\} :: \{3\}\cup[0,1]  ;;  \begin{pmatrix}1\\2\end{pmatrix} :: \begin{bmatrix}1\\ 2\end{bmatrix}
\begin{pmatrix}1&0.5\\3&4\end{pmatrix} :: \left[\begin{array}{cc}1&\frac12\\3&4\end{array}\right]  ;;  4{:}30 :: 4:30
x > 3 :: 3 < x | x \in (3, \infty)  ;;  a<b :: a \lt b  ;;  x>3 :: (3,\infty)  ;;  (-\infty,3] :: x \le 3
[1,3) :: 3 > x \ge 1  ;;  1<x<3 :: (1,3)  ;;  \pi :: \pi \approx 3.14  ;;  1.414 :: x = \sqrt{2} \approx 1.414
4.5 :: p(3) \approx 4.5  ;;  x \equiv 3 \pmod{7} :: x ≡ 3 \pmod{7}  ;;  \int_0^1 x\,dx :: \frac{1}{2}
10 :: 10 \, \text{dollars} | 10 \, \text{cm}^3 | 10 \text{ two-digit numbers} | 10 \text{ one-dollar bills} | m+n = 10
10 :: m + n = 3 + 7 = 10 | a+b+c = 10 | \alpha + \beta = 10 | \frac{m}{n} = 10 | [ABC] = 10 | [ABCD] = 10
10 :: a_{n+1} = 10 | \det(A) = 10 | \det A = 10 | \max = 10 | f(f(2)) = 10 | f(g(2)) = 10 | \underline{10} | **10**
10 :: x \approx 10  ;;  1500 :: 1,500 \text{ meters} | 1,500\text{ m} | 1,500 cm | 1,500^\circ | 1,500 \text{ dollars}
1500 :: \$1,500 \text{ per year} | 1{,}500\,\text{m} | 1,\!500 \text{ cm}^2 | x = 1,500 \text{ m}
1,500\text{ m} :: 1500  ;;  (3,4) :: (x, y) = (3, 4) | (a,b) = (3,4) | x = 3, y = 4
(3,\frac{\pi}{2}) :: (r,\theta) = \left( 3, \frac{\pi}{2} \right)  ;;  x=2,y=-1 :: (2,-1)  ;;  (2,-1) :: x=2, \; y=-1
(2,-1) :: x=2 \text{ and } y=-1  ;;  (3,4),(5,6) :: (x,y) = (3,4), (5,6) | (x,y) = (3,4) \text{ or } (5,6)
\begin{pmatrix}2\\-1\\3\end{pmatrix} :: \vec{v} = \begin{pmatrix}2\\-1\\3\end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} :: \mathbf{A} = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} :: \left( \begin{array}{cc} 1 & 2 \\ 3 & 4 \end{array} \right)
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix} :: \begin{pmatrix} -\dfrac{1}{3} \\[6pt] \dfrac{2}{3} \end{pmatrix}
3:4 :: 3/4  ;;  (-\infty,\infty) :: \mathbb{R}  ;;  x\neq 0 :: x \ne 0  ;;  \frac{14}{3} :: \frac{14}{3} \approx 4.67
33.3 :: \frac{100}{3} \approx 33.3  ;;  12300 :: 12345.6 \approx 12300  ;;  0.333 :: \frac{1}{3} = 0.333
2 :: \sqrt4 = 2  ;;  600 :: 600^1 \approx 605 | \sqrt{360000} \approx 601  ;;  600.0000001 :: 600.0000001 \approx 605
7.0000001 :: 7.0000001 \approx 7.07  ;;  \frac{2}{3} :: \frac{2}{3} \approx 0.66 | \frac{2}{3} \approx 0.67
0.67 :: \frac{2}{3} \approx 0.67  ;;  f(x) = 7 :: 7  ;;  \text{Area} = 7 :: 7  ;;  x=5, y=6 :: 5, 6
\pi :: \pi cm  ;;  x+1 :: (x+1) cm^2
5, 6 :: x=6 \text{ or } x=5  ;;  20 :: 20^\circ\text{C}  ;;  5\text{ feet squared} :: 5  ;;  8/3 :: 2\frac{2}{3}
72 :: 2^{3}3^{2}  ;;  (1000, 2000) :: (1,000, 2,000)  ;;  1000, 2000 :: 2,000, 1,000  ;;  0 :: \sin\pi
0 :: \sqrt2\cdot\sqrt2-2 | \ln 1  ;;  10^{-400}\sqrt8 :: 2\sqrt2\cdot10^{-400}  ;;  e^{-1000} :: \frac{1}{e^{1000}}
2 \cdot 10^{-9} :: \frac{1}{5 \cdot 10^8}
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
5 :: 5 \text{ conjugate} | 5 \text{ base two} | 5 \text{ in binary} | 5 \text{ hexadecimal} | 5 \text{ remainder two}
5 :: 5 \text{ repeating} | 5 \text{ dot five} | 5 \text{ choose two} | 5 \text{ in the red} | 5 \text{ in the hole}
5 :: 5 \text{ below zero} | 5 \text{ degrees below zero} | 5 \text{ overdrawn} | 5 \text{ cannot be}
5 :: 5 \text{ is never} | 5 \text{ is unlikely} | 5 \text{ quadrillion} | 5 \text{ crores} | 5 \text{ score years}
5 :: 5 \text{ thousandfold} | 5 \text{ basis points} | 5 \text{ prime} | 5 \text{ ish} | 5 \text{ and counting}
5 :: 5 th power | 5 square root | 5 kilo | 5 mega | 5 quarter hours | 5 in the red | 4^{\text{th}} | 5 gross
5 :: 5 is wrong | 5 \text{ is not the answer} | 5 \text{ isn't right} | 5 \text{ (wrong)} | 5 \text{ (not 6)}
5 :: 5 \text{ (or 6)} | 5 \text{ maybe} | 5 \text{ excluded} | \text{anything but } 5 | 5 \text{ apples } 6
5 :: 5 \text{ 6} | 5\text{6} | \text{5}\text{6} | \mathbf{5}6 | 5\mathbf{6} | \color{red}{5}6 | 5\color{white}{6}
5 :: \phantom{5} | 5\phantom{6} | \cancel{5} | \sout{5} | ~~5~~ | <s>5</s> | <del>5</del> 6 | 5<sup>2</sup>
5 :: \boxed{5} \boxed{6} | \boxed{5} or \boxed{6} | 5\boxed{6} | **5** or **6** | **5** **6** | x = 5 = 6 | 6 = 5
5 :: x = 5, y = 6 | x > 5 | x ≥ 5 | x \ne 5 | x ≠ 5 | 2x = 5 | 5 < 6 | 5? | ?5 | 5... | 5… | 5+ | 5' | 5'' | 5\%5
5 :: 5%6 | 0.05 | 0.5 | .5 | 50 | 5.1 | 5,000 | 5_000 | 5'000 | 5.5.5 | ٥٦ | ６ | 𝟓𝟔 | ⅕ | ٪5 6 | 5 feet 6 inches
5 :: 5'6 | 5 hours 30 minutes | 5 \text{ hours and 30 minutes} | 5 hours and thirty minutes | €5 or €6 | €56 | 5€6
5 :: \$5/6 | \$5 \text{ to } \$6 | 5 ‮6 | 5⁣6 | 7​5 | 5​7 | \binom{5}{6} | [5, 6] | \{5, 6\} | (5, 6) | (5, ∞) | \pm 5
5 :: ±5 | i5 | 5i | 5 mod 6 | 5 \pmod 6 | 5 \text{ (mod 6)} | \sqrt{5} | |5 | 5|6 | 5 \cup 6 | 5∪6 | x=6
5 :: 5\text{ or 6} | 5\text{ or }6 | x = 6 = 5 | 5 \approx 6 | 5_1 | 5, \text{or maybe } 6 | 5.04 = 5.0
5 :: \frac{504}{100} = 5.0 | 5\text{ million} | 5\mathit{x} | 5\mathsf{x} | 5\mathtt{x} | 5{\it x} | 5\emph{x}
5 :: 5\operatorname{x} | 5\mathrm{x} | 5\text{}^2 | 5{\rm }^2 | 5\operatorname{}^2 | 5\text{!} | 5\text{½} | 5\text{²}
5 :: 5\text{+x} | 5\text{x}^2 | 5\text{apples}^2  ;;  56 :: 5,6  ;;  1 :: 1 \text{ third} | 1 third
1 :: 1 \text{ third of the cake} | -1 | 1000000!  ;;  7 :: \text{6 p.m.} | 7 \text{ (six)} | x + 3 = 7 | 2x = 7
7 :: xy = 7 | ab = 7 | x^2 = 7 | \sin(x) = 7 | n(n+1) = 7 | 7 = x + 3 | x = 8888 = 7 | x = y + 7 | f(x) + 1 = 7
7 :: |x| = 7 | -x = 7 | x - y = 7 | x/2 = 7 | x! = 7 | \text{twice } x = 7 | \text{not } x = 7 | \frac{x}{2} = 7
7 :: x \equiv 7 | x \neq 7 | x > 7 | x \le 7 | x = 7, y = 7 | x = 7, 7 | x = 7, 8888 | x = 7 = 8888 | 9999 = 7
6 :: \text{seven} | 7 \text{ (six)} | (C) 5  ;;  3 :: 10_2 | 3_2 | 2.99999 | 3.1 = 3 | (3] | \sqrt[3]27
4210_7 :: 4210_8 | 1470  ;;  1000 :: 1,0000 | 1.000 | 10,00 | 1, 000 | 1_00 | 1'00 | 1000 \text{ thousand}
12 :: 𝟏 𝟐 | 1 2 | 9^9^9^9 | 9^{9^{9^9}}  ;;  -5 :: 5 | (5) | €5 | --5  ;;  \frac{1}{3} :: ⅔ | 1⅓ | 0.3
\frac{5}{6} :: 5 | 6/5  ;;  10^{-3} :: 10³ | 10-3  ;;  2^{10} :: 210 | 2₁₀  ;;  x^2 :: x2 | x₂ | x^2 t | x^2 c
x_1 :: x1 | x¹ | x₂  ;;  x^{n} :: xn  ;;  1.5\times10^{-3} :: 1.5×10³  ;;  \sqrt[3]{2} :: √2 | 3√2  ;;  2 :: 2t | 2d
2 :: 2h | 2st  ;;  1 < x < 3 :: 1 < y < 3 | 3 < x < 1 | 1 < x \le 3  ;;  \sqrt{2} :: ∛2  ;;  \theta :: φ | \alpha
\alpha+\beta :: α-β | αβ  ;;  \pi :: p | 3.14 | \frac{314}{100}  ;;  \emptyset :: 0 | \{0\} | \{\emptyset\}
\mathbb{R} :: ℤ | R | ℂ  ;;  x\in\mathbb{R} :: x∉ℝ  ;;  (1,2)\cup(3,4) :: (1,2)∩(3,4) | (1,2)∪[3,4) | (1,2)
(-\infty,3) :: (−∞,3] | (∞,3)  ;;  [0,\infty) :: [0,−∞)  ;;  \infty :: -∞ | 8 | -\infty  ;;  -\infty :: infinity
\{1,2\} :: {1, 2, 3} | \{1,3\} | \{1,3\} ≈ \{1,2\}  ;;  (1,2) :: (2,1) | [1,2] | 1.2 | (1,2,3) | (3,4) \approx (1,2)
x \le 3 :: x ≥ 3 | x < 3  ;;  x \neq 3 :: x = 3  ;;  \pm 3 :: 3 | ∓3 or 4  ;;  2:3 :: 3∶2 | 3:2  ;;  x-1 :: x + 1
x-1 :: 1 − x  ;;  7 \text{ cm} :: 7 \text{ m} | 7 km  ;;  25 \text{ cm}^2 :: 25 cm³  ;;  \$7 :: 7 \text{ cents}
50\% :: 5\% | 0.05 | \frac{500001}{10000}\%  ;;  90^\circ :: 90 \text{ radians} | 90\%  ;;  \text{no solution} :: 0
\text{Yes} :: no  ;;  A :: B | A \text{ or } B | \text{not A} | AB | A \approx B  ;;  42 :: 43 | x^{ | \text{not }42
42 :: not 42 | \mathrm{not}\,42 | at least 42 | \text{about }42 | \neg 42 | ~5 or 42 | \text{either 5 or }42
42 :: between 5 and 42 | 5, 42 | 5 or 42 | 5 \\ 42 | 7&42 | 7|42 | 7#42 | 42 \text{ or more} | 42 \text{ or }
42 :: 42 or 5 | 42 or more | 42\text{ dozen} | 42\text{ thousand} | 42\text{ fifths} | 42\text{ (wrong)} | 42, 5
42 :: 42&7 | 42|7 | 42? | 42... | 42\ldots | 42' | 42† | 42/ | 42+ | 42^ | 42_ | (42 | 42) | 42 = 5 | 42 \neq 5
42 :: 42 to 5 | 42 \% 5 | 42\cancel{5} | \phantom{42} | \sout{42} | \boxed{42} or 5 | \text{42}\text{5} | [42, 42]
42 :: \binom{42} | 42{5}  ;;  142.0 :: 142.1  ;;  100000001 :: 100000000  ;;  1000001 :: 1000001.5
1000001.5 :: 1000001  ;;  2.55e-10 :: 2.56 \times 10^{-10} | 2.56 \times 10^{-10} m | 0  ;;  0.0000002 :: 0.0000003 m
2e-7 :: \frac{0.000001}{3}  ;;  4210 :: 4210_7  ;;  \frac{1}{2} :: \frac{1}{3}  ;;  \frac{1}{0} :: 0
0.33 :: \frac13  ;;  73/4 :: 7 3/4  ;;  -\frac{25}{4} :: -7\frac34  ;;  0 :: \frac{0}{0} | \infty-\infty | f(0)
0 :: g^{-1}(0) | \sqrt10  ;;  x=3 :: y=3 | x=4  ;;  5 cm :: 5 meters | 5\%  ;;  5\text{ cm} :: 5\,\mathrm{m}
1 hour :: 1 day  ;;  0.5 :: 5%  ;;  [0,1) :: [0,1]  ;;  1,2 :: 1,2,3
\begin{pmatrix}1\\2\end{pmatrix} :: \begin{pmatrix}1&2\end{pmatrix}  ;;  \pm 2 :: 2
(-1,0]\cup(1,2) :: (1,2)\cup(-1,0)  ;;  (-1,0)\cup(1,2) :: (-1,2)  ;;  \text{Monday} :: Tuesday
\text{even} :: neve  ;;  no :: on  ;;  B :: C  ;;  \sqrt{8} :: 2\sqrt3  ;;  k :: kx  ;;  \sin x :: \cos x
(x+1)^2 :: x^2+1  ;;  x :: y | 5  ;;  10^{20}+1 :: 10^{20}  ;;  \sqrt{x^2} :: -x  ;;  x>3 :: x<3 | x \ge 3 | x>4
x>3 :: [3,\infty)  ;;  C :: A \approx B \approx C \approx D  ;;  yes :: yes ≈ no  ;;  101 :: 100 \approx 101
150 :: 149.9 \approx 150 \approx 150.4 \approx 151  ;;  x+1 :: x-1 \approx x+1  ;;  37 :: 41 \equiv 37 | 41 ≡ 37
\frac13 :: \frac27 \equiv \frac13  ;;  10 :: m + n = 7 = 10 | m + n = 7, 10 | m + 7 = 10 | m + n = p - q = 10
10 :: \frac{m}{2} = 10 | [ABC] = 7 = 10 | f(f(2)) + 1 = 10  ;;  x + y = 10 :: 10  ;;  4 :: 4:1 | \mathbb{R} = 4
4 :: 4\text{ half-hours} | 4\text{ two-dozen} | 4\text{ twenty-five} | \text{not-so }4 | 4\text{ squared}
4 :: 4\text{ doubled} | 4\text{ is excluded} | \text{cannot be } 4 | 4\text{ twelve}  ;;  \frac{x}{y} = 10 :: 10
(3,4) :: (x, y) = (4, 3) | y = 3, x = 4  ;;  2:40 :: 1:20  ;;  3:15 :: 0.2  ;;  1500 :: 1,500 thousand
(A) 5 :: (B) 5  ;;  f(0) :: 0  ;;  f(0)+1 :: 1  ;;  I(0) e^{-\frac{t}{R C}} :: 0  ;;  f(2x) :: 2f(x)
600 :: 602 = 600 | x = 602 = 600  ;;  0.3 :: \frac{1}{3} = 0.4 = 0.3  ;;  3.16 :: \pi = 3.16
600.4 :: 602 = 600 \approx 600.4  ;;  605 :: 600^1 \approx 605 | 600.0000001 \approx 605
601 :: \sqrt{360000} \approx 601  ;;  7.07 :: 7.0000001 \approx 7.07  ;;  0.66 :: \frac{2}{3} \approx 0.66
0.66 :: \frac{2}{3} \approx 0.67  ;;  5.04 :: 5.04 = 5.0  ;;  0.334 :: \frac{1}{3} = 0.333  ;;  x=5, y=6 :: 6, 5
x=5 :: y=5  ;;  5\text{ km/h} :: 5\text{ h/km}  ;;  5 km/h :: 5 hours per km  ;;  ABC :: BAC  ;;  AB :: BA
\begin{vmatrix}1&2\\3&4\end{vmatrix} :: \begin{pmatrix}1&2\\3&4\end{pmatrix}  ;;  (x+1) :: (x+1)\text{}^2
5\text{ thousand} :: 5  ;;  5\text{ hundred} :: 5  ;;  5\text{ dozen} :: 5  ;;  5\text{ squared} :: 5
5\text{ lakh} :: 5  ;;  5\text{ or more} :: 5  ;;  11/3 :: 2\frac{5}{3}  ;;  10/3 :: 2\frac{5}{3}
1000000 :: 1000001  ;;  \sqrt2 :: 1414214/1000000  ;;  \frac{\sqrt2}{1000000} :: \frac{\sqrt2}{1000001}
1:3 :: 333333:1000000  ;;  30 :: \binom523  ;;  2x :: x2  ;;  12345 :: 1{,}2345 | 1,\!2345  ;;  1, 23 :: 1{,}23
1234 :: (1,234) | [1,234] | \{1,234\} | (1,234]  ;;  (1,234) :: 1234  ;;  [1,234] :: 1234  ;;  \{1,234\} :: 1234
(1,234] :: 1234  ;;  10^{-5000} :: 10^{-5001}  ;;  2 \cdot 10^{-9} :: 3 \cdot 10^{-9}
"""


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
