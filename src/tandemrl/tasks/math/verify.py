r"""Values of answers without words: exact numbers, and formulas as math-verify reads them."""

import logging
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from tandemrl.tasks.math.notation import without_thousands

logging.getLogger("math_verify").setLevel(logging.ERROR)
"""It warns that its timers are off, which is intended: they use SIGALRM, which only works in a main thread and cannot
interrupt a long C call."""


class NeedsSympy(Exception):
    """Only math-verify can decide."""


class Number(NamedTuple):
    """An exact value. place: the unit of the last decimal place that is written; None without point and exponent."""

    value: Fraction
    place: Fraction | None = None


def number(text: str) -> Number | None:
    """A plain number, or None if the text is no such number.

    It may be decimal, scientific, repeating, with thousands separators, a product of such, a fraction, a ratio or a
    mixed number.
    """
    text = without_thousands(_SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text))
    if len(text) > _MAX_NUMBER_CHARS or re.search(r"\d, ?\d|\d \d", text):
        return None
    text = _POWER.sub(r"1e\1\2", text.replace(" ", ""))
    factors = [_DECIMAL.fullmatch(factor) for factor in re.split(r"\\times|\\cdot|\*", text)]
    if found := [factor for factor in factors if factor is not None]:
        if len(found) < len(factors):
            return None
        scale = math.prod((Fraction(10) ** int(factor[2] or 0) for factor in found), start=Fraction(1))
        value = math.prod((Fraction(factor[1]) for factor in found), start=scale)
        decimals = sum(len(factor[1].partition(".")[2]) for factor in found)
        return Number(value, scale / 10**decimals if re.search("[.eE]", text) else None)
    if match := _REPEATING.fullmatch(text):
        whole, digits = match[1] + match[2], match[3]
        return Number((int(whole + digits) - int(whole or 0)) / Fraction(10 ** len(match[2]) * (10 ** len(digits) - 1)))
    if match := _FRACTION.fullmatch(text):
        over, under = (int(part) for part in match.groups()[2:] if part is not None)
        if under == 0 or (match["whole"] and not 0 < over < under) or (":" in text and over % under == 0):
            return None
        return Number((-1 if match["sign"] == "-" else 1) * (int(match["whole"] or 0) + Fraction(over, under)))
    return None


def numbers_equal(a: Number, b: Number) -> bool:
    """Whether two numbers are equal: exactly, or up to rounding if one of them is a decimal.

    A rounding changes a number by less than one unit of the last decimal place that is written, and by at most 1e-6.
    Less than 1e-12 is the noise of floating point.
    """
    (x, _), (y, _) = a, b
    places = [each.place for each in (a, b) if each.place is not None]
    if x == y or not places:
        return x == y
    size = max(abs(x), abs(y))
    limit = min(size, Fraction(1)) if 1 in (x.denominator, y.denominator) else size
    return abs(x - y) < max(*places, size / 10**12) and abs(x - y) <= limit / 10**6


def rounded(formula: str, result: str, symbolic: bool) -> bool | None:
    """Whether a number is a formula, rounded to its last digit before zeros; None if it is not even near (`ROUNDED`).

    Raises:
        NeedsSympy: the formula is no number, and math-verify is not to be used.
    """
    if (b := number(result)) is None or b.value == 0 or (a := _value(formula, symbolic)) is None:
        return None
    digits = result.strip()
    zeros = 0 if "." in digits else len(digits) - len(digits.rstrip("0"))
    distance = abs(a - b.value)
    if distance > ROUNDED * max(abs(a), abs(b.value)):
        return None
    return distance <= (b.place or Fraction(10) ** zeros) / 2


# ---- math-verify ---------------------------------------------------------------------------------------------------


