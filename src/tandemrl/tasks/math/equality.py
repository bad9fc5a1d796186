r"""Decides whether an answer is the ground truth: math-verify, and a guard for what it reads as another answer.

math-verify drops words, units and what it does not know, takes the right side of any equation, and reads lists as sets:
``4 \text{ or more}``, ``42'`` and ``3=4`` would be 4, 42 and 4. So answers are taken apart here into lists, tuples and
intervals, and into numbers with their words. What changes a number, as in "5 dozen" or "not 5", makes it another
answer. Numbers are compared exactly; math-verify sees single formulas, all of which it can read.
"""

import itertools
import re
from collections.abc import Sequence
from fractions import Fraction

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
from tandemrl.tasks.math.words import changed, quantity

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
    money = [{sign.lastindex for sign in _MONEY.finditer(side)} for side in (gold, answer)]
    if max(len(gold), len(answer)) > MAX_CHARS or (all(money) and money[0] != money[1]):
        return False
    gold, answer = (clean(side).replace(r"\approx", "≈") for side in (gold, answer))
    return not hidden(answer) and _equal(gold, answer, symbolic, MAX_NESTING)


_PLAIN_NUMBER = re.compile("-?[0-9]{1,100}", re.ASCII)
_MONEY = re.compile(r"\\\$|\bdollars?\b|USD|(¢|\bcents?\b)|(€|\beuros?\b|EUR)|(£|GBP)|(¥)|(₹)")


def _equal(gold: str, answer: str, symbolic: bool, depth: int) -> bool:
    if _squeezed(gold) == _squeezed(answer):
        return answer != ""
    gold, answer = _without_labels(gold, answer)
    (kind, parts, labels), (other, others, other_labels) = _taken_apart(gold), _taken_apart(answer)
    links = [0 if labels else len(split(gold, "=≈")) - 1, 0 if other_labels else len(split(answer, "=≈")) - 1]
    if "≈" in answer or links not in ([0, 0], [1, 1]):
        golds = _values(gold, symbolic) if links[0] else [gold]
        answers = _values(answer, symbolic) if links[1] else [answer]
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
    if _same_value(formula, result, symbolic):
        return True
    value = number(result)
    if value is None or value.value.denominator == 1 or ("." in formula and number(formula) is not None):
        return False
    return rounded(formula, result, symbolic) is True


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
    if not (is_readable(gold) and is_readable(answer)):
        return False
    if not symbolic:
        raise NeedsSympy
    return verified(gold, answer)


def _squeezed(text: str) -> str:
    """A text without spaces, except those between digits, and without commas between thousands."""
    text = re.sub(r"(?<!\d) +| +(?!\d)", "", without_thousands(text))
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", text)


_WORDS = re.compile(r"[A-Za-z]{4,}(?: [A-Za-z]+)*|(?i:yes|no|odd)|[A-Z](?: ?[A-Z])*")
