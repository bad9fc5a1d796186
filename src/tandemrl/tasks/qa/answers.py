"""Scores short answers to questions: exact match and F1 of SQuAD (arXiv:1606.05250). Without torch."""

import re
from collections import Counter
from collections.abc import Collection, Sequence

from tandemrl.tasks.math.tagged import normalise_words

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_ORDINALS = "zeroth:0th first:1st second:2nd third:3rd fourth:4th fifth:5th sixth:6th seventh:7th eighth:8th ninth:9th"
ORDINALS = dict(pair.split(":") for pair in _ORDINALS.split())
_ORDINAL = re.compile(rf"\b(?:{'|'.join(ORDINALS)})\b")


def exact_match(answer: str | None, references: Sequence[str]) -> float:
    """1 if an answer equals one of the references in normal form, else 0. No answer (None) gets 0."""
    return 0.0 if answer is None else float(normalise_words(answer) in map(normalise_words, references))


def f1(answer: str | None, references: Sequence[str]) -> float:
    """The greatest F1 between the words of an answer and those of a reference, each word as often as it occurs. No
    answer (None) gets 0."""
    return 0.0 if answer is None else max((_f1_of(answer, reference) for reference in references), default=0.0)


def with_figures(references: Sequence[str]) -> list[str]:
    """The references, and each of them again in lower case with its numbers in figures: "Two" becomes "2", "the second"
    becomes "the 2nd".

    This is as in rlvr's MuSiQue, except that ordinals inside of words stay ("secondary").
    """
    lower = [reference.lower().strip() for reference in references]
    figures = [
        str(NUMBERS.index(text)) if text in NUMBERS else _ORDINAL.sub(lambda match: ORDINALS[match.group()], text)
        for text in lower
    ]
    return list(dict.fromkeys([*references, *figures]))


def set_f1(chosen: Collection[object], right: Collection[object]) -> float:
    """The F1 of a chosen set against the right one. It is 1 if both are empty."""
    chosen, right = set(chosen), set(right)
    return 2 * len(chosen & right) / (len(chosen) + len(right)) if chosen or right else 1.0


# --------------------------------------------------------------------------------------------------------------------


def _f1_of(answer: str, reference: str) -> float:
    ours, theirs = Counter(normalise_words(answer).split()), Counter(normalise_words(reference).split())
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())
