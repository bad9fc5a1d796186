"""Draw the results of the committed experiments: docs/images/results/NAME.svg from docs/NAME.json. `make figures`.

One picture for each experiment: a row for each arm, a panel for each measure. A small dot is a seed, the large one the
mean, the line its 95 % interval (Student's t over seeds). The pictures of the frontier are those of its report.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

from tandemrl.apps.report import read_results
from tandemrl.apps.report.figures import matrix, plane, shares, style
from tandemrl.apps.report.records import JUNIOR
from tandemrl.apps.report.tables import UNSEEN
from tandemrl.evals.stats import seed_interval
from tandemrl.files import write_text

mpl.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
OUT = DOCS / "images" / "results"

SOLO, TANDEM, FIRST = "solo/pass@1", "tandem/pass@1", "handoff/senior_first"
HANDOFF, CE, JARGON = "handoff/pass@1", "junior_ce", "jargon_rate"
SHORTHAND = "shorthand_rate"
PANELS = {
    SOLO: "solo pass@1 →",
    TANDEM: "tandem pass@1 →",
    FIRST: "handoff, senior first →",
    HANDOFF: "handoff pass@1 →",
    CE: "← junior CE (nats/token)",
    JARGON: "← jargon rate",
    SHORTHAND: "← shorthand rate",
    "handoff/senior_then_junior": "after the senior’s first turn →",
    "handoff/repairs": "repairs per handoff text",
}
"""The measures, with an arrow to where they are better."""
ARMS = {
    "base": "before training",
    "grpo": "GRPO",
    "kl": "GRPO, KL",
    "grpo_8": "GRPO, half batch",
    "brevity": "GRPO, length penalty",
}
TANDEMS = {
    "tandem": "tandem",
    "tandem_self": "tandem, self-paired",
    "tandem_brevity": "tandem, length penalty",
    "sentence": "tandem by steps",
}
AGENTS = {"turns": "tandem by turns", "words": "tandem by words"}
SETTINGS = {
    "word_aligned": "word_aligned",
    "bernoulli": "bernoulli",
    "chunk_8": "chunks of 8",
    "p_0.25": "p = 0.25",
    "p_0.75": "p = 0.75",
    "p_0.9_to_0.5": "p = 0.9 → 0.5",
    "K_2": "K = 2",
    "K_8": "K = 8",
    "junior_weight_0.5": "junior’s weight 0.5",
    "junior_weight_1": "junior’s weight 1",
    "junior_kl_0.1": "λ_jun = 0.1",
    "weak_junior": "weaker junior",
}
NAMES = ARMS | TANDEMS | AGENTS | SETTINGS


class Plot(NamedTuple):
    """An experiment and the measures that its picture shows."""

    name: str
    measures: tuple[str, ...]


PLOTS = (
    Plot("paper_claims_jargon", (SOLO, FIRST, CE, JARGON)),
    Plot("two_tokenizers", (SOLO, FIRST, CE, JARGON)),
    Plot("two_steps_ahead", (SOLO, FIRST, CE, JARGON)),
    Plot("ablations", (SOLO, FIRST, CE, JARGON)),
    Plot("shorthand", (SOLO, FIRST, CE, SHORTHAND)),
    Plot("repair", (SOLO, HANDOFF, CE, "handoff/repairs")),
    Plot("hops_jargon", (SOLO, "handoff/senior_then_junior", CE, JARGON)),
    Plot("hops", (SOLO, "handoff/senior_then_junior", CE)),
    Plot("smollm2", (SOLO, TANDEM, HANDOFF, CE)),
    Plot("smollm2_terse", (SOLO, TANDEM, HANDOFF, CE)),
)

READ = {"0": (-0.22, "o", "none"), "before": (0.0, "o", ""), "100": (0.22, "s", "")}
"""What a reader is given: where its mark stands, the mark, and its filling."""

INK, SOFT, BEFORE, SOLO_COLOUR, TANDEM_COLOUR = "#777777", "#bbbbbb", "#888888", "#c2571a", "#1f6fb4"


def colour(arm: str) -> str:
    if arm == "base":
        return BEFORE
    return SOLO_COLOUR if arm in ARMS else TANDEM_COLOUR


def values(rows: list[dict[str, Any]], arm: str, measure: str) -> list[float]:
    """One value per seed."""
    return [row[measure] for row in rows if row["arm"] == arm and measure in row]


def draw(plot: Plot) -> None:
    rows = json.loads((DOCS / f"{plot.name}.json").read_text())["rows"]
    found = {row["arm"] for row in rows} - {JUNIOR}
    arms = [arm for arm in NAMES if arm in found]
    if missing := found - {*arms}:
        raise ValueError(f"docs/{plot.name}.json: no name for {', '.join(sorted(missing))}; add it to NAMES")
    figure, axes = plt.subplots(
        1, len(plot.measures), figsize=(10, 0.9 + 0.3 * len(arms)), sharey=True, layout="constrained"
    )
    for axis, measure in zip(axes, plot.measures, strict=True):
        for y, arm in enumerate(arms):
            seeds = values(rows, arm, measure)
            if not seeds:
                continue
            axis.plot(seeds, [y] * len(seeds), "o", color=colour(arm), ms=4, alpha=0.6, mew=0)
            if len(seeds) > 1:
                mean, low, high = seed_interval(seeds)
                highest = float("inf") if measure in (CE, "handoff/repairs") else 1.0
                axis.plot([max(0.0, low), min(highest, high)], [y, y], "-", color=colour(arm), lw=1, alpha=0.7)
                axis.plot([mean], [y], "o", color=colour(arm), ms=6)
        dress(axis, PANELS[measure], arms)
    save(figure, plot.name)


def dress(axis: Any, title: str, arms: list[str]) -> None:
    """A panel with a row for each arm."""
    axis.set_title(title, fontsize=9, color=INK)
    axis.set_yticks(range(len(arms)), [NAMES[arm] for arm in arms])
    axis.set_ylim(len(arms) - 0.5, -0.5)
    axis.tick_params(colors=INK, labelsize=8, length=0)
    axis.grid(axis="x", color=SOFT, lw=0.4, alpha=0.6)
    axis.spines[:].set_visible(False)


def headline() -> None:
    """Solo against handoff: an arrow from the model before training to each arm."""
    rows = json.loads((DOCS / "paper_claims_jargon.json").read_text())["rows"]
    figure, axis = plt.subplots(figsize=(5.6, 4), layout="constrained")
    start = [sum(v) / len(v) for v in (values(rows, "base", SOLO), values(rows, "base", FIRST))]
    for arm in ("base", "grpo", "kl", "tandem"):
        solo, first = values(rows, arm, SOLO), values(rows, arm, FIRST)
        end = [sum(solo) / len(solo), sum(first) / len(first)]
        axis.plot(solo, first, "o", color=colour(arm), ms=3.5, alpha=0.45, mew=0)
        axis.plot(*end, "o", color=colour(arm), ms=7)
        below = arm == "grpo"
        at = (-8, -14 if below else 8)
        look: dict[str, Any] = {"color": colour(arm), "fontsize": 9, "ha": "right"}
        axis.annotate(NAMES[arm], end, xytext=at, textcoords="offset points", **look)
        if arm != "base":
            axis.annotate(
                "", end, start, arrowprops={"arrowstyle": "->", "color": colour(arm), "lw": 1.2, "shrinkB": 6}
            )
    axis.set_xlabel("solo pass@1: the senior alone", color=INK, fontsize=9)
    axis.set_ylabel("handoff pass@1: the junior goes on from its first step", color=INK, fontsize=9)
    axis.set_xlim(0.65, 1.0)
    axis.set_ylim(0, 0.75)
    axis.tick_params(colors=INK, labelsize=8, length=0)
    axis.grid(color=SOFT, lw=0.4, alpha=0.6)
    axis.spines[:].set_visible(False)
    save(figure, "headline")


def frontier(file: Path) -> None:
    """Solo against transfer, transfer by shares of the steps, and the matrix of schedules."""
    [setting] = read_results(file)
    arms = [(arm, style(number)) for number, arm in enumerate(setting.arms)]
    pictures = {
        "": plane(arms, "frontier", UNSEEN),
        "_shares": shares(arms, "shares"),
        "_matrix": matrix(arms, "matrix"),
    }
    for name, picture in pictures.items():
        assert picture is not None, file
        opening, rest = str(picture.svg).split(">", 1)
        opening = opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
        look = f"<style>text {{ fill: {INK}; font-family: sans-serif }}</style>"
        write_text(OUT / f"{file.stem}{name}.svg", f"{opening}>{look}{rest}")


def readers(file: Path) -> None:
    """What real readers solve alone, after a model's steps before the true answer, and after all of them."""
    rows = [row for row in json.loads(file.read_text())["rows"] if row["way"] == "free" and row["given"] in READ]
    names, arms = (list(dict.fromkeys(row[what] for row in rows)) for what in ("reader", "arm"))
    figure, axes = plt.subplots(1, len(names), figsize=(8, 0.9 + 0.5 * len(arms)), sharey=True, layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        for row in (row for row in rows if row["reader"] == name):
            y, of, (shift, mark, face) = arms.index(row["arm"]), colour(row["arm"]), READ[row["given"]]
            axis.plot([row["low"], row["high"]], [y + shift, y + shift], "-", color=of, lw=1, alpha=0.7)
            axis.plot([row["pass@1"]], [y + shift], mark, color=of, ms=6, mfc=face or of)
        dress(axis, f"{name}, pass@1 →", arms)
        axis.set_xlim(0, 1)
    save(figure, file.stem)


def save(figure: Any, name: str) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT / f"{name}.svg", transparent=True, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    plt.rcParams |= {"svg.hashsalt": "tandemrl", "svg.fonttype": "none", "font.family": "sans-serif"}
    headline()
    frontier(DOCS / "frontier.json")
    readers(DOCS.parent / "benchmarks" / "results" / "smollm2_readers.json")
    for plot in PLOTS:
        draw(plot)


if __name__ == "__main__":
    main()
