"""The plots of a report, as inline SVG. Their colours can be read on white and on black; the page sets the text's."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from tandemrl.apps.report.records import BASE, JUNIOR, ArmRecord, RunRecord
from tandemrl.apps.report.tables import READERS_ALONE, SCHEDULES, SENIOR_FIRST, SOLO, UNSEEN, Column, Estimate, estimate
from tandemrl.evals.transfer import SHARES

POINTS = 150
"""How many points a learning curve has at most. A longer run is averaged over blocks of consecutive records."""
COLOURS = ("#7c8591", "#d55e00", "#9656a1", "#1f7fc4", "#008f69", "#a87600", "#3a9bd6", "#c4527f")
"""The first is for the model before training."""
_LINES = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1.5, 1.5)))
_MARKERS = "osD^vPX*"
_SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 9,
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), "#808890"),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "grid.alpha": 0.35,
    "lines.linewidth": 1.8,
}

CURVES = {
    "draft/acceptance": ("Drafts that the senior accepts", "fraction where it is the author"),
    "reward/mean": ("Training reward", "mean reward"),
    "eval/pass@1": ("Held-out solo pass@1", "pass@1"),
    "monitor/pass@1": ("Monitored solo pass@1", "pass@1"),
    "response/length": ("Response length", "tokens"),
    "response/truncated": ("Truncated rollouts", "fraction"),
    "eval/truncation_rate": ("Truncated held-out solo texts", "fraction"),
    "tandem/senior_frac": ("Tokens by the senior", "fraction of response tokens"),
    "env/turns": ("Turns of an episode", "turns"),
    "env/tool_errors": ("Tool errors", "per episode"),
    "env/invalid_calls": ("Invalid calls", "per episode"),
    "entropy": ("Entropy of the senior", "nats per token"),
    "ref_kl": ("KL to the reference", "nats per token"),
    "junior_kl": ("KL to the junior, on its tokens", "nats per token"),
    "mismatch/mean_abs": ("Trainer against engine", "mean |Δ log-prob|, nats"),
    "fleet/idle_trainer": ("The trainer waits for rollouts", "fraction of its time"),
    "time/step": ("Time of a step", "seconds"),
}
"""Title and label of the training metrics that have a plot."""


class Style(NamedTuple):
    """How an arm looks in every plot: its colour, and a line and a marker for readers who cannot tell colours apart."""

    colour: str
    line: str | tuple[float, tuple[float, ...]]
    marker: str


Styled = Sequence[tuple[ArmRecord, Style]]


class Figure(NamedTuple):
    """An SVG with its title and a line below it."""

    title: str
    caption: str
    svg: Markup


def style(number: int) -> Style:
    """The style of arm ``number``; 0 is for the model before training. 56 arms have different styles."""
    hue = 0 if number == 0 else 1 + (number - 1) % (len(COLOURS) - 1)
    line = _LINES[3] if number == 0 else _LINES[(number - 1) % len(_LINES)]
    return Style(COLOURS[hue], line, _MARKERS[number % len(_MARKERS)])


def plane(arms: Styled, name: str, legible: Column = SENIOR_FIRST) -> Figure | None:
    """Solo against handoff, or transfer: a point for each arm, with an arrow from the model before training if it was
    evaluated, its interval over seeds or, in the plane of handoff, a small dot for each seed, and a line at what the
    junior, or the unseen readers, solve alone. None without an arm that has both values."""
    points = [
        (arm, look, solo, handoff)
        for arm, look in arms
        if (solo := estimate(arm, SOLO)) is not None and (handoff := estimate(arm, legible)) is not None
    ]
    if not points:
        return None
    start = next(((solo.mean, handoff.mean) for arm, _, solo, handoff in points if arm.name == BASE), None)
    with axes(name, height=3.5) as (canvas, ax):
        for arm, look, solo, handoff in points:
            if legible is UNSEEN:
                for along, of, at in (("x", solo, handoff), ("y", handoff, solo)):
                    _bar(ax, along, of, at.mean, look)
            elif len(seeds := [seed for seed in solo.by_seed if seed in handoff.by_seed]) > 1:
                dots = ([each.by_seed[seed].mean for seed in seeds] for each in (solo, handoff))
                ax.plot(*dots, ".", color=look.colour, alpha=0.45)
            end = solo.mean, handoff.mean
            ax.plot(*end, look.marker, color=look.colour, markersize=8, label=arm.title)
            if start is not None and arm.name != BASE:
                arrow = {"arrowstyle": "->", "color": look.colour, "lw": 1.3, "shrinkA": 4, "shrinkB": 5}
                ax.annotate("", end, start, arrowprops=arrow)
        who, column = (BASE, READERS_ALONE) if legible is UNSEEN else (JUNIOR, SOLO)
        for arm, look in arms:
            if arm.name == who and (alone := estimate(arm, column)) is not None:
                title = column.title if legible is UNSEEN else arm.title
                ax.axhline(alone.mean, color=look.colour, linestyle=look.line, linewidth=1.2, label=title)
        ax.margins(0.14)
        ax.locator_params(nbins=6)
        ax.set(xlabel=f"{SOLO.title}: the senior alone", ylabel=legible.title)
        caption = "top right: good alone and good to work with" + ("; arrows: training" if start is not None else "")
        title = f"Solo against {'transfer' if legible is UNSEEN else 'handoff'}"
        return Figure(title, caption, draw(canvas, f"{title}, pass@1 of each arm"))


def shares(arms: Styled, name: str) -> Figure | None:
    """What unseen readers make of growing parts of each arm's texts; None if there were no readers."""
    with axes(name) as (canvas, ax):
        for arm, look in arms:
            points = [(share, estimate(arm, Column("", "", "", f"unseen/free/{share}"))) for share in SHARES]
            known = [(share, value) for share, value in points if value is not None]
            for share, value in known:
                _bar(ax, "y", value, share, look)
            if known:
                line = ([share for share, _ in known], [value.mean for _, value in known])
                ax.plot(*line, look.marker, color=look.colour, linestyle=look.line, label=arm.title, markersize=4)
        if not ax.lines:
            return None
        ax.set(xlabel="share of the steps that they get, %", ylabel="pass@1 of unseen readers")
        title = "What readers make of parts of the texts"
        return Figure(title, "the last step holds the answer; 95 % intervals over seeds", draw(canvas, title))


