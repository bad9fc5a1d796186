"""The reward of questions about documents (MuSiQue, generated worlds), for answer, retrieval, citations and format.

An episode is scored by its transcript: by the last call of ``complete``, and by the documents that the tools showed.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from tandemrl.config import RewardConfig
from tandemrl.data.documents import HEADER, hops, supporting_ids
from tandemrl.data.messages import Message, Transcript
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Score
from tandemrl.tasks.math.notation import NUMBER_WORDS
from tandemrl.tasks.math.tagged import normalise_words, targets

COMPLETE = "complete"
"""The tool whose call ends an episode; its arguments are the result."""


class Era(NamedTuple):
    """How the parts of a score are combined to a reward: factor(n_hops) · Σ weight · part, where the parts ``em`` and
    ``f1`` are multiplied by answer(n_hops)."""

    weights: Mapping[str, float]
    factor: Callable[[int], float] = lambda n_hops: 1.0
    answer: Callable[[int], float] = lambda n_hops: 1.0

    def reward(self, parts: Mapping[str, float], n_hops: int) -> float:
        answer = {"em": self.answer(n_hops), "f1": self.answer(n_hops)}
        return self.factor(n_hops) * sum(
            weight * answer.get(name, 1.0) * parts[name] for name, weight in self.weights.items()
        )


def _mean(**weights: float) -> dict[str, float]:
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def _per_hop(n_hops: int) -> float:
    return 1 / max(n_hops, 1)


ERAS: Mapping[str, Era] = {
    "head": Era(
        _mean(em=0.9, f1=1.0, recall=1.0, precision=0.4, citation=0.6, format=0.1), factor=lambda n_hops: n_hops / 2
    ),
    "scaled": Era(
        _mean(em=1.0, f1=0.9, recall=1.0, precision=0.4, citation=0.6, format=0.1), factor=lambda n_hops: n_hops / 2
    ),
    "mean": Era(_mean(em=1.0, f1=0.9, citation=0.6, recall=0.4, format=0.1), answer=_per_hop),
    "bonus": Era({"em": 0.5, "f1": 0.5, "recall": 0.3, "citation": 0.2}, answer=_per_hop),
    "readme": Era({"em": 0.5, "f1": 0.5, "recall": 0.5}, answer=lambda n_hops: min(n_hops / 2, 1.0)),
    "agents": Era({"em": 1.0, "f1": 1.0, "citation": 0.7, "format": 0.5}),
}
"""The rewards that `reward.musique` can name: rlvr's, the newest first (fba115a, 1683851, 113abe9, 3ee1108, f5bc513),
and that of its environment of several agents. They are as published: a response that cites all documents and answers
nothing gets the full ``citation`` and ``format``, in the rewards that weigh them."""


def musique(row: Row, text: str, options: RewardConfig, transcript: Transcript) -> Score:
    """The reward of `ERAS` that ``reward.musique`` names. Every component is a part, whether it counts or not.

    The parts are: ``em`` and ``f1`` of the final answer, where numbers and ordinals may be written in figures;
    ``em_official`` and ``f1_official``, as in MuSiQue's script, where they may not; ``recall`` and ``precision`` of the
    documents that were shown; ``citation``, the recall of the documents that were cited; ``support_f1``, their F1 as in
    MuSiQue's script; ``format``, the share of the arguments that the call of ``complete`` has. ``acc`` is ``em``.

    Raises:
        DataError: the ground truth or the documents of the row are malformed.
    """
    references, supporting = targets(row), set(supporting_ids(row))
    retrieved, result = retrieved_ids(transcript.messages), completed(transcript.messages)
    answer, cited = result.final_answer, set(result.cited_doc_ids or ())
    accepted = with_figures(references)
    parts = {
        "em": exact_match(answer, accepted),
        "f1": f1(answer, accepted),
        "em_official": exact_match(answer, references),
        "f1_official": f1(answer, references),
        "recall": len(retrieved & supporting) / max(len(supporting), 1),
        "precision": len(retrieved & supporting) / max(len(retrieved), 1),
        "citation": len(cited & supporting) / len(supporting) if supporting else 1.0,
        "support_f1": set_f1(cited, supporting),
        "format": sum(argument is not None for argument in result) / len(result),
    }
    value = ERAS[options.musique].reward(parts, hops(row))
    return Score(value, {"acc": parts["em"], "answer_present": float(answer is not None), **parts}, answer)


# ---- transcripts ---------------------------------------------------------------------------------------------------


class Completed(NamedTuple):
    """The arguments of a call of ``complete``. An argument is None if it is missing or of the wrong type."""

    reasoning: Any = None
    final_answer: str | None = None
    cited_doc_ids: tuple[str, ...] | None = None


def completed(messages: Sequence[Message]) -> Completed:
    """The last call of ``complete`` in a transcript. Without such a call, all arguments are None."""
    calls = [call.get("function") or {} for message in messages for call in message.get("tool_calls") or ()]
    arguments = next((call.get("arguments") for call in reversed(calls) if call.get("name") == COMPLETE), None)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return Completed()
    if not isinstance(arguments, Mapping):
        return Completed()
    answer, cited = arguments.get("final_answer"), arguments.get("cited_doc_ids")
    cited = cited.split(",") if isinstance(cited, str) else cited
    return Completed(
        arguments.get("reasoning"),
        str(answer) if isinstance(answer, str | int | float) else None,
        tuple(str(each).strip() for each in cited) if isinstance(cited, list | tuple) else None,
    )


def retrieved_ids(messages: Sequence[Message]) -> set[str]:
    """The ids of all documents that tools showed.

    A tool's message counts only if it begins with a document, so that an error message that repeats the author's own
    words does not count.
    """
    told = [str(message.get("content")) for message in messages if message.get("role") == "tool"]
    shown = "\n".join(text for text in told if text.startswith(HEADER))
    return set(re.findall(rf"^{HEADER}(\S+)", shown, re.MULTILINE))


# ---- answers: exact match and F1 of SQuAD (arXiv:1606.05250) -------------------------------------------------------


def exact_match(answer: str | None, references: Sequence[str]) -> float:
    """1 if an answer equals one of the references in normal form, else 0. No answer (None) gets 0."""
    return 0.0 if answer is None else float(normalise_words(answer) in map(normalise_words, references))


def f1(answer: str | None, references: Sequence[str]) -> float:
    """The greatest F1 between the words of an answer and those of a reference, each word as often as it occurs. No
    answer (None) gets 0."""
    if answer is None:
        return 0.0
    ours, *others = (Counter(normalise_words(text).split()) for text in (answer, *references))
    return max((_overlap((ours & words).total(), ours.total(), words.total()) for words in others), default=0.0)


def set_f1(chosen: Collection[object], right: Collection[object]) -> float:
    """The F1 of a chosen set against the right one. It is 1 if both are empty."""
    chosen, right = set(chosen), set(right)
    return _overlap(len(chosen & right), len(chosen), len(right))


def _overlap(common: int, ours: int, theirs: int) -> float:
    return 2 * common / (ours + theirs) if ours or theirs else 1.0


def with_figures(references: Sequence[str]) -> list[str]:
    """The references, and each of them again in lower case with its numbers in figures: "Two" becomes "2", "the second"
    becomes "the 2nd".

    This is as in rlvr's MuSiQue, except that ordinals inside of words stay ("secondary").
    """
    lower = [reference.lower().strip() for reference in references]
    numbers = NUMBER_WORDS[:11]
    figures = [
        str(numbers.index(text)) if text in numbers else _ORDINAL.sub(lambda match: _ORDINALS[match[0]], text)
        for text in lower
    ]
    return list(dict.fromkeys([*references, *figures]))


_FIGURES = "zeroth:0th first:1st second:2nd third:3rd fourth:4th fifth:5th sixth:6th seventh:7th eighth:8th ninth:9th"
_ORDINALS = dict(pair.split(":") for pair in _FIGURES.split())
_ORDINAL = re.compile(rf"\b(?:{'|'.join(_ORDINALS)})\b")
