"""Evaluation results and learning curves as Markdown. A report only reads what runs have written."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tandemrl.checkpoint import write_text


class Column(NamedTuple):
    """A macro metric of a phase, as a column of the summary table."""

    title: str
    phase: str
    metric: str


COLUMNS = (
    Column("solo pass@1", "pass-at-k", "pass@1"),
    Column("tandem pass@1", "tandem", "pass@1"),
    Column("handoff, senior first", "handoff", "senior_first/pass@1"),
    Column("handoff, junior first", "handoff", "junior_first/pass@1"),
    Column("junior CE (nats/token)", "legibility", "cross_entropy"),
)
MISSING = "–"
LAST = 5
"""Steps in the closing mean of a learning curve: one step's reward is too noisy to quote."""


class ReportError(ValueError):
    """A file cannot be reported on; names it."""


def summary_table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A Markdown table: a row per model, a column per headline metric, each with its 95 % interval over problems.

    Args:
        results: row title -> phase -> evaluation result (the content of PHASE.json). Missing phases show as "–".
    """
    lines = ["| | " + " | ".join(column.title for column in COLUMNS) + " |", "|---|" + "---:|" * len(COLUMNS)]
    for row, phases in results.items():
        cells = [_cell(phases.get(column.phase), column.metric) for column in COLUMNS]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def learning_curves(runs: Mapping[str, str | Path], metric: str = "reward/mean") -> str:
    """A Markdown table of where a training metric started and ended: a row per run, from its ``metrics.jsonl``.

    Raises:
        ReportError: a file is missing or not JSON lines, or no step of it has the metric.
    """
    lines = [f"| {metric} | steps | first | last | mean of last {LAST} |", "|---|---:|---:|---:|---:|"]
    for row, file in runs.items():
        values = _read_metric(Path(file), metric)
        figures = " | ".join(f"{value:.3f}" for value in (values[0], values[-1], fmean(values[-LAST:])))
        lines.append(f"| {row} | {len(values)} | {figures} |")
    return "\n".join(lines) + "\n"


def write_report(file: str | Path, title: str, sections: Sequence[str]) -> None:
    """Write a Markdown report, atomically: a title, then the sections with blank lines between them."""
    write_text(Path(file), "\n\n".join([f"# {title}", *(section.strip() for section in sections)]) + "\n")


def _cell(result: Mapping[str, Any] | None, metric: str) -> str:
    macro = {} if result is None else result["metrics"]["macro"]
    if metric not in macro:
        return MISSING
    if f"{metric}/low" not in macro:  # eval.bootstrap=0
        return f"{macro[metric]:.3f}"
    return f"{macro[metric]:.3f} [{macro[f'{metric}/low']:.3f}, {macro[f'{metric}/high']:.3f}]"


def _read_metric(file: Path, metric: str) -> list[float]:
    try:
        steps = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ReportError(f"{file}: not readable as JSON lines: {error}") from None
    values = [step[metric] for step in steps if step.get(metric) is not None]
    if not values:
        raise ReportError(f"{file}: no step has {metric!r}")
    return values
