r"""Whether two mathematical answers in LaTeX are equal, as far as that can be told fast and in bounded time. No torch.

`quick_equal` compares normalised strings, numbers, lists, sets, intervals and matrices entry by entry, and formulas by
their values (`expression`). Where it says None, a computer algebra system may know more: `math.equivalent`.
"""

import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

from tandemrl.rollout.envs import expression

MAX_CHARS = 2000
"""A longer answer is wrong unless it equals the ground truth as a string; it is not normalised and never parsed."""
MAX_NESTING = 6
"""Lists in lists deeper than this, and unordered ones of more than `MAX_UNORDERED` entries, are not compared here."""
MAX_UNORDERED = 20
ROUNDED = Fraction(1, 100)
"""How far a number may be from its rounding, relatively."""


def quick_equal(gold: str, answer: str) -> bool | None:
    """Whether two answers are equal; None where strings, numbers and values do not tell.

    Whole numbers (also written "142.0") are equal exactly, other decimals within 1e-6 (`expression.near`). "2.55e-10"
    is a number. "50%" is 50 and also 0.5. Words, and letters of a multiple choice, are compared without regard to case.
    Units are dropped where one side has none; known units that differ make answers different. A label such as "x ="
    counts where both sides have one.
    """
    if max(len(gold), len(answer)) > MAX_CHARS:
        return gold.strip() == answer.strip()
    return _equal(clean(gold), clean(answer), MAX_NESTING)


def formulas_equal(a: str, b: str, *, tolerance: Fraction | None = None) -> bool | None:
    """Whether two answers without units are equal as numbers or as formulas; None if that is not clear.

    Args:
        tolerance: relative difference allowed; None = as in `expression.same`.
    """
    plain = without_spaces(a), without_spaces(b)
    if any(map(_WITH_BASE.fullmatch, plain)):
        return _equal_in_base(*plain)
    x, y = map(number, plain)
    if x is not None and y is not None:
        return expression.near(x, y, tolerance)
    left, right = expression.read(a), expression.read(b)
    return None if left is None or right is None else expression.same(left, right, tolerance=tolerance)


def number(text: str) -> Fraction | None:
    """The exact value of a plain number without spaces: decimal, scientific, with thousands, or a fraction."""
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if found := _DECIMAL.fullmatch(text):
        return Fraction(found["mantissa"]) * Fraction(10) ** int(found["exponent"] or 0)
    if found := _POWER_OF_TEN.fullmatch(text):
        return Fraction(found["mantissa"] or 1) * Fraction(10) ** int(found["exponent"] or found["digit"])
    if found := _FRACTION.fullmatch(text):
        numerator, denominator = (int(part) for part in found.groups()[1:] if part is not None)
        if denominator != 0:
            return Fraction(numerator, denominator) * (-1 if found["sign"] == "-" else 1)
    return None


# ---- normal forms --------------------------------------------------------------------------------------------------


def clean(answer: str) -> str:
    r"""Markup that changes nothing is removed, ``\frac12`` and "7 3/4" are written out; single spaces stay."""
    for old, new in _REWRITES:
        answer = answer.replace(old, new)
    answer = re.sub(r"(?<!\\)\\!", "", answer)
    answer = re.sub(r"(?<!\\)\\[ ,;:]|\s+", " ", answer)
    answer = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", answer)
    answer = re.sub(r"\\(?:mathrm|text)\{([ie])\}", r"\1", answer)
    answer = re.sub(r" ?\\(?:text|mathrm)\{ ?percent\}| ?\bpercent\b", "%", answer)
    answer = re.sub(r"\\frac\s*(\d|\\pi(?![A-Za-z]))", r"\\frac{\1}", answer)
    answer = re.sub(r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}", answer)
    answer = re.sub(r"(?<![\d./])(\d+) +(\d+) ?/ ?(\d+)(?![\d/])", r"\1\\frac{\2}{\3}", answer).strip()
    return re.sub(r"^\\\((.*)\\\)$", r"\1", answer).strip()


def normalise(answer: str) -> str:
    """An answer without spaces, units, markup and shorthand, for comparison as a string.

    The steps are those of Hendrycks et al. (`math.normalise_math`), but labels such as "x =" stay, and digits with a
    space between them are kept apart: "7 3/4" is not 73/4.
    """
    return without_spaces(bare(clean(answer)))


def bare(answer: str) -> str:
    """A cleaned answer without units, degrees and percent signs."""
    for unwanted in (r"\%", "%", *(() if _ANGLE_FUNCTION.search(answer) else _DEGREES)):
        answer = answer.replace(unwanted, "")
    answer = _UNIT.sub("", answer.strip()).strip()
    answer = re.sub(r"^\\(?:text|mathrm|textrm|textbf|mathbf|mbox)\{([^{}]*)\}$", r"\1", answer)
    return re.sub(r"(?<=\d) (?=\d{3}(?!\d))", "", answer).rstrip(". ")


