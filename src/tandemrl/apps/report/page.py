"""Makes the HTML page of a report from its records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from tandemrl.apps.report import provenance
from tandemrl.apps.report.figures import Style, all_figures, key, style
from tandemrl.apps.report.records import (
    FIRST_ARMS,
    JUNIOR,
    ArmRecord,
    ContrastRecord,
    Records,
    Setting,
    discover,
    with_junior,
)
from tandemrl.apps.report.samples import Gallery, galleries
from tandemrl.apps.report.tables import (
    MISSING,
    Column,
    bounds,
    claim_cells,
    columns_of,
    estimate,
    headline_table,
    nats,
    rate,
    signed_interval,
)
from tandemrl.config import ConfigError
from tandemrl.evals import PHASES, EvalError
from tandemrl.evals.compare import CompareError, InTraining, compare, good_end, last_texts
from tandemrl.files import write_text
from tandemrl.models.loading import load_tokenizer
from tandemrl.types import Author

UNDECIDED = "no difference shown"


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
    settings = (replace(each, contrasts=_differences(each, notes.append)) for each in records.settings)
    records = replace(records, settings=tuple(settings))
    shown = {setting.name: galleries(records, setting, notes.append, decoder) for setting in records.settings}
    name = records.experiment.get("name") or records.folder.resolve().name
    caveats = tuple(dict.fromkeys([*provenance.caveats(records), *notes]))
    return Report(title or str(name), records, shown, caveats)


def write_report(report: Report, file: str | Path | None = None) -> Path:
    """Write the HTML page, completely or not at all, and return its file: ``report.html`` in the report's folder, if
    none is given."""
    page = Path(file) if file is not None else report.records.folder / "report.html"
    write_text(page, to_html(report))
    return page


def to_html(report: Report) -> str:
    """The report as one HTML page, without scripts and without references to other files."""
    looks = styles(report.records)
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["spans"] = _spans
    settings = report.records.settings
    return environment.get_template("page.html.j2").render(
        title=report.title,
        lead=_lead(report.records),
        settings=[_setting(i, each, looks, report.galleries[each.name]) for i, each in enumerate(settings)],
        arms=looks,
        caveats=report.caveats,
        code=provenance.code(report.records),
        sources=provenance.sources(report.records),
        commands=provenance.commands(report.records),
        missing=MISSING,
        bounds=bounds,
    )


def headlines(report: Report, table: Callable[[Sequence[ArmRecord]], str] = headline_table) -> str:
    """The headline tables alone, in Markdown, each with a line that says what its intervals are.

    Args:
        table: ``headline_lines`` for a terminal.
    """
    parts = []
    for setting in report.records.settings:
        if measured := _measured(setting):
            parts += [f"{setting.name}:" if setting.name else "", table(measured), _interval_note(measured)]
    return "\n\n".join(part.strip() for part in parts if part)


def styles(records: Records) -> dict[str, Style]:
    """The style of each arm, by its name. It is the same in every setting and plot, and in all reports for arms that
    every experiment has."""
    names = dict.fromkeys([*FIRST_ARMS, *(arm.name for setting in records.settings for arm in setting.arms), JUNIOR])
    return {name: style(number) for number, name in enumerate(names)}


def _measured(setting: Setting) -> list[ArmRecord]:
    return with_junior([arm for arm in setting.arms if arm.evaluations])


def _setting(number: int, setting: Setting, looks: Mapping[str, Style], shown: list[Gallery]) -> dict[str, Any]:
    """The variables with which the template shows a setting."""
    measured = _measured(setting)
    columns = columns_of(measured)
    contrasts = _contrasts(setting)
    styled = [(arm, looks[arm.name]) for arm in setting.arms]
    return {
        "id": f"s{number}",
        "name": setting.name,
        "columns": columns,
        "table": [
            {
                "arm": arm,
                "hue": looks[arm.name].hue,
                "seeds": len({e.seed for e in arm.evaluations}),
                "cells": [(estimate(arm, column), column.shown) for column in columns],
            }
            for arm in measured
        ],
        "note": _interval_note(measured) if measured else "",
        "contrasts": contrasts,
        "verdicts": _verdicts(contrasts),
        "claims": [claim_cells(claim) for claim in setting.claims],
        "configs": provenance.differing_keys(setting),
        "figures": all_figures([(arm, looks[arm.name]) for arm in measured], styled, f"s{number}"),
        "legend": [(arm, key(look, f"s{number}-key{i}")) for i, (arm, look) in enumerate(styled) if len(styled) > 1],
        "galleries": shown,
        "opened": next((i for i, each in enumerate(shown) if _has_correct(each)), 0),
    }


def _has_correct(gallery: Gallery) -> bool:
    return any(sample.correct for problem in gallery.problems for _, sample in problem.shown)


def _lead(records: Records) -> str:
    arms = [arm for setting in records.settings for arm in setting.arms]
    counts = {
        "training run": sum(len(arm.runs) for arm in arms),
        "finished evaluation": sum(len(arm.evaluations) for arm in arms),
    }
    parts = [f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items() if count]
    macros = [e.result["metrics"]["macro"] for arm in arms for e in arm.evaluations]
    problems = sorted({int(macro["problems"]) for macro in macros if "problems" in macro})
    spread = " to ".join(dict.fromkeys(map(str, (problems[0], problems[-1])))) if problems else ""
    return f"{' and '.join(parts)} below {records.folder}." + (f" {spread} problems per evaluation." if spread else "")


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


# --------------------------------------------------------------------------------------------------------- differences


def _differences(setting: Setting, say: Callable[[str], None]) -> tuple[ContrastRecord, ...]:
    """The differences of every evaluated arm to the first one, or those of ``results.json`` if it has some.

    If no arm is evaluated, the last evaluations during training are compared.

    Args:
        say: called with a sentence if two arms cannot be compared, as with other problems or another number of samples.
    """
    evaluated = [arm for arm in setting.arms if arm.evaluations] or [arm for arm in setting.arms if _texts(arm)]
    if setting.contrasts or not evaluated:
        return setting.contrasts
    first, *others = evaluated
    found: list[ContrastRecord] = []
    for arm in others:
        sides = _places(arm), _places(first)
        seeds = [seed for seed in sides[0] if seed in sides[1]]
        if not seeds:
            say(f"{arm.title} and {first.title} are not compared: they have no seed in common.")
            continue
        if len(seeds) < len(sides[0].keys() | sides[1].keys()):
            say(f"{arm.title} and {first.title} are compared over the seeds of both only: {', '.join(seeds)}.")
        steps = [[_texts(each).get(seed) for seed in seeds] for each in (arm, first)]
        if not arm.evaluations and steps[0] != steps[1]:
            say(f"{arm.title} and {first.title}: their last evaluations, which are compared, are of different steps.")
        try:
            contrasts = compare(*([place for seed in seeds for place in side[seed]] for side in sides))
        except (CompareError, ConfigError, EvalError) as error:
            say(f"{arm.title} and {first.title} cannot be compared: {error}")
            continue
        found += [ContrastRecord(each.phase, each.metric, arm.name, first.name, each.difference) for each in contrasts]
    return tuple(found)


def _places(arm: ArmRecord) -> dict[str, list[Path]]:
    """The folders (or, under names of their own, the files) of each seed's evaluations, in the order of the seeds;
    without any, the folders of the runs."""
    found = [(each.seed, each.file.parent if each.file.stem in PHASES else each.file) for each in arm.evaluations]
    by_seed: dict[str, dict[Path, None]] = {seed: {} for seed in arm.seeds}
    for seed, place in found or [(run.seed, run.folder) for run in arm.runs]:
        by_seed[seed][place] = None
    return {seed: [*places] for seed, places in by_seed.items() if places}


def _texts(arm: ArmRecord) -> dict[str, str]:
    """The names of the texts of the last evaluation during each run of an arm, by seed; {} unless all have some."""
    found = {run.seed: file.name for run in arm.runs if (file := last_texts(run.folder)) is not None}
    return found if len(found) == len(arm.runs) else {}


def _contrasts(setting: Setting) -> list[dict[str, Any]]:
    """The differences of a setting as text. ``headline``: of the headline table, or of training."""
    titles = {arm.name: arm.title for arm in setting.arms}
    columns = {(column.phase, column.metric): column for column in columns_of(setting.arms)}
    rows = []
    for each in setting.contrasts:
        known = columns.get((each.phase, each.metric))
        shown = rate if max(map(abs, each.difference)) < 1 else nats
        column = known or Column(f"{each.phase} {each.metric}", each.phase, each.metric, shown=shown)
        a, b = titles.get(each.a, each.a), titles.get(each.b, each.b)
        mean, interval = signed_interval(each.difference, column.shown)
        above = each.difference.mean > 0
        rows.append(
            {
                "metric": known.heading if known else f"{each.phase}: {each.metric}",
                "title": column.title,
                "amount": f"{mean} {column.unit}".rstrip(),
                "between": (a, b),
                "mean": mean,
                "interval": interval,
                "decided": each.clear,
                "verdict": f"{a} {'>' if above else '<'} {b}" if each.clear else UNDECIDED,
                "direction": _direction(each.metric, above) if each.clear else UNDECIDED,
                "headline": known is not None or each.phase in get_args(InTraining),
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
        changes: dict[str, list[str]] = {d: [] for d in ("better", "worse", "higher", "lower", UNDECIDED)}
        for row in rows:
            if row["between"] == between and row["headline"]:
                changes[row["direction"]].append(f"{row['title']} ({row['amount']})")
        said = [(what, ", ".join(listed)) for what, listed in changes.items() if listed]
        sentences.append((f"{between[0]} against {between[1]}", said))
    return sentences


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
        out += Markup('<span class="{}">{}</span>').format(author.name.lower(), body) if author is not None else body
        out += Markup("\n" * (len(marked) - len(body)))
    return out
