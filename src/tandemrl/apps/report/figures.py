"""The plots of a report. Each takes arms with their styles, and is None if there is nothing to plot."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tandemrl.apps.report.records import ArmRecord, RunRecord
from tandemrl.apps.report.svg import INK, MUTED, PAPER, Style, axes, draw, part
from tandemrl.apps.report.tables import JUNIOR_CE, JUNIOR_FIRST, SENIOR_FIRST, SOLO, Column, Estimate, estimate

POINTS = 150
"""How many points a learning curve has at most. A longer run is averaged over blocks of consecutive records."""
PHASES = ("rollout", "score", "update", "sync", "eval")

Styled = Sequence[tuple[ArmRecord, Style]]


class Figure(NamedTuple):
    """An SVG with its title and a line below it."""

    title: str
    caption: str
    svg: str


class Curve(NamedTuple):
    """A training metric as a plot."""

    metric: str
    title: str
    label: str


CURVES = (
    Curve("reward/mean", "Training reward", "mean reward"),
    Curve("eval/pass@1", "Held-out solo pass@1", "pass@1"),
    Curve("monitor/pass@1", "Monitored solo pass@1", "pass@1"),
    Curve("response/length", "Response length", "tokens"),
    Curve("response/truncated", "Rollouts that the limit of tokens cut off", "fraction"),
    Curve("eval/truncation_rate", "Held-out solo texts that the limit of tokens cut off", "fraction"),
    Curve("tandem/senior_frac", "Tokens by the senior", "fraction of response tokens"),
    Curve("env/turns", "Turns of an episode", "turns"),
    Curve("env/tool_errors", "Tool errors", "per episode"),
    Curve("env/invalid_calls", "Calls that could not be made", "per episode"),
    Curve("draft/tokens_per_senior_pass", "What a pass of the senior brings", "tokens per row and pass"),
    Curve("entropy", "Entropy of the senior", "nats per token"),
    Curve("ref_kl", "KL to the reference", "nats per token"),
    Curve("junior_kl", "KL to the junior, on its tokens", "nats per token"),
    Curve("fleet/idle_trainer", "The trainer waits for rollouts", "fraction of its time"),
    Curve("fleet/idle_workers", "Rollout workers have nothing to do", "fraction of their time"),
    Curve("mismatch/mean_abs", "Trainer against engine", "mean |Δ log-prob|, nats"),
)


ACCEPTANCE = Curve("draft/acceptance", "Drafts that the senior accepts", "fraction where it is the author")
"""The curve beside the junior's cross-entropy. Both show how well the junior can follow."""


def all_figures(arms: Styled, prefix: str) -> list[Figure]:
    """Every plot that the arms have data for, in the order of the page."""
    makers: list[Callable[[Styled, str], Figure | None]] = []
    makers += [partial(pass_at_k_plot, column=column) for column in (SOLO, SENIOR_FIRST, JUNIOR_FIRST)]
    makers += [partial(handoff_plot, column=column) for column in (SENIOR_FIRST, JUNIOR_FIRST)]
    makers += [legibility_plot]
    makers += [partial(curve_plot, curve=curve) for curve in (ACCEPTANCE, *CURVES)]
    makers += [time_plot]
    drawn = [make(arms, f"{prefix}-{number}") for number, make in enumerate(makers)]
    return [figure for figure in drawn if figure is not None]


