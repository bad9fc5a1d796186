"""Reads HardVerify-Math (TinyV, arXiv 2505.14625): problems with a right answer that is hard to verify and a wrong one.

The 250 published rows are in ``benchmarks/HardVerify-Math.json`` of uw-nsl/TinyV, and in zhangchenxu/HardVerify-Math on
the hub. They have ``id``, ``source``, ``question``, ``ground_truth``, ``fn_output``, a right answer that rules took for
wrong (a false negative), and ``tn_output``, a wrong answer (a true negative). The outputs are bare answers. The same
rows in verl's schema, as TinyV writes them, can be read, too. The module does not import torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tandemrl.config.hints import hint
from tandemrl.data.rows import DataError, Row
from tandemrl.data.sources import Origin, flattened, read

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
    path = Path(source)
    if source.startswith("hf:"):
        _, *parts = source.split(":")
        if len(parts) != 3 or not all(parts):
            raise DataError(f"{source}: expected hf:REPO:CONFIG:SPLIT")
        records = read(Origin(parts[0], parts[2], parts[1]), None)
    elif not path.is_file():
        raise DataError(
            f"{source}: no such file{hint(path)}; the published rows are benchmarks/HardVerify-Math.json of "
            "https://github.com/uw-nsl/TinyV"
        )
    else:
        records = read(Origin(HARD_VERIFY), path)
    pairs = [_pair(each.fields, each.where) for each in records]
    if not pairs:
        raise DataError(f"{source}: no rows")
    return pairs


def _pair(record: Mapping[str, Any], where: str) -> AnswerPair:
    fields = flattened(record)
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
