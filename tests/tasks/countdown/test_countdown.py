"""Countdown: every branch of both published rewards, and an evaluator that computes nothing it should not."""

import json
from fractions import Fraction

import pytest

from scored import score_text
from tandemrl.config import RewardConfig
from tandemrl.data.rows import DataError, Row
from tandemrl.tasks.countdown.grader import ExpressionError, evaluate

TINYZERO, COHLEM = RewardConfig(), RewardConfig(countdown="cohlem")
OLD_TINYZERO = RewardConfig(compat="tinyzero")
OLD_COHLEM = RewardConfig(countdown="cohlem", compat="cohlem")


def row(target=98, numbers=(44, 19, 35), key="numbers"):
    return Row("r", (), "countdown", json.dumps({"target": target, key: list(numbers)}), {})


def value(answer, options, **task):
    return score_text(row(**task), f"<think>hm</think> <answer>{answer}</answer>", options).value


@pytest.mark.parametrize(
    ("answer", "task", "tinyzero", "cohlem"),
    [
        ("44 + 19 + 35", {}, 1.0, 1.01),
        ("44 + 19 - 35", {}, 0.1, 0.02),  # right numbers, wrong value
        ("44 + 54", {}, 0.1, 0.01),  # other numbers, and too few
        ("1 + 1 + 3", {"target": 5, "numbers": (1, 2, 3)}, 0.1, 0.01),  # members, but not each once
        ("1 + 1 + 3", {"target": 5, "numbers": (1, 1, 3)}, 1.0, 1.01),
        ("7 / 3 * 3", {"target": 7, "numbers": (7, 3, 3)}, 1.0, 1.01),  # exact, unlike floating point
        ("8 / (3 - 3)", {"target": 8, "numbers": (8, 3, 3)}, 0.1, 0.01),
        ("-3 + 8", {"target": 5, "numbers": (3, 8)}, 1.0, 1.01),
        ("44 + 19 + 35 = 98", {}, 0.1, 1.01),  # an equation: only its left side counts, or nothing does
        ("98 = 44 + 19 + 35", {}, 0.1, 0.01),
        ("2**3", {"target": 8, "numbers": (2, 3)}, 0.1, 0.01),
        ("7//2", {"target": 3, "numbers": (7, 2)}, 0.1, 0.01),
        ("1.5", {"target": 1.5, "numbers": (1, 5)}, 0.1, 0.01),  # not the numbers 1 and 5
        ("44 +\n19 + 35", {}, 1.0, 1.01),
        ("sum(44,19,35)", {}, 0.1, 0.01),
        ("", {}, 0.1, 0.01),
        ("44 + 19 + 35", {"key": "nums"}, 1.0, 1.01),
    ],
)
def test_both_rewards(answer, task, tinyzero, cohlem):
    assert value(answer, TINYZERO, **task) == tinyzero
    assert value(answer, COHLEM, **task) == cohlem


def test_the_last_answer_counts_wherever_it_stands():
    text = "<answer>44 + 19</answer>\n<answer>\n44 + 19 + 35\n</answer>\nThat is it."
    score = score_text(row(), text, TINYZERO)
    assert score == (1.0, {"acc": 1.0, "answer_present": 1.0, "uses_numbers": 1.0}, "44 + 19 + 35")
    assert score_text(row(), text, OLD_TINYZERO).value == 0.0  # the original reads the last line only


@pytest.mark.parametrize(
    ("answer", "task", "old_tinyzero", "old_cohlem"),
    [
        ("44 + 19 + 35", {}, 1.0, 1.01),
        ("44 + 19 - 35", {}, 0.1, 0.02),
        ("2**3", {"target": 8, "numbers": (2, 3)}, 1.0, 1.01),
        ("7//2", {"target": 3, "numbers": (7, 2)}, 1.0, 1.01),
        ("1.5", {"target": 1.5, "numbers": (1, 5)}, 1.0, 1.01),
        ("1 + 1 + 3", {"target": 5, "numbers": (1, 2, 3)}, 0.1, 1.01),
        ("1 + 4", {"target": 5, "numbers": (1, 2)}, 0.1, 0.01),
        ("9**9**9**9", {"target": 1, "numbers": (9, 9, 9, 9)}, 0.1, 0.01),
        ("__import__('os')", {"numbers": ()}, 0.1, 0.01),
    ],
)
def test_compat_restores_what_the_originals_accept(answer, task, old_tinyzero, old_cohlem):
    assert value(answer, OLD_TINYZERO, **task) == old_tinyzero
    assert value(answer, OLD_COHLEM, **task) == old_cohlem


@pytest.mark.parametrize(
    "gold",
    [
        *("98", '{"target": 98}', '{"numbers": [1]}', '{"target": "x", "numbers": [1]}', "[]"),
        *('{"target": 3, "numbers": [1.5, 2]}', '{"target": 3, "numbers": [1e400]}'),
        '{"target": "1/0", "numbers": [1]}',
    ],
)
def test_a_row_without_target_and_numbers_is_named(gold):
    with pytest.raises(DataError, match=r"row r: ground truth of countdown must be \{\"target\""):
        score_text(Row("r", (), "countdown", gold, {}), "<answer>1</answer>")


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) / 4", Fraction(3, 4)),
        ("--3", 3),
        ("2 - -3", 5),
        ("1/3 + 1/3 + 1/3", 1),
        ("10" * 20 + "*0", 0),
    ],
)
def test_exact_values(expression, result):
    assert evaluate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        *("", "1 +", "2**3", "7//2", "7 % 2", "1/0", "1_000", "0x10", "1e3", "1j", "1.0", "x", "f(1)", "1(2)"),
        "(1).real",
        *("1 if 1 else 2", "[1][0]", "lambda: 1", "1;2", "1 < 2", "not 1", "~1", "1 << 2", "'1'", "１ + 1", "٣"),
        *("(" * 499, "1+" * 300 + "1", "9" * 5000),
        "__import__('os').system('true')",
        "().__class__.__bases__[0].__subclasses__()",
    ],
)
def test_anything_else_is_refused(expression):
    with pytest.raises(ExpressionError):
        evaluate(expression)
