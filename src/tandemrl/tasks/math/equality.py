r"""Decides whether an answer is the ground truth: math-verify, and a guard for what it reads as another answer.

math-verify drops words, units and what it does not know, takes the right side of any equation, and reads lists as sets:
``4 \text{ or more}``, ``42'`` and ``3=4`` would be 4, 42 and 4. So answers are taken apart here into lists, tuples and
intervals, and into numbers with their words. What changes a number, as in "5 dozen" or "not 5", makes it another
answer. Numbers are compared exactly; math-verify sees single formulas, all of which it can read.
"""

import itertools
import logging
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from tandemrl.tasks.math.notation import GREEK, LETTER, TEXT, clean, hidden, split, without_thousands
from tandemrl.tasks.math.words import changed, quantity

logging.getLogger("math_verify").setLevel(logging.ERROR)
"""It warns that its timers are off, which is intended: they use SIGALRM, which only works in a main thread and cannot
interrupt a long C call."""
MAX_CHARS = 2000
"""A longer answer is wrong unless it equals the ground truth as a string; it is not normalised and never parsed."""
MAX_NESTING = 6
MAX_UNORDERED = 20
"""Lists in lists deeper than this, and unordered ones of more entries, are not compared."""


class NeedsSympy(Exception):
    """Only math-verify can decide."""


def quick_equal(gold: str, answer: str) -> bool | None:
    """Whether two answers are equal; None if only math-verify can tell, which may run for ever on hostile input."""
    try:
        return equal(gold, answer, symbolic=False)
    except NeedsSympy:
        return None


def equal(gold: str, answer: str, symbolic: bool = True) -> bool:
    """Whether an answer is the ground truth.

    Whole numbers and fractions are equal exactly, decimals within their last digit and 1e-6. "50%" is 50 and also 0.5.
    Words, and letters of a multiple choice, are compared without regard to case. Units are dropped where one side has
    none; known units that differ make answers different. A label such as "x =" counts where both sides have one.

    Args:
        symbolic: math-verify may be used. It can run for ever.

    Raises:
        NeedsSympy: it would be needed, and is not to be used.
    """
    if answer.strip() in (gold.strip(), f"{gold.strip()}."):
        return answer.strip() != ""
    money = [{sign.lastindex for sign in _MONEY.finditer(side)} for side in (gold, answer)]
    if max(len(gold), len(answer)) > MAX_CHARS or (all(money) and money[0] != money[1]):
        return False
    gold, answer = (clean(side).replace(r"\approx", "≈") for side in (gold, answer))
    return not hidden(answer) and _equal(gold, answer, symbolic, MAX_NESTING)


_MONEY = re.compile(r"\\\$|\bdollars?\b|USD|(¢|\bcents?\b)|(€|\beuros?\b|EUR)|(£|GBP)|(¥)|(₹)")


def _equal(gold: str, answer: str, symbolic: bool, depth: int) -> bool:
    if _squeezed(gold) == _squeezed(answer):
        return answer != ""
    gold, answer = _without_labels(gold, answer)
    (kind, parts, labels), (other, others, other_labels) = _taken_apart(gold), _taken_apart(answer)
    lengths = [1 if labels else len(split(gold, "=≈")), 1 if other_labels else len(split(answer, "=≈"))]
    if "≈" in answer or lengths not in ([1, 1], [2, 2]):
        golds, answers = _values(gold, symbolic), _values(answer, symbolic)
        return any(_equal(x, y, symbolic, depth) for x in golds for y in answers if (x, y) != (gold, answer))
    if kind == other == "value":
        return _same_value(gold, answer, symbolic)
    if "value" in (kind, other) and relations(gold + answer) & {"<", r"\le"}:  # an inequality is an interval
        return _by_math_verify(gold, answer, symbolic)
    if depth == 0 or len(parts) != len(others) or len(parts) > MAX_UNORDERED:
        return False
    ordered = kind not in ("list", r"\{\}") or bool(labels and not other_labels)
    if {kind, other} == {"list", "()"} and (named := labels or other_labels):
        ordered = named == sorted(named)
        kind = other if ordered else ""
    if kind != other and {kind, other} != {"list", r"\{\}"}:
        return False
    if not ordered:
        return _equal_in_any_order(parts, others, symbolic, depth - 1)
    return all(_equal(x, y, symbolic, depth - 1) for x, y in zip(parts, others, strict=True))


def _equal_in_any_order(gold: Sequence[str], answer: Sequence[str], symbolic: bool, depth: int) -> bool:
    """Whether the entries can be paired; an entry counts as often as it is written."""
    others = list(answer)
    for part in sorted(gold, key=lambda part: part not in others):
        at = next((at for at, other in enumerate(others) if _equal(part, other, symbolic, depth)), None)
        if at is None:
            return False
        others.pop(at)
    return True


