r"""Takes numbers out of their words: 5 of ``\text{5 more apples}``, but nothing of "5 dozen" and "not 5"."""

import re
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
    if not re.search("sin|cos|tan|cot|sec|csc", answer):
        answer = _DEGREES.sub(r" \\text{degrees}", answer)
    found = _COUNTED.fullmatch(_flat(answer)) or _MEASURED.fullmatch(answer)
    if not found:
        return Quantity(answer)
    value, tail, lead = found["value"].strip(), _flat(found["tail"] or ""), found.groupdict().get("lead") or ""
    names = tail.lower().replace("mph", "miles/hour").replace("/", " per ").replace("per ", "/")
    words = tuple(word for each in names.split() if (word := each.strip(",.:;()")))
    around = {*words, *(word.strip(",.:;()").lower() for word in lead.split())}
    letter = any(len(word) == 1 and word not in "ai" for word in around)
    plain = found.re is _COUNTED and re.search(r"(?<![\\A-Za-z])[A-Za-z]", TEXT.sub("", answer)) is not None
    if words and UNITS.keys() >= set(words) and words[0] != "squared" and not (plain and letter) and not changed(lead):
        return Quantity(value, tuple(sorted({UNITS[word] for word in words} - {"unit"})), unit=True)
    product = plain and (_FORMULA_WORDS & around or not any(len(word) > 3 or word in _SHORT_WORDS for word in around))
    if letter or product or "^" in tail or changed(lead, "1 " * (value == "1") + tail):
        return None
    return Quantity(value, words)


def changed(before: str, behind: str | None = "") -> bool:
    """Whether words make another number of the one they stand beside. None behind: there is no number."""
    words = before if behind is None else f"{before} # {behind}"
    return _CHANGES.search(" ".join(re.sub(r"[(),.:;]", " ", words.lower()).split())) is not None


def harmless(before: str, behind: str) -> bool:
    """Whether the words around an answer, as in "the value is … cm.", leave it as it is."""
    found = quantity(f"{before.replace('**', '')} 7 {behind.replace('**', '')}".strip())
    return found is not None and found.value == "7"


def _flat(answer: str) -> str:
    """Words without macros, and powers of units as words."""
    flat = " ".join(TEXT.sub(r" \g<text> ", answer).split())
    return _UNIT_POWER.sub(lambda unit: f"{'square' if unit[2] == '2' else 'cubic'} {unit[1]}", flat)