def without_spaces(answer: str) -> str:
    """Without spaces but those between digits, which become "␣"; ".5" and ``\\sqrt3`` written out."""
    answer = re.sub(r"(?<=\d) (?=\d)", "␣", answer).replace(" ", "")
    answer = re.sub(r"(?<!\d)\.(?=\d)", "0.", answer)
    return re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", answer)


def drop_label(gold: str, answer: str) -> tuple[str, str]:
    """The right-hand sides where one side only is an equation such as "x = 5" or "p(s) = s^2", or both begin alike."""
    if "=" not in gold + answer:
        return gold, answer
    left, right = _LABEL.fullmatch(gold), _LABEL.fullmatch(answer)
    if left and right and without_spaces(left["label"]) == without_spaces(right["label"]):
        return left["value"].strip(), right["value"].strip()
    if left and "=" not in answer:
        return left["value"].strip(), answer
    if right and "=" not in gold:
        return gold, right["value"].strip()
    return gold, answer


def contradicts(answer: str) -> bool:
    """Whether an answer equates different numbers, as in "6 = 5"; what is rounded may be 1 % off the first of them."""
    sides = [bare(side) for side in re.split(r"=|\\approx|\\equiv", answer)]
    values = [side for side in sides if (formula := expression.read(side)) is not None and not formula.variables]
    return any(formulas_equal(values[0], value, tolerance=ROUNDED) is False for value in values[1:])


def says_more(gold: str, answer: str) -> bool:
    """Whether an answer has a number in a text, or two without a sign between them, and the gold answer has not.

    math-verify reads "5 6" and ``5\\text{ or 6}`` as 5.
    """
    return _ANOTHER_NUMBER.search(answer) is not None and _ANOTHER_NUMBER.search(gold) is None


class Shape(NamedTuple):
    """A cleaned answer taken apart.

    ``kind``: "value", "list", "set" and "union" (in any order), brackets such as "[)", "matrix 2,2" with the length of
    each row, or "order <≤" for sides that grow from left to right.
    """

    kind: str
    parts: tuple[str, ...]

    @classmethod
    def of(cls, answer: str) -> "Shape":
        answer = answer.strip(" .")
        if matrix := _MATRIX.fullmatch(answer):
            return cls.matrix([row.split("&") for row in matrix["body"].strip().removesuffix(r"\\").split(r"\\")])
        if len(sides := _ORDER.split(answer)) > 1:
            return cls.order(sides[::2], sides[1::2])
        if r"\cup" in answer and len(parts := _split(answer.replace(r"\cup", ";"), ";")) > 1:
            return cls("union", parts)
        if inside := re.fullmatch(r"\\\{(.*)\\\}", answer):
            return cls("set", _split(inside[1]))
        if answer[:1] in ("(", "[") and answer[-1:] in (")", "]") and _is_one_bracket(answer):
            parts = _split(answer[1:-1])
            if len(parts) > 1:
                return cls(answer[0] + answer[-1], parts)
        if _THOUSANDS.fullmatch(answer.replace(" ", "")):
            return cls("value", (answer,))
        parts = tuple(each for part in _split(_AND.sub(",", answer)) for each in _both_signs(part))
        return cls("list" if len(parts) > 1 else "value", parts)

    @classmethod
    def matrix(cls, rows: Sequence[Sequence[str]]) -> "Shape":
        sizes = ",".join(str(len(row)) for row in rows)
        return cls(f"matrix {sizes}", tuple(entry.strip() for row in rows for entry in row))

    @classmethod
    def order(cls, sides: Sequence[str], signs: Sequence[str]) -> "Shape":
        """``3 > x`` is ``x < 3``."""
        if all(sign in _FALLING for sign in signs):
            sides, signs = sides[::-1], [_FALLING[sign] for sign in reversed(signs)]
        signs = [_RISING.get(sign, sign) for sign in signs]
        return cls(f"order {''.join(signs)}", tuple(side.strip() for side in sides))

    def as_interval(self) -> "Shape":
        """``x > 3`` as ``(3, infinity)`` and ``1 < x ≤ 3`` as ``(1, 3]``, for a single letter x."""
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
        """Whether they are intervals or tuples in different brackets, or matrices of different shapes."""
        kinds = {self.kind, other.kind}
        return len(kinds) == 2 and (kinds <= BRACKETS or all(kind.startswith("matrix") for kind in kinds))


