"""Matplotlib figures as inline SVG with the fonts and theme colours of the page, and with ids of their own.

Colours are drawn as placeholders and replaced by CSS variables (``--ink``, ``--arm-1`` …) once the SVG is text.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, RULE, PAPER = "#010101", "#010102", "#010103", "#010104"
HUES = 7
"""Colours for arms, --arm-1 to --arm-7; --arm-0 is grey, for ``base``."""
PARTS = 6
"""Shades for the parts of a whole, --part-0 to --part-5."""
_ARM, _PART = "#0102{:02x}", "#0103{:02x}"
_VARIABLES = (
    {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--paper"}
    | {_ARM.format(i): f"--arm-{i}" for i in range(HUES + 1)}
    | {_PART.format(i): f"--part-{i}" for i in range(PARTS)}
)
_LINES = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1.5, 1.5)))
_MARKERS = "osD^vPX*"
_SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tandemrl",  # the same figure is the same text
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "axes.unicode_minus": True,
    "path.simplify": True,
}


class Style(NamedTuple):
    """How an arm looks in every plot: its colour, and a line and a marker for readers who cannot tell colours apart."""

    hue: int
    colour: str
    line: str | tuple[float, tuple[float, ...]]
    marker: str


def style(number: int) -> Style:
    """The style of arm ``number``; 0 is the grey of ``base``. 56 arms have different styles."""
    hue = 0 if number == 0 else 1 + (number - 1) % HUES
    line = _LINES[3] if number == 0 else _LINES[(number - 1) % len(_LINES)]
    return Style(hue, _ARM.format(hue), line, _MARKERS[number % len(_MARKERS)])


def part(number: int) -> str:
    """The shade of one part of a whole."""
    return _PART.format(number % PARTS)


@contextmanager
def axes(width: float = 4.4, height: float = 2.9) -> Iterator[tuple[Figure, Axes]]:
    """A context with one plot in the page's style, of this size in inches. Call ``draw`` inside."""
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.add_subplot()


def draw(figure: Figure, name: str, description: str) -> str:
    """The figure as ``<svg>`` that scales to its box. Its ids start with ``name``; ``description`` is for screen
    readers."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    size = re.search(r'viewBox="([^"]+)"', text)
    assert size is not None
    label = f'role="img" aria-label="{escape(description)}"' if description else 'aria-hidden="true"'
    text = re.sub(
        r"<svg[^>]*>",
        f'<svg viewBox="{size.group(1)}" {label}>',
        text,
        count=1,
    )
    text = text.replace("xlink:href", "href")
    used = set(re.findall(r"""(?:href="#|url\(#)([^")]+)""", text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{name}-{m.group(1)}"' if m.group(1) in used else "", text)
    text = re.sub(r"""(href="#|url\(#)""", rf"\g<1>{name}-", text)
    text = re.sub(r"font: (?:[\w ]+ )?([\d.]+)px [^;\"]+", r"font-size: \1px", text)
    for placeholder, variable in _VARIABLES.items():
        text = text.replace(placeholder, f"var({variable})")
    text = re.sub(r"<[^>]+>", lambda tag: re.sub(r"(?<=\d)\.(\d\d)\d+", r".\1", tag[0]), text)  # coordinates only
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def key(look: Style, name: str) -> str:
    """The sample of a style that a legend shows before the arm's name."""
    with axes(0.42, 0.15) as (figure, ax):
        figure.set_layout_engine("none")
        ax.set_position((0, 0, 1, 1))
        ax.set_axis_off()
        ax.set(xlim=(0, 1), ylim=(-1, 1))
        ax.plot([0.02, 0.98], [0, 0], color=look.colour, linestyle=look.line)
        ax.plot([0.5], [0], color=look.colour, marker=look.marker, markersize=5.5, markeredgecolor=PAPER)
        return draw(figure, name, "")
