r"""Decides whether an answer is the ground truth: math-verify, and a guard for what it reads as another answer.

math-verify drops words, units and what it does not know, takes the right side of any equation, and reads lists as sets:
``4 \text{ or more}``, ``42'`` and ``3=4`` would be 4, 42 and 4. So answers are taken apart here into lists, tuples,
intervals and matrices, and into numbers with their words. What changes a number, as in "5 dozen" or "not 5", makes it
another answer. Numbers are compared exactly; math-verify sees single formulas, all of which it can read.
"""

import itertools
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from tandemrl.tasks.math.notation import TEXT, clean, hidden, split, without_thousands
from tandemrl.tasks.math.verify import (
    LETTER,
    NeedsSympy,
    is_balanced,
    is_readable,
    number,
    numbers_equal,
    relations,
    rounded,
    verified,
)
from tandemrl.tasks.math.words import is_changing, quantity

MAX_CHARS = 2000
"""A longer answer is wrong unless it equals the ground truth as a string; it is not normalised and never parsed."""
MAX_NESTING = 6
MAX_UNORDERED = 20
"""Lists in lists deeper than this, and unordered ones of more entries, are not compared."""


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
    if _PLAIN_NUMBER.fullmatch(gold) and _PLAIN_NUMBER.fullmatch(answer):  # most are
        return Fraction(gold) == Fraction(answer)
    if max(len(gold), len(answer)) > MAX_CHARS:
        return False
    money = [{sign.lastgroup for sign in _MONEY.finditer(side)} for side in (gold, answer)]
    if all(money) and money[0] != money[1]:
        return False
    gold, answer = clean(gold), clean(answer)
    return not hidden(answer) and _equal(gold, answer, symbolic, MAX_NESTING)


_PLAIN_NUMBER = re.compile("-?[0-9]{1,100}", re.ASCII)
_MONEY = re.compile(
    r"(?P<dollar>\\\$|\bdollars?\b|USD)|(?P<cent>¢|\bcents?\b)|(?P<euro>€|\beuros?\b|EUR)"
    r"|(?P<pound>£|GBP)|(?P<yen>¥)|(?P<rupee>₹)"
)


def _equal(gold: str, answer: str, symbolic: bool, depth: int) -> bool:
    if _squeezed(gold) == _squeezed(answer):
        return answer != ""
    if r"\approx" in answer and r"\approx" not in gold:
        return any(_equal(gold, side, symbolic, depth) for side in _exact_and_rounded(answer, symbolic))
    gold, answer = _drop_labels(gold, answer)
    left, right = Shape.of(gold), Shape.of(answer)
    chains = [(side,) if shape.labels else split(side, "=") for side, shape in ((gold, left), (answer, right))]
    if len(chains[0]) != len(chains[1]) or len(chains[0]) > 2:
        golds, answers = (_calculated(chain, symbolic) for chain in chains)
        return any(_equal(x, y, symbolic, depth) for x in golds for y in answers if (x, y) != (gold, answer))
    if left.kind == right.kind == "value":
        return _same_value(gold, answer, symbolic)
    if {left.kind[0], right.kind[0]} in ({"o", "("}, {"o", "["}):  # an inequality is an interval
        return _by_math_verify(gold, answer, symbolic)
    if depth == 0 or max(len(left.parts), len(right.parts)) > MAX_UNORDERED or len(left.parts) != len(right.parts):
        return False
    kinds = {left.kind, right.kind}
    ordered = left.kind not in ("list", "set", "union") or bool(left.labels and not right.labels)
    if kinds == {"list", "()"} and (labels := left.labels or right.labels):
        ordered = True
        if labels != sorted(labels):
            return False
    elif len(kinds) > 1 and kinds != {"list", "set"}:
        return False
    if not ordered:
        return _equal_in_any_order(left.parts, right.parts, symbolic, depth - 1)
    return all(_equal(x, y, symbolic, depth - 1) for x, y in zip(left.parts, right.parts, strict=True))


def _equal_in_any_order(gold: Sequence[str], answer: Sequence[str], symbolic: bool, depth: int) -> bool:
    """Whether the entries can be paired; an entry counts as often as it is written."""
    others = list(answer)
    for part in sorted(gold, key=lambda part: part not in others):
        at = next((at for at, other in enumerate(others) if _equal(part, other, symbolic, depth)), None)
        if at is None:
            return False
        others.pop(at)
    return True


# ---- lists, tuples, intervals, matrices ----------------------------------------------------------------------------


