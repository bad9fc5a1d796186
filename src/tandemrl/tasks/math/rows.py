r"""Builds DeepScaleR and the evaluation sets: maths problems whose answer goes into ``\boxed{}``. Without torch.

Sizes, dropped rows and the held-out draw are those of Tandem-RLVR, so that results are comparable.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandemrl.data.parquet import heldout_size, write_splits
from tandemrl.data.rows import DataError, messages_of, record_of
from tandemrl.data.sources import ANSWER, PROBLEM, ExpectRows, Origin, Record, expect, flattened, provenance, read

BOXED_SUFFIX = (
    " Solve the following math problem step by step. Put your final answer inside \\boxed{}, like \\boxed{42} or "
    "\\boxed{\\frac{1}{2}}."
)
"""The end of every DeepScaleR and benchmark prompt, the same in training and evaluation."""

DEEPSCALER = Origin("agentica-org/DeepScaleR-Preview-Dataset", "train")
DEEPSCALER_ROWS: Mapping[str, int] = {"train": 40_309}
"""How many rows have an answer; `DEEPSCALER_HELDOUT` of them are held out."""
DEEPSCALER_HELDOUT = 1000

_AMC = {
    Origin("math-ai/amc23", "test"): "amc23",
    Origin("rawsh/2024_AMC12"): "amc24",
    Origin("sonthenguyen/amc12-2025-non-figure"): "amc25",
}
_BENCHMARKS: Mapping[str, tuple[int, Sequence[Origin]]] = {
    "aime24": (30, [Origin("math-ai/aime24", "test")]),
    "aime25": (30, [Origin("math-ai/aime25", "test")]),
    "aime26": (30, [Origin("MathArena/aime_2026")]),
    "amc23_25": (121, [*_AMC]),
    "math500": (500, [Origin("HuggingFaceH4/MATH-500", "test")]),
    "minerva": (272, [Origin("math-ai/minervamath", "test")]),
    "olympiad": (581, [Origin("olympiad", "test")]),
}
BENCHMARK_ROWS: Mapping[str, int] = {name: rows for name, (rows, _) in _BENCHMARKS.items()}
"""The evaluation sets and their sizes after rows were dropped. The names are the rows' ``data_source``."""
AMC_DROPS: Mapping[str, tuple[str, ...]] = {
    "amc24": (r"(0, \frac{1}{2})", r"[\frac{3}{4}, \frac{7}{8}]", r"\frac{\pi}{2} - 2\alpha", "D"),
    "amc25": ("4{:}30", "k"),
}
"""Answers that the published grader could not compare. Their rows are dropped, so that the set is the published one."""
INSTRUCTIONS = (
    " Solve the following math problem step by step.",
    " Let's think step by step and output the final answer within",
)
"""The texts with which published prompts begin their own instruction, behind the problem."""


def build_deepscaler(source: Path | None, out: Path, *, expect_rows: ExpectRows = DEEPSCALER_ROWS) -> dict[str, Any]:
    """Write DeepScaleR as ``train`` (39,309 rows) and ``heldout`` (1,000) into ``out``, and return the manifest.

    ``heldout`` is pandas' ``sample(n=1000, random_state=0)`` of the rows with an answer, as published; ``index`` is
    the position among these rows, in both files.

    Args:
        source: a file with the columns of the hub's, or in verl's schema, or a folder with one. None means the hub.
        expect_rows: how many rows must have an answer; 0 accepts any number.

    Raises:
        DataError: the data is missing or malformed, or another number of rows has an answer.
    """
    records = [_unpacked(record) for record in read(DEEPSCALER, source)]
    answered = [each for each in records if any(each.fields.get(name) not in (None, "") for name in ANSWER)]
    rows = [_boxed(each, "deepscaler", index, "math", each.text(*ANSWER)) for index, each in enumerate(answered)]
    expect(str(source or DEEPSCALER.repo), len(rows), expect_rows, "train")
    # What pandas draws with; the numbers of this old generator are frozen for good.
    chosen = np.random.RandomState(0).choice(len(rows), size=heldout_size(DEEPSCALER_HELDOUT, len(rows)), replace=False)
    held = set(chosen.tolist())
    splits = {
        "train": [row for i, row in enumerate(rows) if i not in held],
        "heldout": [rows[i] for i in chosen.tolist()],
    }
    where = provenance([DEEPSCALER], source, {"no answer": len(records) - len(rows)})
    return write_splits(out, "deepscaler", splits, where)


