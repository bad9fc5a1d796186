r"""Checks what an answer claims, before anything compares it. Without torch.

Comparisons read leniently: they drop text, unknown signs and one side of an equation. So answers that such a reading
could turn into another answer are refused before: those with negations and hedges, equations that are more than a bare
label, a second number, or characters that cannot be seen. A refused answer is wrong, unless it is the ground truth
itself.
"""

import re
from typing import NamedTuple

from tandemrl.rewards.math.formula import FUNCTIONS, GREEK
from tandemrl.rewards.math.notation import (
    SCALE,
    TEXT,
    UNIT,
    bare,
    clean,
    hidden,
    split,
    units_differ,
    without_spaces,
    without_thin_spaces,
    without_thousands,
)


def identical(gold: str, answer: str) -> bool:
    """Whether two answers are the same string, apart from outer spaces and a full stop at the end."""
    gold, answer = gold.strip(), answer.strip()
    return answer != "" and answer in (gold, f"{gold}.")


def refused(gold: str, answer: str) -> bool:
    r"""Whether a cleaned answer says something that a comparison would ignore and that the gold answer does not say.

    Examples:
        >>> refused("4", r"4 \text{ or more}"), refused("4", r"4 \text{ apples}")
        (True, False)
    """
    answer = unlabelled(answer)
    if text := TEXT.fullmatch(answer):
        answer = text["text"]
    return (
        hidden(answer)
        or bool(_qualifiers(answer) - _qualifiers(gold))
        or bool(_qualifiers(_removed(gold)) - _qualifiers(answer))
        or (_has_another_number(answer) and not _has_another_number(gold))
        or (_OPEN_END.search(answer) is not None and _OPEN_END.search(gold) is None)
        or (_is_changed(answer) and not _is_changed(gold) and re.search(r" .*\d", answer) is None)  # "1 or 2" is a list
    )


def counted(answer: str) -> tuple[str, str] | None:
    r"""The number and the words of a cleaned answer that counts things; None for another, and if a word changes it.

    Examples:
        >>> counted(r"5 \text{ more apples}"), counted("5 eggs a day"), counted(r"5 \text{ or more}")
        (('5', 'more apples'), ('5', 'eggs a day'), None)
    """
    found = _counted(answer)
    if found is None or _is_product(found) or _is_changed(answer):
        return None
    return found.number, found.words


class _Counted(NamedTuple):
    number: str
    words: str
    plain: bool
    """The words stand in no macro, where letters in a row may be a product."""


def _counted(answer: str) -> _Counted | None:
    if text := TEXT.fullmatch(answer):
        answer = re.sub(r"^(\S+) (.+)$", r"\1 \\text{\2}", text["text"].strip())
    found = _COUNTED.fullmatch(answer)
    words = (found["text"] or found["plain"] or "").strip(" .") if found else ""
    return _Counted(found["number"], words, found["plain"] is not None) if found and words else None


def _split(phrase: str) -> list[str]:
    return [word.strip(",.()") for word in re.findall(r"[^\s/]+", phrase.lower())]


def _is_product(found: _Counted) -> bool:
    """Whether what stands behind the number may be variables and functions."""
    words = _split(found.words)
    if any(len(word) == 1 and word not in "ai" for word in words):
        return True
    return found.plain and bool(
        _FORMULA_WORDS.intersection(words) or not any(len(word) > 3 or word in _SHORT_WORDS for word in words)
    )


