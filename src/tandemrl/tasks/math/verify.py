r"""Values of answers without words: exact numbers, and formulas as math-verify reads them."""

import importlib.util
import logging
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from tandemrl.rewards.protocol import GraderError
from tandemrl.tasks.math.notation import without_thousands


class NeedsSympy(Exception):
    """Only math-verify can decide."""


def number(text: str) -> Fraction | None:
    """The exact value of a plain number, or None if the text is no such number.

    It may be decimal, scientific, repeating, with thousands separators, a fraction, a ratio or a mixed number.
    """
    if len(text) > _MAX_NUMBER_CHARS or re.search(r"\d, ?\d|\d \d", text := without_thousands(_spaced(text))):
        return None
    text = text.replace(" ", "")
    if match := _DECIMAL.fullmatch(text):
        return Fraction(match[1]) * Fraction(10) ** int(match[2] or 0)
    if match := _SCALED.fullmatch(text):
        return Fraction(match[1] or 1) * (int(match[2]) if match[2] else Fraction(10) ** int(match[3] or match[4]))
    if match := _REPEATING.fullmatch(text):
        whole, digits = match[1] + match[2], match[3]
        return (int(whole + digits) - int(whole or 0)) / Fraction(10 ** len(match[2]) * (10 ** len(digits) - 1))
    if match := _FRACTION.fullmatch(text):
        over, under = (int(part) for part in match.groups()[2:] if part is not None)
        whole, sign = int(match["whole"] or 0), -1 if match["sign"] == "-" else 1
        if under == 0 or (match["whole"] and not 0 < over < under) or (":" in text and over % under == 0):
            return None
        return sign * (whole + Fraction(over, under))
    return None


def numbers_equal(a: str, b: str) -> bool:
    """Whether two numbers are equal: exactly, or up to rounding if one of them is a decimal.

    A rounding changes a number by less than one unit of the last decimal place that is written, and by at most 1e-6.
    Less than 1e-12 is the noise of floating point.

    Examples:
        >>> numbers_equal("1/3", "0.333333"), numbers_equal("1/3", "333333/1000000"), numbers_equal("1e7", "10000001")
        (True, False, False)
    """
    x, y = number(a), number(b)
    if x is None or y is None:
        return False
    if x == y or not (_is_decimal(a) or _is_decimal(b)):
        return x == y
    size = max(abs(x), abs(y))
    limit = min(size, Fraction(1)) if 1 in (x.denominator, y.denominator) else size
    rounding = max(_last_place(a, x), _last_place(b, y), size / 10**12)
    return abs(x - y) < rounding and abs(x - y) <= limit / 10**6


def near(formula: str, result: str, tolerance: Fraction, symbolic: bool) -> bool:
    """Whether two numbers or formulas have values that differ by a relative tolerance at most.

    Raises:
        NeedsSympy: one is a formula, and math-verify is not to be used.
    """
    a, b = _value(formula, symbolic), _value(result, symbolic)
    return a is not None and b is not None and abs(a - b) <= tolerance * max(abs(a), abs(b))


def rounds_to(formula: str, result: str, symbolic: bool) -> bool:
    """Whether a number is a rounded formula: it is off by half a unit of its last digit before zeros at most."""
    result = result.strip()
    value = number(result)
    if value is None or value == 0 or not _DECIMAL.fullmatch(result) or "e" in result.lower():
        return False
    unit = Fraction(1, 10 ** len(result.partition(".")[2]))
    if "." not in result:
        unit = Fraction(10 ** (len(result) - len(result.rstrip("0"))))
    return near(formula, result, min(ROUNDED, unit / 2 / abs(value)), symbolic)


def equal_in_base(gold: str, answer: str) -> bool:
    """Whether two answers, of which one has a base, are equal. The answer may leave out that of the ground truth."""
    left, right = with_base(gold), with_base(answer)
    if left and right:
        return left == right
    if left:
        return answer == gold.partition("_")[0]
    return right is not None and number(gold) == right[0]


def with_base(text: str) -> tuple[int, int] | None:
    """Value and base of a number such as ``4210_7``, or None for another text."""
    match = re.fullmatch(r"([0-9][0-9A-Za-z]{0,99})_\{?([0-9]{1,2})\}?", text)
    try:
        return (int(match[1], int(match[2])), int(match[2])) if match else None
    except ValueError:  # a digit that the base does not have
        return None


# ---- math-verify ---------------------------------------------------------------------------------------------------


