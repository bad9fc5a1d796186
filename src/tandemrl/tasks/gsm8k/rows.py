"""GSM8K as files. Without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tandemrl.data.loading import parse_row
from tandemrl.data.parquet import heldout_size, write_splits
from tandemrl.data.rows import GSM8K, Row, record_of_row
from tandemrl.data.sources import ExpectRows, Origin, expect, provenance, read

GSM8K_ROWS: Mapping[str, int] = {"train": 7473, "test": 1319}
"""The published sizes."""
GSM8K_HELDOUT = 500
"""How many training problems are held out to choose checkpoints, which must not happen on a reported benchmark."""


def build_gsm8k(source: Path | None, out: Path, *, expect_rows: ExpectRows = GSM8K_ROWS) -> dict[str, Any]:
    """Write GSM8K as Parquet files ``train``, ``heldout`` and ``test`` into ``out``, and return ``out/manifest.json``.

    ``heldout`` is a fixed random part of the original training split (``GSM8K_HELDOUT`` rows, at most a tenth); no row
    is in two files.

    Args:
        source: a folder with the two splits, as JSON Lines or as on the hub, with ``question`` and ``answer`` or in
            verl's schema; None = the hub (``openai/gsm8k``, main).
        expect_rows: rows that each split must have; 0 accepts any number.

    Raises:
        DataError: a file is missing or malformed, or a split has another number of rows.
    """
    origins = {split: Origin(GSM8K, split, "main") for split in GSM8K_ROWS}
    splits: dict[str, list[Row]] = {}
    where = provenance([*origins.values()], source)
    for split, origin in origins.items():
        records = enumerate(read(origin, source), 1)
        splits[split] = [parse_row(each.fields, each.where, line, split=split) for line, each in records]
        expect(f"{source or GSM8K}, split {split}", len(splits[split]), expect_rows, split)
    train = splits["train"]
    chosen = {*np.random.default_rng(0).permutation(len(train))[: heldout_size(GSM8K_HELDOUT, len(train))].tolist()}
    splits = {
        "train": [row for i, row in enumerate(train) if i not in chosen],
        "heldout": [row for i, row in enumerate(train) if i in chosen],
        "test": splits["test"],
    }
    return write_splits(out, GSM8K, {split: map(record_of_row, rows) for split, rows in splits.items()}, where)
