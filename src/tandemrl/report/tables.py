"""Headline numbers: one estimate per arm and column, over seeds where there are several, and tables of them."""

import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from tandemrl.report.records import Arm, Evaluation
from tandemrl.stats import Interval, seed_interval

MISSING = "–"
LAST = 5
"""Steps in the closing mean of a learning curve: one step's reward is too noisy to quote."""


def rate(value: float) -> str:
    """A share, a probability or a difference of two."""
    return f"{value:.3f}"


def nats(value: float) -> str:
    """A quantity of any size, to three digits."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"


def count(value: float) -> str:
    return f"{value:.1f}"


def bounds(value: "Estimate", shown: Callable[[float], str]) -> str:
    """``[low, high]`` with as many decimals as the estimate itself is shown with; "" where there is no interval."""
    if value.low is None or value.high is None:
        return ""
    decimals = len(shown(value.mean).partition(".")[2])
    return f"[{value.low:,.{decimals}f}, {value.high:,.{decimals}f}]"


class Column(NamedTuple):
    """A macro metric of a phase, as a column of the headline table. ``phase`` "" reads the rows of ``results.json``.

    ``highest``: no value can be above it; none can be below 0. Intervals over seeds are cut there.
    """

    title: str
    phase: str
    metric: str
    unit: str = ""
    shown: Callable[[float], str] = rate
    highest: float = 1.0

    @property
    def heading(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title


SOLO = Column("solo pass@1", "pass-at-k", "pass@1")
SENIOR_FIRST = Column("handoff, senior first", "handoff", "senior_first/pass@1")
JUNIOR_FIRST = Column("handoff, junior first", "handoff", "junior_first/pass@1")
JUNIOR_CE = Column("junior CE", "legibility", "cross_entropy", "nats/token", nats, inf)
COLUMNS = (
    SOLO,
    Column("tandem pass@1", "tandem", "pass@1"),
    SENIOR_FIRST,
    JUNIOR_FIRST,
    JUNIOR_CE,
    Column("drift KL", "drift", "kl", "nats/token", nats, inf),
    Column("verified pass@1", "verified", "verified_pass@1"),
    Column("length", "pass-at-k", "length", "tokens", count, inf),
    Column("jargon rate", "", "jargon_rate"),
    Column("repairs per handoff text", "", "handoff/repairs", "", nats, inf),
)


class Estimate(NamedTuple):
    """A number with its 95 % interval: over seeds where there are several, else over the problems of the one seed.

    ``low`` and ``high`` are None where neither is known. ``by_seed``: the value of each, its interval over problems.
    """

    mean: float
    low: float | None
    high: float | None
    by_seed: dict[str, "Estimate"]


def columns_of(arms: Sequence[Arm]) -> list[Column]:
    """The columns that some arm has a value for, or has some of; the largest k of pass@k stands beside pass@1."""
    results = [result for arm in arms for result in arm.phase("pass-at-k").values()]
    ks = [int(m.group(1)) for r in results for key in r["metrics"]["macro"] if (m := re.fullmatch(r"pass@(\d+)", key))]
    largest = [Column(f"solo pass@{max(ks)}", "pass-at-k", f"pass@{max(ks)}")] if max(ks, default=1) > 1 else []
    found = {c: [e for arm in arms if (e := estimate(arm, c)) is not None] for c in (SOLO, *largest, *COLUMNS[1:])}
    return [c for c, values in found.items() if values and (c.phase or any(value.mean for value in values))]


def estimate(arm: Arm, column: Column) -> Estimate | None:
    """An arm's value in a column; None if no seed has one."""
    by_seed: dict[str, Estimate] = {}
    if column.phase:
        for seed, result in arm.phase(column.phase).items():
            macro = result["metrics"]["macro"]
            if column.metric in macro:
                low, high = (macro.get(f"{column.metric}/{end}") for end in ("low", "high"))
                by_seed[seed] = Estimate(macro[column.metric], low, high, {})
    else:
        found = {seed: values[column.metric] for seed, values in arm.extra.items() if column.metric in values}
        by_seed = {seed: Estimate(value, None, None, {}) for seed, value in found.items()}
    return over_seeds(by_seed, highest=column.highest)


def over_seeds(by_seed: Mapping[str, Estimate], *, highest: float = inf) -> Estimate | None:
    """The mean over seeds with Student's interval, cut at 0 and ``highest``; one seed keeps its own; none is None."""
    values = list(by_seed.values())
    if len(values) < 2:
        return values[0]._replace(by_seed=dict(by_seed)) if values else None
    interval: Interval = seed_interval([value.mean for value in values])
    return Estimate(interval.mean, max(0.0, interval.low), min(highest, interval.high), dict(by_seed))


def cell(value: Estimate | None, shown: Callable[[float], str] = rate) -> str:
    """``0.523 [0.480, 0.566]``"""
    if value is None:
        return MISSING
    return f"{shown(value.mean)} {bounds(value, shown)}".rstrip()


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A Markdown table; all but the first ``left`` columns are numbers, aligned to the right."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(" ".join(each.split()).replace("|", "\\|") for each in cells) + " |"

    rule = "|" + "---|" * left + "---:|" * (len(head) - left)
    return "\n".join([line(head), rule, *map(line, rows)]) + "\n"


def headline_table(arms: Sequence[Arm]) -> str:
    """A Markdown table: a row per arm, a column per headline metric, each with its 95 % interval."""
    columns = columns_of(arms)
    rows = [[arm.title, *(cell(estimate(arm, column), column.shown) for column in columns)] for arm in arms]
    return markdown_table(["", *(column.heading for column in columns)], rows)


def summary_table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """``headline_table`` of single results, with intervals over problems.

    Args:
        results: row title -> phase -> evaluation result (the content of PHASE.json). Missing phases show as "–".
    """
    return headline_table(
        [
            Arm(row, row, evaluations=tuple(Evaluation(Path(), "", phase, dict(r)) for phase, r in phases.items()))
            for row, phases in results.items()
        ]
    )
