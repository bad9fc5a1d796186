r"""DeepScaleR and the evaluation sets: maths problems whose answer goes into ``\boxed{}``. No torch.

Sizes, drops and the held-out draw are those of Tandem-RLVR, so that results compare.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandemrl.data.parquet import heldout_size, write_splits
from tandemrl.data.rows import DataError, messages_of
from tandemrl.data.sources import ExpectRows, Origin, Record, expect, provenance, read

BOXED_SUFFIX = (
    " Solve the following math problem step by step. Put your final answer inside \\boxed{}, like \\boxed{42} or "
    "\\boxed{\\frac{1}{2}}."
)
"""Ends every DeepScaleR and benchmark prompt: the same in training and evaluation."""

DEEPSCALER = Origin("agentica-org/DeepScaleR-Preview-Dataset", "train")
DEEPSCALER_ROWS: Mapping[str, int] = {"train": 40_309}
"""Rows with an answer, of which `DEEPSCALER_HELDOUT` are set aside."""
DEEPSCALER_HELDOUT = 1000

BENCHMARK_ROWS: Mapping[str, int] = {
    "aime24": 30,
    "aime25": 30,
    "aime26": 30,
    "amc23_25": 121,
    "math500": 500,
    "minerva": 272,
    "olympiad": 581,
}
"""The evaluation sets and their sizes after drops; the names are the rows' ``data_source``."""
AMC_DROPS: Mapping[str, tuple[str, ...]] = {
    "amc24": (r"(0, \frac{1}{2})", r"[\frac{3}{4}, \frac{7}{8}]", r"\frac{\pi}{2} - 2\alpha", "D"),
    "amc25": ("4{:}30", "k"),
}
"""Answers that the published grader could not compare: left out, so that the set stays the published one."""
OLYMPIAD_INSTRUCTION = " Solve the following math problem step by step."
"""Where the published prompts of the olympiad set end the problem and begin their own instruction."""


def build_deepscaler(source: Path | None, out: Path, *, expect_rows: ExpectRows = DEEPSCALER_ROWS) -> dict[str, Any]:
    """DeepScaleR as ``train`` (39,309 rows) and ``heldout`` (1,000) in ``out``; returns the manifest.

    ``heldout`` is pandas' ``sample(n=1000, random_state=0)`` of the rows with an answer, as published; ``index`` is
    the position among these rows, in both files.

    Args:
        source: a file with ``problem`` and ``answer``, or a folder with one; None = the hub.

    Raises:
        DataError: the data is missing or malformed, or another number of rows has an answer.
    """
    dropped: Counter[str] = Counter()
    rows: list[dict[str, Any]] = []
    for record in read(DEEPSCALER, source):
        if record.fields.get("answer") in (None, ""):
            dropped["no answer"] += 1
        else:
            rows.append(_boxed(record, "deepscaler", len(rows), ability="math"))
    expect(str(source or DEEPSCALER.repo), len(rows), expect_rows, "train")
    # What pandas draws with; the numbers of this old generator are frozen for good.
    chosen = np.random.RandomState(0).choice(len(rows), size=heldout_size(DEEPSCALER_HELDOUT, len(rows)), replace=False)
    held = set(chosen.tolist())
    splits = {
        "train": [row for i, row in enumerate(rows) if i not in held],
        "heldout": [rows[i] for i in chosen.tolist()],
    }
    return write_splits(out, "deepscaler", splits, provenance([DEEPSCALER], source, dropped))


