"""Writes Parquet files in verl's row schema, one per split, and a manifest with counts and checksums. Without torch."""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tandemrl.data.rows import DataError
from tandemrl.data.sources import ExpectRows, Origin, Record, checksum, expect, provenance, read
from tandemrl.files import write_text

CHUNK = 1024
"""Rows that become a table of Arrow's at once."""


def write_splits(
    out: Path, data_source: str, splits: Mapping[str, Iterable[Mapping[str, Any]]], origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Write every split and the manifest, and return the manifest. A folder with a manifest is complete.

    ``out`` changes only when everything is written. The manifest also counts the prompts that two splits share, which
    may happen in published splits.

    Args:
        splits: the rows of each split, which are read in order.
        origin: further entries of the manifest. Counts in them may still change while the splits are read.

    Raises:
        DataError: a split has no rows.
    """
    manifest: dict[str, Any] = {"schema": 1, "data_source": data_source, **origin, "splits": {}}
    prompts: dict[str, set[bytes]] = {}
    out.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(prefix=".", dir=out) as inside:  # not beside it: that may be another file system
            for split, records in splits.items():
                file = Path(inside) / f"{split}.parquet"
                rows, prompts[split] = _write_parquet(records, file, where=f"{data_source}, split {split}")
                manifest["splits"][split] = {"file": file.name, "rows": rows, "sha256": checksum(file)}
            (out / "manifest.json").unlink(missing_ok=True)
            for file in Path(inside).iterdir():
                os.replace(file, out / file.name)
    finally:
        with suppress(OSError):  # there is something in it
            out.rmdir()
    manifest["shared_prompts"] = {
        f"{one}/{other}": shared
        for one, other in itertools.combinations(splits, 2)
        if (shared := len(prompts[one] & prompts[other]))
    }
    write_text(out / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    return json.loads((out / "manifest.json").read_text())


def build_splits(
    out: Path,
    data_source: str,
    origins: Mapping[str, Origin],
    source: Path | None,
    row: Callable[[Record, str, int], Mapping[str, Any]],
    expect_rows: ExpectRows = 0,
    **settings: Any,
) -> dict[str, Any]:
    """`write_splits` of what ``row(record, split, index)`` makes of each record of a split's origin.

    Args:
        source: a local copy. None means the hub.
        settings: further entries of the manifest.

    Raises:
        DataError: the data is missing or malformed, or a split has another number of rows.
    """

    def rows(split: str) -> Iterator[Mapping[str, Any]]:
        count = 0
        for count, record in enumerate(read(origins[split], source), 1):
            yield row(record, split, count - 1)
        expect(str(source or origins[split].repo), count, expect_rows, split)

    where = provenance([*origins.values()], source)
    return write_splits(out, data_source, {split: rows(split) for split in origins}, where | settings)


def heldout_size(size: int, rows: int) -> int:
    """How many of ``rows`` to hold out: ``size``, but at most a tenth and at least one."""
    return min(size, max(1, rows // 10))


# --------------------------------------------------------------------------------------------------------------------


def _write_parquet(records: Iterable[Mapping[str, Any]], path: Path, *, where: str) -> tuple[int, set[bytes]]:
    """Write rows in verl's schema, and return their number and the digests of their prompts.

    The fields are those of all rows.

    Raises:
        DataError: there are no rows, or a field has values of several types.
    """
    import pyarrow
    import pyarrow.parquet

    count, prompts, stream = 0, set[bytes](), iter(records)
    schema, tables = pyarrow.schema([]), list[Any]()
    while chunk := list(itertools.islice(stream, CHUNK)):
        try:
            tables.append(pyarrow.Table.from_pylist(chunk))
            schema = pyarrow.unify_schemas([schema, tables[-1].schema], promote_options="permissive")
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
            rows = f"rows {count + 1} to {count + len(chunk)}"
            raise DataError(f"{where}, {rows}: {error}; give a field values of one type in all rows") from None
        count += len(chunk)
        prompts |= {hashlib.blake2b(repr(row["prompt"]).encode(), digest_size=8).digest() for row in chunk}
    if not tables:
        raise DataError(f"{where}: no rows are left")
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for table in tables:
            same = table.schema.equals(schema)
            writer.write_table(table if same else pyarrow.Table.from_pylist(table.to_pylist(), schema=schema))
    return count, prompts
