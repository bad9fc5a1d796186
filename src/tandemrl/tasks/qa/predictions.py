"""Predictions in the form that MuSiQue's own evaluation script reads (arXiv:2108.00573)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandemrl.data.documents import documents_of
from tandemrl.data.rows import DataError, Row
from tandemrl.files import write_text
from tandemrl.tasks.qa.grader import completed


class Prediction(NamedTuple):
    """A line of MuSiQue's prediction file. ``predicted_support_idxs`` are the indices of the cited paragraphs, or where
    ids are no numbers, their places among the documents."""

    id: str
    predicted_answer: str
    predicted_support_idxs: list[int]
    predicted_answerable: bool


def predictions(samples: Sequence[Any], rows: Sequence[Row]) -> list[Prediction]:
    """The prediction of each row, in the order of the rows, from the call of ``complete`` in its first sample.

    The samples are those of an evaluation (``evals.measures.Sample``).

    The prediction is empty if the sample has no such call, or the row has no sample because its prompt is too long. A
    question with an answer is predicted to be answerable.

    Raises:
        DataError: a sample is not an episode, or the documents of a row are malformed.
    """
    first = {sample.example_id: sample for sample in samples if sample.sample == 0}
    return [_prediction(row, first.get(row.example_id)) for row in rows]


def write_predictions(file: str | Path, found: Sequence[Prediction]) -> None:
    """Write one JSON object per line, as MuSiQue's ``evaluate_v1.0.py`` reads it."""
    write_text(Path(file), "".join(json.dumps(each._asdict(), ensure_ascii=False) + "\n" for each in found))


def by_group(macro: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The metrics of a result for each group of problems: ``all``, and every ``hops=N`` that exists."""
    groups: dict[str, dict[str, float]] = {"all": {}}
    for name, value in macro.items():
        group, _, metric = name.partition("/")
        group, metric = (group, metric) if "=" in group else ("all", name)
        groups.setdefault(group, {})[metric] = value
    return groups


# --------------------------------------------------------------------------------------------------------------------


def _prediction(row: Row, sample: Any | None) -> Prediction:
    name = str(row.extra_info.get("id", row.example_id))
    if sample is None:
        return Prediction(name, "", [], False)
    if sample.transcript is None:
        raise DataError(f"sample of {row.example_id}: it is no episode; predictions need rollout.environment=multihop")
    result, documents = completed(sample.transcript["messages"]), documents_of(row)
    numbered = all(document.id.isdecimal() for document in documents)  # as MuSiQue's are: indices of the paragraphs
    index = {each.id: int(each.id) if numbered else place for place, each in enumerate(documents)}
    cited = dict.fromkeys(index[each] for each in result.cited_doc_ids or () if each in index)
    answer = result.final_answer or ""
    return Prediction(name, answer, [*cited], bool(answer))
