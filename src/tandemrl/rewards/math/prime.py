r"""PRIME's two-stage grader for maths answers in free text (arXiv:2502.01456). It does not import torch.

The answer is whatever follows "answer is", stands in the last box, or comes after a label and "=" (`extract_answer`).
Stage one (`grade`, after prm800k) compares normal forms, then tuples entry by entry, and wants fractions reduced. Stage
two (`math_equal`, after ToRA) is lenient: a relative 1e-4 where one side is a decimal, a factor of 100 either way for
percentages, 3.14 for π, lists in any brackets.

Where the original has a bug, this has none: units are removed as words (there, "perimeter" becomes "peri"), and cm is
not m, ``12_5`` is not ``12_6``, ``\frac{x+1}{2}`` keeps its numerator together, ``[0,1)`` is not ``[0,1]``, a boxed
answer is not cut at ". ", and nothing is ever passed to ``eval``. An unreduced fraction stays wrong; there, the second
stage forgives it. ``x + 3 = 4`` is not 4: only a bare label is dropped, and what `claims` refuses is wrong. With
``reward.compat`` = ``verl``, as published, whatever stands before the last "=" is dropped, and the tolerance of 1e-4
holds for all numbers: 1000001 is 1000000.
"""

import math as numeric
import re
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.rewards.math.boxed import EQUIVALENT, extract_boxed, gold_answer, normalise_math, settled
from tandemrl.rewards.math.claims import (
    admitted,
    drop_label,
    identical,
    readable,
    refused,
    sides,
    unlabelled,
    without_reason,
)
from tandemrl.rewards.math.equality import (
    BRACKETS,
    CAPITALS,
    MAX_NESTING,
    Shape,
    all_true,
    any_true,
    exact_and_rounded,
    formulas_equal,
    one_for_several,
    quick_equal,
    values,
    written_number,
)
from tandemrl.rewards.math.expression import near
from tandemrl.rewards.math.notation import (
    bare,
    clean,
    one_text_macro,
    units_differ,
    visible,
    without_braced_thousands,
    without_full_stop,
    without_spaces,
    without_thousands,
)
from tandemrl.rewards.protocol import Deferred, Lost, Score

MAX_ANSWER_CHARS = 1000
"""A longer answer is wrong unless it equals the ground truth as a string."""
TOLERANCE = Fraction(1, 10**4)
PI = "(3.14)"


def prime(row: Row, text: str, options: RewardConfig) -> Score | Deferred:
    """1 if either stage finds the answer equal to the ground truth, else 0. The part ``format`` is 1 with a box."""
    published = options.compat == "verl"
    gold, answers = gold_answer(row), extract_answer(text, published=published)

    def score(outcome: bool | Lost) -> Score:
        result = settled(outcome, answers[-1] or None)
        result.parts["format"] = float(r"\box" in text)
        return result

    verdict = equal(gold, *answers, published=published)
    return Deferred("symbolic", (EQUIVALENT, gold, answers[-1]), score) if verdict is None else score(verdict)


def extract_answer(text: str, *, published: bool = False) -> tuple[str, ...]:
    r"""The readings of a response's answer: the whole content of a box, and its part after "is" and the like.

    Args:
        published: drop everything before the last "=", not only a bare label.

    Examples:
        >>> extract_answer("Adding up, the answer is x = 5"), extract_answer(r"so \boxed{x = 5}.")
        (('5',), ('x = 5', '5'))
    """
    for marker in ("answer:", "answer is", "answers are"):
        text = _after_last(text, (marker,))
    for marker in ("is answer", "is the answer", "are answers", "are the answers"):
        at = _lower(text).rfind(marker)
        text = text if at < 0 else text[:at].strip()
    boxed = extract_boxed(text, loose=True)
    if boxed is None:
        cut = text.rfind(". ")
        return (_led_to(text if cut < 0 else text[:cut].strip(), published),)
    last = _led_to(boxed, published)
    return (boxed,) if last == boxed else (boxed, last)