def _taken_apart(answer: str) -> tuple[str, Sequence[str], list[str]]:
    """Its kind, entries, and their labels if each has one, as in "x = 3, y = 5".

    The kind is "value", "list", or the brackets around the entries, such as "[)". A list and a set have any order.
    """
    kind, parts = "list", split(_AND.sub(", ", without_thousands(answer)))
    if (brackets := _BRACKETS.fullmatch(answer)) and is_balanced(brackets[2]):
        inside = split(brackets[2])
        if len(inside) > 1 or brackets[1] == r"\{":
            kind, parts = brackets[1] + brackets[3], inside
    if any(part.count(r"\pm") == 1 for part in parts):
        both = [part.replace(r"\pm", sign).lstrip("+ ") for part in parts for sign in "+-"]
        parts = tuple(dict.fromkeys(both))
    sides = [split(part, "=") for part in parts]
    labels = [side[0] for side in sides if len(side) == 2 and _LABEL.fullmatch(side[0])]
    return "value" if kind == "list" and len(parts) == 1 else kind, parts, labels if len(labels) == len(parts) else []


_BRACKETS = re.compile(r"(\\\{|[(\[])(.*)(\\\}|[)\]])")
_AND = re.compile(r",? ?\\text ?\{,? ?(?:and|or) ?\} ?|,? (?:and|or) (?=[-+\\(\[{\d]|[A-Za-z](?![A-Za-z]))")


# ---- equations -----------------------------------------------------------------------------------------------------


def _without_labels(gold: str, answer: str) -> tuple[str, str]:
    r"""Two answers without bare labels such as ``x =``, if only one of them has a label or both have the same one.

    If the ground truth is not an equation, the answer may also name what the question asks for, as in "m + n = 3", or a
    choice, as in "(C) 5".
    """
    if "=" not in gold:
        answer = _ASKED_FOR.sub("", answer)
    elif "=" in answer and _squeezed(gold.partition("=")[0]) != _squeezed(answer.partition("=")[0]):
        return gold, answer
    return _unlabelled(gold), _unlabelled(answer if re.search("[A-J]", gold) else _CHOICE.sub("", answer))


def _unlabelled(text: str) -> str:
    """A cleaned answer without a bare label in front. "x = 3, y = 5" stays whole."""
    first, *others = split(text, "=≈")
    words = TEXT.sub(r"\g<text>", first)
    extreme = re.sub(r"minimum|maximum|least|most|smaller|larger|lower|higher|other", "", words)
    named = _LABEL.fullmatch(first) or first == "" or (_WORD_LABEL.fullmatch(words) and not changed(extreme, None))
    rest = text[len(first) :].lstrip(" =≈")
    return rest if others and named and not re.search(r"[,;]|\b(?:and|or)\b", " ".join(others[:-1])) else text


def _values(chain: str, symbolic: bool) -> Sequence[str]:
    r"""The values that a chain such as ``\frac{1}{3} = 0.333 \approx 0.3`` gives: its ends.

    Every equation has to be right, and a wrong rounding does not count. Sides that are not even near, and equations
    with a variable, have no value.
    """
    exact, *others = split(chain, "≈")
    sides = split(exact, "=")
    if not all(_is_result(a, b, symbolic) for a, b in itertools.pairwise(sides)) or "=" in "".join(others[-1:]):
        return ()
    values = list(dict.fromkeys((sides[0], sides[-1])))
    if not others or _taken_apart(exact)[0] != "value":
        return values if [_taken_apart(side)[0] for side in others[-1:]] in ([], [_taken_apart(exact)[0]]) else ()
    near = rounded(sides[-1], others[-1], symbolic)
    whole = (value := number(sides[-1])) is not None and value.value.denominator == 1
    return () if near is None else [*values, others[-1]] if near and not whole else values


def _is_result(formula: str, result: str, symbolic: bool) -> bool:
    """Whether "formula = result" is right: an equal formula, or a decimal as a rounding of what is none."""
    value = number(result)
    decimal = value is not None and value.value.denominator > 1 and not ("." in formula and number(formula))
    return _same_value(formula, result, symbolic) or (decimal and rounded(formula, result, symbolic) is True)


_NAME = rf"{LETTER}(?:_(?:\w|\{{(?:[^{{}}]|\{{\w+\}})*\}}))?"
_ATOM = rf"-?(?:{LETTER}|[0-9.]+)"
_ARGUMENTS = rf"\( ?{_ATOM}(?: ?, ?{_ATOM})* ?\)"
_LABEL = re.compile(
    rf" *(?:(?P<name>{_NAME})'*(?: ?(?!\([^()]*(?P=name)|(?<=[xyzn])\(\d){_ARGUMENTS})?|[|\[]? ?[A-Z]{{2,6}} ?[|\]]?"
    r"|(?:m? ?\\angle|\\overline ?\{|\\det ?\(?) ?[A-Z]{1,3} ?[)}]?|\\(?:text|vec) ?\{ ?[A-Za-z] ?\}|\\max|\\min"
    rf"|[PE][(\[][^()\[\]=0-9]{{1,40}}[)\]]|[fgh]\( ?[fgh]{_ARGUMENTS} ?\)|\( ?{_NAME}(?: ?, ?{_NAME})+ ?\)) *"
)
"""x, p(s), lengths, angles, expectations, areas such as [ABC], determinants, a_{n+1}, f(g(2)), (x, y), but not 2x."""
_WORD_LABEL = re.compile(r" *(?:[Tt]he )?(?:[A-Za-z][a-z]{3,}|min|max|sum|gcd|lcm|det|avg)(?:[ -][A-Za-z]{2,}){0,7} *")
_ASKED_FOR = re.compile(rf"^(?:{LETTER}(?: ?\+ ?{LETTER})+|\\frac ?\{{ ?{LETTER} ?\}} ?\{{ ?{LETTER} ?\}}) ?=")
_CHOICE = re.compile(r"^(?:\\text ?\{ ?\([A-J]\) ?\}|\([A-J]\)(?=[ \\])) *(?=[-\d.\\])")