def matrix(arms: Styled, name: str) -> Figure | None:
    """Schedules at evaluation by arms, with intervals; None if there were no readers."""
    cells = {arm.title: [estimate(arm, column) for column in SCHEDULES] for arm, _ in arms}
    rows = {title: [value for value in found if value is not None] for title, found in cells.items()}
    rows = {title: found for title, found in rows.items() if len(found) == len(SCHEDULES)}
    if not rows:
        return None
    with axes(name, height=0.9 + 0.42 * len(rows)) as (canvas, ax):
        canvas.set_size_inches(7.2, 0.9 + 0.42 * len(rows))
        shade = np.array([[(0.23, 0.61, 0.84, 0.7 * value.mean) for value in row] for row in rows.values()])
        ax.imshow(shade, aspect="auto")
        for y, row in enumerate(rows.values()):
            for x, value in enumerate(row):
                ends = "" if value.low is None else f"\n[{value.low:.2f}, {value.high:.2f}]"
                ax.text(x, y, f"{value.mean:.2f}{ends}", ha="center", va="center", fontsize=7.5)
        ax.set_xticks(range(len(SCHEDULES)), [column.title for column in SCHEDULES])
        ax.set_yticks(range(len(rows)), [*rows])
        ax.grid(visible=False)
        title = "Trained one way, evaluated another"
        return Figure(title, "pass@1; rows: arms, columns: how the authors change", draw(canvas, title))


def _bar(ax: Axes, along: str, value: Estimate, at: float, look: Style) -> None:
    """The interval of a value along an axis, where the other one is ``at``."""
    if value.low is not None and value.high is not None:
        ends, other = (value.low, value.high), (at, at)
        ax.plot(*((ends, other) if along == "x" else (other, ends)), "-", color=look.colour, linewidth=1, alpha=0.6)


