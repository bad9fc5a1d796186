r"""Values of answers without words: exact numbers, and formulas as math-verify reads them."""

import logging
import math
import re
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
    """An exact value. place: the unit of the last decimal place that is written; 0 without point and exponent."""

    value: Fraction
    place: Fraction = Fraction(0)


def number(text: str) -> Number | None:
    """A plain number, or None if the text is no such number.

    It may be decimal, scientific, repeating, with thousands separators, a product of such, a fraction, a ratio or a
    mixed number.
    """
    text = without_thousands(_SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text))
    if len(text) > _MAX_NUMBER_CHARS or re.search(r"\d, ?\d|\d \d", text):
        return None
    text = _POWER.sub(r"1e\1\2", text.replace(" ", ""))
    if _PRODUCT.fullmatch(text):
        factors = re.findall(_DECIMAL, text)
        scale = Fraction(10) ** sum(int(power or 0) for _, power in factors)
        places = sum(len(factor.partition(".")[2]) for factor, _ in factors)
        value = math.prod((Fraction(factor) for factor, _ in factors), start=scale)
        return Number(value, scale / 10**places if re.search("[.eE]", text) else Fraction(0))
    if match := re.fullmatch(r"(\d*)\.(\d*)\\overline\{(\d+)\}", text):
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
    place, size = max(a.place, b.place), max(abs(x), abs(y))
    limit = min(size, Fraction(1)) if 1 in (x.denominator, y.denominator) else size
    return x == y or (place > 0 and abs(x - y) < max(place, size / 10**12) and abs(x - y) <= limit / 10**6)


def rounded(formula: str, result: str, symbolic: bool) -> bool | None:
    """Whether a number is a formula, rounded to its last digit before zeros; None if it is not even near (`ROUNDED`).

    Raises:
        NeedsSympy: the formula is no number, and math-verify is not to be used.
    """
    a, b = number(formula), number(result)
    if b is None or b.value == 0 or (a is None and not is_readable(formula)):
        return None
    if a is None and not symbolic:
        raise NeedsSympy
    try:
        value = a.value if a else Fraction(float(_parsed(formula).evalf(20)))
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
    if abs(value - b.value) > ROUNDED * max(abs(value), abs(b.value)):
        return None
    zeros = 0 if "." in result else len(result) - len(result.rstrip("0"))
    return abs(value - b.value) <= (b.place or Fraction(10) ** zeros) / 2


# ---- math-verify ---------------------------------------------------------------------------------------------------


def is_readable(text: str) -> bool:
    r"""Whether math-verify reads all of a formula: it skips what it does not know, so ``7&42`` and ``42'`` would be 42.

    It reads f(0) as a product, 2\frac{5}{3} as a sum, and an equation without a variable as its right side. Towers of
    powers such as 9^{9^9} would take for ever.
    """
    plain = _MATRIX.sub(lambda sign: "[" if sign["begin"] else "]" if sign["end"] else ",", text)
    return (
        _READ.fullmatch(plain) is not None
        and _MISREAD.search(plain) is None
        and all(int(over) < int(under) for over, under in _MIXED.findall(plain))
        and plain.count("|") % 2 == 0
        and is_balanced(plain)
        and not ("=" in plain and re.search(rf"(?<![A-Za-z\\]){LETTER}", plain) is None)
    )


def relations(text: str) -> set[str]:
    """The relations in a text, in whichever direction, but for those in limits such as that of a sum."""
    found = _RELATION.findall(re.sub(r"[_^] ?\{[^{}]*\}", "", text))
    return {{">": "<", r"\ge": r"\le"}.get(sign, sign) for sign in found}


def verified(gold: str, answer: str) -> bool:
    """Whether math-verify finds two readable formulas equal. Time and memory are not bounded: see `scoring.Scorer`."""
    import math_verify
    from sympy import And, Expr, Float, expand

    a, b = _parsed(gold), _parsed(answer)
    if isinstance(a, Expr) and isinstance(b, Expr):
        distance, decimal = _distance(a, b), a.has(Float) or b.has(Float)
        if distance is not None and (distance > DECIMALS or (decimal and a.is_number)):
            return distance <= DECIMALS
        difference = expand(a - b)  # math-verify rounds to 6 decimals
        if difference == 0 or (a.is_number and b.is_number and difference.equals(0) is False):
            return bool(difference == 0)
    if isinstance(a, And) and isinstance(b, And) and len(a.free_symbols | b.free_symbols) == 1:
        return bool(a.as_set() == b.as_set())  # whichever side comes first
    return bool(math_verify.verify(a, b, timeout_seconds=None, allow_set_relation_comp=True))


def _distance(a: Any, b: Any) -> float | None:
    """How far two expressions are from each other at a point, relatively; None if one of them has no value there."""
    point = {symbol: 0.71 + 0.63 * i for i, symbol in enumerate(sorted(a.free_symbols | b.free_symbols, key=str))}
    try:
        x, y = (complex(side.evalf(15, subs=point)) for side in (a, b))
        return abs(x - y) / max(abs(x), abs(y), 1e-9)
    except (TypeError, ValueError, ArithmeticError):
        return None