def equal(gold: str, *answers: str, published: bool = False) -> bool | None:
    """Whether one of the answers is right by either stage; None if only sympy could decide whether the last one is.

    Args:
        published: the tolerance of stage two holds for all numbers, not only where one side is a decimal.
    """
    if any(identical(gold, answer) for answer in answers):
        return True
    if any(len(side) > MAX_ANSWER_CHARS for side in (gold, *answers)) or not all(answers):
        return False
    if any(not admitted(gold, answer) for answer in answers):
        return False
    if any(_decided(gold, answer, published) for answer in answers[:-1]):
        return True
    return _decided(gold, answers[-1], published)


def grade(gold: str, answer: str) -> bool | None:
    """Stage one: equal normal forms, or equal entries of tuples in equal brackets. None if only sympy could decide."""
    if _mathd(gold) == _mathd(answer):
        return True
    left, right = normalise(gold), normalise(answer)
    if left == right or not right:
        return bool(right)
    golds, answers = _entries(left), _entries(right)
    if len(golds) != len(answers) or (len(golds) > 1 and (left[0], left[-1]) != (right[0], right[-1])):
        return False
    return all_true(_entries_equal(a, b) for a, b in zip(golds, answers, strict=True))


def math_equal(gold: str, answer: str, *, published: bool = False) -> bool | None:
    """Stage two: equal as numbers (within 1e-4, or up to a factor of 100), strings, lists, matrices or formulas.

    None if only sympy could decide.

    Args:
        published: the tolerance of 1e-4 holds for all numbers, not only where one side is a decimal.
    """
    gold, answer = (_unwrap(clean(side)) for side in (gold, answer))
    tolerance = TOLERANCE if published or _A_DECIMAL.search(f"{gold} {answer}") else Fraction(0)
    exact = _lenient(gold, answer, MAX_NESTING, tolerance)
    if exact is True or tolerance == 0 or _PI.search(gold + answer) is None:
        return exact
    return True if _lenient(_PI.sub(PI, gold), _PI.sub(PI, answer), MAX_NESTING, tolerance) else exact