def build_benchmark(
    name: str,
    source: Path | None,
    out: Path,
    *,
    expect_rows: ExpectRows = BENCHMARK_ROWS,
    alone: bool = True,
) -> dict[str, Any]:
    """One evaluation set of `BENCHMARK_ROWS` as ``out/NAME/test.parquet``; returns its manifest.

    Args:
        source: a local copy; for a set made of several, or with ``alone=False``, a folder with one copy per data set,
            each named like its repository on the hub (`sources.local_files`). None = the hub, which lacks ``olympiad``.

    Raises:
        DataError: an unknown set, missing or malformed data, or another number of rows than published.
    """
    if name not in _BENCHMARKS:
        raise DataError(f"unknown evaluation set {name!r}; known: {', '.join(_BENCHMARKS)}")
    origins, convert = _BENCHMARKS[name]
    if source is None and name == "olympiad":
        raise DataError(
            "olympiad: no public data set has its 581 problems in order; give --source, the test.parquet of the "
            "published evaluation sets (Tandem-RLVR, data/eval/olympiad) or a Parquet file with problem and answer"
        )
    dropped: Counter[str] = Counter()
    alone = alone and len(origins) == 1
    rows: list[dict[str, Any]] = []
    for origin in origins:
        for record in read(origin, source, alone=alone):
            row = convert(record, origin, len(rows))
            answer = row["reward_model"]["ground_truth"]
            if answer in AMC_DROPS.get(row["extra_info"].get("subset", "")[:5], ()):
                dropped[answer] += 1
            else:
                rows.append(row)
    if expect_rows != 0:
        expect(f"{source or 'hub'}: {name}", len(rows), expect_rows, name)
        for answer in itertools.chain(*AMC_DROPS.values()) if name == "amc23_25" else ():
            if dropped[answer] == 0:
                raise DataError(f"{source or 'hub'}: {name}: no row has the answer {answer!r}, which is to be left out")
    return write_splits(out / name, name, {"test": rows}, provenance(origins, source, dropped, alone=alone))


# --------------------------------------------------------------------------------------------------------------------

Convert = Callable[[Record, Origin, int], dict[str, Any]]


def _boxed(
    record: Record,
    data_source: str,
    index: int,
    *,
    ability: str,
    problem: str = "problem",
    answer: str | None = None,
    **extra: str,
) -> dict[str, Any]:
    """A maths problem with the boxed instruction. problem: its field; answer: the ground truth, if not ``answer``."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": record.text(problem) + BOXED_SUFFIX}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": record.text("answer") if answer is None else answer},
        "extra_info": {"index": index, **extra},
    }


def _plain(name: str, problem: str = "problem") -> Convert:
    return lambda record, origin, index: _boxed(record, name, index, ability="MATH", problem=problem)


def _aime24(record: Record, origin: Origin, index: int) -> dict[str, Any]:
    r"""The answer is what the solution boxes first."""
    boxed = re.search(r"\\boxed\{([^{}]+)\}", record.text("solution"))
    if boxed is None:
        raise DataError(f"{record.where}, field 'solution': no \\boxed{{…}} with the answer")
    return _boxed(record, "aime24", index, ability="MATH", answer=boxed.group(1))


def _amc(record: Record, origin: Origin, index: int) -> dict[str, Any]:
    problem, subset = _AMC[origin]
    if subset == "amc24":
        subset += f"_{record.text('exam').split()[-1]}"
    return _boxed(record, "amc23_25", index, ability="MATH", problem=problem, subset=subset)


def _olympiad(record: Record, origin: Origin, index: int) -> dict[str, Any]:
    """Problems with their answers, or rows of the published file, whose own instruction is cut off."""
    fields = dict(record.fields)
    if "problem" not in fields:
        asked = messages_of(fields.get("prompt"), record.where)[-1]["content"]
        problem, instruction, _ = asked.rpartition(OLYMPIAD_INSTRUCTION)
        if not instruction:
            raise DataError(
                f"{record.where}: expected a field 'problem', or a prompt that goes on with {OLYMPIAD_INSTRUCTION!r}"
            )
        fields["problem"] = problem
    if "answer" not in fields:
        fields["answer"] = (fields.get("reward_model") or {}).get("ground_truth")
    return _boxed(Record(record.where, fields), "olympiad", index, ability="MATH")


_AMC = {
    Origin("math-ai/amc23", "test"): ("question", "amc23"),
    Origin("rawsh/2024_AMC12"): ("problem", "amc24"),
    Origin("sonthenguyen/amc12-2025-non-figure"): ("question", "amc25"),
}
_BENCHMARKS: Mapping[str, tuple[Sequence[Origin], Convert]] = {
    "aime24": ([Origin("math-ai/aime24", "test")], _aime24),
    "aime25": ([Origin("math-ai/aime25", "test")], _plain("aime25")),
    "aime26": ([Origin("MathArena/aime_2026")], _plain("aime26")),
    "amc23_25": (list(_AMC), _amc),
    "math500": ([Origin("HuggingFaceH4/MATH-500", "test")], _plain("math500")),
    "minerva": ([Origin("math-ai/minervamath", "test")], _plain("minerva", "question")),
    "olympiad": ([Origin("olympiad", "test")], _olympiad),
}
