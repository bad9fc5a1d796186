r"""The graders of MATH and DAPO against verdicts of verl 0.9.1's ``math_reward`` and ``math_dapo``, faults included."""

import pytest

from scored import score_text
from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.tasks.math.published import normalise_dapo, normalise_math


def scored(scorer, gold, text):
    return score_text(Row("r", (), "mine", gold, {}), text, RewardConfig(scorers={"mine": scorer}))


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("1\\!\n5", "15"),
        (r"\tfrac{1}{2}", r"\frac{1}{2}"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        (r"90^{\circ}", "90"),
        (r"\$5", "5"),
        (r"5\text{ cm}", "5"),
        (r"5\text{ or }6", "5"),
        (r"50\%", "50"),
        (".5", r"\frac{1}{2}"),
        ("3 .5", "30.5"),
        ("k = 5", "5"),
        ("3=4", "4"),
        ("area = 5", "area=5"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"\frac1\frac12", r"\frac1\frac12"),
        ("1/2", r"\frac{1}{2}"),
        ("01/2", "01/2"),
        ("7 3/4", r"\frac{73}{4}"),
        ("", ""),
    ],
)
def test_the_normal_form_of_math(answer, normal):
    assert normalise_math(answer) == normal


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        (r"\frac{1}{4}", r"\boxed{0.25}", 0.0),  # strings only
        ("5", r"$\boxed 5$", 1.0),
        ("5", r"\boxed 6$ or \boxed{5}", 0.0),
        ("5", r"\boxed{6} or \boxed{5}", 1.0),
        ("5", r"\fbox{5}", 0.0),
        ("5", "5", 0.0),
        ("4", r"\boxed{3=4}", 1.0),
        (r"5\text{ m }\text{ s}", r"\boxed{5\text{ m }\text{ s}}", 1.0),  # without a normal form, as written
        (r"5\text{ m }\text{ s}", r"\boxed{5}", 0.0),
        (r"\boxed{5}", r"\boxed{5}", 0.0),  # a ground truth has no box
    ],
)
def test_the_grader_of_math(gold, text, value):
    assert scored("hendrycks", gold, text).value == value


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        ("x = 5", "5"),
        ("x + 3 = 4", "4"),
        (r"$5$", "5"),
        ("the value $5$ of it", "5"),
        ("$34.$", "34"),
        (r"5\text{ cm}", "5"),
        ("5 dollars", "5"),
        (r"\overline{5}", "5"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("1,000", "1000"),
        ("3, 4", "34"),
        (r"90^\circ", "90"),
        (r"3,\text{and}4x", "3,4x"),
    ],
)
def test_the_normal_form_of_dapo(answer, normal):
    assert normalise_dapo(answer) == normal


@pytest.mark.parametrize(
    ("gold", "text", "value", "answer"),
    [
        ("34", "Answer: 34", 1.0, "34"),
        ("34", "answer : $34$", 1.0, "34"),
        ("34", "Answer: not $34$.", 1.0, "34"),
        ("34", "Answer: 34\nAnswer: 33", -1.0, "33"),
        ("34", r"\boxed{34}", 1.0, "34"),  # without "Answer:"
        ("34", r"Answer: 33 \boxed{34}", -1.0, r"3334"),
        ("34", "Answer: 34" + "x" * 300, -1.0, None),
        ("0.5", r"Answer: \frac12", -1.0, r"\frac{1}{2}"),  # strings only
        ("34", "", -1.0, None),
    ],
)
def test_dapo_rewards_are_plus_and_minus_one(gold, text, value, answer):
    score = scored("dapo", gold, text)
    assert (score.value, score.parts["acc"], score.answer) == (value, float(value > 0), answer)


def test_dapo_strict_wants_the_literal_box_at_the_end():
    for text, value in [(r"\boxed{34}", 1.0), (r"\boxed{34.0}", -1.0), (r"\boxed{34}" + "x" * 100, -1.0), ("34", -1.0)]:
        assert scored("dapo_boxed", "34", text).value == value
