r"""Takes numbers out of their words: 5 of ``\text{5 more apples}``, but nothing of "5 dozen" and "not 5"."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from tandemrl.tasks.math.notation import NUMBER_WORDS, TEXT


class Quantity(NamedTuple):
    """A value, and the words that say of what."""

    value: str
    words: tuple[str, ...] = ()
    unit: bool = False
    """The words are the name of a known unit."""


@lru_cache(1024)
def quantity(answer: str) -> Quantity | None:
    r"""A cleaned answer without its words, of which there may be some before and behind; None if a word changes it.

    Examples:
        >>> quantity(r"\text{Tom has 5 more apples}").value, quantity("5 km"), quantity(r"5 \text{ or more}")
        ('5', Quantity(value='5', words=('kilometer',), unit=True), None)
    """
    if not ANGLE.search(answer):
        answer = _DEGREES.sub(r" \\text{degrees}", answer)
    flat = " ".join(TEXT.sub(r" \g<text> ", answer).split())
    flat = _UNIT_POWER.sub(lambda unit: f"{_POWERS[unit[2]]} {unit[1]}", flat)
    if found := _COUNTED.fullmatch(flat):
        value, lead, tail = found["value"], found["lead"] or "", found["tail"] or ""
        plain = re.search(r"(?<![\\A-Za-z])[A-Za-z]", TEXT.sub("", answer)) is not None
    elif found := _MEASURED.fullmatch(answer):
        tail = _UNIT_POWER.sub(lambda unit: f"{_POWERS[unit[2]]} {unit[1]}", TEXT.sub(r" \g<text> ", found["words"]))
        value, lead, plain = found["value"].strip(), "", False
    else:
        return Quantity(answer)
    words = tail.lower().replace("mph", "miles/hour").replace("/", " per ").replace("per ", "/")
    words = tuple(word for each in words.split() if (word := each.strip(",.:;()")))
    letters = plain and any(len(word) == 1 for word in words)
    if words and set(words) <= UNITS.keys() and words[0] != "squared" and not letters and not _wrong(lead, ""):
        return Quantity(value, tuple(sorted({UNITS[word] for word in words} - {"unit"})), unit=True)
    product = plain and _may_be_product([*lead.split(), *words])
    product = product or "^" in tail or any(len(word) == 1 and word not in "ai" for word in words)
    fraction = value == "1" and re.fullmatch(_PART, words[0] if words else "")
    return None if product or fraction or _wrong(lead, tail) else Quantity(value, words)


def is_changing(words: str) -> bool:
    """Whether a word makes another number of the one it stands beside."""
    return _CHANGES.search(words.lower()) is not None


def harmless(before: str, behind: str) -> bool:
    """Whether the words around an answer, as in "the value is … cm.", leave it as it is."""
    before, behind = (TEXT.sub(r"\g<text>", side.replace("**", "")) for side in (before, behind))
    if not (_BEFORE.fullmatch(before) and _BEHIND.fullmatch(behind)) or _wrong(before, behind):
        return False
    beside = [word.strip(".,:;()") for word in (*before.split()[-1:], *behind.split()[:1])]
    return not any(
        word in _FORMULA_WORDS or (len(word) == 1 and word.lower() not in UNITS and word not in "aAI%°")
        for word in beside
    )


def _wrong(lead: str, tail: str) -> bool:
    before, behind = (" ".join(re.sub(r"[(),.:;]", " ", words.lower()).split()) for words in (lead, tail))
    return bool(_CHANGES.search(before) or _CHANGES_BEHIND.search(before)) or bool(
        _CHANGES.search(behind) or _CHANGED_BY.search(behind)
    )


def _may_be_product(words: Sequence[str]) -> bool:
    """Whether words that stand in no macro may be variables and functions."""
    words = [word.lower().strip(",.:;()") for word in words]
    if any(len(word) == 1 and word not in "ai" for word in words) or _FORMULA_WORDS.intersection(words):
        return True
    return bool(words) and not any(len(word) > 3 or word in _SHORT_WORDS for word in words)


_UNIT_NAMES = """
    centimeter cm centimeters centimetre centimetres, millimeter mm millimeters millimetre millimetres,
    kilometer km kilometers kilometre kilometres, meter m meters metre metres, foot feet ft, inch inches in,
    mile miles mi, yard yards yd, second seconds sec secs s, minute minutes min mins, hour hours hr hrs h, day days,
    week weeks, month months, year years, kilogram kg kilograms, gram grams g, milligram mg milligrams,
    pound pounds lb lbs, ounce ounces oz, liter liters litre litres l, milliliter ml milliliters, dollar dollars,
    cent cents, degree degrees, radian radians rad, square sq squared, cubic cu, unit units
