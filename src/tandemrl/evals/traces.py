"""A solution as text: its steps, what is left without the final answer, and what a reader could copy out of it."""

import re
from collections.abc import Sequence
from typing import NamedTuple

_NUMBER = r"(?:(?<![\w)\]}])-)?(?:\d+(?:(?:,|\{,\}|\\[,!])\d{3}(?!\d))*(?:\.\d+)?|(?<![\w.])\.\d+)"
"""A number; a minus after another one subtracts."""
_FRACTION = r"(?:(?<![\w)\]}])-)?(?:\\[dt]?frac\{\d+\}\{\d+\}|\d+/\d+)"
_ENDS = (r"\n[ \t]*\n\s*", r"\n\s*", r"(?<=[.!?])\s+")
"""What ends a step: a blank line; in a text without one a line break; in a text of one line the end of a sentence."""
_HASHES = rf"####\s*\$?(?:{_NUMBER})\$?[ \t]*(?:\n|\Z)"
"""GSM8K's answer; with more in the line it is a heading."""
_STATED = re.compile(rf"\\boxed|{_HASHES}|<answer>|\banswers?\b[^\n]{{0,12}}?(?:\bis\b|:|=)", re.IGNORECASE)
_BRACED = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"
_MARKED = re.compile(
    rf"\\boxed\{{({_BRACED})\}}|####\s*\$?({_NUMBER})\$?[ \t]*(?:\n|\Z)|<answer>\s*([^<\n]*)"
    rf"|\banswer\b[^\d\n.!?]{{0,20}}?({_NUMBER})|\banswer\s+is:?\s+([^.\n]+)",
    re.IGNORECASE,
)
_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_ONES += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_WORDS = [*_ONES, *(f"{ten}-{one}" if one else ten for ten in _TENS for one in ["", *_ONES[1:10]])]
"""The numbers below 100 in words."""
MASK = "…"


class Cue(NamedTuple):
    """What begins and what ends a stated answer. A reader that is to answer at once goes on after ``begin``."""

    begin: str
    end: str


CUES = (Cue("\\boxed{", "}"), Cue("#### ", ""), Cue("<answer>", "</answer>"), Cue("The answer is ", "."))


def cue_of(texts: Sequence[str]) -> Cue:
    """The cue that most texts state their answers with; of texts without any it is that of words."""
    signs = (r"\\boxed\{", _HASHES, "<answer>", r"\banswer is\b")
    counts = [sum(bool(re.search(sign, text, re.IGNORECASE)) for text in texts) for sign in signs]
    return CUES[counts.index(max(counts))] if any(counts) else CUES[-1]


def steps_of(text: str) -> list[str]:
    r"""The steps of a text, each with the white space that follows it.

    Examples:
        >>> steps_of("5 plus 2 is 7.\n\n7 minus 3 is 4.\n\n")
        ['5 plus 2 is 7.\n\n', '7 minus 3 is 4.\n\n']
        >>> steps_of("It has 3.5 l. Half is left.")
        ['It has 3.5 l. ', 'Half is left.']
    """
    for end in _ENDS:
        steps = [match[0] for match in re.finditer(rf".+?(?:{end}|\Z)", text, re.DOTALL)]
        if len(steps) > 1 or end is _ENDS[-1]:
            return steps if text.strip() else []
    raise AssertionError


def reasoning(text: str, answer: str | None = None) -> str:
    r"""A text without its final answer: without the lines at its end that state one, and what follows them. Of the
    first such line, the sentences before the one that states the answer stay.

    Args:
        answer: the answer that the grader found. A last sentence that holds it goes, too, where nothing states one.

    Examples:
        >>> reasoning("5 plus 2 is 7.\n\n\\boxed{7}"), reasoning("5 plus 2 is 7. So the answer is 7.")
        ('5 plus 2 is 7.\n\n', '5 plus 2 is 7. ')
    """
    lines = text.splitlines(keepends=True)
    filled = [i for i, line in enumerate(lines) if line.strip()]
    stated = {i for i in filled if _STATED.search(lines[i])}
    if not stated:
        *kept, last = _sentences(lines[filled[-1]]) if filled else [""]
        ends = bool(answer and (kept or len(filled) > 1) and mentions(last, answer))
        return "".join([*lines[: filled[-1]], *kept]) if ends else text
    cut = max(stated)
    for i in reversed([i for i in filled if i < cut]):
        if i not in stated and lines[i].strip() not in ("\\[", "$$"):
            break
        cut = i
    sentences = _sentences(lines[cut])
    first = next((i for i, sentence in enumerate(sentences) if _STATED.search(sentence)), 0)
    return "".join([*lines[:cut], *sentences[:first]])


