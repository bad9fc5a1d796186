"""The generated sets: rows of a source ``synthetic:PAIR:SPLIT[:COUNT]``, and files of such rows. Without torch."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tandemrl.data.parquet import write_splits
from tandemrl.data.rows import DataError, Row, record_of_row
from tandemrl.tasks.generated import calculator, hops, synthetic, word_problems

GENERATORS = {pair: module for module in (synthetic, hops, word_problems, calculator) for pair in module.PAIRS}
"""The module of each pair."""
AGENTS: Mapping[str, str] = dict.fromkeys(hops.PAIRS, "hops_grpo") | dict.fromkeys(calculator.PAIRS, "calculator")
"""The pairs that act in an environment, each with a packaged config of it."""
SYNTHETIC_ROWS: Mapping[str, int] = {"train": 2048, "heldout": 512}


def rows(source: str, parts: list[str]) -> Iterator[Row]:
    """The rows of a source ``synthetic:PAIR:SPLIT[:COUNT]``, given in parts.

    Raises:
        DataError: it is not of this form; see `generated_rows`.
    """
    if len(parts) not in (2, 3) or (len(parts) == 3 and not parts[2].isdigit()):
        raise DataError(f"{source}: expected synthetic:PAIR:SPLIT[:COUNT], e.g. synthetic:plain:train:256")
    pair, split = parts[:2]
    count = int(parts[2]) if len(parts) == 3 else None
    return iter(generated_rows(pair, split, count, 0))


def generated_rows(pair: str, split: str, count: int | None, seed: int) -> list[Row]:
    """``count`` problems for a tiny pair, or the split's default number if that is None.

    Equal arguments give equal problems.

    Raises:
        DataError: a pair or a split is unknown, or the split cannot have so many or so few rows.
    """
    if split not in synthetic.SPLITS:
        raise DataError(f"synthetic:{pair}: unknown split {split!r}; known: {', '.join(synthetic.SPLITS)}")
    if pair not in GENERATORS:
        raise DataError(f"unknown synthetic pair {pair!r}; known: {', '.join(GENERATORS)}")
    count = GENERATORS[pair].DEFAULT_COUNTS[split] if count is None else count
    if count < 1:
        raise DataError(f"synthetic:{pair}:{split}: asked for {count} rows")
    return list(GENERATORS[pair].generate(pair, split, count, seed))


def build_synthetic(
    out: Path, *, pair: str = "plain", counts: Mapping[str, int] = SYNTHETIC_ROWS, seed: int = 0
) -> dict[str, Any]:
    """Write a generated task as Parquet files, one per split in ``counts``, and return the manifest.

    Args:
        pair: which tiny pair the task is for, e.g. ``plain``.
        counts: rows per split, e.g. ``{"train": 2048, "heldout": 256}``.

    Raises:
        DataError: a pair or a split is unknown, or a split is empty.
    """
    splits = {split: generated_rows(pair, split, count, seed) for split, count in counts.items()}
    records = {split: map(record_of_row, rows) for split, rows in splits.items()}
    return write_splits(out, f"synthetic/{pair}", records, {"pair": pair, "seed": seed})
