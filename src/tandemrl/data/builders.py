"""Data sets as files: verl-schema Parquet, one per split, beside a manifest with counts and checksums."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from tandemrl.data.rows import GSM8K, DataError, Row, load_rows

Split = Literal["train", "heldout"]

GSM8K_ROWS: Mapping[str, int] = {"train": 7473, "test": 1319}
"""The published sizes."""
GSM8K_HELDOUT = 500
"""Training problems set aside for choosing checkpoints, which must not happen on a reported benchmark."""


def build_gsm8k(
    source: Path | None, out: Path, *, expect_rows: Mapping[str, int] | Literal[0] = GSM8K_ROWS
) -> dict[str, Any]:
    """GSM8K as Parquet files ``train``, ``heldout`` and ``test`` in ``out``; returns ``out/manifest.json``.

    ``heldout`` is a fixed random part of the original training split (``GSM8K_HELDOUT`` rows, at most a tenth); no row
    is in two files.

    Args:
        source: a folder with the original ``train.jsonl`` and ``test.jsonl``; None = the hub (``openai/gsm8k``, main).
        expect_rows: rows that each split must have; 0 accepts any number.

    Raises:
        DataError: a file is missing or malformed, or a split has another number of rows.
    """
    splits: dict[str, list[Row]] = {}
    for split in GSM8K_ROWS:
        where = f"hf:{GSM8K}:main:{split}" if source is None else str(source / f"{split}.jsonl")
        if source is not None and not Path(where).is_file():
            raise DataError(f"{where}: no such file; --source takes the folder with GSM8K's train.jsonl and test.jsonl")
        splits[split] = load_rows([where])
        if expect_rows != 0 and len(splits[split]) != expect_rows[split]:
            raise DataError(
                f"{where}: {len(splits[split])} rows, expected {expect_rows[split]}; the file is incomplete or another "
                "revision (--expect-rows 0 accepts it)"
            )
    train = splits["train"]
    chosen = set(
        np.random.default_rng(0).permutation(len(train))[: min(GSM8K_HELDOUT, max(1, len(train) // 10))].tolist()
    )
    parts = {
        "train": [row for i, row in enumerate(train) if i not in chosen],
        "heldout": [row for i, row in enumerate(train) if i in chosen],
        "test": splits["test"],
    }
    return _write(out, GSM8K, parts, {"source": GSM8K if source is None else str(source)})


def build_synthetic(pair: str, out: Path, counts: Mapping[str, int], seed: int) -> dict[str, Any]:
    """A generated task as Parquet files, one per split in ``counts``, and a manifest; returns the manifest.

    Args:
        pair: which tiny pair the task is for, e.g. ``plain``.
        counts: rows per split, e.g. ``{"train": 2048, "heldout": 256}``.

    Raises:
        DataError: an unknown pair or split, or a split that is empty.
    """
    from tandemrl.data.synthetic import generate

    splits: dict[str, list[Row]] = {}
    for split, count in counts.items():
        if split not in ("train", "heldout") or count < 1:
            raise DataError(f"synthetic split {split!r} with {count} rows: expected train or heldout, at least 1 row")
        splits[split] = generate(pair, cast(Split, split), count, seed)
    return _write(out, f"synthetic/{pair}", splits, {"pair": pair, "seed": seed})


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Rows in verl's schema, written whole or not at all."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([_record(row, number) for number, row in enumerate(rows)])
    part = path.with_name(f".{path.name}.{os.getpid()}")
    pyarrow.parquet.write_table(table, part)
    os.replace(part, path)


# --------------------------------------------------------------------------------------------------------------------


def _record(row: Row, number: int) -> dict[str, Any]:
    return {
        "data_source": row.data_source,
        "prompt": [dict(message) for message in row.messages],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row.ground_truth},
        "extra_info": {"index": number, **row.extra_info},
    }


def _write(out: Path, data_source: str, splits: Mapping[str, list[Row]], origin: Mapping[str, Any]) -> dict[str, Any]:
    """Every split, then the manifest: a folder with a manifest is complete."""
    out.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {"schema": 1, "data_source": data_source, **origin, "splits": {}}
    for split, rows in splits.items():
        path = out / f"{split}.parquet"
        write_parquet(rows, path)
        checksum = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest["splits"][split] = {"file": path.name, "rows": len(rows), "sha256": checksum}
    part = out / f".manifest.json.{os.getpid()}"
    part.write_text(json.dumps(manifest, indent=2) + "\n")
    os.replace(part, out / "manifest.json")
    return manifest