def build_benchmark(
    name: str, source: Path | None, out: Path, *, expect_rows: ExpectRows = BENCHMARK_ROWS, alone: bool = True
) -> dict[str, Any]:
    """Write one evaluation set of `BENCHMARK_ROWS` as ``out/NAME/test.parquet``, and return its manifest.

    Args:
        source: a local copy, with the columns of the hub's or in verl's schema. For a set that is made of several data
            sets, or with ``alone=False``, it is a folder with one copy per data set, each named like its repository on
            the hub (`sources.local_files`), or one file in verl's schema with all rows. None means the hub, which does
            not have ``olympiad``.

    Raises:
        DataError: the data is missing or malformed, or there is another number of rows than published.
    """
    _, origins = _BENCHMARKS[name]
    if source is None and name == "olympiad":
        raise DataError(
            "olympiad: no public data set has its 581 problems in order; give --source, the test.parquet of the "
            "published evaluation sets (Tandem-RLVR, data/eval/olympiad) or a Parquet file with problem and answer"
        )
    dropped: Counter[str] = Counter()
    if source is not None and source.is_file():
        origins = [Origin(name, "test")]
    alone = alone and len(origins) == 1
    rows: list[dict[str, Any]] = []
    for origin in origins:
        for record in read(origin, source, alone=alone):
            row = _benchmark_row(name, _unpacked(record), origin, len(rows))
            answer = row["reward_model"]["ground_truth"]
            if answer in AMC_DROPS.get(row["extra_info"].get("subset", "")[:5], ()):
                dropped[answer] += 1
            else:
                rows.append(row)
    expect(f"{source or 'hub'}: {name}", len(rows), expect_rows, name)
    return write_splits(out / name, name, {"test": rows}, provenance(origins, source, dropped, alone=alone))


# --------------------------------------------------------------------------------------------------------------------


def _unpacked(record: Record) -> Record:
    """A record whose problem and answer are fields, also where it is a published row in verl's schema. The instruction
    of its prompt is then cut off."""
    fields = flattened(record.fields)
    if any(name in fields for name in PROBLEM) or not fields.get("prompt"):
        return Record(record.where, fields)
    asked = messages_of(fields["prompt"], record.where)[-1]["content"]
    problem = next((asked.rpartition(begin)[0] for begin in INSTRUCTIONS if begin in asked), "")
    if not problem:
        begins = " or ".join(map(repr, INSTRUCTIONS))
        raise DataError(f"{record.where}: expected a field 'problem', or a prompt that goes on with {begins}")
    return Record(record.where, {**fields, "problem": problem})


def _boxed(record: Record, data_source: str, index: int, ability: str, answer: str, **extra: str) -> dict[str, Any]:
    """The row of a maths problem with the boxed instruction."""
    prompt = [{"role": "user", "content": record.text(*PROBLEM) + BOXED_SUFFIX}]
    return record_of(data_source, prompt, ability, answer, {"index": index, **extra})


def _benchmark_row(name: str, record: Record, origin: Origin, index: int) -> dict[str, Any]:
    r"""A row of an evaluation set. The answer of AIME 2024 is the content of the first box in the solution, if there is
    a solution; a row of AMC says which year it is of."""
    extra = {}
    if name == "aime24" and "solution" in record.fields:
        boxed = re.search(r"\\boxed\{([^{}]+)\}", record.text("solution"))
        if boxed is None:
            raise DataError(f"{record.where}, field 'solution': no \\boxed{{…}} with the answer")
        answer = boxed[1]
    else:
        answer = record.text(*ANSWER)
    if name == "amc23_25":
        subset = _AMC[origin] if origin in _AMC else record.text("subset")
        if subset == "amc24" and record.fields.get("exam"):  # "2024 AMC 12A"; not every copy says so
            subset += f"_{record.text('exam').split()[-1]}"
        extra = {"subset": subset}
    return _boxed(record, name, index, "MATH", answer, **extra)
