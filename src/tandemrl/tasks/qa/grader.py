"""The reward of questions about documents (MuSiQue, generated worlds), for answer, retrieval, citations and format.

An episode is scored by its transcript: by the last call of ``complete``, and by the documents that the tools showed.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tandemrl.config import RewardConfig
from tandemrl.data.documents import hops, supporting_ids
from tandemrl.data.messages import Transcript
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Score
from tandemrl.tasks.math.tagged import targets
from tandemrl.tasks.qa.answers import exact_match, f1, set_f1, with_figures
from tandemrl.tasks.qa.transcripts import completed, retrieved_ids


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
        "format": result.share,
    }
    value = ERAS[options.musique].reward(parts, hops(row))
    return Score(value, {"acc": parts["em"], "answer_present": float(answer is not None), **parts}, answer)
