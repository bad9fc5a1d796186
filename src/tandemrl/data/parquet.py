"""Writes Parquet files in verl's row schema, one per split, and a manifest with counts and checksums. Without torch."""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandemrl.data.rows import DataError
from tandemrl.data.sources import checksum
from tandemrl.files import write_text

CHUNK = 1024
"""Rows that are in memory at once."""


def write_splits(
    out: Path, data_source: str, splits: Mapping[str, Iterable[Mapping[str, Any]]], origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Write every split and the manifest, and return the manifest. A folder with a manifest is complete.

    ``out`` changes only when everything is written. The manifest also counts the prompts that two splits share, which
    may happen in published splits.

    Args:
        splits: the rows of each split. Streams are read in order, with one chunk in memory at a time.
        origin: further entries of the manifest. Counts in them may still change while the splits are read.

    Raises:
        DataError: a split has no rows.
    """
    out.mkdir(parents=True, exist_ok=True)
    parts = {split: out / f".{split}.parquet.{os.getpid()}" for split in splits}
    manifest: dict[str, Any] = {"schema": 1, "data_source": data_source, **origin, "splits": {}}
    prompts: dict[str, set[bytes]] = {}
    try:
        for split, records in splits.items():
            rows, prompts[split] = _write_parquet(records, parts[split], where=f"{data_source}, split {split}")
            manifest["splits"][split] = {"file": f"{split}.parquet", "rows": rows, "sha256": checksum(parts[split])}
    except BaseException:
        for part in parts.values():
            part.unlink(missing_ok=True)
        with suppress(OSError):  # it was there before, with something in it
            out.rmdir()
        raise
    manifest["shared_prompts"] = {
        f"{one}/{other}": shared
        for one, other in itertools.combinations(splits, 2)
        if (shared := len(prompts[one] & prompts[other]))
    }
    (out / "manifest.json").unlink(missing_ok=True)
    for split, part in parts.items():
        os.replace(part, out / f"{split}.parquet")
    write_text(out / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    return json.loads((out / "manifest.json").read_text())


def heldout_size(size: int, rows: int) -> int:
    """How many of ``rows`` to hold out: ``size``, but at most a tenth and at least one."""
    return min(size, max(1, rows // 10))


# --------------------------------------------------------------------------------------------------------------------


def _write_parquet(records: Iterable[Mapping[str, Any]], path: Path, *, where: str) -> tuple[int, set[bytes]]:
    """Write rows in verl's schema, a chunk at a time, and return their number and the digests of their prompts.

    The fields are those of all rows. A chunk with fields that none before has begins a file of its own; in the end, all
    are put together.

    Raises:
        DataError: there are no rows, or a field has values of several types.
    """
    import pyarrow
    import pyarrow.parquet

    count, prompts, stream = 0, set[bytes](), iter(records)
    schema, writer = pyarrow.schema([]), None
    pieces: list[Path] = []
    try:
        while chunk := list(itertools.islice(stream, CHUNK)):
            try:
                table = pyarrow.Table.from_pylist(chunk)
                wider = pyarrow.unify_schemas([schema, table.schema], promote_options="permissive")
            except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
                rows = f"rows {count + 1} to {count + len(chunk)}"
                raise DataError(f"{where}, {rows}: {error}; give a field values of one type in all rows") from None
            if writer is None or not wider.equals(schema):
                if writer is not None:
                    writer.close()
                schema = wider
                pieces.append(path.with_name(f"{path.name}.{len(pieces)}"))
                writer = pyarrow.parquet.ParquetWriter(pieces[-1], schema)
            writer.write_table(pyarrow.Table.from_pylist(chunk, schema=schema))
            count += len(chunk)
            prompts |= {hashlib.blake2b(repr(row["prompt"]).encode(), digest_size=8).digest() for row in chunk}
        if writer is None:
            raise DataError(f"{where}: no rows are left")
        writer.close()
        if len(pieces) == 1:
            os.replace(pieces[0], path)
        else:
            with pyarrow.parquet.ParquetWriter(path, schema) as whole:
                for piece in pieces:
                    for batch in pyarrow.parquet.ParquetFile(piece).iter_batches(CHUNK):
                        whole.write_table(pyarrow.Table.from_pylist(batch.to_pylist(), schema=schema))
    finally:
        for piece in pieces:
            piece.unlink(missing_ok=True)
    return count, prompts
