r"""Decides whether two mathematical answers in LaTeX are equal, as far as that is possible fast and in bounded time.

`quick_equal` compares normalised strings, numbers, lists, sets, intervals and matrices entry by entry, and formulas by
their values (`expression`). If it returns None, a computer algebra system may know more: `boxed.equivalent`.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from tandemrl.rewards.math import expression
from tandemrl.rewards.math.claims import counted, drop_label, identical, is_label, readable, refused, sides, unlabelled
from tandemrl.rewards.math.formula import read
from tandemrl.rewards.math.notation import (
    bare,
    clean,
    currencies,
    split,
    units_differ,
    without_spaces,
    without_thousands,
)

MAX_CHARS = 2000
"""A longer answer is wrong unless it equals the ground truth as a string; it is not normalised and never parsed."""
MAX_NESTING = 6
"""Lists in lists deeper than this, and unordered ones of more than `MAX_UNORDERED` entries, are not compared here."""
MAX_UNORDERED = 20
MAX_COMPARISONS = 2000
"""After so many comparisons of entries nothing is decided here."""
ROUNDED = Fraction(1, 100)
"""How far a number may be from its rounding, relatively."""


def quick_equal(gold: str, answer: str) -> bool | None:
    """Whether two answers are equal, or None if strings, numbers and values do not decide it.

    Whole numbers (also written "142.0") and fractions are equal exactly, decimals within 1e-6 (`numbers_equal`).
    "2.55e-10" is a number. "50%" is 50 and also 0.5. Words, and letters of a multiple choice, are compared without
    regard to case. Units are dropped where one side has none; known units that differ make answers different. A label
    such as "x =" counts where both sides have one.
    """
    if identical(gold, answer):
        return True
    if gold.isdigit() and answer.isdigit() and gold.isascii() and answer.isascii() and len(answer) < _MAX_NUMBER_CHARS:
        return gold.lstrip("0") == answer.lstrip("0")
    if max(len(gold), len(answer)) > MAX_CHARS:
        return False
    if (mine := currencies(gold)) and (theirs := currencies(answer)) and mine != theirs:
        return False
    gold, answer = without_things(clean(gold), clean(answer))
    if refused(gold, answer):
        return False
    verdict = _equal(gold, answer, MAX_NESTING, iter(range(MAX_COMPARISONS)))
    return False if verdict is None and not readable(*drop_label(gold, answer)) else verdict


def without_things(gold: str, answer: str) -> tuple[str, str]:
    r"""Two cleaned answers without the words for what they count, as in ``5 \text{ more apples}``, unless both have
    words and those differ."""
    mine, theirs = counted(gold), counted(unlabelled(answer) if "=" not in gold else answer)
    if theirs is None or units_differ(gold, answer):
        return gold, answer
    if mine is None:
        return gold, theirs[0]
    left, right = (set(words.lower().split()) for _, words in (mine, theirs))
    return (mine[0], theirs[0]) if left <= right or right <= left else (gold, answer)


def exact_and_rounded(answer: str) -> list[str]:
    r"""The sides of ``a \approx b`` that count: both if b is the rounded a, only b if a is a name, and else only a.

    Several guesses are not an answer. So what stands between the first and the last side never counts, and a whole
    number is no rounding of another one. Sides that differ are no answer at all.

    Examples:
        >>> exact_and_rounded(r"\frac{2}{3} \approx 0.67"), exact_and_rounded(r"600^1 \approx 605")
        (['\\frac{2}{3}', '0.67'], ['600^1'])
    """
    first, *_, last = (side.strip() for side in answer.split(r"\approx"))
    if not first or is_label(first):
        return [last]
    exact, rounded = bare(sides(first)[-1]), bare(last)
    whole = all(value is not None and value.denominator == 1 for value in map(written_number, (exact, rounded)))
    agree = formulas_equal(exact, rounded, tolerance=ROUNDED)
    kinds = Shape.of(exact).kind, Shape.of(rounded).kind
    comparable = kinds[0] == kinds[1] and (kinds[0] != "value" or agree or written_number(rounded) is not None)
    if len(sides(last)) > 1 or agree is False or not comparable:
        return []
    both = agree and not whole and _is_rounding(exact, rounded) and values(unlabelled(first))
    return [first, last] if both else [first]


def formulas_equal(a: str, b: str, *, tolerance: Fraction | None = None) -> bool | None:
    """Whether two answers without units are equal as numbers or as formulas, or None if that is not clear.

    Args:
        tolerance: the relative difference that is allowed. None means that of `numbers_equal` and `expression.same`.
    """
    plain = without_spaces(a), without_spaces(b)
    names = [side.strip("()") for side in plain]
    if all(map(CAPITALS.fullmatch, names)):  # an order or a choice, not a product: ABC is not BAC
        return names[0] == names[1]
    if any(map(_WITH_BASE.fullmatch, plain)):
        return _equal_in_base(*plain)
    x, y = written_number(a), written_number(b)
    if x is not None and y is not None:
        return numbers_equal(*plain) if tolerance is None else expression.near(x, y, tolerance)
    left, right = read(a), read(b)
    return None if left is None or right is None else expression.same(left, right, tolerance=tolerance)


def numbers_equal(a: str, b: str) -> bool:
    """Whether two numbers without spaces are equal: exactly, or up to rounding if one of them is a decimal.

    A rounding changes a number by less than one unit of the last decimal place that is written, and by at most 1e-6
    (`expression.near`). Less than 1e-12 is the noise of floating point.

    Examples:
        >>> numbers_equal("1/3", "0.333333"), numbers_equal("1/3", "333333/1000000"), numbers_equal("1e7", "10000001")
        (True, False, False)
    """
    a, b = without_thousands(a), without_thousands(b)
    x, y = number(a), number(b)
    if x is None or y is None:
        return False
    if x == y or not (_is_decimal(a) or _is_decimal(b)):
        return x == y
    rounding = max(_last_place(a, x), _last_place(b, y), max(abs(x), abs(y)) / 10**12)
    return abs(x - y) < rounding and expression.near(x, y)


def written_number(text: str) -> Fraction | None:
    """The exact value of a plain number, in which spaces may stand; "1, 234" is none."""
    return None if re.search(r"\d, +\d", text) else number(without_spaces(text))


def number(text: str) -> Fraction | None:
    """The exact value of a plain number without spaces, or None if the text is no such number.

    It may be decimal, scientific, with thousands separators, or a fraction.
    """
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    text = without_thousands(text)
    if match := _DECIMAL.fullmatch(text):
        return Fraction(match["mantissa"]) * Fraction(10) ** int(match["exponent"] or 0)
    if match := _POWER_OF_TEN.fullmatch(text):
        return Fraction(match["mantissa"] or 1) * Fraction(10) ** int(match["exponent"] or match["digit"])
    if match := _FRACTION.fullmatch(text):
        numerator, denominator = (int(part) for part in match.groups()[1:] if part is not None)
        if denominator != 0 and not (":" in text and numerator % denominator == 0):
            return Fraction(numerator, denominator) * (-1 if match["sign"] == "-" else 1)
    return None


def values(text: str) -> tuple[str, ...]:
    r"""The forms in which a cleaned answer gives its value.

    They are the sides of a true calculation such as "2 + 3 = 5". Any other equation has none. Of a text that is no
    equation, it is the text itself.

    Examples:
        >>> values("2 + 3 = 5"), values("x + 3 = 5"), values("x = 3, y = 5")
        (('2 + 3', '5'), (), ('x = 3, y = 5',))
    """
    chain = sides(text)
    if len(chain) == 1 or is_labelled(Shape.of(text)):
        return (text,)
    calculated = all(_is_result(bare(a), bare(b)) for a, b in itertools.pairwise(chain))
    return (chain[0], chain[-1]) if calculated else ()


def is_labelled(shape: "Shape") -> bool:
    """Whether an answer is a list of values with a label each, such as "x = 3, y = 5"."""
    labels = [sides(part)[0] for part in shape.parts if len(sides(part)) == 2]
    return shape.kind == "list" and len(shape.parts) == len(labels) and all(map(is_label, labels))


class Shape(NamedTuple):
    """A cleaned answer taken apart.

    ``kind``: "value", "list", "set" and "union" (in any order), brackets such as "[)", "matrix 2,2" with the length of
    each row, or "order <≤" for sides that grow from left to right.
    """

    kind: str
    parts: tuple[str, ...]

    @classmethod
    def of(cls, answer: str) -> "Shape":
        answer = without_thousands(answer.strip().removesuffix("."))
        if matrix := _MATRIX.fullmatch(answer[1:-1].strip() if _BRACKETED_MATRIX.fullmatch(answer) else answer):
            shape = cls.matrix([row.split("&") for row in matrix["body"].strip().removesuffix(r"\\").split(r"\\")])
            return shape._replace(kind=f"determinant {shape.kind}") if matrix["kind"][0] in "vV" else shape
        if len(chain := _ORDER.split(answer)) > 1:
            return cls.order(chain[::2], chain[1::2])
        if r"\cup" in answer and len(parts := split(answer.replace(r"\cup", ";"), ";")) > 1:
            return cls("union", parts)
        if inside := re.fullmatch(r"\\\{(.*)\\\}", answer):
            return cls("set", _with_both_signs(split(inside[1])))
        if answer[:1] in ("(", "[") and answer[-1:] in (")", "]") and _is_one_bracket(answer):
            parts = split(answer[1:-1])
            if len(parts) > 1:
                return cls(answer[0] + answer[-1], parts)
        parts = _with_both_signs(split(_AND.sub(", ", answer)))
        return cls("list" if len(parts) > 1 else "value", parts)

    @classmethod
    def matrix(cls, rows: Sequence[Sequence[str]]) -> "Shape":
        sizes = ",".join(str(len(row)) for row in rows)
        return cls(f"matrix {sizes}", tuple(entry.strip() for row in rows for entry in row))

    @classmethod
    def order(cls, chain: Sequence[str], signs: Sequence[str]) -> "Shape":
        """The shape of an inequality, with the sides in rising order: ``3 > x`` becomes ``x < 3``."""
        if all(sign in _FALLING for sign in signs):
            chain, signs = chain[::-1], [_FALLING[sign] for sign in reversed(signs)]
        signs = [_RISING.get(sign, sign) for sign in signs]
        return cls(f"order {''.join(signs)}", tuple(side.strip() for side in chain))

    def as_interval(self) -> "Shape":
        """An inequality for a single letter as an interval: ``x > 3`` as ``(3, infinity)``, and others as they are."""
        if not self.kind.startswith("order"):
            return self
        opening, closing = ("[" if "≤" in end else "(" for end in (self.kind[6:7], self.kind[-1:]))
        closing = "]" if closing == "[" else ")"
        match self.parts:
            case (left, right) if len(left) == 1 and left.isalpha():
                return Shape(f"({closing}", (r"-\infty", right))
            case (left, right) if len(right) == 1 and right.isalpha():
                return Shape(f"{opening})", (left, r"\infty"))
            case (left, middle, right) if len(middle) == 1 and middle.isalpha():
                return Shape(f"{opening}{closing}", (left, right))
        return self

    def clashes(self, other: "Shape") -> bool:
        """Whether the two are intervals or tuples in different brackets, or matrices of different shapes."""
        kinds = {self.kind, other.kind}
        return len(kinds) == 2 and (kinds <= BRACKETS or all("matrix" in kind for kind in kinds))


def one_for_several(left: Shape, right: Shape) -> bool:
    """Whether one of the two shapes is a single value, and the other a collection of several values."""
    one, other = (left, right) if left.kind == "value" else (right, left)
    return one.kind == "value" and len(other.parts) > 1 and _SYMBOLIC_SET.search(one.parts[0]) is None


BRACKETS = {"()", "[]", "[)", "(]"}


def all_true(verdicts: Iterable[bool | None]) -> bool | None:
    """False if any verdict is False, else None if any is None, else True."""
    outcomes = set(verdicts)
    return False if False in outcomes else None if None in outcomes else True


def any_true(verdicts: Iterable[bool | None]) -> bool | None:
    """True if any verdict is True, else None if any is None, else False. Stops at the first True."""
    doubt = False
    for verdict in verdicts:
        if verdict:
            return True
        doubt |= verdict is None
    return None if doubt else False


# --------------------------------------------------------------------------------------------------------------------

_MAX_NUMBER_CHARS = 100
_DIGITS = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_DECIMAL = re.compile(rf"(?P<mantissa>{_DIGITS})(?:[eE](?P<exponent>[-+]?\d{{1,3}}))?", re.ASCII)
_POWER_OF_TEN = re.compile(
    rf"(?:(?P<mantissa>{_DIGITS})(?:\\times|\\cdot|\*|×))?10\^(?:\{{(?P<exponent>[-+]?\d{{1,3}})\}}|(?P<digit>\d))",
    re.ASCII,
)
_FRACTION = re.compile(r"(?P<sign>[-+]?)(?:\\frac\{(-?\d+)\}\{(-?\d+)\}|(\d+)/(\d+)|(\d+):(?!\d\d$)(\d+))", re.ASCII)
"""A fraction or a ratio; 2:40 may be a time of day, which is not 1:20, and 4:1 is compared as it is written."""
CAPITALS = re.compile(r"[A-Z]{2,}")
_WITH_BASE = re.compile(r"([0-9][0-9A-Za-z]{0,99})_\{?([0-9]{1,2})\}?")

_BRACKETED_MATRIX = re.compile(r"[\[(] ?\\begin.*\\end\{[a-zA-Z]+\} ?[\])]")
_SYMBOLIC_SET = re.compile(r"\\(?:begin|mathbb|emptyset|varnothing|setminus|cap)(?![A-Za-z])")
_WORD = re.compile(r"[A-Za-z]{4,}|(?i:yes|no|odd)|[A-Za-z]|\([A-Za-z]\)")
_RISING = {"<": "<", r"\lt": "<", "≤": "≤", r"\le": "≤", r"\leq": "≤", r"\leqslant": "≤"}
_FALLING = {">": "<", r"\gt": "<", "≥": "≤", r"\ge": "≤", r"\geq": "≤", r"\geqslant": "≤"}
_ORDER = re.compile(r"([<>≤≥]|\\(?:l|g)(?:t|e|eq|eqslant)(?![A-Za-z]))")
_AND = re.compile(r",? ?\\text ?\{ ?,? ?(?:and|or) ?\}|,? \b(?:and|or)\b(?= )")
_MATRIX = re.compile(
    r"\\begin\{(?P<kind>[bpvBV]?matrix|array)\}(?:\{[lcr|]*\})?(?P<body>(?:(?!\\end).)*)\\end\{(?P=kind)\}"
)


def _equal(gold: str, answer: str, depth: int, budget: Iterator[int]) -> bool | None:
    if next(budget, None) is None:
        return None
    if without_spaces(without_thousands(gold)) == without_spaces(without_thousands(answer)):
        return True if gold else None
    if r"\approx" in answer and r"\approx" not in gold:
        return any_true(_equal(gold, side, depth, budget) for side in exact_and_rounded(answer))
    gold, answer = drop_label(gold, answer)
    if len(sides(gold)) == 2 and written_number(bare(unlabelled(gold))) is not None and unlabelled(answer) == answer:
        gold = unlabelled(gold)
    golds, answers = values(gold), values(answer)
    if (golds, answers) != ((gold,), (answer,)) and 1 in (len(sides(gold)), len(sides(answer))):
        return any_true(_equal(x, y, depth, budget) for x in golds for y in answers)
    if units_differ(gold, answer):
        return False
    formulas = bare(gold), bare(answer)
    a, b = (without_spaces(without_thousands(formula)) for formula in formulas)
    if a == b:
        return True if a else None
    words = a.strip("()").lower(), b.strip("()").lower()
    if all(map(str.isalpha, words)) and (_WORD.fullmatch(a) or _WORD.fullmatch(b)):
        return words[0] == words[1]
    if ("%" in gold) != ("%" in answer):
        percent, plain = formulas if "%" in gold else formulas[::-1]
        return any_true(formulas_equal(plain, each) for each in (percent, f"({percent})/100"))
    left, right = Shape.of(gold), Shape.of(answer)
    if left.kind == right.kind == "value":
        return formulas_equal(*formulas)
    if left.kind in BRACKETS or right.kind in BRACKETS:
        left, right = left.as_interval(), right.as_interval()
    if left.clashes(right):
        return False
    if depth == 0:
        return None
    if left.kind != right.kind:
        return _equal_across(left, right, depth, budget)
    if len(left.parts) != len(right.parts):
        return None if left.kind == "union" else False
    if left.kind in ("list", "set", "union") and not (is_labelled(left) and not is_labelled(right)):
        return _equal_in_any_order(left.parts, right.parts, depth - 1, budget)
    verdict = all_true(_equal(x, y, depth - 1, budget) for x, y in zip(left.parts, right.parts, strict=True))
    return verdict or (None if left.kind.startswith("order") else verdict)  # 2x < 6 is x < 3


def _equal_across(gold: Shape, answer: Shape, depth: int, budget: Iterator[int]) -> bool | None:
    """Whether answers of different kinds are equal, or None if that is not clear.

    A list may be meant as a tuple. It counts as one if it has labels in alphabetical order, as in "x = 3, y = 4".
    """
    if {gold.kind, answer.kind} == {"list", "()"}:
        in_order = len(gold.parts) == len(answer.parts) and all_true(
            _equal(x, y, depth - 1, budget) for x, y in zip(gold.parts, answer.parts, strict=True)
        )
        labelled = gold if is_labelled(gold) else answer
        if in_order and is_labelled(labelled):
            labels = [sides(part)[0].strip() for part in labelled.parts]
            return labels == sorted(labels)
        return None if in_order is not False else False
    if {gold.kind, answer.kind} == {"list", "set"}:
        same_length = len(gold.parts) == len(answer.parts)
        return same_length and _equal_in_any_order(gold.parts, answer.parts, depth - 1, budget)
    return False if one_for_several(gold, answer) else None


def _equal_in_any_order(gold: Sequence[str], answer: Sequence[str], depth: int, budget: Iterator[int]) -> bool | None:
    """Whether the entries can be paired, each one with an equal one of the other side; None if that is not clear.

    An entry counts as often as it is written: 1, 1, 2 are not 1, 2, 2, and not 1, 2.
    """
    missing, left = _unpaired(gold, answer)
    if len(missing) > MAX_UNORDERED:
        return None
    others: dict[int, str] = dict(enumerate(left))
    doubtful: list[dict[int, bool | None]] = []
    for part in missing:
        verdicts = {at: _equal(part, other, depth, budget) for at, other in others.items()}
        if True in verdicts.values():
            del others[next(at for at, verdict in verdicts.items() if verdict)]
        elif None in verdicts.values():
            doubtful.append(verdicts)
        else:
            return False
    # What is left must be able to pair off: an entry that differs from all that remain has no partner.
    verdicts_left = [[verdicts[at] for at in others] for verdicts in doubtful]
    if any(None not in verdicts for verdicts in [*verdicts_left, *zip(*verdicts_left, strict=True)]):
        return False
    return None if doubtful else True


def _unpaired(gold: Sequence[str], answer: Sequence[str]) -> tuple[list[str], list[str]]:
    """The entries of either side without those that the other side has in the same words."""
    missing, left = [], {at: without_spaces(part) for at, part in enumerate(answer)}
    for part in gold:
        at = next((at for at, words in left.items() if words == without_spaces(part)), None)
        if at is None:
            missing.append(part)
        else:
            del left[at]
    return missing, [answer[at] for at in left]


def _is_result(formula: str, result: str) -> bool:
    """Whether "formula = result" is right: the result is an equal formula, or a decimal that differs by rounding only.

    A decimal must not be rounded to another decimal, and nothing may be rounded to a whole number: "5.04 = 5.0" is
    wrong.
    """
    if formulas_equal(formula, result):
        return True
    value = written_number(result)
    if value is None or value.denominator == 1 or _DECIMAL.fullmatch(without_spaces(formula)):
        return False
    return "." in result and _is_rounding(formula, result)


def _is_rounding(formula: str, result: str) -> bool:
    """Whether ``result`` is the rounded formula.

    It may be off by half a unit of its last decimal place, or, if it is a whole number, of its last digit before zeros
    at the end. It is never off by more than ``ROUNDED``.
    """
    result = result.strip()
    value = written_number(result)
    if value is None or value == 0 or not _DECIMAL.fullmatch(result) or "e" in result.lower():
        return False
    _, point, places = result.partition(".")
    zeros = len(result) - len(result.rstrip("0"))
    unit = Fraction(1, 10 ** len(places)) if point else Fraction(10**zeros)
    return formulas_equal(formula, result, tolerance=min(ROUNDED, unit / 2 / abs(value))) is True


def _with_base(text: str) -> tuple[int, int] | None:
    """Value and base of a number such as ``4210_7``, or None for another text."""
    match = _WITH_BASE.fullmatch(text)
    try:
        return (int(match[1], int(match[2])), int(match[2])) if match else None
    except ValueError:  # a digit that the base does not have
        return None


def _equal_in_base(gold: str, answer: str) -> bool | None:
    """Whether two answers, of which at least one has a base, are equal; None if that is not clear.

    The other may leave out the base, for which the question asks.
    """
    left, right = _with_base(gold), _with_base(answer)
    if left and right:
        return left == right
    if left:
        return True if answer == gold.partition("_")[0] else None if number(answer) is None else False
    value = number(gold)
    return None if value is None else right is not None and value == right[0]


def _is_one_bracket(answer: str) -> bool:
    """Whether the first bracket is closed by the last character, whatever the kind of either."""
    depth = 0
    for at, character in enumerate(answer):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return at == len(answer) - 1
    return False


def _with_both_signs(parts: Iterable[str]) -> tuple[str, ...]:
    r"""Entries, where ``1 \pm x`` stands for two."""
    signs = [("",) if part.count(r"\pm") + part.count("±") != 1 else ("+", "-") for part in parts]
    return tuple(
        part.replace(r"\pm", sign).replace("±", sign) if sign else part
        for part, both in zip(parts, signs, strict=True)
        for sign in both
    )


def _is_decimal(text: str) -> bool:
    return "." in text or (_DECIMAL.fullmatch(text) is not None and "e" in text.lower())


def _last_place(text: str, value: Fraction) -> Fraction:
    """The unit of the last decimal place of a number as it is written: 1 for a whole number, 0 for a fraction."""
    written = _DECIMAL.fullmatch(text) or _POWER_OF_TEN.fullmatch(text)
    if written is None:
        return Fraction(int(value.denominator == 1))
    parts = written.groupdict()
    exponent = int(parts["exponent"] or parts.get("digit") or 0)
    return Fraction(10) ** (exponent - len((parts["mantissa"] or "").partition(".")[2]))