# ---- values --------------------------------------------------------------------------------------------------------


def _same_value(gold: str, answer: str, symbolic: bool) -> bool:
    """Whether two single values with their words are equal. A percentage is also a fraction."""
    left, right = quantity(gold), quantity(answer)
    if left is None or right is None or (("%" in left.value) != ("%" in right.value) and (left.unit or right.unit)):
        return False
    mine, theirs = set(left.words), set(right.words)
    subset = mine <= theirs or theirs <= mine
    if left.words != right.words and mine and theirs and ((left.unit and right.unit) or not subset):
        return False
    a, b = (re.sub(r"^\( ?([^()]*) ?\)$", r"\1", side.value.strip()) for side in (left, right))
    c, d = (side.strip(" %") for side in (a, b))
    if ("%" in a) == ("%" in b) or _equal_formulas(c, d, symbolic):
        return _equal_formulas(c, d, symbolic)
    return _equal_formulas(*((rf"\frac{{{c}}}{{100}}", d) if "%" in a else (c, rf"\frac{{{d}}}{{100}}")), symbolic)


def _equal_formulas(gold: str, answer: str, symbolic: bool) -> bool:
    """Whether two answers without words are equal as text, as numbers, or to math-verify."""
    if _squeezed(gold) == _squeezed(answer):
        return answer != ""
    plain = [TEXT.sub(r"\g<text>", side).strip(" ().") for side in (gold, answer)]
    if any(TEXT.search(side) or _WORDS.fullmatch(word) for side, word in zip((gold, answer), plain, strict=True)):
        return _squeezed(plain[0].lower()) == _squeezed(plain[1].lower())
    if re.fullmatch(r"[0-9]+_\{?[0-9]{1,2}\}?", gold):
        return answer == gold.partition("_")[0]  # it may leave out the base that the ground truth has
    if (a := number(gold)) is not None and (b := number(answer)) is not None:
        return numbers_equal(a, b)
    return relations(gold) == relations(answer) and _by_math_verify(gold, answer, symbolic)


def _by_math_verify(gold: str, answer: str, symbolic: bool) -> bool:
    """Whether math-verify finds two formulas equal. Its time and memory are not bounded: see `scoring.Scorer`."""
    if not (is_readable(gold) and is_readable(answer)):
        return False
    if not symbolic:
        raise NeedsSympy
    import math_verify
    from sympy import Expr, Float, expand

    a, b = _parsed(gold), _parsed(answer)
    if isinstance(a, Expr) and isinstance(b, Expr):
        distance, decimal = _distance(a, b), a.has(Float) or b.has(Float)
        if distance is not None and (distance > DECIMALS or (decimal and a.is_number)):
            return distance <= DECIMALS
        difference = expand(a - b)  # math-verify rounds to 6 decimals
        if difference == 0 or (a.is_number and b.is_number and difference.equals(0) is False):
            return bool(difference == 0)
    return bool(math_verify.verify(a, b, timeout_seconds=None, allow_set_relation_comp=True))


def _squeezed(text: str) -> str:
    """A text without spaces, except those between digits, and without commas between thousands."""
    text = re.sub(r"(?<!\d) +| +(?!\d)", "", without_thousands(text))
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", text)


_WORDS = re.compile(r"[A-Za-z]{4,}(?: [A-Za-z]+)*|(?i:yes|no|odd)|[A-Z](?: ?[A-Z])*")


# ---- numbers -------------------------------------------------------------------------------------------------------


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
    from latex2sympy2_extended import latex2sympy
    from sympy import I

    for pattern, plain in _FOR_MATH_VERIFY:
        formula = re.sub(pattern, plain, formula)
    real = re.search(r"\bi\b", formula) is None
    try:
        parsed = latex2sympy(formula, is_real=real, normalization_config=None)
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

_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|gcd|lcm|max|min|lim"
_MACROS = (
    "frac|binom|sqrt|pi|infty|cdot|times|div|pm|mp|lg|sum|prod|int|iint|iiint|oint|cup|cap|setminus|in|to|mathbb|emptyset"
    "|lfloor|rfloor|lceil|rceil|lvert|rvert|vert|overline|equiv|ne|notin|subset|subseteq|limits|partial|prime|circ|le|ge"
)
_READ = re.compile(
    rf"(?:\s|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\\(?:{_MACROS}|{_FUNCTIONS}|{GREEK})(?![A-Za-z])|\\[{{}}|]"
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
