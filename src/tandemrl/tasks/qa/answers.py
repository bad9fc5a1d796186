"""Scores short answers to questions: exact match and F1 of SQuAD (arXiv:1606.05250), and MuSiQue's official scores
(arXiv:2108.00573). The module does not import torch.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tandemrl.tasks.math.tagged import normalise_words

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ORDINALS = dict(
    re.findall(
        r"(\w+):(\w+)",
        "zeroth:0th first:1st second:2nd third:3rd fourth:4th fifth:5th sixth:6th seventh:7th eighth:8th ninth:9th",
    )
)
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


def set_f1(chosen: Collection[str], right: Collection[str]) -> float:
    """The F1 of a chosen set against the right one. It is 1 if both are empty."""
    chosen, right = set(chosen), set(right)
    return 2 * len(chosen & right) / (len(chosen) + len(right)) if chosen or right else 1.0


class Judged(NamedTuple):
    """A question of MuSiQue with what was predicted of it.

    references: the answer and its aliases. supports: ids of the supporting paragraphs. answerable: whether its
    paragraphs suffice to answer it.
    """

    id: str
    references: Sequence[str]
    supports: Collection[str]
    answerable: bool
    predicted_answer: str | None
    predicted_supports: Collection[str]
    predicted_answerable: bool


def official_scores(questions: Sequence[Judged]) -> dict[str, float]:
    """The scores of MuSiQue's evaluation script, rounded to three places as there.

    Answer and support scores are means over answerable questions. If some are not (MuSiQue-Full), every id comes twice,
    once either way; the ``group_*`` scores are means over these pairs, with 0 unless both answerabilities were
    predicted right.

    Raises:
        ValueError: there is no answerable question, or an id of MuSiQue-Full does not come once either way.
    """
    answerable = [question for question in questions if question.answerable]
    if not answerable:
        raise ValueError("official scores need at least one answerable question")
    answers = [f1(each.predicted_answer or "", each.references) for each in answerable]
    supports = [set_f1(each.predicted_supports, each.supports) for each in answerable]
    scores = {
        "answer_f1": _mean(answers),
        "answer_em": _mean([exact_match(each.predicted_answer or "", each.references) for each in answerable]),
        "support_f1": _mean(supports),
    }
    if len(answerable) < len(questions):
        pairs: dict[str, list[bool]] = {}
        for each in questions:
            pairs.setdefault(each.id, []).append(each.answerable)
        for name, pair in pairs.items():
            if sorted(pair) != [False, True]:
                raise ValueError(f"{name}: MuSiQue-Full has every question twice, answerable and not")
        misjudged = {each.id for each in questions if each.predicted_answerable != each.answerable}
        right = [each.id not in misjudged for each in answerable]
        scores["group_answer_sufficiency_f1"] = _mean([x * ok for x, ok in zip(answers, right, strict=True)])
        scores["group_support_sufficiency_f1"] = _mean([x * ok for x, ok in zip(supports, right, strict=True)])
    return {name: round(score, 3) for name, score in scores.items()}


# --------------------------------------------------------------------------------------------------------------------


def _f1_of(answer: str, reference: str) -> float:
    ours, theirs = Counter(normalise_words(answer).split()), Counter(normalise_words(reference).split())
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
