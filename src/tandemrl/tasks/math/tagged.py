"""Scores short answers in ``<answer>…</answer>``: whole numbers and texts. It does not import torch."""

import json
import re
import string

from tandemrl.config import RewardConfig
from tandemrl.data.rows import DataError, Row
from tandemrl.rewards.protocol import Score

MAX_ANSWER_TAGS = 10
"""Search-R1 gives a right answer a quarter if more ``<answer>`` or ``</answer>`` tags than this are in the response."""

_ANSWER_TAG = re.compile(r"</?answer>")


# ---- scorers: (row, text, options) -> Score ------------------------------------------------------------------------


def integer(row: Row, text: str, options: RewardConfig) -> Score:
    """TinyZero's multiplication and arithmetic: 1 if the last ``<answer>`` is the right whole number, 0.1 for another.

    Raises:
        DataError: the ground truth is not a whole number.
    """
    try:
        gold = int(row.ground_truth)
    except ValueError:
        raise DataError(
            f"row {row.example_id}: ground truth of {row.data_source} must be a whole number, found "
            f"{row.ground_truth[:80]!r}"
        ) from None
    number = re.fullmatch(
        r"-?[0-9]{1,100}", tagged_answer(text, published=options.compat in ("verl", "tinyzero")) or ""
    )
    answer = number.group() if number else None
    return graded(answer is not None and int(answer) == gold, answer, options, 0.1)


def exact_match(row: Row, text: str, options: RewardConfig) -> Score:
    """Search-R1's question answering (arXiv:2503.09516): 1 if the last ``<answer>`` is one of the targets, else
    ``reward.format_score``. A right answer gets a quarter if the response has more than `MAX_ANSWER_TAGS` tags."""
    answer = tagged_answer(text, published=options.compat == "verl")
    correct = answer is not None and normalise_words(answer) in map(normalise_words, targets(row))
    score = graded(correct, answer, options, 0.0)
    if correct and max(text.count("<answer>"), text.count("</answer>")) > MAX_ANSWER_TAGS:
        return score._replace(value=score.value / 4)
    return score


def graded(correct: bool, answer: str | None, options: RewardConfig, wrong: float) -> Score:
    """1 for a correct answer, ``reward.format_score`` for another one (``wrong`` if that is null), 0 for none."""
    if options.format_score is not None:
        wrong = options.format_score
    value = 0.0 if answer is None else 1.0 if correct else float(wrong)
    return Score(value, {"acc": float(correct), "answer_present": float(answer is not None)}, answer)


# ---- extraction ----------------------------------------------------------------------------------------------------


def tagged_answer(text: str, *, published: bool = False) -> str | None:
    """The content of the last ``<answer>…</answer>``, which may have several lines; None if there is none.

    Every tag of the response must belong to a pair: ``<answer>5</answer>3</answer>`` has no answer. A grader that
    overlooks stray tags pays for responses that ramble on after their answer. In tandem training this is enough to make
    a senior forget to stop, since its junior ends most of its texts.

    Args:
        published: stray tags are overlooked, as in Search-R1, verl and TinyZero: the last match of
            ``<answer>(.*?)</answer>``.
    """
    if published:
        answer, rest = None, text
        while True:  # linear, which the regular expression is not where many tags are left open
            _, opened, rest = rest.partition("<answer>")
            content, closed, rest = rest.partition("</answer>")
            if not (opened and closed):
                return answer
            answer = content.strip()
    tags = _ANSWER_TAG.findall(text)
    if not tags or tags != ["<answer>", "</answer>"] * (len(tags) // 2):
        return None
    return text[text.rindex("<answer>") + len("<answer>") : text.rindex("</answer>")].strip()


def normalise_words(text: str) -> str:
    """SQuAD's normal form (arXiv:1606.05250): lower case, no punctuation, no articles, single spaces."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())


def targets(row: Row) -> list[str]:
    """The accepted answers: a string, a JSON list, or ``{"target": …}`` with either.

    Raises:
        DataError: the ground truth is none of these.
    """
    try:
        gold = json.loads(row.ground_truth)
    except (ValueError, RecursionError):
        gold = row.ground_truth
    if isinstance(gold, dict):
        gold = gold.get("target")
    elif not isinstance(gold, str | list):  # a text that happens to be JSON, such as 1912
        gold = row.ground_truth
    accepted = gold if isinstance(gold, list) else [gold]
    if not accepted or not all(isinstance(target, str) for target in accepted):
        raise DataError(
            f"row {row.example_id}: ground truth of {row.data_source} must be a text, a list of texts, or "
            f'{{"target": …}}, found {row.ground_truth[:80]!r}'
        )
    return accepted
