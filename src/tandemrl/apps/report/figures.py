"""The plots of a report, as inline SVG with the fonts and theme colours of the page, and with ids of their own.

Colours are drawn as placeholders and replaced by CSS variables (``--ink``, ``--arm-1`` …) once the SVG is text.
"""

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
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from tandemrl.apps.report.records import ArmRecord, RunRecord
from tandemrl.apps.report.tables import JUNIOR_CE, JUNIOR_FIRST, SENIOR_FIRST, SOLO, Column, estimate

POINTS = 150
"""How many points a learning curve has at most. A longer run is averaged over blocks of consecutive records."""
INK, MUTED, RULE, PAPER = "#010101", "#010102", "#010103", "#010104"
HUES = 7
"""Colours for arms, --arm-1 to --arm-7; --arm-0 is grey, for ``base``."""
_ARM = "#0102{:02x}"
_VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"} | {
    _ARM.format(i): f"--arm-{i}" for i in range(HUES + 1)
}
_LINES = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1.5, 1.5)))
_MARKERS = "osD^vPX*"
_SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tandemrl",  # the same figure is the same text
    "font.size": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.8,
}

MEASURED = (SOLO, SENIOR_FIRST, JUNIOR_FIRST, JUNIOR_CE)
"""The columns of the headline table that have a plot."""
CURVES = {
    "draft/acceptance": ("Drafts that the senior accepts", "fraction where it is the author"),
    "reward/mean": ("Training reward", "mean reward"),
    "eval/pass@1": ("Held-out solo pass@1", "pass@1"),
    "monitor/pass@1": ("Monitored solo pass@1", "pass@1"),
    "response/length": ("Response length", "tokens"),
    "response/truncated": ("Rollouts that the limit of tokens cut off", "fraction"),
    "eval/truncation_rate": ("Held-out solo texts that the limit of tokens cut off", "fraction"),
    "tandem/senior_frac": ("Tokens by the senior", "fraction of response tokens"),
    "env/turns": ("Turns of an episode", "turns"),
    "env/tool_errors": ("Tool errors", "per episode"),
    "env/invalid_calls": ("Calls that could not be made", "per episode"),
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

    hue: int
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
    """The style of arm ``number``; 0 is the grey of ``base``. 56 arms have different styles."""
    hue = 0 if number == 0 else 1 + (number - 1) % HUES
    line = _LINES[3] if number == 0 else _LINES[(number - 1) % len(_LINES)]
    return Style(hue, _ARM.format(hue), line, _MARKERS[number % len(_MARKERS)])


def all_figures(measured: Styled, trained: Styled, prefix: str) -> list[Figure]:
    """Every plot that there is data for, in the order of the page: of evaluations, then of training."""
    drawn = [dots(measured, f"{prefix}-m{number}", column) for number, column in enumerate(MEASURED)]
    drawn += [curve(trained, f"{prefix}-c{number}", metric) for number, metric in enumerate(CURVES)]
    return [figure for figure in drawn if figure is not None]


def dots(arms: Styled, name: str, column: Column) -> Figure | None:
    """A column of the headline table: a point with its interval for each arm, and a tick for each seed."""
    rows = [(arm, look, value) for arm, look in arms if (value := estimate(arm, column)) is not None]
    if len(rows) < 2:
        return None
    with axes(height=0.85 + 0.34 * max(3, len(rows))) as (canvas, ax):
        for y, (_, look, value) in enumerate(rows):
            seeds = [each.mean for each in value.by_seed.values()]
            if len(seeds) > 1:
                ax.plot(seeds, [y] * len(seeds), "|", color=look.colour, markersize=11, alpha=0.6)
            low, high = (value.mean if end is None else end for end in (value.low, value.high))
            ax.plot([low, high], [y, y], color=look.colour)
            ax.plot([value.mean], [y], look.marker, color=look.colour, markersize=8, markeredgecolor=PAPER, zorder=3)
        ax.set_yticks(range(len(rows)), [_short(arm.title) for arm, _, _ in rows])
        ax.set_ylim(len(rows) - 0.4, -0.6)
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
        ax.set_xlabel(column.heading)
        values = [each.mean for _, _, value in rows for each in value.by_seed.values()]
        if min(values) > 0 and max(values) > 8 * min(values) and column.unit:
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xlim(left=min(values) / 1.6)
        else:
            ax.xaxis.set_major_locator(MaxNLocator(6))
        title = column.title[0].upper() + column.title[1:]
        return Figure(title, "bars: 95 % intervals; ticks: seeds", draw(canvas, name, title))


def curve(arms: Styled, name: str, metric: str) -> Figure | None:
    """A learning curve: the mean over seeds, a band from the lowest to the highest seed, and a thin line per seed."""
    title, label = CURVES[metric]
    found = [
        (look, runs) for arm, look in arms if (runs := [s for run in arm.runs if len((s := series(run, metric))[0])])
    ]
    longest, several = max((len(x) for _, runs in found for x, _ in runs), default=0), any(len(r) > 1 for _, r in found)
    measured = [y for _, runs in found for _, y in runs]
    if not found or (len(np.unique(np.concatenate(measured))) == 1 and sum(map(len, measured)) > 1):
        return None  # nothing to see
    highest = max(float(np.abs(y).max()) for y in measured)
    power = int(np.floor(np.log10(highest))) if 0 < highest < 1e-2 else 0
    with axes() as (canvas, ax):
        for look, runs in found:
            x, values = shared_blocks([(x, y * 10.0**-power) for x, y in runs])
            if len(runs) > 1:
                for seed_x, seed_y in ((thin(x), thin(y * 10.0**-power)) for x, y in runs):
                    ax.plot(seed_x, seed_y, color=look.colour, linewidth=0.7, alpha=0.45)
                if len(x):
                    ax.fill_between(x, values.min(0), values.max(0), color=look.colour, alpha=0.14, linewidth=0)
            if len(x):
                marker = look.marker if len(x) <= 12 else None
                ax.plot(
                    x, values.mean(0), color=look.colour, linestyle=look.line, marker=marker, markersize=4, zorder=3
                )
        unit = f" × 10{str(power).translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}" if power else ""
        ax.set(xlabel="training step", ylabel=f"{label}{unit}")
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
        ax.margins(x=0.02)
        notes = ["mean over seeds, band from lowest to highest seed" if several else "one seed per arm"]
        notes += [f"each point is the mean of {-(-longest // POINTS)} records"] if longest > POINTS else []
        return Figure(title, "; ".join(notes), draw(canvas, name, f"{title} over training steps"))


def series(run: RunRecord, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps and the values of a metric in one run."""
    points = [(step["step"], step[metric]) for step in run.steps if step.get(metric) is not None and "step" in step]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps, dtype=float), np.array(values, dtype=float)


def thin(values: np.ndarray, points: int = POINTS) -> np.ndarray:
    """Means over blocks of consecutive entries, so that at most ``points`` are left."""
    size = -(-len(values) // points) if len(values) else 1
    return np.array([values[start : start + size].mean() for start in range(0, len(values), size)])


def shared_blocks(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that all seeds have, and a row of values per seed; thinned afterwards, since the blocks of two runs of
    other lengths would have no step in common."""
    common = sorted(set.intersection(*(set(x.tolist()) for x, _ in curves)))
    rows = [np.array([y[x == step][0] for step in common]) for x, y in curves]
    return thin(np.array(common)), np.array([thin(row) for row in rows])


# ----------------------------------------------------------------------------------------------------------------- SVG


@contextmanager
def axes(width: float = 4.4, height: float = 2.9) -> Iterator[tuple[Canvas, Axes]]:
    """A context with one plot in the page's style, of this size in inches. Call ``draw`` inside."""
    with matplotlib.rc_context(_SETTINGS):
        canvas = Canvas(figsize=(width, height), layout="constrained")
        yield canvas, canvas.add_subplot()


def draw(canvas: Canvas, name: str, description: str) -> Markup:
    """The figure as ``<svg>`` that scales to its box. Its ids start with ``name``; ``description`` is for screen
    readers."""
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    size = re.search(r'viewBox="([^"]+)"', text)
    assert size is not None
    label = f'role="img" aria-label="{escape(description)}"' if description else 'aria-hidden="true"'
    text = re.sub(r"<svg[^>]*>", lambda _: f'<svg viewBox="{size[1]}" {label}>', text, count=1)
    text = text.replace("xlink:href", "href")
    used = set(re.findall(r"""(?:href="#|url\(#)([^")]+)""", text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r"""(href="#|url\(#)""", rf"\g<1>{name}-", text)
    text = re.sub(r"font: (?:[\w ]+ )?([\d.]+)px [^;\"]+", r"font-size: \1px", text)
    for placeholder, variable in _VARIABLES.items():
        text = text.replace(placeholder, f"var({variable})")
    text = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(?<=\d)\.(\d\d)\d+", r".\1", tag[0]), text)  # coordinates only
    return Markup(re.sub(r"\s*\n\s*", "\n", text).strip())


def key(look: Style, name: str) -> Markup:
    """The sample of a style that a legend shows before the arm's name."""
    with axes(0.42, 0.15) as (canvas, ax):
        canvas.set_layout_engine("none")
        ax.set_position((0, 0, 1, 1))
        ax.set_axis_off()
        ax.set(xlim=(0, 1), ylim=(-1, 1))
        ax.plot([0.02, 0.98], [0, 0], color=look.colour, linestyle=look.line)
        ax.plot([0.5], [0], color=look.colour, marker=look.marker, markersize=5.5, markeredgecolor=PAPER)
        return draw(canvas, name, "")


def _short(title: str, width: int = 22) -> str:
    return title if len(title) <= width else f"{title[: width - 1]}…"