def mentions(text: str, truth: str) -> list[tuple[int, int]]:
    """Where a text holds a ground truth: numbers of its value, in digits, as fractions or (below 100) in words; or
    else the words of it.

    Examples:
        >>> mentions("1,200 is 1200.0, not 120", "1200"), mentions("10-7, or Seven, not 77 or twenty-seven", "7")
        ([(0, 5), (9, 15)], [(3, 4), (9, 14)])
    """
    value, words = _value(truth), truth.strip().strip("$").strip()
    if value is None:
        exact = re.NOFLAG if len(words) == 1 else re.IGNORECASE
        return [match.span() for match in re.finditer(rf"(?<!\w){re.escape(words)}(?!\w)", text, exact) if words]
    found = [match for kind in (_FRACTION, _NUMBER) for match in re.finditer(kind, text) if _value(match[0]) == value]
    if value in range(len(_WORDS)):
        word = _WORDS[int(value)].replace("-", "[- ]")
        found += re.finditer(rf"(?<![\w-]){word}(?![\w-])", text, re.IGNORECASE)
    spans = sorted(match.span() for match in found)
    return [
        (a, b) for i, (a, b) in enumerate(spans) if not any(c <= a and b <= d for c, d in spans[:i] + spans[i + 1 :])
    ]


def before(steps: Sequence[str], truth: str) -> int:
    """How many steps there are before the first one that holds the ground truth."""
    return next((i for i, step in enumerate(steps) if mentions(step, truth)), len(steps))


def masked(text: str, truth: str) -> str:
    """A text with `MASK` wherever it holds the ground truth."""
    for begin, end in reversed(mentions(text, truth)):
        text = text[:begin] + MASK + text[end:]
    return text


def corrupted(step: str, *, up: bool) -> str | None:
    """A step with another result: its last number is one more (``up``) or one less; None if it has no number.

    Examples:
        >>> corrupted("5 plus 2 is 7.", up=False), corrupted("vam yab", up=True)
        ('5 plus 2 is 6.', None)
    """
    numbers = [*re.finditer(_NUMBER, step)]
    value = _value(numbers[-1][0]) if numbers else None
    if value is None:
        return None
    other = value + (1 if up or value == 0 else -1)
    told = f"{other:.0f}" if other.is_integer() else repr(round(other, 9))
    return f"{step[: numbers[-1].start()]}{told}{step[numbers[-1].end() :]}"


def copied(text: str) -> str | None:
    r"""What a reader answers that can only copy: the last answer that the text states, else its last number.

    Examples:
        >>> copied("The answer is 9. First 5 plus 2 is 7."), copied("5 plus 2 is 7."), copied("vam yab")
        ('9', '7', None)
    """
    marked = [next(filter(None, match.groups()), "").strip() for match in _MARKED.finditer(text)]
    found = (marked or re.findall(_NUMBER, text) or [None])[-1]
    return str(_WORDS.index(found.lower())) if found is not None and found.lower() in _WORDS else found


def _sentences(line: str) -> list[str]:
    return re.findall(rf".+?(?:{_ENDS[-1]}|\Z)", line, re.DOTALL)


def _value(text: str) -> float | None:
    text = re.sub(r"[{\\]?,\}?|\\!|[$\s]", "", text)
    whole = re.fullmatch(r"(-?)(?:\\[dt]?frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+))", text)
    try:
        if whole is None:
            return float(text) if re.search(r"\d", text) else None  # words such as nan are no numbers
        above, below = map(int, filter(None, whole.groups()[1:]))
        return (-1 if whole[1] else 1) * above / below
    except (ValueError, ZeroDivisionError):
        return None