_UNIT_NAMES = """
    centimeter cm centimeters centimetre centimetres, millimeter mm millimeters,
    kilometer km kilometers kilometre kilometres, meter m meters metre metres, foot feet ft, inch inches in,
    mile miles mi, yard yards yd, second seconds sec secs s, minute minutes min mins, hour hours hr hrs h, day days,
    week weeks, month months, year years, kilogram kg kilograms, gram grams g, milligram mg milligrams,
    pound pounds lb lbs, ounce ounces oz, liter liters litre litres l, milliliter ml milliliters, dollar dollars,
    cent cents, degree degrees, radian radians rad, square sq squared, cubic cu, unit units
"""
UNITS = {name: names.split()[0] for names in _UNIT_NAMES.split(",") for name in names.split()}
_WORD_UNITS = "|".join(sorted((name for name in UNITS if len(name) > 1), key=len, reverse=True))
UNITS |= {f"/{name}": f"/{unit}" for name, unit in UNITS.items()}
_SHORT_WORDS = UNITS.keys() | re.findall(
    "[a-z]+",
    "did is of do was are can red new has toy men she he it dog ice to oil cds hot old his her key too mb net kwh mph "
    "gb pay egg car the per all bag box cup pen job pie pig cow cat hat kid boy pts",
)
"""Words of two or three letters that are no product of variables."""
_FORMULA_WORDS = set(re.findall("[a-z]+", "sin cos tan cot sec csc log ln exp gcd lcm det sqrt root pi inf frac mod"))
_UNIT_POWER = re.compile(rf"(?<![A-Za-z])({_WORD_UNITS}|[mshl]) ?\^ ?\{{?([23])\}}?")
_DEGREES = re.compile(r" ?\^\\circ ?(?:\\text ?\{ ?[CFK] ?\}|[CFK](?![A-Za-z]))?(?=$| ?\\text)")
_COUNTED = re.compile(
    r"(?:(?P<lead>[A-Za-z][A-Za-z ,'’:-]*)[ :])??"
    r"(?P<value>[-+]? ?(?:\d*\\frac\{-?\d+\}\{\d+\}|\d[\d,]*(?:\.\d+)?(?:/\d+| \\cdot 1[02]0*)?|\.\d+)%?)"
    rf"(?:(?: |(?<=%)|(?=(?:{_WORD_UNITS})(?![A-Za-z])))"
    r"(?P<tail>\(?(?:[A-Za-z/]|\d+-[a-z])(?:[^\W\d]|[ ,.'’()/-]|(?<= )\d+-[a-z])*))?",
)
_MEASURED = re.compile(
    r"(?P<value>.*[\w)}\]])"
    r"(?P<tail>(?:(?: ?\\text ?\{(?: ?[msghl] ?| ?[ap]\.m\. ?|[^{}\d]*[^\W\d_]{2}[^{}\d]*)\}"
    rf"| (?:{_WORD_UNITS})(?![A-Za-z]))(?: ?\^ ?\{{?[23]\}}?)?)+)"
)
_COUNTS = f"{'|'.join(NUMBER_WORDS)}|nil|thirty|forty|fifty|sixty|seventy|eighty|ninety|dozen|hundred|thousand"
_PART = "half|quarter|third|fourth|(?:fif|six|seven|eigh|nin|ten|eleven|twelf|sixteen|twentie|hundred|thousand)th"
_CHANGES = re.compile(
    # anywhere
    r"\b(?:or|wrongly|incorrectly|false|untrue|excluded|ruled|impossible|guess|maybe|perhaps|possibly|probably|unknown"
    r"|undefined|undetermined|squared|cubed|factorials?|doubled|tripled|halved|twice|thrice|dozen|hundreds?|thousands?"
    r"|[mbtr]+illions?|(?:quadr|quint|sext)illions?|lakhs?|lac|crores?|googol|myriad|least|most|minimum|maximum|about"
    r"|approximately|approx|roughly|around|nearly|almost|negatives?|minus|plus|mod|modulo|multiplied|divided|opposite"
    r"|reciprocals?|inverse|deficit|debt|loss|excluding|except|versus|vs|unless|neither|nor|either|instead|rather|but"
    r"|itself|exponent|logarithm|conjugate|complement|unlikely|mistaken|overdrawn|overdraft|too|short|sqrt|ln"
    r"|(?<!are )(?<!were )(?<!do )(?<!did )(?:not|no|never|none|cannot)|(?:is|was|ca|wo|could|would|should)n['’]t"
    r"|(?:right|wrong|correct|incorrect|root|power|log|double|triple|quadruple)(?! \w+s\b))\b"
    # before the number
    r"|\b(?:not|no|never|none|cannot|\w+n['’]t)\b.*#|\b(?:than|between|from|up|under|over|below|above|pi|times|root"
    r"|of(?<!(?:total|value) of)(?<!area of)(?<!volume of)(?<!probability of)|steps?|case|part|problem|question"
    r"|equation|figure|example|exercise|option|page|line|chapter|section|any|some|multiples?|divisible|factor) #"
    # behind the number
    r"|# (?:and|over|under|above|below|be|equals|than|k|if|without|off|pi|grand|gross|mil|kilo|mega|giga|tera|peta"
    r"|hecto|deca|deka|deci|centi|milli|micro|nano|pico|score|fold|something|basis|repeating|recurring|half|quarter"
    rf"|th|(?:st|nd|rd) of|to (?:the )?(?:power|third|\w+th)|1 (?:{_PART}))\b"
    r"|# (?:ish|odd|prime|cube|binary|hex|hexadecimal|octal|decimal)\b(?!.*s$)"
    r"|(?=#).*(?:\bin (?:the (?:red|hole)$|binary|hex|octal|base)\b|[a-z]fold\b|\bhalf$"
    rf"|\b(?:below|under|above|less than)(?: \w+)?$|\b(?:{_COUNTS})-(?:{_COUNTS}|{_PART})|(?:# |\b(?:and|or|to|of|is"
    rf"|are|plus|minus|times|over|by|at|point|than|base|remainder|dot|choose) )(?:{_COUNTS})\b(?!-)"
    rf"|\b(?:halves|(?:{_PART})s)\b(?<!quarters)|\b(?:{_PART})(?:-| of\b)"
    r"|\bquarters(?: of\b| (?!does|was|is|has)\w+s\b))"
)
"""Words that change the number, which is #, or doubt it."""
