"""Countdown: reach a target with given numbers and the four operations. Neither ``eval`` nor torch is used.

Two published rewards, chosen by ``reward.countdown``:

| response                                               | ``tinyzero`` | ``cohlem`` |
|--------------------------------------------------------|--------------|------------|
| no ``<answer>…</answer>``                              | 0            | 0.01       |
| an answer that is no expression in exactly the numbers | 0.1          | 0.01       |
| such an expression with another value                  | 0.1          | 0.02       |
| the target                                             | 1            | 1.01       |

(github.com/Jiayi-Pan/TinyZero; github.com/CohleM/RL-GRPO, where an equation's left side counts.) The last answer of the
response counts, each number has to be used exactly once, and values are exact fractions. Only ``+ - * /``, brackets and
whole numbers are read; ``reward.compat`` = ``tinyzero`` or ``cohlem`` restores what the original accepts besides
(`_check`).
"""

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction

from tandemrl.config import RewardConfig
from tandemrl.data.rows import DataError, Row
from tandemrl.rewards.protocol import Score
from tandemrl.tasks.math.tagged import graded, tagged_answer

MAX_EXPRESSION_CHARS = 500
MAX_BITS = 2000
"""The size in bits beyond which intermediate results are refused."""
TOLERANCE = Fraction(1, 10**5)


class ExpressionError(ValueError):
    """A text is not an arithmetic expression that this module computes."""


def countdown(row: Row, text: str, options: RewardConfig) -> Score:
    """Score a response by the table in the module's docstring. The part ``uses_numbers`` is 1 if it uses exactly the
    given numbers.

    Raises:
        DataError: the ground truth is not ``{"target": …, "numbers": […]}``.
    """
    answer, uses_numbers, reached = _check(*read_task(row), text, options)
    score = graded(reached is True, answer, options, 0.1)
    score.parts["uses_numbers"] = float(uses_numbers)
    if options.countdown == "cohlem":
        return score._replace(value=1.01 if reached else 0.02 if reached is False else 0.01)
    return score


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of whole numbers, ``+ - * /`` and brackets.

    Raises:
        ExpressionError: it is anything else, too long, too large, or divides by zero.

    Examples:
        >>> evaluate("(1 + 2) / 3 * 7")
        Fraction(7, 1)
    """
    return _evaluate(expression, _STRICT)[0]


def read_task(row: Row) -> tuple[Fraction, list[int]]:
    """The target and the numbers of a row.

    Raises:
        DataError: they are not in its ground truth.
    """
    try:
        gold = json.loads(row.ground_truth)
        numbers = [Fraction(str(number)) for number in (gold["numbers"] if "numbers" in gold else gold["nums"])]
        if all(number.denominator == 1 for number in numbers):
            return Fraction(str(gold["target"])), [*map(int, numbers)]
    except (ValueError, TypeError, KeyError, ZeroDivisionError, RecursionError):
        pass
    raise DataError(
        f'row {row.example_id}: ground truth of {row.data_source} must be {{"target": …, "numbers": […]}} with whole '
        f"numbers, found {row.ground_truth[:80]!r}"
    )


# --------------------------------------------------------------------------------------------------------------------

Operations = Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]]
_STRICT: Operations = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _check(
    target: Fraction, numbers: list[int], text: str, options: RewardConfig
) -> tuple[str | None, bool, bool | None]:
    """The answer, whether it has exactly the numbers, and whether its value is the target, or None without a value.

    What the original code accepts, for results that depend on it: ``reward.compat=tinyzero``: the answer must be on the
    last line; whatever is made of digits, ``+ - * / ( ) .`` and spaces counts, so decimals and ``**`` and ``//`` too.
    ``cohlem``: as many numbers as given, each one of them, in any multiplicity; any operator; the target up to rounding
    to a floating-point number. Values are exact here: ``1 / 49 * 49`` is 1, which the original misses.
    """
    original = options.compat if options.compat in ("tinyzero", "cohlem") else None
    said = text.rpartition("\n")[2] if original == "tinyzero" else text
    answer = tagged_answer(said, published=original is not None or options.compat == "verl")
    expression = answer or ""
    if (original or options.countdown) == "cohlem":
        expression = expression.partition("=")[0]
    try:
        result, used = _evaluate(expression, _STRICT if original is None else _LENIENT)
    except ExpressionError:
        result, used = None, []
    if original is not None:
        used = [int(number[:100]) for number in re.findall(r"\d+", expression)]
    uses_numbers = sorted(used) == sorted(numbers)
    if original == "cohlem":
        uses_numbers = len(used) == len(numbers) and set(used) <= set(numbers)
    if result is None or not uses_numbers or (original == "tinyzero" and "%" in expression):
        return answer, uses_numbers, None
    if original == "cohlem":
        return answer, uses_numbers, float(result) == float(target)
    return answer, uses_numbers, abs(result - target) < TOLERANCE


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if exponent.denominator != 1 or size * abs(exponent) > MAX_BITS:
        raise ExpressionError("power")
    return base ** int(exponent)


_LENIENT: Operations = {**_STRICT, ast.Pow: _power, ast.FloorDiv: lambda a, b: Fraction(a // b), ast.Mod: operator.mod}


def _evaluate(expression: str, operations: Operations) -> tuple[Fraction, list[int]]:
    """The value of an expression, and the whole numbers that occur in it."""
    expression = " ".join(expression.split())
    allowed = r"[0-9+\-*/() ]+" if operations is _STRICT else r"[0-9+\-*/().% ]+"
    if len(expression) > MAX_EXPRESSION_CHARS or re.fullmatch(allowed, expression) is None:
        raise ExpressionError(f"not arithmetic: {expression[:80]!r}")
    used: list[int] = []

    def compute(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() as number) if type(number) is int:
                used.append(number)
                return Fraction(number)
            case ast.Constant(value=float() as number) if operations is _LENIENT:
                return Fraction(repr(number))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                return compute(operand) * (-1 if isinstance(sign, ast.USub) else 1)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in operations:
                result = operations[type(op)](compute(left), compute(right))
                if max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
                    raise ExpressionError("too large")
                return result
        raise ExpressionError(type(node).__name__)

    try:
        return compute(ast.parse(expression, mode="eval").body), used
    except (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise ExpressionError(str(error)) from None