class Shape(NamedTuple):
    """A cleaned answer taken apart.

    ``kind``: "value", "list", "set" and "union" (in any order), brackets such as "[)", "matrix 2,2" with the length of
    each row, or "order <≤" for sides that grow from left to right.
    """

    kind: str
    parts: tuple[str, ...]

    @classmethod
    def of(cls, answer: str) -> "Shape":
        if matrix := _MATRIX.fullmatch(answer):
            rows = [row.split("&") for row in matrix["body"].strip().removesuffix(r"\\").split(r"\\")]
            kind, sizes = (
                "determinant" if matrix["kind"][0] in "vV" else "matrix",
                ",".join(str(len(row)) for row in rows),
            )
            return cls(f"{kind} {sizes}", tuple(entry.strip() for row in rows for entry in row))
        if len(chain := _ORDER.split(answer)) > 1:
            sides, signs = chain[::2], chain[1::2]
            if all(sign in _FALLING for sign in signs):
                sides, signs = sides[::-1], [_FALLING[sign] for sign in reversed(signs)]
            return cls(f"order {''.join(signs)}", tuple(side.strip() for side in sides))
        if len(parts := split(answer.replace(r"\cup", ";"), ";")) > 1 and r"\cup" in answer:
            return cls("union", parts)
        if inside := re.fullmatch(r"\\\{(.*)\\\}", answer):
            return cls("set", _with_both_signs(split(inside[1])))
        if _BRACKET.fullmatch(answer) and is_balanced(answer[1:-1]) and len(parts := split(answer[1:-1])) > 1:
            return cls(answer[0] + answer[-1], parts)
        parts = _with_both_signs(split(_AND.sub(", ", without_thousands(answer))))
        return cls("list" if len(parts) > 1 else "value", parts)

    @property
    def labels(self) -> list[str]:
        """The labels of a list of values that have one each, such as "x = 3, y = 5"."""
        sides = [split(part, "=") for part in self.parts]
        one_each = all(len(each) == 2 and _LABEL.fullmatch(each[0]) for each in sides)
        return [side[0] for side in sides] if one_each else []


_MATRIX = re.compile(
    r"[\[(]? ?\\begin\{(?P<kind>[bpvBV]?matrix|array)\}(?:\{[lcr|]*\})?"
    r"(?P<body>(?:(?!\\end).)*)\\end\{(?P=kind)\} ?[\])]?"
)
_FALLING = {">": "<", r"\ge": r"\le"}
_ORDER = re.compile(r"([<>]|\\(?:le|ge)(?![A-Za-z]))")
_BRACKET = re.compile(r"[(\[].*[)\]]")
_AND = re.compile(r",? ?\\text ?\{,? ?(?:and|or) ?\} ?|,? (?:and|or) (?=[-+\\(\[{\d]|[A-Za-z](?![A-Za-z]))")


def _with_both_signs(parts: Sequence[str]) -> tuple[str, ...]:
    r"""Entries, where ``1 \pm x`` stands for two."""
    both = [part.replace(r"\pm", sign).lstrip("+ ") for part in parts for sign in "+-"]
    return tuple(dict.fromkeys(both)) if any(part.count(r"\pm") == 1 for part in parts) else tuple(parts)


# ---- equations -----------------------------------------------------------------------------------------------------


def _drop_labels(gold: str, answer: str) -> tuple[str, str]:
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
    first, *others = split(text, "=")
    words = TEXT.sub(r"\g<text>", first)
    extreme = re.sub(r"minimum|maximum|least|most|smaller|larger|lower|higher|other", "", words)
    named = _LABEL.fullmatch(first) or (_WORD_LABEL.fullmatch(words) and not is_changing(extreme))
    return "=".join(others) if others and named and not _SEPARATOR.search(" ".join(others[:-1])) else text


def _calculated(chain: Sequence[str], symbolic: bool) -> tuple[str, ...]:
    """The first and the last side of a true calculation such as "2 + 3 = 5"; any other equation has no value."""
    true = all(_is_result(a, b, symbolic) for a, b in itertools.pairwise(chain))
    return tuple(dict.fromkeys((chain[0], chain[-1]))) if true else ()


def _is_result(formula: str, result: str, symbolic: bool) -> bool:
    """Whether "formula = result" is right: an equal formula, or a decimal as a rounding of what is none."""
    if _same_value(formula, result, symbolic):
        return True
    value = number(result)
    if value is None or value.value.denominator == 1 or ("." in formula and number(formula) is not None):
        return False
    return rounded(formula, result, symbolic) is True


def _exact_and_rounded(answer: str, symbolic: bool) -> list[str]:
    r"""The sides of ``a \approx b`` that count: both if b is the rounded a, only b if a is a name, and else only a.

    What stands between the first and the last side never counts. Sides that differ are no answer at all.
    """
    first, *_, last = (side.strip() for side in answer.split(r"\approx"))
    if not first or _LABEL.fullmatch(first):
        return [last]
    exact = split(first, "=")[-1]
    kinds = [Shape.of(side).kind for side in (exact, last)]
    if "=" in last or kinds[0] != kinds[1]:
        return []
    if kinds[0] != "value":
        return [first]
    is_rounding = rounded(exact, last, symbolic)
    if is_rounding is None:
        return []
    whole = (value := number(exact)) is not None and value.value.denominator == 1
    return [first, last] if is_rounding and not whole else [first]