def is_readable(text: str) -> bool:
    r"""Whether math-verify reads all of a formula: it skips what it does not know, so ``7&42`` and ``42'`` would be 42.

    It reads f(0) as a product, 2\frac{5}{3} as a sum, and an equation without a variable as its right side. Towers of
    powers such as 9^{9^9} would take for ever.
    """
    plain = _MATRIX.sub("x", text)
    return (
        _READ.fullmatch(plain) is not None
        and _UNFINISHED.search(plain) is None
        and _APPLIED.search(plain) is None
        and all(int(over) < int(under) for over, under in _MIXED.findall(plain))
        and plain.count("|") % 2 == 0
        and is_balanced(plain)
        and not ("=" in plain and _VARIABLE.search(plain) is None)
    )


def relations(text: str) -> set[str]:
    """The relations in a text, but for those in limits such as that of a sum."""
    return set(_RELATION.findall(re.sub(r"[_^] ?\{[^{}]*\}", "", text)))


def verified(gold: str, answer: str) -> bool:
    """Whether math-verify finds two readable formulas equal. Time and memory are not bounded: see `scoring.Scorer`."""
    import math_verify
    from sympy import Expr, Float, expand

    left, right = _parsed(gold), _parsed(answer)
    if all(side and isinstance(side[0], Expr) for side in (left, right)):
        a, b = left[0], right[0]
        distance, decimal = _distance(a, b), a.has(Float) or b.has(Float)
        if distance is not None and (distance > DECIMALS or (decimal and a.is_number)):
            return distance <= DECIMALS
        difference = expand(a - b)  # math-verify rounds to 6 decimals
        if difference == 0 or (a.is_number and b.is_number and difference.equals(0) is False):
            return bool(difference == 0)
    return bool(math_verify.verify(list(left), list(right), timeout_seconds=None, allow_set_relation_comp=True))


def _distance(a: Any, b: Any) -> float | None:
    """How far two expressions are from each other at a point, relatively; None if one of them has no value there."""
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {symbol: 0.71 + 0.63 * i for i, symbol in enumerate(symbols)}
    try:
        x, y = (complex(side.evalf(15, subs=point)) for side in (a, b))
        return abs(x - y) / max(abs(x), abs(y), 1e-9)
    except (TypeError, ValueError, OverflowError, ArithmeticError):
        return None


@lru_cache(256)
def _parsed(formula: str) -> Sequence[Any]:
    """The LaTeX of a formula as sympy objects. math-verify's other reader, for plain arithmetic, would `eval`."""
    import math_verify
    from sympy import Basic, I

    for pattern, plain in _FOR_MATH_VERIFY:
        formula = pattern.sub(plain, formula)
    parsed = math_verify.parse(
        f"${formula}$",
        extraction_config=[math_verify.LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return tuple(
        each.subs({symbol: I for symbol in each.free_symbols if str(symbol) == "i"})
        if isinstance(each, Basic)
        else each
        for each in parsed
    )


def _value(formula: str, symbolic: bool) -> Fraction | None:
    """The value of a number or a formula; None if it has none."""
    if (plain := number(formula)) is not None:
        return plain.value
    if not is_readable(formula):
        return None
    if not symbolic:
        raise NeedsSympy
    parsed = _parsed(formula)
    try:
        return Fraction(float(parsed[0].evalf(20))) if parsed else None
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None


def is_balanced(text: str) -> bool:
    """Whether every bracket is closed; ``]`` and ``)`` close either bracket, as in intervals."""
    opened: list[str] = []
    for character in text:
        if character in "([{":
            opened.append("{" if character == "{" else "(")
        elif character in ")]}" and (not opened or opened.pop() != ("{" if character == "}" else "(")):
            return False
    return not opened


ROUNDED = Fraction(1, 100)
"""How far a number may be from its rounding, relatively."""
DECIMALS = 1e-6
"""How far apart two decimals may be, relatively."""
_MAX_NUMBER_CHARS = 100
_DECIMAL = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))(?:[eE]([-+]?\d{1,3}))?", re.ASCII)
_POWER = re.compile(r"(?<![\d.])10\^(?:\{([-+]?\d{1,3})\}|(\d)(?!\d))", re.ASCII)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_FRACTION = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>\d*)(?:\\frac\{(-?\d+)\}\{(-?\d+)\}|(?<!\d)(\d+)(?:/|\\div)(\d+)|(?<!\d)(\d+):(?!\d\d$)(\d+))",
    re.ASCII,
)
"""A fraction or a ratio; 2:40 may be a time of day, which is not 1:20, and 4:1 is compared as it is written."""
_SPACED_THOUSANDS = re.compile(r"(?<![\w.,^}])(?<![0-9] )[1-9][0-9]{0,2}(?: [0-9]{3})+(?! ?[0-9])")