@lru_cache(256)
def _parsed(formula: str) -> Any:
    """A formula as math-verify's reader of LaTeX has it, or None. Its own steps before it drop units, as the t of 2t,
    and its reader of plain arithmetic would `eval`."""
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy
    from sympy import I

    for pattern, plain in _FOR_MATH_VERIFY:
        formula = re.sub(pattern, plain, formula)
    real = re.search(r"\bi\b", formula) is None
    try:
        parsed = latex2sympy(formula, is_real=real, normalization_config=NormalizationConfig(malformed_operators=True))
    except Exception:  # it raises anything
        return None
    return parsed.subs({symbol: I for symbol in parsed.free_symbols if str(symbol) == "i"})


def is_balanced(text: str) -> bool:
    """Whether every bracket is closed; ``]`` and ``)`` close either bracket, as in intervals."""
    text = re.sub(r"[^()\[\]{}]", "", text).replace("[", "(").replace("]", ")")
    while (fewer := text.replace("()", "").replace("{}", "")) != text:
        text = fewer
    return text == ""


ROUNDED = Fraction(1, 100)
"""How far a number may be from its rounding, relatively."""
DECIMALS = 1e-6
"""How far apart two decimals may be, relatively."""
_MAX_NUMBER_CHARS = 100
_DECIMAL = r"([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:[eE]([-+]?[0-9]{1,3}))?"
_PRODUCT = re.compile(rf"{_DECIMAL}(?:(?:\\times|\\cdot|\*){_DECIMAL})*")
_POWER = re.compile(r"(?<![\d.])10\^(?:\{([-+]?\d{1,3})\}|(\d)(?!\d))", re.ASCII)
_FRACTION = re.compile(
    r"(?P<sign>[-+]?)(?P<whole>\d*)(?:\\frac\{(-?\d+)\}\{(-?\d+)\}|(?<!\d)(\d+)(?:/|\\div)(\d+)|(?<!\d)(\d+):(?!\d\d$)(\d+))",
    re.ASCII,
)
"""A fraction or a ratio; 2:40 may be a time of day, which is not 1:20, and 4:1 is compared as it is written."""
_SPACED_THOUSANDS = re.compile(r"(?<![\w.,^}])(?<![0-9] )[1-9][0-9]{0,2}(?: [0-9]{3})+(?! ?[0-9])")

_GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|upsilon|phi|chi|psi|omega"
    "|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Upsilon|Phi|Psi|Omega"
)
LETTER = rf"(?:[A-Za-z]|\\(?:{_GREEK})(?![A-Za-z]) ?)"
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|max|min|lim"
_MACROS = (
    "frac|binom|sqrt|pi|infty|cdot|times|div|pm|mp|lg|sum|prod|int|iint|iiint|oint|cup|cap|setminus|in|to|mathbb|emptyset"
    "|lfloor|rfloor|lceil|rceil|lvert|rvert|vert|overline|equiv|ne|notin|subset|subseteq|limits|partial|prime|circ|le|ge"
)
_READ = re.compile(
    rf"(?:\s|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\\(?:{_MACROS}|{_FUNCTIONS}|{_GREEK})(?![A-Za-z])|\\[{{}}|]"
    rf"|(?<![A-Za-z])(?:{_FUNCTIONS}|[A-Za-z]{{1,3}})(?![A-Za-z])|[-+*/^_(){{}}\[\]<>=,;|!])*+"
)
_MATRIX = re.compile(
    r"(?P<begin>\\begin ?\{(?:[bpvBV]?matrix|array)\}(?:\{[lcr|]*\})?)|(?P<end>(?:\\\\)? ?\\end ?\{[a-zA-Z]+\})|&|\\\\"
)
_MISREAD = re.compile(
    r"(?:[-+*/^_=<>]|\\(?:cdot|times|div|pm|mp|frac|sqrt|binom|le|ge|in|cup|cap|to)) *(?:$|[)\]}])"
    r"|[0-9]_|\{ *\}|[0-9] *\{ *[0-9]|\( *\)|[,;] *(?:$|[)\]}])|(?:^|[(\[{]) *[,;*/^_]"
    r"|\\(?:frac|binom)(?! *\{)|\\(?:frac|binom) *\{[^{}]*\}(?! *\{)|(?<![_0-9])[0-9]+ [0-9]"
    r"|[0-9] ?\^ ?\{? ?[0-9]+ ?\^|[0-9]{5,} ?!|! *!|(?:(?<![_0-9])[0-9]+|\)) ?\^ ?\{? ?[0-9]{5,}"
    r"|\\sqrt *(?:\[[^\]]*\])? *[0-9] *[0-9]|(?<![_^]) *\{[^{}]*\} *[0-9]|(?<![A-Za-z0-9\\])[A-Za-z][0-9]"
    rf"|(?<![A-Za-z\\]){LETTER}(?:_(?:\w|\{{\w+\}}))?(?:\^\{{?[-\w]+\}}?)? ?\( ?-?[^()+-]*\)"
)
_MIXED = re.compile(r"[0-9] *\\frac *\{ *([0-9]{1,50}) *\} *\{ *([0-9]{1,50}) *\}")
_RELATION = re.compile(r"[<>=]|\\(?:le|ge|in|to|ne|notin|equiv|approx|pmod|bmod|mod)(?![A-Za-z])")
_FOR_MATH_VERIFY = (
    (r"(?<![\w.\\])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![\w.])", r"\1 \\times 10^{\2}"),
    (r"(\d+(?:\.\d+)?) ?\^\\circ ?", r"(\\frac{\1\\pi}{180})"),
    (r"\\sqrt\[([3579])\]\{-", r"-\\sqrt[\1]{"),
)
"""What math-verify reads as something else: numbers such as 2e-10, degrees, and odd roots of negative numbers."""
