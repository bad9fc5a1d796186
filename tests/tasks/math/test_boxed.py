r"""Where the answer of a response is: in its last box, or without one behind "####" or at its end."""

import pytest
from test_equality import cases

from scored import score_text
from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Score
from tandemrl.tasks.math.boxed import boxed, extract_boxed


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
        # a box in a box is part of it
        (r"\boxed{\boxed{7} or 8}", "{7} or 8"),
        (r"\boxed{\boxed{7} or \boxed{8}}", "{7} or {8}"),
        (r"\boxed{\boxed{\boxed{7}}}", "7"),
        (r"\boxed{\boxed{7} or {8}}", "{7} or {8}"),
        (r"\boxed{" * 500 + "7" + "}" * 500, "7"),
        (r"{ \boxed{1} and \boxed{2} }", "2"),
    ],
)
def test_extract_boxed(text, answer):
    assert extract_boxed(text) == answer


def test_long_hostile_text_is_cheap():
    for text in (r"\boxed{" * 20000, "{" * 100000, r"\boxed{" + r"\text{" * 10000 + "}" * 10001, "#### " * 50000):
        score = boxed(Row("r", (), "math500", "7", {}), text, RewardConfig())
        assert isinstance(score, Score)  # settled here, not by math-verify
        assert score.value == 0.0


STATED = r"""
-5 :: #### −5 | #### $-5 | #### -$5 | #### -5 | It is −5.  ;;  5 :: #### +5 | #### $5 | #### €5 | #### **5** | ####5
5 :: **#### 5** | *#### 5* | #### \boxed{5} | #### $\boxed{5}$ | #### $5$ | #### 5. | #### 5.00 | #### 5 apples
5 :: #### 5 more apples | #### x = 5 | ####␤5 | #### 5␍Done | #### 5␤That is 6 less. | #### The answer is 5
5 :: #### Answer: 5 | #### 5 dollars. | #### 5 USD | #### ５ | #### `5` | #### 6␤#### 5 | ##### 5 | ### 6␤#### 5
5 :: #### it must be 5 | It is 5. | 20 - 15 = 5 | 20-15 | #### 5␤6 were left | #### 5 | Therefore, Tom has 5 apples.
5 :: It costs $5. | The answer is indeed 5. | The answer is:␤\[␤5␤\] | The answer is␤$$␤x = 5.␤$$  ;;  0.5 :: #### .5
1000 :: #### 1,000 | #### $1,000.00 | so $1,000. | 1,000 | She needs 1,000 steps  ;;  50 :: #### 50% | #### 50 percent
5000 :: #### 5e3 | #### 5 thousand  ;;  5000000 :: #### 5 million  ;;  1,000 :: #### 1,000 | #### 1000
7.0 :: #### 7  ;;  $5 :: #### 5  ;;  300 :: Answer: 300  ;;  0.4 :: .4  ;;  n :: the answer is n
4 :: As $x^2 = 16$, x is 4.  ;;  12 :: that is 3 * 4 | <answer>12</answer>  ;;  1.5 :: It takes 1.5 hours.
5 km :: He ran 5 km.
"""
NOT_STATED = r"""
5 :: #### −5 | **#### 6** | #### \boxed{6} | #### 5! | #### 5␤#### 6 | #### 5 or 6 | #### 5/6 | #### 5e3
5 :: #### 5 million | #### 5, 6 | #### 5-6 | #### 5 to 6 | #### 5 dozen | #### 5k | #### not 5 | #### 5 x 6 | #### 5^2
5 :: #### 5:30 | #### 5.5 | #### 5 (not 6) | ####  | #### five or 6 | #### 1 5 | #### square root of 5
5 :: #### the log of 5 | #### it cannot be 5 | #### it can't be 5 | #### it should not be 5 | #### 5 (six)
5 :: #### 5 kilo | #### 5 in the red | It is −5. | It is 5 million | 5 then 6 | 5e3 | it cannot be 5 | nothing
5 :: $x = 7, y = 5$ | x + 3 = 5 | Tom has about 5 apples. | Tom doesn't have 5 apples. | He cannot have 5 apples.
5 :: Tom has 5 dozen apples. | Tom has 5 apples or 6. | Tom has 5 or | Tom has 5 apples? | Look at step 5.
5 :: Tom has 5 of 6. | Chapter 5 | Tom ran 5 m. | He eats 5 to ten apples. | It costs 5 + x.
5 :: He wrongly counts 5 apples. | So the answer is -$5$ | So the answer is −$5$ | So the answer is √$5$
5 :: So the answer is e^$5$ | So the answer is ≠ $5$ | So the answer is > $5$ | So the answer is ±$5$
5 :: So the answer is x$5$ | So the answer is log $5$ | So the answer is sin $5$ | So the answer is ½ of $5$
5 :: So the answer is square root of $5$ | So the answer is a multiple of $5$ | So the answer is x or $5$
5 :: So the answer is $5$x | So the answer is $5$ x | So the answer is -$5$ apples | So the answer is $5$ or x
56 :: #### 5,6  ;;  15 :: 20-15  ;;  6 :: It is 5/6 | 5 or 6  ;;  4 :: .4 | the answer is not 4 | it is 5 or 4.
2 :: AZYUK2A | H2O  ;;  42 :: version42  ;;  n :: nothing | then n  ;;  16 :: As $x^2 = 16$, x is 4.
7 :: 3 * 4 = 7
"""
"""``␤`` stands for the end of a line."""
LATER = "\nSo that is how many there are." * 12


@pytest.mark.parametrize(("table", "value"), [(STATED, 1.0), (NOT_STATED, 0.0)])
def test_an_answer_without_a_box(table, value):
    items = [(gold, text.replace("␤", "\n").replace("␍", "\r\n")) for gold, text in cases(table)]
    items += [("42", f"#### {42 if value else 43}{LATER}"), ("5", "####  5  " if value else "")]
    options = RewardConfig(scorers={"mine": "math"})
    found = [score_text(Row("r", (), "mine", gold, {}), text, options) for gold, text in items]
    assert [item for item, score in zip(items, found, strict=True) if score.parts["acc"] != value] == []
