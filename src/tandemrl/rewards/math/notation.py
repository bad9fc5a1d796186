r"""Normal forms of mathematical answers, without markup, units and shorthand that change nothing. Without torch."""

import re
import string
import unicodedata


def visible(text: str) -> str:
    """A text as it looks: characters of no width are removed, and full-width ones become plain ones."""
    if text.isascii():
        return text
    return text.translate(_VISIBLE)


def hidden(text: str) -> bool:
    """Whether a text has characters that cannot be seen, such as one that turns the direction of the text."""
    return any(unicodedata.category(each) in _UNSEEN for each in text if not each.isspace() and each not in _ASCII)


def clean(answer: str) -> str:
    r"""An answer without markup that changes nothing. ``\frac12``, "7 3/4" and "3 million" are written out, and single
    spaces stay."""
    answer = visible(answer)
    for old, new in _REWRITES:
        answer = answer.replace(old, new)
    answer = re.sub(r"(?<!\\)\\!", "", answer)
    answer = re.sub(r"(?:(?<!\\)\\[ ,;:]|\s)+", " ", answer)
    answer = _ROW_GAP.sub(r"\\\\", answer)
    answer = _EMPHASIS.sub(r"\g<markdown>\g<latex>", answer.strip())
    if _REALS.fullmatch(answer):
        answer = r"(-\infty, \infty)"
    answer = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", answer)
    answer = re.sub(r"\\(?:mathrm|text)\{([ie])\}", r"\1", answer)
    answer = re.sub(r" ?\\(?:text|mathrm)\{ ?percent\}| ?\bpercent\b", "%", answer)
    answer = re.sub(r"\\frac\s*(\d|\\pi(?![A-Za-z]))", r"\\frac{\1}", answer)
    answer = re.sub(r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}", answer)
    answer = re.sub(r"(?<![\d./])(\d+) +(\d+) ?/ ?(\d+)(?![\d/])", r"\1\\frac{\2}{\3}", answer).strip()
    answer = re.sub(r"(?<=[\d}]) ?(?:\\(?:text|mathrm) ?\{)? ?(tr|b|m)illion(?![A-Za-z])\}?", _power_of_ten, answer)
    answer = re.sub(r"^\\\((.*)\\\)$", r"\1", answer)
    return without_full_stop(answer)


def without_full_stop(answer: str) -> str:
    """An answer without outer spaces and without a full stop at the end. An ellipsis stays."""
    return re.sub(r"(?<!\.)\.$", "", answer.strip()).strip()


def normalise(answer: str) -> str:
    """An answer without spaces, units, markup and shorthand, for comparison as a string.

    The steps are those of Hendrycks et al. (`boxed.normalise_math`), but labels such as "x =" stay, and digits with a
    space between them are kept apart: "7 3/4" is not 73/4.
    """
    return without_spaces(bare(clean(answer)))


def bare(answer: str) -> str:
    """A cleaned answer without units, degrees and percent signs."""
    for unwanted in (r"\%", "%", *(() if _ANGLE_FUNCTION.search(answer) else _DEGREES)):
        answer = answer.replace(unwanted, "")
    answer = UNIT.sub("", answer.strip()).strip()
    answer = re.sub(r"^\\(?:text|mathrm|textrm|textbf|mathbf|mbox)\{([^{}]*)\}$", r"\1", answer)
    return re.sub(r"(?<=\d) (?=\d{3}(?!\d))", "", answer).removesuffix(".").rstrip()


def without_spaces(answer: str) -> str:
    """An answer without spaces, except those between digits, which become "␣". ".5" and ``\\sqrt3`` are written out."""
    answer = re.sub(r"(?<=\d) (?=\d)", "␣", answer).replace(" ", "")
    answer = re.sub(r"(?<!\d)\.(?=\d)", "0.", answer)
    return re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", answer)


def split(answer: str, separators: str = ",;") -> tuple[str, ...]:
    """The parts of an answer between separators that are outside of brackets.

    ``]`` and ``)`` close either kind of bracket, as in intervals.
    """
    parts, depth, start = [], 0, 0
    for at, character in enumerate(answer):
        depth += (character in "([{") - (character in ")]}")
        if character in separators and depth == 0:
            parts.append(answer[start:at])
            start = at + 1
    return tuple(part.strip() for part in [*parts, answer[start:]])