@lru_cache(1024)
def normalise(answer: str) -> str:
    """prm800k's normal form: no units, $ or %, "or" and "and" as commas, millions written out, LaTeX as plain text."""
    if text := re.match(r"^\\text\{(.+?)\}$", answer):
        answer = text[1]
    for old, new in (("\\%", ""), ("\\$", ""), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")):
        answer = answer.replace(old, new)
    for name, zeros in (("trillion", 12), ("billion", 9), ("million", 6)):
        answer = answer.replace(name, f"*10^{{{zeros}}}")
    answer = re.sub(r"\^ *\{? *\\circ *\}?", "", _UNIT.sub("", answer)).strip()
    if answer.startswith("{") and answer.endswith("}"):
        answer = answer[1:-1]
    answer = re.sub(r",\\! *", ",", answer)
    if "\\" in answer:
        answer = _plain(answer)
    answer = re.sub(r"- *", "-", answer)
    answer = re.sub(r"([0-9]+) +([0-9]+/[0-9]+)", r"(\1+\2)", answer).lower().strip()
    value = _decimal(answer)
    return str(value.numerator) if value is not None and value.denominator == 1 else answer


# --------------------------------------------------------------------------------------------------------------------

_LEADS = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")
_BEFORE_LABEL = re.compile(r"^(?:[A-Za-z]{2,},? )*(?=[^ ]+ ?=)")
_UNIT = re.compile(
    r"(?<![A-Za-z])(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard|liter)"
    r"(?:es|s)?(?![A-Za-z]) *(?:\^[0-9]+)?"
)
_A_DECIMAL = re.compile(r"[0-9]\.[0-9]|\.[0-9]|[0-9][eE]-[0-9]")
_PI = re.compile(r"\\pi(?![A-Za-z])|π")
_FRACTION = re.compile(r"(-?[0-9]+)/([0-9]+)")
_PLAIN = {
    **{r"\left": "", r"\right": "", r"\tfrac": r"\frac", r"\dfrac": r"\frac", r"\pi": "pi", r"\infty": "inf"},
    **{r"\cup": "U", r"\cdot": "*", r"\times": "*", r"\sqrt": "sqrt", r"\,": " ", r"\ ": " "},
}
_MACRO = re.compile(r"\\(?:left|right|tfrac|dfrac|pi|infty|cup|cdot|times|sqrt)(?![A-Za-z])|\\[, ]")


def _after_last(text: str, markers: Iterable[str]) -> str:
    """What follows the last occurrence of each marker in turn, without regard to case."""
    for marker in markers:
        at = _lower(text).rfind(marker)
        text = text if at < 0 else text[at + len(marker) :].strip()
    return text


def _lower(text: str) -> str:
    """The text in lower case, in the same length, which ``str.lower`` may change."""
    return text.lower() if text.isascii() else re.sub("[A-Z]+", lambda letters: letters[0].lower(), text)


def _led_to(text: str, published: bool) -> str:
    """The text that follows the last lead such as "is", without a label."""
    if published:
        return _after_last(text, _LEADS)
    text = _after_last(text, [lead for lead in _LEADS if lead != "="])
    text = without_full_stop(without_reason(text))
    if text.count("$") == 2:
        text = text.replace("$", "")
    words = _BEFORE_LABEL.match(text)
    if words and not refused("", words[0]):
        text = text.removeprefix(words[0])
    return unlabelled(text).strip()


def _decided(gold: str, answer: str, published: bool) -> bool | None:
    """Whether two answers are equal by either stage; None if only sympy could decide, and it reads both answers."""
    gold, answer = (without_braced_thousands(one_text_macro(visible(side))).strip() for side in (gold, answer))
    gold, answer = drop_label(gold, answer)
    if units_differ(clean(gold), clean(answer)):
        return False
    names = [without_spaces(bare(clean(side))).strip("()") for side in (gold, answer)]
    if all(map(CAPITALS.fullmatch, names)):  # before stage one takes lower case
        return names[0] == names[1]
    if r"\approx" in answer and r"\approx" not in gold:
        return any_true(_decided(gold, side, published) for side in exact_and_rounded(clean(answer)))
    if 1 in (len(sides(gold)), len(sides(answer))):
        verdict = any_true(_stages(a, b, published) for a in values(gold) for b in values(answer))
    else:
        verdict = _stages(gold, answer, published)
    left, right = clean(gold), clean(answer)
    undecided = verdict is None and readable(left, right) and not one_for_several(Shape.of(left), Shape.of(right))
    return None if undecided else verdict is True


def _stages(gold: str, answer: str, published: bool) -> bool | None:
    gold, answer = without_full_stop(gold), without_full_stop(answer)
    if not answer:
        return False
    if _unreduced(gold, answer):
        return False
    return grade(gold, answer) or math_equal(gold, answer, published=published)


def _unreduced(gold: str, answer: str) -> bool:
    """Whether an entry of the answer is a fraction that could be reduced, where the gold answer's is reduced."""
    for a, b in zip(_entries(normalise(gold)), _entries(normalise(answer)), strict=False):
        left, right = _FRACTION.fullmatch(a), _FRACTION.fullmatch(b)
        if left and right and left.groups() != right.groups() and _common_factor(right) > 1 == _common_factor(left):
            return True
    return False


def _common_factor(fraction: re.Match[str]) -> int:
    return numeric.gcd(int(fraction[1]), int(fraction[2]))


def _entries(answer: str) -> list[str]:
    """The entries of a bracketed tuple or interval without brackets inside, thousands unseparated."""
    plain = without_thousands(answer)
    if re.fullmatch(r"\([^()\[\],]+\)|[(\[][^()\[\]]+,[^()\[\]]+[)\]]", plain):
        return [part.strip() for part in plain[1:-1].split(",")]
    return [plain]


def _entries_equal(gold: str, answer: str) -> bool | None:
    """Whether two entries of tuples are equal in stage one. A whole number is equal only to another whole number."""
    values = [_decimal(gold), _decimal(answer)]
    whole = {value is not None and value.denominator == 1 for value in values}
    return False if len(whole) == 2 else formulas_equal(gold, answer, tolerance=Fraction(0))


def _lenient(gold: str, answer: str, depth: int, tolerance: Fraction) -> bool | None:
    if not answer:
        return False
    if without_spaces(without_thousands(gold)).lower() == without_spaces(without_thousands(answer)).lower():
        return True
    a, b = _decimal(gold), _decimal(answer)
    if a is not None and b is not None:
        return any(near(a * factor, b, tolerance) for factor in (Fraction(1, 100), Fraction(1), Fraction(100)))
    left, right = (_list(side) for side in (gold, answer))
    if left.kind.startswith("matrix") or right.kind.startswith("matrix"):
        left, right = _as_matrix(left), _as_matrix(right)
    if one_for_several(left, right):
        return False
    if depth == 0 or "value" in (left.kind, right.kind):
        return formulas_equal(gold, answer, tolerance=tolerance)
    if any(shape.kind.startswith("order") for shape in (left, right)):
        return quick_equal(gold, answer)
    half_open = {left.kind, right.kind} & {"[)", "(]"}
    if left.clashes(right) or (left.kind != right.kind and half_open):
        return False
    if len(left.parts) != len(right.parts):
        return False if {left.kind, right.kind} <= BRACKETS | {"list", "set"} else None
    pairs = zip(left.parts, right.parts, strict=True)
    in_order = all_true(_lenient(_unwrap(x), _unwrap(y), depth - 1, tolerance) for x, y in pairs)
    in_any_order = {left.kind, right.kind} <= {"list", "set", "union"}
    return quick_equal(gold, answer) if in_any_order and not in_order else in_order


def _list(answer: str) -> Shape:
    """The shape of an answer, also if it is sympy's ``Interval.open(0, 1)``, ``Point(1, 2)`` or ``Matrix([…])``."""
    interval = re.fullmatch(r"Interval(\.open|\.Lopen|\.Ropen)?\((.*)\)", answer)
    if interval is None:
        return Shape.of(re.sub(r"^(?:Point|Matrix)(?=\()", "", answer))
    opening = "(" if interval[1] in (".open", ".Lopen") else "["
    closing = ")" if interval[1] in (".open", ".Ropen") else "]"
    return Shape.of(f"{opening}{interval[2]}{closing}")


def _as_matrix(shape: Shape) -> Shape:
    """A matrix from lists such as ``[[1, 2], [3, 4]]``, in square or round brackets. ``[1, 2]`` is a column.

    Other shapes are returned as they are.
    """
    if shape.kind == "value":
        inner = Shape.of(shape.parts[0][1:-1])
        return _as_matrix(inner) if shape.parts[0][:1] in ("(", "[") and inner.kind in BRACKETS | {"list"} else shape
    if shape.kind not in ("[]", "()", "list"):
        return shape
    rows = [Shape.of(part) for part in shape.parts]
    return Shape.matrix(
        [row.parts if row.kind == "[]" else (part,) for row, part in zip(rows, shape.parts, strict=True)]
    )


def _unwrap(answer: str) -> str:
    """An answer without a dollar sign before a number, and without a percent sign after it."""
    answer = re.sub(r"^\\?\$(?=[0-9])", "", answer.strip())
    return re.sub(r"(?<=[0-9]) ?\\?%$", "", answer)


def _plain(answer: str) -> str:
    r"""LaTeX as plain text where that is unambiguous: ``\frac{1}{2}`` becomes 1/2. Other macros stay."""
    answer = _MACRO.sub(lambda macro: _PLAIN[macro.group()], answer)
    fraction = r"(?:\\frac *\{ *(-?[0-9]+) *\} *\{ *([0-9]+) *\}|\\frac *([0-9])([0-9]))(?! *[0-9])"
    answer = re.sub(fraction, _slash, answer)
    return re.sub(r"\\text *\{([^{}]*)\}", r"\1", answer).strip()


def _slash(fraction: re.Match[str]) -> str:
    return f" {fraction[1] or fraction[3]}/{fraction[2] or fraction[4]}"


def _mathd(answer: str) -> str:
    text = re.fullmatch(r"\\text\{(?P<text>.+?)\}", answer.strip())
    return normalise_math(without_thousands(text["text"].strip() if text else answer.strip()))


def _decimal(answer: str) -> Fraction | None:
    """The value of a number that is not written as a fraction."""
    return None if "/" in answer or "frac" in answer else written_number(answer)
