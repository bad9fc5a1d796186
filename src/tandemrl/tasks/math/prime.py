r"""PRIME's grader (arXiv:2502.01456), as published in PRIME and verl, faults included. It does not import torch.

An answer is right if it passes one of two graders. The first is prm800k's (arXiv:2305.20050): equal normal forms, or
entries whose difference sympy simplifies to 0. The second: numbers within 1e-4, also if one is 100 times the other,
lists entry by entry, or formulas by sympy. What is wrong with it stays: ``x + 3 = 4`` is 4, 1000001 is 1000000, 50 is
0.5, ``\sqrt[3]{2}`` is ``\sqrt{2}``, and most LaTeX that is not written like the ground truth is refused.

One thing differs: what could run code or for ever is no formula (`_parsed`). sympy runs in a process that is killed in
time.
verl 0.9.1 itself never gets to simplify formulas in the second grader: it uses a decorator, ``timeout_limit``, as a
context, which raises, and that counts as unequal. So it refuses ``2/4`` for ``1/2``, and ours does not.
"""

import ast
import logging
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Deferred, Lost, Score
from tandemrl.tasks.math.boxed import settled
from tandemrl.tasks.math.equality import NeedsSympy
from tandemrl.tasks.math.published import braced, normalise_math

TOLERANCE = 1e-4
MAX_CHARS = 1000
"""The second grader reads no more of an answer."""
MAX_ANSWER = 5000
"""A longer answer is wrong unless it is the ground truth."""
MAX_PARSED = 2000
"""Longer formulas are not given to sympy."""
EQUIVALENT = f"{__name__}:equal"


def prime(row: Row, text: str, options: RewardConfig) -> Score | Deferred:
    """1 if the answer is right to PRIME's grader, else 0. The part ``format`` is 1 with a box."""
    gold, answer = row.ground_truth, extract_answer(text)

    def score(outcome: bool | Lost) -> Score:
        result = settled(outcome, answer or None)
        result.parts["format"] = float(r"\box" in text)
        return result

    try:
        return score(equal(gold, answer, symbolic=False))
    except NeedsSympy:
        return Deferred("symbolic", (EQUIVALENT, gold, answer), score)


def extract_answer(text: str) -> str:
    """What follows "answer is" and the like: the last box or the text up to the last ". ", behind its last "=" or
    "is"."""
    for marker in ("answer:", "answer is", "answers are"):
        text = _after(text, marker)
    for marker in ("is answer", "is the answer", "are answers", "are the answers"):
        at = _lower(text).rfind(marker)
        text = text if at < 0 else text[:at].strip()
    text = _last_box(text) or text
    if ". " in text:
        text = text[: text.rindex(". ")].strip()
    for marker in ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n"):
        text = _after(text, marker)
    return text


def equal(gold: str, answer: str, symbolic: bool = True) -> bool:
    """Whether one of the two graders finds an answer right.

    Args:
        symbolic: sympy may be used. It can run for ever.

    Raises:
        NeedsSympy: it would be needed, and is not to be used.
    """
    if len(answer) > MAX_ANSWER:
        return gold == answer
    if prm800k_equal(gold, answer, symbolic):
        return True
    try:
        pies = (math.pi, 3.14) if r"\pi" in gold + answer else (math.pi,)
        return any([math_equal(gold, answer, symbolic, pi) for pi in pies])
    except (ValueError, TypeError, IndexError, OverflowError, SyntaxError, RecursionError):
        return False


# ---- prm800k's grader ----------------------------------------------------------------------------------------------


def prm800k_equal(gold: str, answer: str, symbolic: bool) -> bool:
    """Equal as MATH's strings, as normal forms, or entry by entry in equal brackets."""
    if _mathd(gold) == _mathd(answer):
        return True
    left, right = normalise(gold), normalise(answer)
    if left == right:
        return True
    if not right:
        return False
    golds, answers = _entries(left), _entries(right)
    if len(golds) != len(answers) or (len(golds) > 1 and (left[0], left[-1]) != (right[0], right[-1])):
        return False
    return all(_entry_equal(a, b, symbolic) for a, b in zip(golds, answers, strict=True))


