"""Countdown, published or generated, and calculations as files. Without torch."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tandemrl.data.parquet import write_splits
from tandemrl.data.rows import DataError, messages_of
from tandemrl.data.sources import Origin, Record, flattened, provenance, read
from tandemrl.tasks.countdown import puzzles as arithmetic
from tandemrl.tasks.countdown.puzzles import Template

COUNTDOWN = Origin("Jiayi-Pan/Countdown-Tasks-3to4", "train")
COUNTDOWN_ROWS: Mapping[str, int] = {"train": 327_680, "test": 1024}
"""How many of the first rows of the published set are for training, and how many of the next ones for testing."""
CALCULATION_ROWS: Mapping[str, int] = {"train": 32_768, "test": 4096}


def build_countdown(
    source: Path | None, out: Path, *, template: Template, counts: Mapping[str, int] = COUNTDOWN_ROWS
) -> dict[str, Any]:
    """Write the published Countdown problems as ``train`` and ``test`` into ``out``, and return the manifest.

    The first ``counts["train"]`` rows are the training split, the next ``counts["test"]`` the test split.

    Args:
        source: a file with ``target`` and ``nums`` or ``numbers`` (and ``messages``, which ``template="chat"`` then
            uses), or with verl's ``reward_model.ground_truth`` of these two, or a folder with one; None = the hub.
        template: see `arithmetic.prompt`.

    Raises:
        DataError: the data is missing, malformed, or has too few rows.
    """
    records = read(COUNTDOWN, source)  # one stream: each split goes on where the one before it ended
    where = str(source or COUNTDOWN.repo)
    splits = {split: _countdowns(records, count, template, split, where) for split, count in counts.items()}
    return write_splits(out, "countdown", splits, provenance([COUNTDOWN], source) | {"template": template})


def generate_countdown(
    out: Path, *, template: Template, counts: Mapping[str, int] = COUNTDOWN_ROWS, seed: int = 0
) -> dict[str, Any]:
    """Generate Countdown problems that have a solution as ``train`` and ``test`` in ``out``, and return the manifest.

    No problem occurs twice, whatever the order of its numbers. The test split depends on its own size and the seed
    only. ``extra_info.solution`` is a right expression.

    Raises:
        DataError: a split is empty, or there are not enough different problems.
    """
    return _generate(out, "countdown", arithmetic.countdowns(seed), template, counts, {"seed": seed})


def generate_calculations(
    out: Path,
    *,
    data_source: Literal["multiply", "arithmetic"],
    template: Template,
    digits: int = 3,
    counts: Mapping[str, int] = CALCULATION_ROWS,
    seed: int = 0,
) -> dict[str, Any]:
    """Generate calculations with two numbers of ``digits`` digits as ``train`` and ``test`` in ``out``, and return the
    manifest.

    They are products for ``multiply``, and sums, differences and products for ``arithmetic``. No two problems have the
    same numbers and operation.

    Raises:
        DataError: a split is empty, or there are not enough different problems.
    """
    operations = "*" if data_source == "multiply" else arithmetic.OPERATIONS
    draw = arithmetic.calculations(data_source, operations, digits, seed)
    return _generate(out, data_source, draw, template, counts, {"digits": digits, "seed": seed})


# --------------------------------------------------------------------------------------------------------------------


def _countdowns(
    records: Iterator[Record], count: int, template: Template, split: str, where: str
) -> Iterator[dict[str, Any]]:
    number = 0
    for number, record in enumerate(itertools.islice(records, count), 1):
        yield _countdown(record, template, split, number - 1)
    if number < count:
        raise DataError(
            f"{where}, split {split}: {number} rows are left, expected {count}; give a complete source, or ask for "
            "fewer with --train and --test"
        )


def _countdown(record: Record, template: Template, split: str, index: int) -> dict[str, Any]:
    fields = flattened(record.fields)
    truth = fields.get("ground_truth")
    fields = {**fields, **truth} if isinstance(truth, Mapping) else fields
    numbers, target, messages = fields.get("nums", fields.get("numbers")), fields.get("target"), fields.get("messages")
    if not isinstance(target, int):
        raise DataError(f"{record.where}, field 'target': expected a whole number, found {target!r}")
    if not isinstance(numbers, Sequence) or not numbers or not all(isinstance(number, int) for number in numbers):
        raise DataError(f"{record.where}, field 'nums': expected whole numbers, found {numbers!r}")
    if messages and template == "chat":
        messages = messages_of(messages, f"{record.where}, field 'messages'")
    puzzle = arithmetic.countdown(numbers, target)
    return arithmetic.record(puzzle, template, split=split, index=index, messages=messages)


def _generate(
    out: Path,
    data_source: str,
    draw: Callable[[], arithmetic.Puzzle],
    template: Template,
    counts: Mapping[str, int],
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    if empty := [split for split, count in counts.items() if count < 1]:
        raise DataError(f"{data_source}: {', '.join(empty)} with no rows; ask for at least 1")
    puzzles = arithmetic.distinct(draw, {split: counts[split] for split in sorted(counts, key=("test", "train").index)})

    def records(split: str) -> Iterator[dict[str, Any]]:
        for index, puzzle in enumerate(puzzles[split]):
            yield arithmetic.record(puzzle, template, split=split, index=index)

    splits = {split: records(split) for split in counts}
    return write_splits(out, data_source, splits, {"generated": True, "template": template, **origin})