def series(run: RunRecord, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps and the finite values of a metric in one run."""
    points = [(step["step"], step[metric]) for step in run.steps if step.get(metric) is not None and "step" in step]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps, dtype=float), np.array(values, dtype=float)


def thin(x: np.ndarray, y: np.ndarray, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Means over blocks of consecutive entries, so that at most ``points`` are left."""
    size = -(-len(x) // points) if len(x) else 1
    cuts = list(range(0, len(x), size))
    blocks = [slice(start, start + size) for start in cuts]
    return np.array([x[b].mean() for b in blocks]), np.array([y[b].mean() for b in blocks])


def shared(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all seeds have, and a row of values per seed."""
    common = sorted(set.intersection(*(set(x.tolist()) for x, _ in curves)))
    rows = [[dict(zip(x.tolist(), y.tolist(), strict=True))[step] for step in common] for x, y in curves]
    return np.array(common), np.array(rows)


def shared_blocks(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """What is `shared`, then thinned: the blocks of two runs of other lengths would have no step in common."""
    steps, rows = shared(curves)
    thinned = [thin(steps, row) for row in rows]
    return thinned[0][0], np.array([values for _, values in thinned])


def curve_plot(arms: Styled, name: str, curve: Curve) -> Figure | None:
    """A learning curve: the mean over seeds, a band from the lowest to the highest seed, and a thin line per seed."""
    longest, several = 0, False
    measured = [series(run, curve.metric)[1] for arm, _ in arms for run in arm.runs]
    if len({value for values in measured for value in values.tolist()}) == 1 and sum(map(len, measured)) > 1:
        return None  # nothing to see
    scale, unit = _scale(measured)
    with axes() as (figure, ax):
        for arm, look in arms:
            runs = [(x, scale * y) for x, y in (series(run, curve.metric) for run in arm.runs) if len(x)]
            if not runs:
                continue
            longest, several = max(longest, *(len(x) for x, _ in runs)), several or len(runs) > 1
            x, values = shared_blocks(runs)
            runs = [thin(x, y) for x, y in runs]
            marker = look.marker if len(x) < 12 else ""
            if len(runs) > 1:
                for seed_x, seed_y in runs:
                    ax.plot(seed_x, seed_y, color=look.colour, linewidth=0.7, alpha=0.45)
                if len(x):
                    ax.fill_between(x, values.min(0), values.max(0), color=look.colour, alpha=0.14, linewidth=0)
            if len(x):
                ax.plot(
                    x, values.mean(0), color=look.colour, linestyle=look.line, zorder=3, marker=marker, markersize=4
                )
        if not longest:
            return None
        ax.set(xlabel="training step", ylabel=f"{curve.label}{unit}")
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        ax.margins(x=0.02)
        notes = ["mean over seeds, band from lowest to highest seed" if several else "one seed per arm"]
        if longest > POINTS:
            notes.append(f"each point is the mean of {-(-longest // POINTS)} records")
        return Figure(curve.title, "; ".join(notes), draw(figure, name, f"{curve.title} over training steps"))


def pass_at_k_plot(arms: Styled, name: str, column: Column = SOLO) -> Figure | None:
    """pass@k over k: that of a column which shows pass@1."""
    prefix = column.metric.removesuffix("pass@1")
    with axes() as (figure, ax):
        ks: set[int] = set()
        for arm, look in arms:
            keys = {key for r in arm.phase(column.phase).values() for key in r["metrics"]["macro"]}
            matches = (re.fullmatch(rf"{re.escape(prefix)}pass@(\d+)", key) for key in keys)
            ks_of_arm = sorted(int(match.group(1)) for match in matches if match)
            estimates = [estimate(arm, Column("", column.phase, f"{prefix}pass@{k}")) for k in ks_of_arm]
            points = [(k, e) for k, e in zip(ks_of_arm, estimates, strict=True) if e is not None]
            if points:
                ks |= {k for k, _ in points}
                _line(ax, [float(k) for k, _ in points], [e for _, e in points], look)
        if len(ks) < 2:
            return None
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(ks), [str(k) for k in sorted(ks)])
        ax.xaxis.set_minor_locator(NullLocator())
        what = column.title.removesuffix(" pass@1")
        ax.set(xlabel="k (samples per problem)", ylabel=f"{what}: pass@k")
        title = f"{what.capitalize()}: pass@k"
        return Figure(title, f"{column.meaning}; bars: 95 % intervals", draw(figure, name, f"{title} over k"))


def handoff_plot(arms: Styled, name: str, column: Column) -> Figure | None:
    """Handoff pass@1 over solo pass@1, with a point for each arm and a small one for each seed."""
    limits: list[float] = []
    with axes(height=3.3) as (figure, ax):
        for arm, look in arms:
            solo, handoff = estimate(arm, SOLO), estimate(arm, column)
            if solo is None or handoff is None:
                continue
            both = [seed for seed in solo.by_seed if seed in handoff.by_seed]
            if len(both) > 1:
                xs, ys = ([e.by_seed[seed].mean for seed in both] for e in (solo, handoff))
                ax.plot(xs, ys, look.marker, color=look.colour, markersize=3.5, alpha=0.55, markeredgewidth=0)
                limits += [*xs, *ys]
            ax.errorbar(
                [solo.mean],
                [handoff.mean],
                xerr=_error(solo),
                yerr=_error(handoff),
                fmt=look.marker,
                color=look.colour,
                markersize=8,
                markeredgecolor=PAPER,
                elinewidth=1,
                zorder=3,
            )
            limits += [end for e in (solo, handoff) for end in (e.mean, e.low, e.high) if end is not None]
        if not limits:
            return None
        margin = max(0.04, 0.12 * (max(limits) - min(limits)))
        low, high = max(-0.02, min(limits) - margin), min(1.02, max(limits) + margin)
        ax.plot([low, high], [low, high], color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
        middle = low + 0.97 * (high - low)
        ax.annotate(
            "handoff = solo", (middle, middle), (-14, -1), textcoords="offset points", ha="right", va="center",
            color=MUTED, fontsize=8,
        )  # fmt: skip
        ax.set(xlim=(low, high), ylim=(low, high), aspect="equal", xlabel="solo pass@1", ylabel="handoff pass@1")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5))
        title = f"{column.title.capitalize()}, against solo"
        return Figure(title, "bars: 95 % intervals; small points: seeds", draw(figure, name, title))


def legibility_plot(arms: Styled, name: str) -> Figure | None:
    """The junior's cross-entropy on each arm's solo texts."""
    rows = [(arm, look, value) for arm, look in arms if (value := estimate(arm, JUNIOR_CE)) is not None]
    if not rows:
        return None
    with axes(height=0.85 + 0.34 * max(3, len(rows))) as (figure, ax):
        for y, (_, look, value) in enumerate(rows):
            if len(value.by_seed) > 1:
                seeds = [each.mean for each in value.by_seed.values()]
                ax.plot(seeds, [y] * len(seeds), "|", color=look.colour, markersize=11, alpha=0.6)
            ax.errorbar(
                [value.mean], [y], xerr=_error(value), fmt=look.marker, color=look.colour, markersize=8,
                markeredgecolor=PAPER, zorder=3,
            )  # fmt: skip
        ax.set_yticks(range(len(rows)), [_short(arm.title) for arm, _, _ in rows])
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("junior cross-entropy (nats per token)")
        values = [each.mean for _, _, value in rows for each in value.by_seed.values()]
        if min(values) > 0 and max(values) > 8 * min(values):
            _log_axis(ax)
            positive = [each for _, _, v in rows for each in (v.mean, v.low) if each is not None and each > 0]
            ax.set_xlim(left=min(*positive, min(values)) / 1.4)
        else:
            ax.xaxis.set_major_locator(MaxNLocator(6))
        title = "Legibility"
        return Figure(title, "junior on solo texts; bars: 95 % intervals; ticks: seeds", draw(figure, name, title))


def time_plot(arms: Styled, name: str) -> Figure | None:
    """The seconds of a training step by phase, as stacked bars."""
    rows = [(arm, spent) for arm, _ in arms if (spent := _seconds(arm.runs))]
    if not rows:
        return None
    with axes(height=1.2 + 0.34 * max(3, len(rows))) as (figure, ax):
        for number, phase in enumerate((*PHASES, "other")):
            widths = [spent.get(phase, 0.0) for _, spent in rows]
            starts = [sum(spent.get(p, 0.0) for p in PHASES[:number]) for _, spent in rows]
            if any(widths):
                ax.barh(
                    range(len(rows)), widths, 0.62, left=starts, color=part(number), edgecolor=PAPER, linewidth=0.8,
                    label=phase,
                )  # fmt: skip
        for y, (_, spent) in enumerate(rows):
            ax.annotate(f"{sum(spent.values()):.2g} s", (sum(spent.values()), y), (4, 0), textcoords="offset points",
                        va="center", fontsize=8, color=INK)  # fmt: skip
        ax.set_yticks(range(len(rows)), [_short(arm.title) for arm, _ in rows])
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel("seconds per training step")
        ax.margins(x=0.14)
        ax.set_xlim(left=0)
        figure.legend(
            loc="outside upper left", ncols=6, frameon=False, handlelength=0.9, handletextpad=0.4, columnspacing=1.0
        )
        title = "Where the time goes"
        return Figure(title, "mean over steps and seeds", draw(figure, name, title))


def _seconds(runs: Sequence[RunRecord]) -> dict[str, float]:
    """The mean seconds per step of each phase. A phase that not every step has is averaged over all steps."""
    steps: list[Mapping[str, Any]] = [step for run in runs for step in run.steps if step.get("time/step") is not None]
    if not steps:
        return {}
    spent = {phase: fmean(step.get(f"time/{phase}") or 0.0 for step in steps) for phase in PHASES}
    other = fmean(step["time/step"] for step in steps) - sum(spent.values())
    return spent | {"other": max(0.0, other)}


def _line(ax: Axes, x: Sequence[float], y: Sequence[Estimate], look: Style) -> None:
    errors = [_error(each) or ([0.0], [0.0]) for each in y]
    ax.errorbar(
        x,
        [each.mean for each in y],
        yerr=([low[0] for low, _ in errors], [high[0] for _, high in errors]),
        color=look.colour,
        linestyle=look.line,
        marker=look.marker,
        markersize=5.5,
        markeredgecolor=PAPER,
        elinewidth=1,
    )


def _error(value: Estimate) -> tuple[list[float], list[float]] | None:
    """The lengths of an error bar below and above its point, or None without an interval."""
    if value.low is None or value.high is None:
        return None
    return [max(0.0, value.mean - value.low)], [max(0.0, value.high - value.mean)]


def _scale(values: Sequence[np.ndarray]) -> tuple[float, str]:
    """A power of ten that makes small values readable, and what to add to their label."""
    highest = max((float(np.abs(each).max()) for each in values if len(each)), default=1.0)
    if not 0 < highest < 1e-2:
        return 1.0, ""
    power = int(np.floor(np.log10(highest)))
    return 10.0**-power, f" × 10{str(power).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def _log_axis(ax: Axes) -> None:
    """A logarithmic x axis with plain numbers."""
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_locator(NullLocator())


def _short(title: str, width: int = 22) -> str:
    return title if len(title) <= width else f"{title[: width - 1]}…"