BRACKETS = {"()", "[]", "[)", "(]"}


def all_true(verdicts: Iterable[bool | None]) -> bool | None:
    """False if one is, else None if one is, else True."""
    found = set(verdicts)
    return False if False in found else None if None in found else True


def any_true(verdicts: Iterable[bool | None]) -> bool | None:
    """True if one is, else None if one is, else False; stops at the first True."""
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
_FRACTION = re.compile(r"(?P<sign>[-+]?)(?:\\frac\{(-?\d+)\}\{(-?\d+)\}|(\d+)/(\d+))", re.ASCII)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_WITH_BASE = re.compile(r"([0-9][0-9A-Za-z]{0,99})_\{?([0-9]{1,2})\}?")

_DEGREES = (r"^\circ", r"^{\circ}", "°")
_ANGLE_FUNCTION = re.compile(r"sin|cos|tan|cot|sec|csc")
_WORD = re.compile(r"[A-Za-z]{4,}|(?i:yes|no|odd)|[A-Za-z]|\([A-Za-z]\)")
_NAME = re.compile(r"(?:\\text ?\{[^{}]*\}|\\?[A-Za-z]+)(?:_\{?\w+\}?)?'* ?(?:\([^()=]*\))?")
_LABEL = re.compile(rf"(?P<label>{_NAME.pattern}) ?= ?(?P<value>[^=<>]+)")
_RISING = {"<": "<", r"\lt": "<", "≤": "≤", r"\le": "≤", r"\leq": "≤", r"\leqslant": "≤"}
_FALLING = {">": "<", r"\gt": "<", "≥": "≤", r"\ge": "≤", r"\geq": "≤", r"\geqslant": "≤"}
_ORDER = re.compile(r"([<>≤≥]|\\(?:l|g)(?:t|e|eq|eqslant)(?![A-Za-z]))")
_AND = re.compile(r",? ?\\text ?\{ ?,? ?(?:and|or) ?\}|,? \b(?:and|or)\b(?= )")
_MATRIX = re.compile(r"\\begin\{(?P<kind>[bpvBV]?matrix|array)\}(?:\{[lcr|]*\})?(?P<body>.*)\\end\{(?P=kind)\}")
_REWRITES = (
    (r"\$", ""),
    ("$", ""),
    ("~", " "),
    ("{,}", ","),
    ("{:}", ":"),
    ("\N{MINUS SIGN}", "-"),
    ("≈", r"\approx "),
    ("≡", r"\equiv "),
    (r"\displaystyle", ""),
    (r"\tfrac", r"\frac"),
    (r"\dfrac", r"\frac"),
    (r"\cfrac", r"\frac"),
)

_UNIT_NAMES = (
    "cm centimeter centimeters centimetre centimetres",
    "mm millimeter millimeters millimetre millimetres",
    "km kilometer kilometers kilometre kilometres",
    "meter meters metre metres",
    "foot feet ft",
    "inch inches",
    "mile miles",
    "yard yards",
    "second seconds sec secs",
    "minute minutes min mins",
    "hour hours hr hrs",
    "day days",
    "week weeks",
    "month months",
    "year years",
    "kg kilogram kilograms",
    "gram grams",
    "mg milligram milligrams",
    "pound pounds lb lbs",
    "ounce ounces oz",
    "liter liters litre litres",
    "ml milliliter milliliters",
    "dollar dollars",
    "cent cents",
    "degree degrees",
    "radian radians",
    "mph",
    "unit units square sq cubic cu per",
)
_UNITS = {name: names.split()[0] for names in _UNIT_NAMES for name in names.split()}
_PLAIN_UNIT = "|".join(sorted(_UNITS, key=len, reverse=True))
_UNITS |= {"m": "meter", "s": "second", "g": "gram", "h": "hour", "l": "liter"}
_UNIT = re.compile(
    rf"(?<=[\w}}).\]°]) ?(?:"
    r"\\(?:text|mathrm|textrm|mbox|textit|rm) ?\{[^{}\d]*\}(?: ?\^ ?\{?\d\}?|[²³])?"
    rf"|(?:(?<![A-Za-z])(?:{_PLAIN_UNIT})(?: ?\^ ?\{{?\d\}}?|[²³])?(?: ?/ ?| |$))+)$",
    re.IGNORECASE,
)
"""A unit at the end of an answer: any text macro without digits, or known names (``m`` and ``s`` in a macro only)."""
_ANOTHER_NUMBER = re.compile(r"\\(?:text|mathrm|textrm|mbox|textit|rm) ?\{[^{}]*\d[^{}]*\}|\d (?!\d{3}(?!\d))\d")