def is_readable(text: str) -> bool:
    r"""Whether math-verify reads all of a formula: it skips what it does not know, so ``7&42`` and ``42'`` would be 42.

    It reads f(0) as a product, 2\frac{5}{3} as a sum, and an equation without a variable as its right side. Towers of
    powers such as 9^{9^9} would take for ever.
    """
    plain = _LETTERS.sub("x", _MATRIX.sub("x", text))
    return (
        _READ.fullmatch(plain) is not None
        and _UNFINISHED.search(plain) is None
        and _APPLIED.search(plain) is None
        and all(int(over) < int(under) for over, under in _MIXED.findall(plain))
        and plain.count("|") % 2 == 0
        and _is_balanced(plain)
        and not ("=" in plain and _VARIABLE.search(plain) is None)
    )


def relations(text: str) -> set[str]:
    """The relations in a text, but for those in limits such as that of a sum."""
    return set(_RELATION.findall(re.sub(r"[_^] ?\{[^{}]*\}", "", text)))


def verified(gold: str, answer: str) -> bool:
    """Whether math-verify finds two readable formulas equal. Time and memory are not bounded: see `scoring.Scorer`.

    Raises:
        GraderError: math-verify is not installed.
    """
    from sympy import Expr, Float, expand

    left, right = _parsed(gold), _parsed(answer)
    if all(side and isinstance(side[0], Expr) for side in (left, right)):
        a, b = left[0], right[0]
        distance, rounded = _distance(a, b), a.has(Float) or b.has(Float)
        if distance is not None and (distance > DECIMALS or (rounded and a.is_number)):
            return distance <= DECIMALS
        difference = expand(a - b)
        if difference == 0 or (
            a.is_number and b.is_number and difference.equals(0) is False
        ):  # it rounds to 6 decimals
            return bool(difference == 0)
    return bool(_math_verify().verify(list(left), list(right), timeout_seconds=None))


def _distance(a: Any, b: Any) -> float | None:
    """How far two expressions are from each other at a point, relatively; None if one of them has no value there."""
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {symbol: 0.71 + 0.63 * i for i, symbol in enumerate(symbols)}
    try:
        x, y = (complex(side.evalf(15, subs=point)) for side in (a, b))
        return abs(x - y) / max(abs(x), abs(y), 1e-9)
    except (TypeError, ValueError, OverflowError, ArithmeticError):
        return None


def require_math_verify() -> None:
    """Check that math-verify is installed.

    Raises:
        GraderError: math-verify, or a package that it needs, is not installed.
    """
    for module in ("math_verify", "latex2sympy2_extended", "sympy"):
        if importlib.util.find_spec(module) is None:
            raise GraderError(f"grading needs {module}, which is not installed: pip install 'math-verify>=0.9'")


@lru_cache(256)
def _parsed(formula: str) -> Sequence[Any]:
    """The LaTeX of a formula as sympy objects. math-verify's other reader, for plain arithmetic, would `eval`.

    Its own timers are off, since they use SIGALRM, which only works in a main thread and cannot interrupt a long C
    call.
    """
    from sympy import Basic, I

    library = _math_verify()
    for pattern, plain in _FOR_MATH_VERIFY:
        formula = pattern.sub(plain, formula)
    config = library.LatexExtractionConfig(boxed_match_priority=0)
    parsed = library.parse(
        f"${formula}$",
        extraction_config=[config],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return tuple(each.subs(dict.fromkeys(_units(each), I)) if isinstance(each, Basic) else each for each in parsed)


def _units(expression: Any) -> list[Any]:
    """The symbols of an expression that are the imaginary unit."""
    return [symbol for symbol in expression.free_symbols if str(symbol) == "i"]


def _value(formula: str, symbolic: bool) -> Fraction | None:
    """The value of a number or a formula; None if it has none."""
    if (value := number(formula)) is not None or not is_readable(formula):
        return value
    if not symbolic:
        raise NeedsSympy
    parsed = _parsed(formula)
    try:
        return Fraction(float(parsed[0].evalf(20))) if parsed else None
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None


@cache
def _math_verify() -> Any:
    require_math_verify()
    import math_verify

    # It warns once that its timers are off, which is intended here.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def _is_balanced(text: str) -> bool:
    """Whether every bracket is closed; ``]`` and ``)`` close either bracket, as in intervals."""
    opened: list[str] = []
    for character in text:
        if character in "([{":
            opened.append("{" if character == "{" else "(")
        elif character in ")]}" and (not opened or opened.pop() != ("{" if character == "}" else "(")):
            return False
    return not opened


def _spaced(text: str) -> str:
    """A text without the spaces between thousands, as in "1 234"."""
    return _SPACED_THOUSANDS.sub(lambda number: number[0].replace(" ", ""), text)


def _is_decimal(text: str) -> bool:
    return re.search(r"\d?\.\d|\d[eE]", text) is not None


def _last_place(text: str, value: Fraction) -> Fraction:
    """The unit of the last decimal place of a number as it is written: 1 for a whole number, 0 for a fraction."""
    text = without_thousands(text).replace(" ", "")
    if written := _DECIMAL.fullmatch(text):
        return Fraction(10) ** (int(written[2] or 0) - len(written[1].partition(".")[2]))
    if written := _SCALED.fullmatch(text):
        exponent = len(written[2]) - 1 if written[2] else int(written[3] or written[4])
        return Fraction(10) ** (exponent - len((written[1] or "").partition(".")[2]))
    return Fraction(int(value.denominator == 1))


DECIMALS = 1e-6
"""How far apart two decimals may be, relatively."""
ROUNDED = Fraction(1, 100)
"""How far a number may be from its rounding, relatively."""
_MAX_NUMBER_CHARS = 100
_DIGITS = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_DECIMAL = re.compile(rf"({_DIGITS})(?:[eE]([-+]?\d{{1,3}}))?", re.ASCII)
_SCALED = re.compile(
    rf"(?:({_DIGITS})(?:\\times|\\cdot|\*))?(?:(1(?:0+|2))|10\^(?:\{{([-+]?\d{{1,3}})\}}|(\d)))", re.ASCII
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_FRACTION = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>\d*)(?:\\frac\{(-?\d+)\}\{(-?\d+)\}|(?<!\d)(\d+)(?:/|\\div)(\d+)|(?<!\d)(\d+):(?!\d\d$)(\d+))",
    re.ASCII,
)
"""A fraction or a ratio; 2:40 may be a time of day, which is not 1:20, and 4:1 is compared as it is written."""
_SPACED_THOUSANDS = re.compile(r"(?<![\w.,^}])(?<![0-9] )[1-9][0-9]{0,2}(?: [0-9]{3})+(?! ?[0-9])")

