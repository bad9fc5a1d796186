"""A solution as text: its steps, what is left without the final answer, and what a reader could copy out of it."""

import re
from collections.abc import Sequence
from typing import NamedTuple

_NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?"
_ENDS = (r"\n[ \t]*\n\s*", r"\n\s*", r"(?<=[.!?])\s+")
"""What ends a step: a blank line; in a text without one a line break; in a text of one line the end of a sentence."""
_STATED = re.compile(r"\\boxed|####|<answer>|\banswers?\b[^\n]{0,12}?(?:\bis\b|:|=)", re.IGNORECASE)
_MARKED = re.compile(
    rf"\\boxed\{{([^{{}}]*)\}}|####\s*({_NUMBER})|<answer>\s*([^<\n]*)|\banswer\b[^\d\n]{{0,20}}?({_NUMBER})",
    re.IGNORECASE,
)
MASK = "…"


class Cue(NamedTuple):
    """What begins and what ends a stated answer. A reader that is to answer at once goes on after ``begin``."""

    begin: str
    end: str


CUES = (Cue("\\boxed{", "}"), Cue("#### ", ""), Cue("<answer>", "</answer>"), Cue("The answer is ", "."))


def cue_of(texts: Sequence[str]) -> Cue:
    """The cue that most texts state their answers with; of texts without any it is that of words."""
    return max(CUES, key=lambda cue: sum(cue.begin.strip() in text for text in texts))


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
    r"""A text without its final answer: without the lines at its end that state one, and what follows them.

    Args:
        answer: the answer that the grader found. A last line that holds it goes, too, where no line states one.

    Examples:
        >>> reasoning("5 plus 2 is 7.\n\n\\boxed{7}")
        '5 plus 2 is 7.\n\n'
    """
    lines = text.splitlines(keepends=True)
    filled = [i for i, line in enumerate(lines) if line.strip()]
    stated = {i for i in filled if _STATED.search(lines[i])}
    if not stated and answer and len(filled) > 1 and mentions(lines[filled[-1]], answer):
        stated = {filled[-1]}
    cut = max(stated, default=len(lines))
    for i in reversed([i for i in filled if i < cut] if stated else []):
        if i not in stated and lines[i].strip() not in ("\\[", "$$"):
            break
        cut = i
    return "".join(lines[:cut])


def mentions(text: str, truth: str) -> list[tuple[int, int]]:
    """Where a text holds a ground truth: numbers of its value, or else the words of it.

    Examples:
        >>> mentions("1,200 is 1200.0, not 120", "1200")
        [(0, 5), (9, 15)]
    """
    value = _value(truth)
    if value is None:
        return [match.span() for match in re.finditer(re.escape(truth.strip()), text, re.I)] if truth.strip() else []
    return [match.span() for match in re.finditer(_NUMBER, text) if _value(match[0]) == value]


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
    return f"{step[: numbers[-1].start()]}{value + (1 if up or value == 0 else -1):g}{step[numbers[-1].end() :]}"


def copied(text: str) -> str | None:
    r"""What a reader answers that can only copy: the last answer that the text states, else its last number.

    Examples:
        >>> copied("The answer is 9. First 5 plus 2 is 7."), copied("5 plus 2 is 7."), copied("vam yab")
        ('9', '7', None)
    """
    marked = [next(filter(None, match.groups()), "") for match in _MARKED.finditer(text)]
    return (marked or re.findall(_NUMBER, text) or [None])[-1]


def _value(text: str) -> float | None:
    try:
        return float(text.strip().strip("$").replace(",", ""))
    except ValueError:
        return None