def _equal(gold: str, answer: str, depth: int) -> bool | None:
    if contradicts(answer):
        return False
    if r"\approx" in answer and r"\approx" not in gold:
        return any_true(_equal(gold, side, depth) for side in _exact_and_rounded(answer))
    gold, answer = drop_label(gold, answer)
    if _units_differ(gold, answer):
        return False
    sides = bare(gold), bare(answer)
    a, b = map(without_spaces, sides)
    if a == b:
        return True if a else None
    words = a.strip("()").lower(), b.strip("()").lower()
    if all(map(str.isalpha, words)) and (_WORD.fullmatch(a) or _WORD.fullmatch(b)):
        return words[0] == words[1]
    if ("%" in gold) != ("%" in answer):
        percent, plain = sides if "%" in gold else sides[::-1]
        return any_true(formulas_equal(plain, each) for each in (percent, f"({percent})/100"))
    left, right = Shape.of(gold), Shape.of(answer)
    doubt = False if says_more(gold, answer) else None
    if left.kind == right.kind == "value":
        verdict = formulas_equal(*sides)
        return doubt if verdict is None else verdict
    if left.kind in BRACKETS or right.kind in BRACKETS:
        left, right = left.as_interval(), right.as_interval()
    if left.clashes(right):
        return False
    if left.kind != right.kind or depth == 0:
        return doubt
    if left.kind in ("list", "set", "union"):
        return _equal_in_any_order(left.parts, right.parts, depth - 1)
    if len(left.parts) != len(right.parts):
        return False
    verdict = all_true(_equal(x, y, depth - 1) for x, y in zip(left.parts, right.parts, strict=True))
    return verdict or (None if left.kind.startswith("order") else verdict)  # 2x < 6 is x < 3


def _exact_and_rounded(answer: str) -> list[str]:
    r"""The sides of ``a \approx b`` that count: both where b is a rounded, else b after a name, else a alone.

    Several guesses are not an answer: what stands between the first and the last side never counts, and a whole number
    is no rounding of another one.
    """
    first, *_, last = (side.strip() for side in answer.split(r"\approx"))
    exact, rounded = bare(first.rpartition("=")[2]), bare(last)
    values = [number(without_spaces(side)) for side in (exact, rounded)]
    whole = all(value is not None and value.denominator == 1 for value in values)
    if not whole and formulas_equal(exact, rounded, tolerance=ROUNDED):
        return [first, last]
    return [last if not first or _NAME.fullmatch(first) else first]


def _equal_in_any_order(gold: Sequence[str], answer: Sequence[str], depth: int) -> bool | None:
    left, doubt = list(answer), False
    if len(gold) != len(answer) or len(gold) > MAX_UNORDERED:
        return None
    for part in gold:
        verdicts = [_equal(part, other, depth) for other in left]
        if True in verdicts:
            left.pop(verdicts.index(True))
        elif None in verdicts:
            doubt = True
        else:
            return False
    return None if doubt else True


def _units_differ(gold: str, answer: str) -> bool:
    """Whether both sides end in known units, and in different ones: cm and meters, but not cm and centimeters."""
    left, right = _units(gold), _units(answer)
    return bool(left and right) and left != right


def _units(answer: str) -> set[str]:
    found = _UNIT.search(answer.strip(" ."))
    if found is None:
        return set()
    words = re.findall(r"[a-z]+", re.sub(r"\\[a-z]+", "", found.group().lower()).replace("mph", "miles hour"))
    return {_UNITS[word] for word in words} - {"unit"} if all(word in _UNITS for word in words) else set()


def _with_base(text: str) -> tuple[int, int] | None:
    """Value and base of a number such as ``4210_7``."""
    found = _WITH_BASE.fullmatch(text)
    try:
        return (int(found[1], int(found[2])), int(found[2])) if found else None
    except ValueError:  # a digit that the base does not have
        return None


def _equal_in_base(gold: str, answer: str) -> bool | None:
    """An answer may leave out the base, which the question asks for."""
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


def _split(answer: str, separators: str = ",;") -> tuple[str, ...]:
    """The parts between separators outside brackets; ``]`` and ``)`` close either bracket, as in intervals."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(answer):
        depth += (character in "([{") - (character in ")]}")
        if character in separators and depth == 0:
            parts.append(answer[start:at])
            start = at + 1
    return tuple(part.strip() for part in [*parts, answer[start:]])


def _both_signs(part: str) -> tuple[str, ...]:
    r"""``1 \pm x`` is two answers."""
    if part.count(r"\pm") + part.count("±") != 1:
        return (part,)
    return tuple(part.replace(r"\pm", sign).replace("±", sign) for sign in "+-")