def _is_changed(answer: str) -> bool:
    """Whether a word behind the number of a cleaned answer makes another number of it, or doubts it."""
    found = _counted(answer)
    if found is None:
        return False
    words = _split(found.words)
    first = words[0].split("-")[0]
    if _CHANGES_PHRASE.search(" ".join(words)):
        return True
    if first in _CHANGES_FIRST or (first in _CHANGES_FIRST_NOT_AS_KINDS and not words[-1].endswith("s")):
        return True
    things = False
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        head, _, rest = word.partition("-")
        kind = after.endswith("s") and after not in _VERBS
        unit = word == "squared" and before == "second"
        if ({word, head, rest} & _CHANGES and not unit) or (head in _CHANGES_NOT_AS_KINDS and not kind):
            return True
        if (
            rest in _NUMBERS
            or (word == "half" and before in ("a", "and", "one"))
            or (head in _NUMBERS and (rest in _PARTS or (not rest and (not before or before in _BEFORE_A_NUMBER))))
        ):
            return True
        if (
            head in _PARTS
            and (rest or (not things and (found.number == "1" or word.endswith("s") or after == "of")))
            and (word != "quarters" or after == "of" or kind)
        ):
            return True
        if any(map(str.isdecimal, word)) and (found.plain or not re.fullmatch(r"\d+-[a-z]+", word)):
            return True
        if (word in _DENIALS and (not things or before in ("is", "was"))) or (
            word.endswith(("n't", "n’t")) and not things and word[:4] not in ("aren", "were")
        ):
            return True
        things |= word.endswith("s") and word not in _VERBS
    return False


_COUNTED = re.compile(
    r"(?P<number>[-+]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+|[0-9]+/[0-9]+|[0-9]*\\frac\{[0-9]+\}\{[0-9]+\}))"
    r" ?(?:\\(?:text|mathrm) ?\{(?P<text>[\w .,'’/()-]{1,120})\}|(?P<plain>(?<= )[A-Za-z][\w ,'’/-]{1,120}))"
)


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall("[a-z]+", text))


_CHANGES = _words(
    """
    or wrongly incorrectly false untrue excluded ruled impossible guess maybe perhaps possibly probably unknown
    undefined undetermined squared cubed factorial doubled tripled halved twice thrice dozen hundred thousand
    million billion trillion hundreds thousands millions billions trillions lakh crore least most minimum maximum
    about approximately approx roughly around nearly almost negative minus plus mod modulo multiplied divided
    opposite reciprocal inverse deficit debt loss excluding except versus vs unless neither nor either instead
    rather but answer cannot itself quadrillion quintillion sextillion googol crores lakhs lac myriad
    factorials exponent logarithm reciprocals conjugate complement unlikely mistaken overdrawn overdraft sqrt ln
    """
)
"""Words that change the number before them, or doubt it, wherever they stand."""
_CHANGES_NOT_AS_KINDS = _words("right wrong correct incorrect root power log double triple quadruple")
"""Words that change it unless they say of what kind the things are, as in "5 wrong turns" or "5 power plants"."""
_CHANGES_FIRST = _words(
    """
    and over under above below isn be equals than k if without off half pi grand gross mil kilo mega giga tera
    peta hecto deca deka deci centi milli micro nano pico quarter score fold something basis repeating recurring
    """
)
"""Words that change it if they stand next to it."""
_CHANGES_FIRST_NOT_AS_KINDS = _words("ish odd prime cube binary hex hexadecimal octal decimal")
_CHANGES_PHRASE = re.compile(
    r"^(?:(?:st|nd|rd|th) of|to (?:the )?(?:power|third|\w+th))\b"
    r"|\bin the (?:red|hole)$|\bin (?:binary|hex|octal|base)\b|[a-z]fold\b"
)
_PARTS = _words(
    """
    half halves quarter quarters third thirds fourth fourths fifth fifths sixth sixths seventh sevenths eighth
    eighths ninth ninths tenth tenths eleventh elevenths twelfth twelfths sixteenth sixteenths twentieth twentieths
    hundredth hundredths thousandth thousandths
    """
)
_NUMBERS = _words(
    """
    zero nil nought naught one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety dozen hundred thousand
    million
    """
)
_BEFORE_A_NUMBER = _words(
    """
    and or to of is are was be equals equal plus minus times over by point than below above under base rem remainder
    dot decimal comma choose pick permute ratio
    """
)
_DENIALS = _words("not no never none cannot")
_VERBS = _words("is was as this its does has")
_SHORT_WORDS = _words(
    """
    did is of do was are can red in new has toy men she ml he it dog ice to oil cds hot old his her cm key kg too mg mb
    net kwh sq mph gb oz pay egg car km mm ft lb lbs hr hrs sec min mi yd the per all day bag box cup pen job pie pig
    cow cat hat kid boy pts
    """
)
"""Words of two or three letters that are no product of variables."""
_FORMULA_WORDS = frozenset({*FUNCTIONS, *GREEK, "sqrt", "root", "pi", "infty", "frac", "inf"})