# --------------------------------------------------------------------------------------------------------------------

_VISIBLE = {
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad")),
    **{fullwidth: fullwidth - 0xFEE0 for fullwidth in range(0xFF01, 0xFF5F)},
}
_ASCII = frozenset(string.printable)
_UNSEEN = {"Cc", "Cf", "Co", "Cs", "Cn"}
_ZEROS = {"m": 6, "b": 9, "tr": 12}


def _power_of_ten(scale: re.Match[str]) -> str:
    return rf" \cdot 10^{{{_ZEROS[scale[1]]}}}"


_ROW_GAP = re.compile(r"\\\\ ?\[-?[0-9.]+ ?(?:pt|ex|em|mm|cm)\]")
"""The end of a matrix row with the space below it."""
_EMPHASIS = re.compile(r"^\*\*(?P<markdown>.*)\*\*$|^\\(?:underline|mathbf|boldsymbol|bm) ?\{(?P<latex>[^{}]*)\}$")
_REALS = re.compile(r"(?:[A-Za-z] ?\\in ?)?(?:\\mathbb ?\{?R\}?|\\R|\\Reals)")
_DEGREES = (r"^\circ", r"^{\circ}", "°")
_ANGLE_FUNCTION = re.compile(r"sin|cos|tan|cot|sec|csc")
_REWRITES = (
    (r"\$", ""),
    ("$", ""),
    ("~", " "),
    ("{,}", ","),
    ("{:}", ":"),
    ("\N{MINUS SIGN}", "-"),
    ("≈", r"\approx "),
    ("≡", r"\equiv "),
    ("<=", "≤"),
    (">=", "≥"),
    ("!=", r"\ne "),
    ("≠", r"\ne "),
    (r"\neq", r"\ne"),
    ("==", "="),
    (r"\displaystyle", ""),
    (r"\varnothing", r"\emptyset"),
    (r"\tfrac", r"\frac"),
    (r"\dfrac", r"\frac"),
    (r"\cfrac", r"\frac"),
)

_UNIT_NAMES = (
    "cm centimeter centimeters centimetre centimetres",
    "mm millimeter millimeters millimetre millimetres",
    "km kilometer kilometers kilometre kilometres",
    "meter meters metre metres",
    "foot feet ft",
    "inch inches",
    "mile miles",
    "yard yards",
    "second seconds sec secs",
    "minute minutes min mins",
    "hour hours hr hrs",
    "day days",
    "week weeks",
    "month months",
    "year years",
    "kg kilogram kilograms",
    "gram grams",
    "mg milligram milligrams",
    "pound pounds lb lbs",
    "ounce ounces oz",
    "liter liters litre litres",
    "ml milliliter milliliters",
    "dollar dollars",
    "cent cents",
    "degree degrees",
    "radian radians rad",
    "mph",
    "unit units square sq cubic cu per",
)
UNITS = {name: names.split()[0] for names in _UNIT_NAMES for name in names.split()}
_PLAIN_UNIT = "|".join(sorted(UNITS, key=len, reverse=True))
UNITS |= {"m": "meter", "s": "second", "g": "gram", "h": "hour", "l": "liter"}
TEXT = re.compile(r"\\(?:text|mathrm|textrm|textbf|textit|mbox|operatorname|rm) ?\{(?P<text>[^{}]*)\}")
UNIT = re.compile(
    rf"(?<=[\w}}).\]°]) ?(?:"
    r"\\(?:text|mathrm|textrm|mbox|textit|rm) ?\{[^{}\d]*\}(?: ?\^ ?\{?\d\}?|[²³])?"
    rf"|(?:(?<![A-Za-z])(?:{_PLAIN_UNIT})(?: ?\^ ?\{{?\d\}}?|[²³])?(?: ?/ ?| |$))+)$",
    re.IGNORECASE,
)
"""A unit at the end of an answer: any text macro without digits, or known names (``m`` and ``s`` in a macro only)."""