def curves(arms: Styled, prefix: str) -> list[Figure]:
    """The learning curves that there is data for."""
    return [*filter(None, (curve(arms, f"{prefix}-{number}", metric) for number, metric in enumerate(CURVES)))]


def curve(arms: Styled, name: str, metric: str) -> Figure | None:
    """A learning curve: the mean over seeds, a band that holds all seeds, and a thin line per seed."""
    title, label = CURVES[metric]
    found = [
        (arm, look, runs) for arm, look in arms if (runs := [*filter(None, (series(r, metric) for r in arm.runs))])
    ]
    measured = [run for _, _, runs in found for run in runs]
    values = [value for run in measured for value in run.values()]
    if not values or (len(set(values)) == 1 and len(values) > 1):
        return None  # nothing to see
    with axes(name) as (canvas, ax):
        for arm, look, runs in found:
            common = sorted(set.intersection(*map(set, runs)))  # thinned after: blocks of other lengths share no step
            x, shared = thin(common), np.array([thin([run[step] for step in common]) for run in runs])
            if len(runs) > 1:
                for run in runs:
                    ax.plot(thin([*run]), thin([*run.values()]), color=look.colour, linewidth=0.7, alpha=0.45)
                if len(x):
                    ax.fill_between(x, shared.min(0), shared.max(0), color=look.colour, alpha=0.14, linewidth=0)
            if len(x):
                (line,) = ax.plot(x, shared.mean(0), color=look.colour, linestyle=look.line, label=arm.title)
                line.set(marker=look.marker if len(x) <= 12 else "", markersize=4)
        ax.set(xlabel="training step", ylabel=label)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        ax.margins(x=0.02)
        longest = max(map(len, measured))
        notes = ["mean and band of the seeds" if len(measured) > len(found) else "one seed per arm"]
        notes += [f"each point is the mean of {-(-longest // POINTS)} records"] if longest > POINTS else []
        return Figure(title, "; ".join(notes), draw(canvas, f"{title} over training steps"))


def series(run: RunRecord, metric: str) -> dict[float, float]:
    """The values of a metric in one run, by step."""
    return {step["step"]: step[metric] for step in run.steps if step.get(metric) is not None and "step" in step}


def thin(values: Sequence[float], points: int = POINTS) -> np.ndarray:
    """Means over blocks of consecutive entries, so that at most ``points`` are left."""
    size = -(-len(values) // points) or 1
    return np.array([np.mean(values[start : start + size]) for start in range(0, len(values), size)])


# ----------------------------------------------------------------------------------------------------------------- SVG


@contextmanager
def axes(name: str, height: float = 3.1) -> Iterator[tuple[Canvas, Axes]]:
    """A context with one plot in the page's style, as high as this in inches. Call ``draw`` inside. The ids in the SVG
    depend on ``name``, which is the plot's own on its page."""
    with matplotlib.rc_context(_SETTINGS | {"svg.hashsalt": name}):
        canvas = Canvas(figsize=(4.4, height), layout="constrained")
        yield canvas, canvas.add_subplot()


def draw(canvas: Canvas, description: str) -> Markup:
    """The figure as ``<svg>`` that scales to its box, with a legend below; ``description`` is for screen readers."""
    if len(canvas.axes[0].get_legend_handles_labels()[0]) > 1:
        canvas.legend(loc="outside lower left", ncols=2, fontsize=9)
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue().replace("xlink:href", "href")
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1)
    text = re.sub(r' (xmlns[:\w]*|version)="[^"]+"', "", text)  # which HTML knows
    used = set(re.findall(r"""(?:href="#|url\(#)([^")]+)""", text))
    text = re.sub(r' id="([^"]+)"', lambda match: match[0] if match[1] in used else "", text)
    return Markup(re.sub(r"<[^>]+>", lambda tag: re.sub(r"(?<=\d)\.(\d\d)\d+", r".\1", tag[0]), text))  # coordinates
