"""Makes the HTML and Markdown pages of a report from its records."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from tandemrl.apps.report import provenance, svg
from tandemrl.apps.report.differences import paired_differences
from tandemrl.apps.report.figures import Styled, all_figures
from tandemrl.apps.report.records import FIRST_ARMS, JUNIOR, ArmRecord, Records, Setting, discover, with_junior
from tandemrl.apps.report.samples import Gallery, galleries
from tandemrl.apps.report.tables import (
    LAST,
    MISSING,
    bounds,
    claim_cells,
    claims_table,
    columns_of,
    estimate,
    headline_table,
    markdown_table,
    nats,
    rate,
    relations,
    signed_interval,
)
from tandemrl.apps.report.workers import HEAD, worker_rows
from tandemrl.evals.compare import InTraining, good_end
from tandemrl.files import write_text
from tandemrl.models.loading import load_tokenizer
from tandemrl.types import Author

UNDECIDED = "no difference shown"
TREND = ("reward/mean", "eval/pass@1", "response/length")
"""Training metrics whose first and closing values are in the Markdown page, which has no plots."""


@dataclass(frozen=True, slots=True)
class Report:
    """The content of a page. ``caveats`` say what the numbers do not show; ``galleries`` are samples by setting."""

    title: str
    records: Records
    galleries: Mapping[str, list[Gallery]]
    caveats: tuple[str, ...]


def build_report(folder: str | Path, *, title: str | None = None, tokenizer: str | Path | None = None) -> Report:
    """Read every run and evaluation below a folder. Of files outside of it, only data files that they name are read.

    Args:
        title: the title of the page. The default is the name of the experiment or of the folder.
        tokenizer: folder or hub id of the models' tokenizer, if it is not below ``folder``.

    Raises:
        ReportError: there is nothing to report on, or a file is damaged; the message names it.
        ModelError: ``tokenizer`` cannot be loaded.
    """
    records = discover(folder)
    decoder = None if tokenizer is None else load_tokenizer(tokenizer)
    notes: list[str] = []
    settings = (replace(each, contrasts=paired_differences(each, notes.append)) for each in records.settings)
    records = replace(records, settings=tuple(settings))
    shown = {setting.name: galleries(records, setting, notes.append, decoder) for setting in records.settings}
    name = records.experiment.get("name") or records.folder.resolve().name
    return Report(
        title=title or str(name),
        records=records,
        galleries=shown,
        caveats=tuple(dict.fromkeys([*provenance.caveats(records), *notes])),
    )


def write_report(report: Report, file: str | Path | None = None) -> tuple[Path, Path]:
    """Write the HTML page and, beside it, the Markdown page. Each appears complete or not at all.

    Args:
        file: the file of the HTML page. The default is ``report.html`` in the report's folder.

    Returns:
        The files of the HTML page and of the Markdown page.
    """
    page = Path(file) if file is not None else report.records.folder / "report.html"
    text = page.with_suffix(".md")
    write_text(page, to_html(report))
    write_text(text, to_markdown(report, plots=page.name))
    return page, text


def to_html(report: Report) -> str:
    """The report as one HTML page, without scripts and without references to other files."""
    looks = styles(report.records)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["spans"] = _spans
    return environment.get_template("page.html.j2").render(
        title=report.title,
        lead=_lead(report.records),
        settings=[
            _setting(number, setting, looks, report.galleries[setting.name])
            for number, setting in enumerate(report.records.settings)
        ],
        arms=looks,
        caveats=report.caveats,
        code=provenance.code(report.records),
        sources=provenance.sources(report.records),
        commands=provenance.commands(report.records),
        experiment=_flat_settings(report.records.experiment),
        missing=MISSING,
        workers_head=HEAD,
        bounds=bounds,
    )


def to_markdown(report: Report, *, plots: str = "report.html") -> str:
    """The report as Markdown: the tables, and a reference to the HTML page for plots and samples.

    Args:
        plots: the name of the HTML page.
    """
    parts = [f"# {report.title}", f"{_lead(report.records)} Plots and samples: `{plots}`."]
    several = len(report.records.settings) > 1
    for setting in report.records.settings:
        if several or setting.name:
            parts.append(f"## {setting.name or 'top level'}")
        measured = with_junior([arm for arm in setting.arms if arm.evaluations])
        contrasts = _contrasts(setting)
        if contrasts:
            parts += ["### In short", _sentences(contrasts)]
        if measured:
            parts += [headline_table(measured), _interval_note(measured), *relations(setting.arms)]
        if contrasts:
            head = ["comparison", "metric", "difference [95 % interval]", "verdict"]
            rows = [
                [" − ".join(c["between"]), c["metric"], f"{c['mean']} {c['interval']}", c["verdict"]] for c in contrasts
            ]
            parts += ["### Differences", markdown_table(head, rows, left=2)]
        if setting.claims:
            parts += ["### Claims", claims_table(setting.claims)]
        if workers := worker_rows(setting.arms):
            parts += ["### Workers and staleness", markdown_table(HEAD, workers)]
        for metric in TREND:
            rows = [row for arm in setting.arms if (row := _trend(arm, metric))]
            if rows:
                head = [metric, "seeds", "values", "first (step)", "mean of the last (values)"]
                parts += [markdown_table(head, rows)]
    if report.caveats:
        parts += ["## What this does not show", "\n".join(f"- {caveat}" for caveat in report.caveats)]
    parts += ["## Provenance", "\n".join(f"- {name}: {value}" for name, value in provenance.code(report.records))]
    head = ["arm", "seeds", "steps", "config of runs", "config of evaluations"]
    rows = [
        [f"{s.setting}/{s.arm}" if s.setting else s.arm, s.seeds, s.steps, s.runs, s.evaluations]
        for s in provenance.sources(report.records)
    ]
    parts += [markdown_table(head, rows), "```\n" + "\n".join(provenance.commands(report.records)) + "\n```"]
    return without_tags("\n\n".join(part.strip() for part in parts if part.strip())) + "\n"


def without_tags(markdown: str) -> str:
    """Markdown without HTML tags, whatever names and paths it quotes: what would begin a tag becomes text.

    Examples:
        >>> without_tags("A < B, <img src=x>")
        'A < B, &lt;img src=x>'
    """
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", markdown)


def headlines(report: Report, table: Callable[[Sequence[ArmRecord]], str] = headline_table) -> str:
    """The headline tables alone, in Markdown, each with a line that says what its intervals are.

    Args:
        table: ``headline_lines`` for a terminal.
    """
    parts = []
    for setting in report.records.settings:
        measured = with_junior([arm for arm in setting.arms if arm.evaluations])
        if measured:
            parts += [f"{setting.name}:" if setting.name else "", table(measured), _interval_note(measured)]
    return "\n\n".join(part.strip() for part in parts if part)


def styles(records: Records) -> dict[str, svg.Style]:
    """The style of each arm, by its name. It is the same in every setting and plot, and in all reports for arms that
    every experiment has."""
    names = dict.fromkeys([*FIRST_ARMS, *(arm.name for setting in records.settings for arm in setting.arms), JUNIOR])
    return {name: svg.style(number) for number, name in enumerate(names)}


def _setting(number: int, setting: Setting, looks: Mapping[str, svg.Style], shown: list[Gallery]) -> dict[str, Any]:
    """The variables with which the template shows a setting."""
    measured = with_junior([arm for arm in setting.arms if arm.evaluations])
    columns = columns_of(measured)
    table: list[dict[str, Any]] = [
        {
            "arm": arm,
            "hue": looks[arm.name].hue,
            "seeds": len({e.seed for e in arm.evaluations}),
            "cells": [(estimate(arm, column), column.shown) for column in columns],
        }
        for arm in measured
    ]
    contrasts = _contrasts(setting)
    styled: Styled = [(arm, looks[arm.name]) for arm in setting.arms]
    return {
        "id": f"s{number}",
        "name": setting.name,
        "columns": columns,
        "table": table,
        "note": _interval_note(measured) if measured else "",
        "relations": relations(setting.arms),
        "several_seeds": any(row["seeds"] > 1 for row in table),
        "unequal_seeds": len({row["seeds"] for row in table}) > 1,
        "contrasts": contrasts,
        "verdicts": _verdicts(contrasts),
        "claims": [claim_cells(claim) for claim in setting.claims],
        "workers": worker_rows(setting.arms),
        "figures": [figure._replace(svg=Markup(figure.svg)) for figure in all_figures(styled, f"s{number}")],
        "legend": [
            (arm, Markup(svg.key(look, f"s{number}-key{i}"))) for i, (arm, look) in enumerate(styled) if len(styled) > 1
        ],
        "galleries": shown,
        "opened": next((i for i, each in enumerate(shown) if _has_correct(each)), 0),
        "episodes": any(
            author == Author.CONTEXT
            for gallery in shown
            for problem in gallery.problems
            for _, each in problem.shown
            for author, _ in each.spans
        ),
    }


def _has_correct(gallery: Gallery) -> bool:
    return any(sample.correct for problem in gallery.problems for _, sample in problem.shown)


def _lead(records: Records) -> str:
    runs = [run for setting in records.settings for arm in setting.arms for run in arm.runs]
    evaluations = [e for setting in records.settings for arm in setting.arms for e in arm.evaluations]
    macros = [e.result["metrics"]["macro"] for e in evaluations]
    problems = sorted({int(macro["problems"]) for macro in macros if "problems" in macro})
    parts = [_plural(len(runs), "training run")] if runs else []
    parts += [_plural(len(evaluations), "finished evaluation")] if evaluations else []
    lead = f"{' and '.join(parts)} below {records.folder}."
    if problems:
        spread = str(problems[0]) if len(problems) == 1 else f"{problems[0]} to {problems[-1]}"
        lead += f" {spread} problems per evaluation."
    return lead


def _interval_note(arms: Sequence[ArmRecord]) -> str:
    seeds = [len({e.seed for e in arm.evaluations}) for arm in arms]
    number = f"{max(seeds)} " if len(set(seeds)) == 1 else ""
    over_seeds = (
        f"Mean over {number}seeds with its 95 % interval over seeds (Student's t, cut at the ends of what is possible)."
    )
    over_problems = "95 % bootstrap intervals over problems."
    if min(seeds) > 1:
        return over_seeds
    return (
        over_problems if max(seeds) == 1 else f"Where there are several seeds: {over_seeds} Elsewhere: {over_problems}"
    )


def _contrasts(setting: Setting) -> list[dict[str, Any]]:
    """The differences of a setting as text. ``headline``: of the headline table, or of training."""
    titles = {arm.name: arm.title for arm in setting.arms}
    columns = {(column.phase, column.metric): column for column in columns_of(setting.arms)}
    rows = []
    comparisons = list(dict.fromkeys((each.a, each.b) for each in setting.contrasts))
    for each in setting.contrasts:
        column = columns.get((each.phase, each.metric))
        shown = column.shown if column else rate if max(map(abs, each.difference)) < 1 else nats
        a, b = titles.get(each.a, each.a), titles.get(each.b, each.b)
        mean, interval = signed_interval(each.difference, shown)
        above = each.difference.mean > 0
        rows.append(
            {
                "metric": column.heading if column else f"{each.phase}: {each.metric}",
                "title": column.title if column else f"{each.phase} {each.metric}",
                "amount": f"{mean} {column.unit}".rstrip() if column else mean,
                "between": (a, b),
                "order": comparisons.index((each.a, each.b)),
                "mean": mean,
                "interval": interval,
                "decided": each.clear,
                "verdict": f"{a} {'>' if above else '<'} {b}" if each.clear else UNDECIDED,
                "direction": _direction(each.metric, above) if each.clear else UNDECIDED,
                "headline": column is not None or each.phase in get_args(InTraining),
            }
        )
    return rows


def _direction(metric: str, above: bool) -> str:
    """What a clear difference is called: better or worse if the metric has a good end, else higher or lower."""
    good = good_end(metric)
    if good is None:
        return "higher" if above else "lower"
    return "better" if above == (good == "higher") else "worse"


def _verdicts(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """A sentence per comparison: (what is compared, [("better", metrics with their differences), …])."""
    sentences = []
    for between in dict.fromkeys(row["between"] for row in rows):
        mine = [row for row in rows if row["between"] == between and row["headline"]]
        changes = [
            (direction, ", ".join(f"{row['title']} ({row['amount']})" for row in mine if row["direction"] == direction))
            for direction in ("better", "worse", "higher", "lower", UNDECIDED)
        ]
        sentences.append((f"{between[0]} against {between[1]}", [(what, listed) for what, listed in changes if listed]))
    return sentences


def _sentences(rows: Sequence[Mapping[str, Any]]) -> str:
    """The verdicts as Markdown."""
    return "\n".join(
        f"- **{between}**: " + "; ".join(f"{what}: {listed}" for what, listed in changes) + "."
        for between, changes in _verdicts(rows)
        if changes
    )


def _trend(arm: ArmRecord, metric: str) -> list[str]:
    """The first value and the closing mean of a training metric, averaged over seeds."""
    lines = [[s for s in run.steps if s.get(metric) is not None] for run in arm.runs]
    begun = sorted({each[0].get("step", 0) for each in lines if each})
    values = [[s[metric] for s in each] for each in lines if each]
    if not values:
        return []
    counts = sorted({len(each) for each in values})
    closing = sorted({min(each, LAST) for each in counts})
    first, last = fmean(each[0] for each in values), fmean(fmean(each[-LAST:]) for each in values)
    return [
        arm.title,
        str(len(values)),
        _range(counts),
        f"{nats(first)} ({_range(begun)})",
        f"{nats(last)} ({_range(closing)})",
    ]


def _range(numbers: Sequence[int]) -> str:
    """``3``, or ``3 to 5`` from the lowest to the highest of sorted numbers."""
    return " to ".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))


def _flat_settings(experiment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Plain settings of an experiment."""
    plain = (str, int, float, bool)
    return [
        (name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
        for name, value in experiment.items()
        if isinstance(value, plain) or (isinstance(value, list) and value and all(isinstance(v, plain) for v in value))
    ]


def _spans(spans: Sequence[tuple[Author | None, str]]) -> Markup:
    """Text by author, as HTML. The junior's text is underlined between ‹ and ›, a blank line (the end of a step) is ¶,
    and what the environment said is in a box."""
    out = Markup("")
    for author, text in spans:
        if author == Author.CONTEXT:
            out += Markup('<span class="observation">{}</span>').format(text.strip("\n"))
            continue
        marked = escape(text).replace("\n\n", Markup('<span class="step">¶</span>\n'))
        body = marked.removesuffix("\n")  # a closing bracket after the line break would stand on the next line
        name = {Author.SENIOR: "senior", Author.JUNIOR: "junior"}.get(author) if author is not None else None
        out += Markup('<span class="{}">{}</span>').format(name, Markup(body)) if name else Markup(body)
        out += Markup("\n" * (len(marked) - len(body)))
    return out


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