def admitted(gold: str, answer: str) -> bool:
    """Whether two answers as written may be compared by a reader that drops spaces, texts, units and labels."""
    scales = [SCALE.findall(side) for side in (gold, answer)]
    gold, answer = clean(gold), clean(answer)
    if units_differ(gold, answer) or scales[0] != scales[1]:
        return False
    other_label = all(unlabelled(side) != side for side in drop_label(gold, answer))
    return not other_label and not refused(gold, answer)


def readable(gold: str, answer: str) -> bool:
    r"""Whether a computer algebra system reads all of two cleaned answers, with relations and lists in both or neither.

    math-verify skips what it does not know: ``7&42``, ``42'`` and ``42?`` would be 42, and f(0) a product.
    """
    a, b = _TRAILING_WORDS.search(gold), _TRAILING_WORDS.search(answer)
    if a and b and a.group() != b.group():  # km and m
        return False
    left, right = (_TRAILING_WORDS.sub("", bare(side)) for side in (gold, answer))
    alike = _relations(left) == _relations(right) and _is_listed(left) == _is_listed(right)
    return alike and _is_read(left) and _is_read(right)


def sides(text: str) -> tuple[str, ...]:
    """The parts of an answer between its equals signs. Signs inside of brackets and braces do not count."""
    return split(text, "=") if "=" in text else (text,)


def is_label(text: str) -> bool:
    r"""Whether a side of an equation only names the answer: x, p(s), (x, y), ``\text{Area}``, but not 2x or x + 3."""
    if symbol := _SYMBOL.fullmatch(text):
        arguments = symbol["arguments"] or ""
        name = symbol["name"]
        return name not in re.split(r"[ ,]+", arguments) and not (name in "xyzn" and re.search(r"\d", arguments))
    if _NAMED.fullmatch(text) or _VECTOR.fullmatch(text):
        return True
    words = TEXT.sub(lambda macro: macro["text"], text)
    return _WORDS.fullmatch(words) is not None and not _qualifiers(text) - _EXTREMES


def hints_at_a_qualifier(prose: str) -> bool:
    """Whether a word ends with a qualifier, as in "vnot": what stands before it may be a slip of the model."""
    return any(word.lower().endswith(_LONG_QUALIFIERS) for word in _WORD.findall(prose))


def without_reason(text: str) -> str:
    """An answer in prose without the reason that follows it, as in "5, because 2 + 3 = 5"."""
    return _REASON.split(text)[0]


def unlabelled(text: str) -> str:
    """A cleaned answer without a bare label such as "x =" in front. "x = 3, y = 5" stays whole."""
    text = _MEMBER.sub("", text)
    first, *others = sides(text)
    if others and is_label(first) and not _SEPARATOR.search(" ".join(others[:-1])):
        return "=".join(others)
    return text


def drop_label(gold: str, answer: str) -> tuple[str, str]:
    r"""Two cleaned answers without their bare labels, if only one of them has a label or both have the same one.

    If the ground truth is not an equation, the answer may also name what the question asks for, as in "m + n = 3", or a
    choice, as in "(C) 5".
    """
    if re.search("[A-J]", gold) is None:
        answer = _CHOICE.sub("", answer)
    if "=" not in gold:
        answer = _ASKED_FOR.sub("", answer)
    elif "=" in answer and without_spaces(sides(gold)[0]) != without_spaces(sides(answer)[0]):
        return gold, answer
    return unlabelled(gold), unlabelled(answer)