_GREEK = """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega
    Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega
"""
_MACROS = """
    frac binom sqrt pi infty cdot times div pm mp exp ln log lg lim min max gcd lcm sum prod int iint iiint oint cup
    cap setminus in to mathbb emptyset lfloor rfloor lceil rceil lvert rvert vert overline equiv ne notin subset
    subseteq limits sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh partial prime circ le ge
"""
_NAMES = "|".join(sorted((_MACROS + _GREEK).split(), key=len, reverse=True))
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|max|min|det|lim"
_READ = re.compile(
    rf"(?:\s|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\\(?:{_NAMES})(?![A-Za-z])|\\[{{}}|]"
    rf"|(?<![A-Za-z])(?:{_FUNCTIONS}|[A-Za-z]{{1,3}})(?![A-Za-z])|[-+*/^_(){{}}\[\]<>=,;|!])*+"
)
_MATRIX = re.compile(r"\\begin ?\{([bpvBV]?matrix|array)\}.*?\\end ?\{\1\}")
_UNFINISHED = re.compile(
    r"(?:[-+*/^_=<>]|\\(?:cdot|times|div|pm|mp|frac|sqrt|binom|le|ge|in|cup|cap|to)) *(?:$|[)\]}])"
    r"|[0-9]_|\{ *\}|[0-9] *\{ *[0-9]|\( *\)|[,;] *(?:$|[)\]}])|(?:^|[(\[{]) *[,;*/^_]"
    r"|\\(?:frac|binom)(?! *\{)|\\(?:frac|binom) *\{[^{}]*\}(?! *\{)|(?<![_0-9])[0-9]+ [0-9]"
    r"|[0-9] ?\^ ?\{? ?[0-9]+ ?\^|[0-9]{5,} ?!|! *!|(?:(?<![_0-9])[0-9]+|\)) ?\^ ?\{? ?[0-9]{5,}"
    r"|\\sqrt *(?:\[[^\]]*\])? *[0-9] *[0-9]|(?<![_^]) *\{[^{}]*\} *[0-9]|(?<![A-Za-z0-9\\])[A-Za-z][0-9]"
)
_MIXED = re.compile(r"[0-9] *\\frac *\{ *([0-9]{1,50}) *\} *\{ *([0-9]{1,50}) *\}")
LETTER = rf"(?:[A-Za-z]|\\(?:{'|'.join(sorted(_GREEK.split(), key=len, reverse=True))})(?![A-Za-z]) ?)"
_VARIABLE = re.compile(rf"(?<![A-Za-z\\]){LETTER}")
_APPLIED = re.compile(rf"(?<![A-Za-z\\]){LETTER}(?:_(?:\w|\{{\w+\}}))?(?:\^\{{?[-\w]+\}}?)? ?\( ?-?[^()+-]*\)")
_RELATION = re.compile(r"[<>=]|\\(?:le|ge|in|to|ne|notin|equiv|approx|pmod|bmod|mod)(?![A-Za-z])")
_FOR_MATH_VERIFY = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.])", r"\1 \\times 10^{\2}"),
        (r"(\d+(?:\.\d+)?) ?\^\\circ ?", r"(\\frac{\1\\pi}{180})"),
        (r"\\sqrt\[([3579])\]\{-", r"-\\sqrt[\1]{"),
    )
]
"""What math-verify reads as something else: numbers such as 2e-10, degrees, and odd roots of negative numbers."""