def normalise(answer: str) -> str:
    """prm800k's normal form: without units, $ and %, "or" and "and" as commas, LaTeX as text, in lower case."""
    if text := re.search(r"^\\text\{(.+?)\}$", answer):
        answer = text[1]
    for old, new in (("\\%", ""), ("\\$", ""), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")):
        answer = answer.replace(old, new)
    for name, zeros in (("million", 6), ("billion", 9), ("trillion", 12)):
        answer = answer.replace(name, f"*10^{zeros}")
    answer = re.sub(r"\^ *\\circ", "", _UNIT.sub("", answer))
    if answer and answer[0] == "{" and answer[-1] == "}":
        answer = answer[1:-1]
    answer = re.sub(",\\\\! *", "", answer)
    value = _float(answer)
    if value is not None and _is_whole(value):
        answer = str(round(value))
    if "\\" in answer:
        answer = _text(answer)
    answer = re.sub(r"([0-9]) +([0-9])", r"\1+\2", re.sub("- *", "-", answer)).lower()
    value = _float(_without_thousands(answer))
    return str(int(value)) if value is not None and _is_whole(value) else answer


_UNIT = re.compile(
    "(?:degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard|liter)"
    r"(?:es)?s? *(?:\^[0-9]+)?"
)
_THOUSANDS = re.compile(r"(\d),(\d\d\d)(?=$|\D)")


def _mathd(answer: str) -> str:
    answer = answer.strip()
    text = re.search(r"^\\text\{(.+?)\}$", answer)
    try:
        return normalise_math(text[1].strip() if text else answer)
    except ValueError:
        return answer


def _entries(answer: str) -> list[str]:
    answer = _without_thousands(answer)
    if len(answer) > 2 and answer[0] in "()[]" and answer[-1] in "()[]" and not set("()[]") & set(answer[1:-1]):
        return [entry.strip() for entry in answer[1:-1].split(",")]
    return [answer]


def _entry_equal(gold: str, answer: str, symbolic: bool) -> bool:
    """A fraction must be the same fraction, and a whole number is equal only to another one; else sympy decides."""
    if all(re.search(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$", side) for side in (gold, answer)):
        return gold == answer
    a, b = (_float(_without_thousands(side)) for side in (gold, answer))
    if (a is not None and _is_whole(a)) != (b is not None and _is_whole(b)):
        return False
    if a is not None and b is not None and math.isfinite(a) and math.isfinite(b):
        return a == b
    formula = f"({gold})-({answer})"
    letters = set(filter(str.isalpha, formula.replace("sqrt", "").replace("frac", "")))
    if len(letters) > 2 or re.search(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+", formula):
        return False
    return _is_zero(lambda: _parsed(formula.replace("^", "**"), implicit=True), symbolic)


# ---- the second grader ---------------------------------------------------------------------------------------------


def math_equal(gold: Any, answer: Any, symbolic: bool, pi: float = math.pi) -> bool:
    """Equal as text, as numbers, entry by entry, or to sympy.

    Raises:
        ValueError: the published code fails on the two; the answer is wrong.
    """
    answer, gold = _without_signs(answer, pi), _without_signs(gold, pi)
    if isinstance(answer, str):
        answer = answer[:MAX_CHARS]
        if isinstance(gold, str) and answer.strip().lower() == gold.strip().lower():
            return True
        if isinstance(gold, str) and answer.replace(" ", "") == gold.replace(" ", ""):
            return True
    a, b = _number(answer), _number(gold)
    if a is not None and b is not None:
        return any(math.isclose(each, a, rel_tol=TOLERANCE) for each in (b / 100, b, b * 100))
    if not answer and answer not in (0, False):
        return False
    gold, answer = str(gold).strip(), _as_interval(str(answer).strip())
    if _bare(gold, answer):
        return True
    ends = answer[:1] + answer[-1:]
    bracketed = ends in ("()", "(]", "[)", "[]") and ends == gold[:1] + gold[-1:]
    if bracketed and _each_equal(gold[1:-1].split(","), answer[1:-1].split(","), symbolic):
        return True
    if "," in answer and "," in gold:
        parts = [[part.strip() for part in side.split(",")] for side in (gold, answer)]
        if len(parts[0]) == len(parts[1]):
            return _each_equal(parts[0], parts[1], symbolic)
    point = answer[answer.find("(") + 1 : -1].split(",") if answer.startswith("Point") else None
    if point and gold[0] == "(" and gold[-1] == ")" and _each_equal(gold[1:-1].split(","), point, symbolic):
        return True
    if r"\begin{pmatrix}" in gold and answer.startswith("[") and answer.endswith("]"):
        body = gold.removeprefix(r"\begin{pmatrix}").removesuffix(r"\end{pmatrix}")
        rows = [row.split("&") if "&" in row else row for row in body.split("\\")]
        matrix = _evaluated(answer)
        if len(matrix) == len(rows) and all(math_equal(x, y, symbolic) for x, y in zip(rows, matrix, strict=True)):
            return True
    return _symbols_equal(gold, answer, symbolic)


def _each_equal(golds: list[str], answers: list[str], symbolic: bool) -> bool:
    same = len(golds) == len(answers)
    return same and all(math_equal(x, y, symbolic) for x, y in zip(golds, answers, strict=True))


def _without_signs(side: Any, pi: float) -> Any:
    r"""A number without $ or %; without its base; with a value for ``\pi``, computed if that is all there is."""
    if not isinstance(side, str):
        return side
    if re.match(r"\$\d+(\.\d+)?", side):
        return side[1:]
    if re.match(r"^\d+(\.\d+)?\\?%$", side):
        return side.replace("\\%", "").replace("%", "")
    if "_" in side:
        return int(float(side.partition("_")[0]))
    if r"\pi" in side:
        side = re.sub(r"(?<=\d)\\pi", f"*{pi}", side)
        side = side.replace(r"\pi", f"1*{pi}")
        try:
            return _evaluated(side)
        except (ValueError, SyntaxError, ArithmeticError, TypeError, RecursionError):
            return side
    return side


def _bare(gold: str, answer: str) -> bool:
    """Whether two texts are the same without brackets, where those may differ."""
    inside = gold, answer
    if (answer[:1] + answer[-1:] == "[]" and gold[:1] != "(") or (answer[:1] + answer[-1:] == "()" and gold[:1] != "["):
        inside = gold.strip("[]()"), answer.strip("[]()")
    left, right = (re.sub(r"[{}()]", "", side) for side in inside)
    return left == right


def _as_interval(answer: str) -> str:
    interval = re.match(r"^Interval(\.Ropen|\.Lopen|\.open)?\((.*)\)$", answer)
    if interval is None:
        return answer
    opening = "(" if interval[1] in (".open", ".Lopen") else "["
    return f"{opening}{interval[2]}{')' if interval[1] in ('.open', '.Ropen') else ']'}"


def _symbols_equal(gold: str, answer: str, symbolic: bool) -> bool:
    if not symbolic:
        raise NeedsSympy
    from sympy import N

    a, b = _formula(answer), _formula(gold)
    if a is None or b is None:
        return False
    return _is_zero(lambda: a - b, symbolic) or bool(_tried(lambda: math.isclose(N(a), N(b), rel_tol=TOLERANCE)))


# ---- sympy ---------------------------------------------------------------------------------------------------------


def _tried(compute: Callable[[], Any]) -> Any:
    """What sympy computes, or None: its exceptions are of many kinds, and all of them mean "not equal" here."""
    try:
        return compute()
    except Exception:
        return None


def _is_zero(difference: Callable[[], Any], symbolic: bool) -> bool:
    if not symbolic:
        raise NeedsSympy
    from sympy import simplify

    return bool(_tried(lambda: simplify(difference()) == 0))


def _formula(text: str) -> Any:
    """A text as a formula of sympy's, plain or else in LaTeX; None if it is neither. sympy reads LaTeX only with
    antlr4 4.11, which it may have or not, as it is with the published code."""
    from sympy.parsing.latex import parse_latex

    plain = _tried(lambda: _parsed(text))
    return _tried(lambda: parse_latex(text)) if plain is None else plain


def _parsed(text: str, *, implicit: bool = False) -> Any:
    """What sympy's parser makes of a text.

    Raises:
        ValueError: sympy would run it as code: it has a string, an attribute or a call of more than a function of
            mathematics; or it is a tower of powers.
    """
    calls = set(re.findall(r"([A-Za-z_]\w+)\s*\(", text))
    if len(text) > MAX_PARSED or _CODE.search(text) or not calls <= _FUNCTIONS:
        raise ValueError(text)
    from sympy.parsing import sympy_parser as parser

    rules = parser.standard_transformations
    if implicit:
        rules += (parser.implicit_multiplication_application,)
    return parser.parse_expr(text, transformations=rules)


_CODE = re.compile(
    r"""["'`:;@\\]|__|\.\s*[A-Za-z_]|\blambda\b|\*\*\s*-?[\w.]+\s*\*\*|\*\*\s*\([^()]*\*\*|\*\*\s*\(?\d{5,}"""
    r"|!\s*!|\d{4,}!"
)
_FUNCTIONS = {
    *("sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "log", "ln", "exp", "pi", "inf"),
    *("Matrix", "Rational", "Abs", "abs", "factorial", "binomial", "cbrt", "root", "oo", "Point"),
}


# ---- texts and numbers ---------------------------------------------------------------------------------------------


def _after(text: str, marker: str) -> str:
    at = _lower(text).rfind(marker)
    return text if at < 0 else text[at + len(marker) :].strip()


def _lower(text: str) -> str:
    """The text in lower case, in the same length, which ``str.lower`` may change."""
    return text.lower() if text.isascii() else re.sub("[A-Z]+", lambda letters: letters[0].lower(), text)


def _last_box(text: str) -> str | None:
    """What the last ``\\boxed``, or else ``\\fbox``, holds."""
    start = text.rfind(r"\boxed")
    start = text.rfind(r"\fbox") if start < 0 else start
    inside = braced(text[start:]) if start >= 0 else None
    return None if inside is None else inside.strip()


def _without_thousands(text: str) -> str:
    while (fewer := _THOUSANDS.sub(r"\1\2", text)) != text:
        text = fewer
    return text


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _is_whole(value: float) -> bool:
    return math.isfinite(value) and abs(value - round(value)) <= 1e-7


def _number(side: Any) -> float | None:
    text = str(side)
    return _float(text.replace("{,}", "") if "{,}" in text else text.replace(",", ""))


def _evaluated(text: str) -> Any:
    """The value of plain arithmetic, or of tuples and lists of it, as Python has it.

    Raises:
        ValueError: it is anything else.
    """
    return _value(ast.parse(text.strip(), mode="eval").body)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            return _OPERATIONS[type(sign)](_value(left), _value(right))
        case ast.Tuple(elts=parts):
            return tuple(map(_value, parts))
        case ast.List(elts=parts):
            return list(map(_value, parts))
    raise ValueError


_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: lambda base, exponent: float(base) ** float(exponent),
}

_SIGNS = {"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"}


def _text(latex: str) -> str:
    r"""LaTeX as plain text, which pylatexenc makes of it: ``\frac{x+1}{2}`` is x+1/2, an unknown macro is nothing."""
    from pylatexenc.latex2text import LatexNodes2Text

    logging.getLogger("pylatexenc").setLevel(logging.CRITICAL)  # it warns of each macro that lacks its arguments
    plain = re.sub(r"\\[td]?frac", r" \\frac", latex)
    try:
        text = str(LatexNodes2Text().latex_to_text(plain))  # a new one: it remembers a \title
    except Exception:  # as published: it stays as it is
        return latex
    return re.sub("|".join(_SIGNS), lambda sign: _SIGNS[sign[0]], text).strip()