_INDEXED = rf"{LETTER}(?:_(?:\w|\{{\w+\}}|\{{ ?\\text\{{\w+\}} ?\}}))?"
_ARGUMENTS = rf"\( ?-?(?:{LETTER}|[0-9.]+)(?: ?, ?-?(?:{LETTER}|[0-9.]+)){{0,5}} ?\)"
_LABEL = re.compile(
    rf" *(?:(?P<name>{_INDEXED})'*(?: ?(?!\([^()]*(?P=name)|(?<=[xyzn])\(\d){_ARGUMENTS})?"
    r"|[A-Z]{2,4}|\|[A-Z]{2}\||m? ?\\angle ?[A-Z]{1,3}|\\overline ?\{ ?[A-Z]{2} ?\}|[PE][(\[][^()\[\]=0-9]{1,40}[)\]]"
    r"|\[ ?[A-Z]{3,6} ?\]|\\(?:det|max|min)(?: ?[A-Z]| ?\( ?[A-Z] ?\))?|\\(?:text|vec|mathbf) ?\{ ?[A-Za-z] ?\}"
    rf"|{LETTER}_\{{ ?{LETTER} ?[-+] ?[0-9]+ ?\}}|[fgh]\( ?[fgh]{_ARGUMENTS} ?\)"
    rf"|\( ?{_INDEXED}(?: ?, ?{_INDEXED}){{1,5}} ?\)) *"
)
"""x, p(s), lengths, angles, expectations, areas such as [ABC], determinants, a_{n+1}, f(g(2)), (x, y), but not 2x."""
_WORD_LABEL = re.compile(r" *(?:[Tt]he )?(?:[A-Za-z][a-z]{3,}|min|max|sum|gcd|lcm|det|avg)(?:[ -][A-Za-z]{2,}){0,7} *")
_ASKED_FOR = re.compile(rf"^(?:{LETTER}(?: ?\+ ?{LETTER})+|\\frac ?\{{ ?{LETTER} ?\}} ?\{{ ?{LETTER} ?\}}) ?=")
_CHOICE = re.compile(r"^(?:\\text ?\{ ?\([A-J]\) ?\}|\([A-J]\)(?=[ \\])) *(?=[-\d.\\])")
_SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b")


# ---- values --------------------------------------------------------------------------------------------------------


def _same_value(gold: str, answer: str, symbolic: bool) -> bool:
    """Whether two single values with their words are equal. A percentage is also a fraction."""
    left, right = quantity(gold), quantity(answer)
    if left is None or right is None:
        return False
    if ("%" in left.value) != ("%" in right.value) and (left.unit or right.unit):
        return False
    if left.words and right.words and left.words != right.words:
        mine, theirs = set(left.words), set(right.words)
        if (left.unit and right.unit) or not (mine <= theirs or theirs <= mine):
            return False
    a, b = (re.sub(r"^\( ?([^()]*) ?\)$", r"\1", side.value.strip()) for side in (left, right))
    c, d = (side.strip(" %") for side in (a, b))
    if ("%" in a) == ("%" in b):
        return _equal_formulas(c, d, symbolic)
    if _equal_formulas(c, d, symbolic):
        return True
    return _equal_formulas(*((rf"\frac{{{c}}}{{100}}", d) if "%" in a else (c, rf"\frac{{{d}}}{{100}}")), symbolic)


def _equal_formulas(gold: str, answer: str, symbolic: bool) -> bool:
    """Whether two answers without words are equal as text, as numbers, or to math-verify."""
    if _squeezed(gold) == _squeezed(answer):
        return answer != ""
    plain = [TEXT.sub(r"\g<text>", side).strip(" ().") for side in (gold, answer)]
    if any(TEXT.search(side) or _WORDS.fullmatch(word) for side, word in zip((gold, answer), plain, strict=True)):
        return _squeezed(plain[0].lower()) == _squeezed(plain[1].lower())
    mine, theirs = _in_base(gold), _in_base(answer)
    if mine is not None and theirs is None:
        return answer == gold.partition("_")[0]  # it may leave out the base that the ground truth has
    if theirs is not None:
        value = number(gold)
        return mine == theirs if mine is not None else value is not None and value.value == theirs[0]
    if (a := number(gold)) is not None and (b := number(answer)) is not None:
        return numbers_equal(a, b)
    return relations(gold) == relations(answer) and _by_math_verify(gold, answer, symbolic)


def _in_base(text: str) -> tuple[int, int] | None:
    """Value and base of a number such as ``4210_7``, or None for another text."""
    match = _BASED.fullmatch(text)
    try:
        return (int(match[1], int(match[2])), int(match[2])) if match else None
    except ValueError:  # a digit that the base does not have
        return None


def _by_math_verify(gold: str, answer: str, symbolic: bool) -> bool:
    if not (is_readable(gold) and is_readable(answer)):
        return False
    if not symbolic:
        raise NeedsSympy
    return verified(gold, answer)


def _squeezed(text: str) -> str:
    """A text without spaces, except those between digits, and without commas between thousands."""
    text = re.sub(r"(?<!\d) +| +(?!\d)", "", without_thousands(text))
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", text)


_BASED = re.compile(r"([0-9][0-9A-Za-z]{0,99})_\{?([0-9]{1,2})\}?")
_WORDS = re.compile(r"[A-Za-z]{4,}(?: [A-Za-z]+)*|(?i:yes|no|odd)|[A-Z](?: ?[A-Z])*")