"""
UNITS = {name: names.split()[0] for names in _UNIT_NAMES.split(",") for name in names.split()}
UNITS |= {f"/{name}": f"/{unit}" for name, unit in UNITS.items()}
_WORD_UNITS = "|".join(sorted((name for name in UNITS if name.isalpha() and len(name) > 1), key=len, reverse=True))
_POWERS = {"2": "square", "3": "cubic"}
_UNIT_POWER = re.compile(rf"(?<![A-Za-z])({_WORD_UNITS}|[mshl]) ?\^ ?\{{?([23])\}}?")
ANGLE = re.compile(r"sin|cos|tan|cot|sec|csc")
_DEGREES = re.compile(r" ?\^\\circ ?(?:\\text ?\{ ?[CFK] ?\}|[CFK](?![A-Za-z]))?(?=$| ?\\text)")
_NUMBER = r"[-+]? ?(?:\d*\\frac\{-?\d+\}\{\d+\}|\d[\d,]*(?:\.\d+)?(?:/\d+| \\cdot 1[02]0*)?|\.\d+)%?"
_COUNTED = re.compile(
    rf"(?:(?P<lead>[A-Za-z][A-Za-z ,'’:-]*)[ :])??(?P<value>{_NUMBER})"
    rf"(?:(?: |(?<=%)|(?=(?:{_WORD_UNITS})(?![A-Za-z])))"
    r"(?P<tail>\(?(?:[A-Za-z/]|\d+-[a-z])(?:[^\W\d]|[ ,.'’()/-]|(?<= )\d+-[a-z])*))?"
)
_MEASURED = re.compile(
    r"(?P<value>.*[\w)}\]])"
    r"(?P<words>(?: ?\\text ?\{(?: ?[msghl] ?| ?[ap]\.m\. ?|[^{}\d]*[^\W\d_]{2}[^{}\d]*)\}(?: ?\^ ?\{?[23]\}?)?)+)"
)
_BEFORE = re.compile(r"\s*(?:#*[A-Za-z]+(?:['’-][a-z]+)*[,.:;]*\s+|[:#]+\s*)*")
_BEHIND = re.compile(r"(?: ?\\?%| ?°)?[,.:;]*(?:\s+\(?[A-Za-z]+(?:['’-][a-z]+)*\)?[,.:;]*)*\s*")
_FORMULA_WORDS = set(re.findall("[a-z]+", "sin cos tan cot sec csc log ln exp gcd lcm det sqrt root pi inf frac mod"))
_SHORT_WORDS = re.findall(
    "[a-z]+",
    """
    did is of do was are can red in new has toy men she ml he it dog ice to oil cds hot old his her cm key kg too mg mb
    net kwh sq mph gb oz pay egg car km mm ft lb lbs hr hrs sec min mi yd the per all day bag box cup pen job pie pig
    cow cat hat kid boy pts
    """,
)
"""Words of two or three letters that are no product of variables."""
_COUNTS = f"{'|'.join(NUMBER_WORDS)}|nil|thirty|forty|fifty|sixty|seventy|eighty|ninety|dozen|hundred|thousand"
_PART = (
    "half|quarter|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|sixteenth|twentieth"
    "|hundredth|thousandth)"
)
_CHANGES = re.compile(
    r"\b(?:or|wrongly|incorrectly|false|untrue|excluded|ruled|impossible|guess|maybe|perhaps|possibly|probably|unknown"
    r"|undefined|undetermined|squared|cubed|factorials?|doubled|tripled|halved|twice|thrice|dozen|hundreds?|thousands?"
    r"|[mbtr]+illions?|(?:quadr|quint|sext)illions?|lakhs?|lac|crores?|googol|myriad|least|most|minimum|maximum|about"
    r"|approximately|approx|roughly|around|nearly|almost|negatives?|minus|plus|mod|modulo|multiplied|divided|opposite"
    r"|reciprocals?|inverse|deficit|debt|loss|excluding|except|versus|vs|unless|neither|nor|either|instead|rather|but"
    r"|itself|exponent|logarithm|conjugate|complement|unlikely|mistaken|overdrawn|overdraft|too|short|sqrt|ln"
    r"|(?<!are )(?<!were )(?<!do )(?<!did )(?:not|no|never|none|cannot)|(?:is|was|ca|wo|could|would|should)n['’]t"
    r"|(?:right|wrong|correct|incorrect|root|power|log|double|triple|quadruple)(?! \w+s\b))\b"
)
"""Words that change the number they stand beside, or doubt it."""
_CHANGED_BY = re.compile(
    r"^(?:and|over|under|above|below|be|equals|than|k|if|without|off|pi|grand|gross|mil|kilo|mega|giga|tera|peta|hecto"
    r"|deca|deka|deci|centi|milli|micro|nano|pico|score|fold|something|basis|repeating|recurring|half|quarter)\b"
    r"|^(?:ish|odd|prime|cube|binary|hex|hexadecimal|octal|decimal)\b(?!.*s$)"
    r"|^(?:st|nd|rd|th) of\b|^th\b|^to (?:the )?(?:power|third|\w+th)\b"
    r"|\bin (?:the (?:red|hole)$|binary|hex|octal|base)\b"
    rf"|[a-z]fold\b|\b(?:{_COUNTS})-(?:{_COUNTS}|{_PART})|\bhalf$|\b(?:below|under|above|less than)(?: \w+)?$"
    r"|(?:^|\b(?:and|or|to|of|is|are|plus|minus|times|over|by|at|point|than|base|remainder|dot|choose) )"
    rf"(?:{_COUNTS})\b(?!-)"
    rf"|\b(?:halves|(?:{_PART})s)\b(?<!quarters)|\b(?:{_PART})(?:-| of\b)"
    r"|\bquarters(?: of\b| (?!does|was|is|has)\w+s\b)"
)
"""What changes a number before it."""
_CHANGES_BEHIND = re.compile(
    r"\b(?:not|no|never|none|cannot|\w+n['’]t)\b|\b(?:than|between|from|up|under|over|below|above|pi|times|root|of|steps?|case|part|problem|question|equation|figure"
    r"|example|exercise|option|page|line|chapter|section|any|some|multiples?|divisible|factor)$"
    r"(?<!total of)(?<!value of)(?<!area of)(?<!volume of)(?<!probability of)"
)
"""What changes or counts a number behind it."""
