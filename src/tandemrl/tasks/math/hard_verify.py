"""Reads HardVerify-Math (TinyV, arXiv 2505.14625): problems with a right answer that is hard to verify and a wrong one.

The 250 published rows are in ``benchmarks/HardVerify-Math.json`` of uw-nsl/TinyV, and in zhangchenxu/HardVerify-Math on
the hub. They have ``id``, ``source``, ``question``, ``ground_truth``, ``fn_output``, a right answer that rules took for
wrong (a false negative), and ``tn_output``, a wrong answer (a true negative). The outputs are bare answers. The same
rows in verl's schema, as TinyV writes them, can be read, too. The module does not import torch.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tandemrl.data.loading import load_hub, read_list, read_records
from tandemrl.data.rows import DataError, Row, object_of
from tandemrl.data.sources import SUFFIXES, flattened
from tandemrl.files import hint

HARD_VERIFY = "HardVerify-Math"
"""The ``data_source`` of its rows."""


class AnswerPair(NamedTuple):
    """A problem, an answer to be accepted and one to be refused. ``source`` names the data set of the problem."""

    row: Row
    source: str
    right: str
    wrong: str


def load_pairs(source: str) -> list[AnswerPair]:
    """The rows of a ``.json`` file (one list), a ``.jsonl`` or ``.parquet`` file, or of ``hf:REPO:CONFIG:SPLIT``.

    Raises:
        DataError: there is no such file, or a row lacks a field; the message names the row (from 1) and the field.
    """
    pairs = [_pair(record, f"{source}, row {number}") for number, record in _records(source)]
    if not pairs:
        raise DataError(f"{source}: no rows")
    return pairs


def _records(source: str) -> Iterator[tuple[int, Any]]:
    if source.startswith("hf:"):
        _, *parts = source.split(":")
        if len(parts) != 3 or not all(parts):
            raise DataError(f"{source}: expected hf:REPO:CONFIG:SPLIT")
        return iter(enumerate(load_hub(parts[0], parts[1], parts[2], where=source), 1))
    path = Path(source)
    if not path.is_file():
        raise DataError(
            f"{source}: no such file{hint(path)}; the published rows are benchmarks/HardVerify-Math.json of "
            "https://github.com/uw-nsl/TinyV"
        )
    if path.suffix not in SUFFIXES:
        raise DataError(f"{source}: expected a .json, .jsonl or .parquet file, or hf:REPO:CONFIG:SPLIT")
    return read_list(path) if path.suffix == ".json" else read_records(path)


def _pair(record: Any, where: str) -> AnswerPair:
    fields = flattened(object_of(record, where))
    fields = {"id": fields.get("index"), **fields} if "index" in fields else fields
    texts = {name: fields.get(name) for name in ("source", "question", "ground_truth", "fn_output", "tn_output")}
    if wrong := [name for name, text in texts.items() if not isinstance(text, str) or not text.strip()]:
        raise DataError(f"{where}, field {wrong[0]!r}: expected a non-empty string, found {texts[wrong[0]]!r}")
    if "id" not in fields:
        raise DataError(f"{where}, field 'id': missing")
    question = str(texts["question"])
    row = Row(
        example_id=f"{HARD_VERIFY}/{fields['id']}",
        messages=({"role": "user", "content": question},),
        data_source=HARD_VERIFY,
        ground_truth=str(texts["ground_truth"]),
        extra_info={"question": question, "source": texts["source"]},
        ability="math",
    )
    return AnswerPair(row, str(texts["source"]), str(texts["fn_output"]), str(texts["tn_output"]))