# --------------------------------------------------------------------------------------------------------------------

_QUALIFIERS = frozenset(
    re.findall(
        r"[a-z]+",
        """
        not no never none neither nor without except excluding unless if than more less fewer greater smaller
        larger bigger higher lower least most minimum maximum about approximately approx roughly around nearly
        almost maybe perhaps possibly probably likely unknown undefined undetermined impossible wrong incorrect
        false untrue negative minus plus thrice twice double triple half halves third thirds quarter quarters
        fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths
        hundredth hundredths thousandth thousandths dozen dozens hundred hundreds thousand thousands million
        millions billion billions trillion trillions lakh crore squared cubed factorial modulo mod multiplied
        divided over under above below zero one two three four five six seven eight nine ten but instead rather
        versus vs any some several itself off kilo either other another else loss debt deficit reciprocal
        inverse opposite between guess eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen
        twenty thirty forty fifty sixty seventy eighty ninety doubled tripled halved cannot excluded ruled wrongly
        pi grand gross mil mega
        """,
    )
)
"""Words that change the value of what they stand beside."""
_LONG_QUALIFIERS = tuple(word for word in _QUALIFIERS if len(word) > 2)
_MACRO = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}(?:['’]t)?")
_COMPOUND = re.compile(
    r"\b(?:one|two|three|four|five|six|seven|eight|nine|ten)-(?=[A-Za-z])|(?<=\bper second )squared\b", re.IGNORECASE
)
"""The number in "two-digit numbers", though what follows it may still be a qualifier, and the power in a unit."""
_ANOTHER_NUMBER = re.compile(r"\\(?:text|mathrm) ?\{[^{}]*\d[^{}]*\}|\d \d")
"""A number in a text, or two numbers without a sign between them."""
_OPEN_END = re.compile(
    r"\.\.|…|\\[lcd]?dots(?![A-Za-z])|%(?! *(?:$|[,;)\]}.=]|\\(?:text|approx|cup|in)(?![A-Za-z])|and\b|or\b))"
    r"|\b(?:or|and|to) ?\}?$|\\(?:text|mathrm) ?\{[^{}]*\b(?:or|to)\b[^{}]*\}$"
    r"|^\\(?:text|mathrm) ?\{[^{}]*\} ?\\(?:text|mathrm)(?![A-Za-z])|[0-9] ?\\(?:text|mathrm) ?\{ ?k ?\}$"
)
"""An ellipsis, a percent sign within a formula, a text with "or" at the end, a text after another, or k for 1000."""


def _has_another_number(text: str) -> bool:
    return _ANOTHER_NUMBER.search(without_thin_spaces(text)) is not None


def _removed(gold: str) -> str:
    """The words behind a ground truth that a comparison drops as its unit, without those that belong to a unit."""
    unit = UNIT.search(gold)
    return re.sub(r"(?<=[a-z] )(?:squared|cubed)\b|\b[a-z]+-(?=[a-z])", "", unit[0]) if unit else ""


def _qualifiers(text: str) -> set[str]:
    words = {word.lower() for word in _WORD.findall(_COMPOUND.sub("", _MACRO.sub(" ", text)))}
    return words & _QUALIFIERS | {"not" for word in words if word.endswith("t") and not word[-2].isalpha()}


_GREEK_LETTER = "|".join(sorted(GREEK, key=len, reverse=True))
_LETTER = rf"(?:[A-Za-z]|\\(?:{_GREEK_LETTER})(?![A-Za-z]))"
_ARGUMENT = rf"-?(?:{_LETTER}|[0-9.]+)"
_SUBSCRIPT = r"_(?:\{?\w+\}?|\{ ?\\(?:text|mathrm) ?\{\w+\} ?\})"
_SYMBOL = re.compile(
    rf"(?P<name>{_LETTER})(?:{_SUBSCRIPT})?'* ?(?:\((?P<arguments> ?{_ARGUMENT}(?: ?, ?{_ARGUMENT}){{0,5}} ?)\))?"
)
_INDEXED = rf"{_LETTER}(?:{_SUBSCRIPT})?"
_NAMED = re.compile(
    r"[A-Z]{2,4}|\|[A-Z]{2}\||m? ?\\angle ?[A-Z]{1,3}|\\overline ?\{ ?[A-Z]{2} ?\}|[PE][(\[][^()\[\]=0-9]{1,40}[)\]]"
    r"|\[ ?[A-Z]{3,6} ?\]|\\(?:det|max|min)(?: ?[A-Z]| ?\( ?[A-Z] ?\))?"
    rf"|{_LETTER}_\{{ ?{_LETTER} ?[-+] ?[0-9]+ ?\}}|[fgh]\( ?[fgh]\( ?{_ARGUMENT} ?\) ?\)"
)
"""Lengths, angles, expectations, areas such as [ABC], determinants, a_{n+1} and f(g(2))."""
_VECTOR = re.compile(rf"\( ?{_INDEXED}(?: ?, ?{_INDEXED}){{1,5}} ?\)|\\(?:math(?:bf|rm)|vec) ?\{{ ?[A-Za-z] ?\}}")
_ASKED_FOR = re.compile(rf"^(?:{_LETTER}(?: ?\+ ?{_LETTER})+|\\frac ?\{{ ?{_LETTER} ?\}} ?\{{ ?{_LETTER} ?\}}) ?=")
"""What questions ask for so that the answer is one number: m + n, or a ratio of two unknowns; no number in it."""
_CHOICE = re.compile(
    r"^(?:\\(?:text|textbf|mathrm|mathbf) ?\{ ?\([A-J]\) ?\}|\([A-J]\)(?=[ ~\\]))(?:\\ |[ ~])*(?=[-\d.\\])"
)
_WORDS = re.compile(r" *(?:[Tt]he )?(?:[A-Za-z][a-z]{3,}|min|max|sum|gcd|lcm|det|avg)(?:[ -][A-Za-z]{2,}){0,7} *")
_EXTREMES = {"minimum", "maximum", "least", "most", "smaller", "larger", "lower", "higher", "other"}
"""Words of `_QUALIFIERS` that a label may have, as in "minimum = 5"."""
_REASON = re.compile(r",? (?:because|since|as)(?= )")
_SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b")
_MEMBER = re.compile(rf"^{_LETTER} ?(?:\\in(?![A-Za-z])|∈) ?(?=[(\[]|\\\{{|\\mathbb)")


# ---- what a computer algebra system reads --------------------------------------------------------------------------

_READ_MACROS = re.findall(
    r"[a-z]+",
    """
    frac binom sqrt pi infty cdot times div pm mp circ exp ln log lg lim min max gcd lcm sum prod int iint iiint
    oint cup cap setminus in le ge lt gt leq geq leqslant geqslant to mathbb emptyset varnothing
    lfloor rfloor lceil rceil lvert rvert vert overline pmod bmod mod equiv approx ne neq notin subset subseteq
    quad qquad limits sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh begin end partial prime
    """,
)
_READ = re.compile(
    r"(?:\s|[0-9]+(?:\.[0-9]+)?|\.[0-9]+"
    rf"|\\(?:{'|'.join(sorted({*_READ_MACROS, *GREEK}, key=len, reverse=True))})(?![A-Za-z])|\\[{{}}|]"
    rf"|(?<![A-Za-z])(?:{'|'.join(sorted(FUNCTIONS, key=len, reverse=True))}|[A-Za-z]{{1,3}})(?![A-Za-z])"
    r"|[-+*/^_(){}\[\]<>=,;|!≤≥])*+"
)
_MATRIX_BODY = re.compile(
    r"\\begin ?\{[bpvBV]?matrix\}.*?\\end ?\{[bpvBV]?matrix\}|\\begin ?\{array\}.*?\\end ?\{array\}"
)
_STYLED_LETTER = re.compile(r"\\math(?:bf|rm|bb|cal) ?\{ ?[A-Za-z] ?\}")
_LIST_WORD = re.compile(r"\\text ?\{ ?,? ?(?:and|or) ?\}|(?<= )(?:and|or)(?= )")
_TRAILING_WORDS = re.compile(r"(?<=[\d)}]) [A-Za-z]+(?: [A-Za-z]{2,}){0,3}$")
_UNFINISHED = re.compile(
    r"(?:[-+*/^_=<>]|\\(?:cdot|times|div|pm|mp|frac|sqrt|binom|le|ge|lt|gt|leq|geq|in|cup|cap|to)) *(?:$|[)\]}])"
    r"|[0-9]_|\{ *\}|[0-9] *\{ *[0-9]|\( *\)|[,;] *(?:$|[)\]}])|(?:^|[(\[{]) *[,;*/^_]"
    r"|\\(?:frac|binom)(?! *\{)|\\(?:frac|binom) *\{[^{}]*\}(?! *\{)"
    r"|\\sqrt *(?:\[[^\]]*\])? *[0-9] *[0-9]|(?<![_^]) *\{[^{}]*\} *[0-9]|(?<![A-Za-z0-9\\])[A-Za-z][0-9]"
)
_MIXED = re.compile(r"[0-9] *\\frac *\{ *([0-9]{1,50}) *\} *\{ *([0-9]{1,50}) *\}")
_SHORT_WORD = re.compile(r" (?:to|is|of|by|at|on|as|so|if|in|it|per|for|the|not)\b")
_VARIABLE = re.compile(rf"(?<![A-Za-z\\]){_LETTER}")
_APPLIED = re.compile(rf"(?<![A-Za-z\\]){_LETTER}(?:{_SUBSCRIPT})?(?:\^\{{?[-\w]+\}}?)? ?\( ?-?[^()+-]*\)")
_ORDERS = "lt|gt|le|ge|leq|geq|leqslant|geqslant"
_RELATION = re.compile(rf"[<>=≤≥]|\\(?:{_ORDERS}|in|to|ne|neq|notin|equiv|approx|pmod|bmod|mod)(?![A-Za-z])")
_ORDER = re.compile(rf"[<>≤≥]|\\(?:{_ORDERS})")


def _is_read(text: str) -> bool:
    plain = _STYLED_LETTER.sub("x", _LIST_WORD.sub(",", _MATRIX_BODY.sub("x", text)))
    return (
        _READ.fullmatch(plain) is not None
        and _UNFINISHED.search(plain) is None
        and _APPLIED.search(plain) is None
        and all(int(over) < int(under) for over, under in _MIXED.findall(plain))
        and _SHORT_WORD.search(plain) is None
        and plain.count("|") % 2 == 0
        and _is_balanced(plain)
        and not ("=" in plain and _VARIABLE.search(plain) is None)
    )


def _is_balanced(text: str) -> bool:
    """Whether every bracket is closed; ``]`` and ``)`` close either bracket, as in intervals."""
    opened: list[str] = []
    for character in text:
        if character in "([{":
            opened.append("{" if character == "{" else "(")
        elif character in ")]}" and (not opened or opened.pop() != ("{" if character == "}" else "(")):
            return False
    return not opened


def _is_listed(text: str) -> bool:
    """Whether anything in a text stands in a list, be it in brackets; commas between thousands make none."""
    return _SEPARATOR.search(without_thousands(text)) is not None


def _relations(text: str) -> set[str]:
    """The kinds of relations in a text, but for those in limits such as that of a sum."""
    outside = re.sub(r"[_^] ?\{[^{}]*\}", "", text)
    return {_ORDER.sub("<", relation) for relation in _RELATION.findall(outside)}
