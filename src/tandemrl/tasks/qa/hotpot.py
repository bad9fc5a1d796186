"""HotpotQA (arXiv:1809.09600) and 2WikiMultiHopQA (arXiv:2011.01060) in the form of MuSiQue. No torch."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tandemrl.data.parquet import write_splits
from tandemrl.data.rows import DataError
from tandemrl.data.sources import ExpectRows, Origin, Record, copy_of, provenance, split_rows
from tandemrl.tasks.qa.rows import question_record


class Published(NamedTuple):
    """A set. rows: the published sizes. files: those of the splits in what its authors publish."""

    repo: str
    config: str | None
    rows: Mapping[str, int]
    files: Mapping[str, str]


SETS: Mapping[str, Published] = {
    "hotpotqa": Published(
        "hotpotqa/hotpot_qa",
        "distractor",
        {"train": 90_447, "validation": 7405},
        {"train": "hotpot_train_v1.1.json", "validation": "hotpot_dev_distractor_v1.json"},
    ),
    "2wikimultihopqa": Published(
        "ohjoonhee/2WikiMultihopQA",
        None,
        {"train": 167_454, "validation": 12_576},
        {"train": "train.json", "validation": "dev.json"},
    ),
}


def build_hotpot(name: str, source: Path | None, out: Path, *, expect_rows: ExpectRows | None = None) -> dict[str, Any]:
    """Write a set as ``train`` and ``validation`` into ``out``, in the published order, and return the manifest.

    The rows are as those of `rows.build_musique`, with ``type`` in ``extra_info``. A document is a paragraph; it
    supports the answer if one of its sentences does.

    Args:
        name: a set of `SETS`.
        source: a folder with files of the two splits, as on the hub or as its authors publish them. None means the hub.
        expect_rows: how many rows each split must have; None as published, 0 any number.

    Raises:
        DataError: the data is missing or malformed, or a split has another number of rows than published.
    """
    published = SETS[name]
    origins = {split: Origin(published.repo, split, published.config) for split in published.rows}
    copies = {split: copy_of(source, published.files[split]) for split in origins}
    expected = published.rows if expect_rows is None else expect_rows
    where = str(source or published.repo)
    splits = split_rows(origins, copies, partial(_row, name), where, expected)
    official = any(copy != source for copy in copies.values())
    return write_splits(out, name, splits, {"source": where} if official else provenance([*origins.values()], source))


# --------------------------------------------------------------------------------------------------------------------


def _row(name: str, record: Record, split: str, index: int) -> dict[str, Any]:
    facts = {title for title, _ in _pairs(record, "supporting_facts", "sent_id")}
    docs = []
    for number, (title, sentences) in enumerate(_pairs(record, "context", "sentences")):
        body = " ".join(map(str.strip, sentences))
        docs.append({"id": str(number), "title": title, "body": body, "is_supporting": title in facts})
    place = {"split": split, "index": index, "id": record.text("id", "_id"), "type": record.text("type")}
    return question_record(name, record.text("question"), [record.text("answer")], docs, record.where, place)


def _pairs(record: Record, field: str, second: str) -> Iterator[tuple[str, Any]]:
    """(title, value) of a column: pairs as its authors write them, also as JSON text, or two lists as on the hub."""
    value: Any = record.fields.get(field)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if isinstance(value, Mapping):
        lists: list[Any] = [value.get("title"), value.get(second, value.get("content"))]
        paired = all(isinstance(each, list) for each in lists) and len(lists[0]) == len(lists[1])
        value = [*zip(*lists, strict=True)] if paired else None
    whole = isinstance(value, list) and value and all(isinstance(each, Sequence) and len(each) == 2 for each in value)
    if not whole or not all(isinstance(title, str) for title, _ in value):
        raise DataError(
            f"{record.where}, field {field!r}: expected [title, …] pairs, or lists title and {second}, found "
            f"{record.fields.get(field)!r:.80}"
        )
    for title, other in value:
        if second == "sentences" and not (isinstance(other, list) and all(isinstance(each, str) for each in other)):
            raise DataError(f"{record.where}, field {field!r}: expected sentences of {title!r}, found {other!r:.80}")
        yield title, other