GREEK = re.findall(
    "[A-Za-z]+",
    """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega
    Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega
    """,
)
_MACROS = re.findall(
    "[A-Za-z]+",
    """
    frac binom sqrt pi infty cdot times div pm mp exp ln log lg lim min max gcd lcm sum prod int iint iiint oint cup
    cap setminus in to mathbb emptyset lfloor rfloor lceil rceil lvert rvert vert overline equiv ne notin subset
    subseteq limits sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh partial prime circ le ge
    """,
)
_NAMES = "|".join(sorted([*_MACROS, *GREEK], key=len, reverse=True))
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|max|min|det|lim"
_READ = re.compile(
    rf"(?:\s|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\\(?:{_NAMES})(?![A-Za-z])|\\[{{}}|]"
    rf"|(?<![A-Za-z])(?:{_FUNCTIONS}|[A-Za-z]{{1,3}})(?![A-Za-z])|[-+*/^_(){{}}\[\]<>=,;|!])*+"
)
_MATRIX = re.compile(r"\\begin ?\{([bpvBV]?matrix|array)\}.*?\\end ?\{\1\}")
_LETTERS = re.compile(r"\\math(?:bf|rm|cal) ?\{ ?[A-Za-z] ?\}")
_UNFINISHED = re.compile(
    r"(?:[-+*/^_=<>]|\\(?:cdot|times|div|pm|mp|frac|sqrt|binom|le|ge|in|cup|cap|to)) *(?:$|[)\]}])"
    r"|[0-9]_|\{ *\}|[0-9] *\{ *[0-9]|\( *\)|[,;] *(?:$|[)\]}])|(?:^|[(\[{]) *[,;*/^_]"
    r"|\\(?:frac|binom)(?! *\{)|\\(?:frac|binom) *\{[^{}]*\}(?! *\{)|(?<![_0-9])[0-9]+ [0-9]"
    r"|[0-9] ?\^ ?\{? ?[0-9]+ ?\^|[0-9]{5,} ?!|! *!|(?:(?<![_0-9])[0-9]+|\)) ?\^ ?\{? ?[0-9]{5,}"
    r"|\\sqrt *(?:\[[^\]]*\])? *[0-9] *[0-9]|(?<![_^]) *\{[^{}]*\} *[0-9]|(?<![A-Za-z0-9\\])[A-Za-z][0-9]"
)
_MIXED = re.compile(r"[0-9] *\\frac *\{ *([0-9]{1,50}) *\} *\{ *([0-9]{1,50}) *\}")
LETTER = rf"(?:[A-Za-z]|\\(?:{'|'.join(sorted(GREEK, key=len, reverse=True))})(?![A-Za-z]) ?)"
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
