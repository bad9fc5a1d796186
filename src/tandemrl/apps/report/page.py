"""Makes the HTML page of a report from its records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tandemrl.apps.report import provenance, tables
from tandemrl.apps.report.figures import Style, curves, matrix, plane, shares, style
from tandemrl.apps.report.records import (
    FIRST_ARMS,
    JUNIOR,
    ArmRecord,
    ContrastRecord,
    Records,
    Setting,
    discover,
    natural,
    with_junior,
)
from tandemrl.apps.report.samples import Gallery, galleries
from tandemrl.apps.report.tables import HEADLINE, UNSEEN, Column, estimate
from tandemrl.config import ConfigError
from tandemrl.evals import PHASES, EvalError
from tandemrl.evals.compare import UNDECIDED, CompareError, InTraining, compare, judgement, last_texts
from tandemrl.files import write_text
from tandemrl.models.loading import load_tokenizer


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
    for setting in records.settings:
        setting.contrasts = setting.contrasts or _differences(setting, notes.append)
    shown = {setting.name: galleries(records.folder, setting, notes.append, decoder) for setting in records.settings}
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
    settings = report.records.settings
    return rendered(
        "page.html.j2",
        title=report.title,
        settings=[_setting(i, each, looks, report.galleries[each.name]) for i, each in enumerate(settings)],
        arms=looks,
        caveats=report.caveats,
        made_by=provenance.made_by(report.records),
        tables=tables,
    )


def rendered(template: str, **values: Any) -> str:
    """A page from one of the templates in this folder."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**values)


def headlines(report: Report) -> str:
    """What each setting shows, in a sentence, and its headline table for a terminal, with what its intervals are."""
    parts = []
    for setting in report.records.settings:
        measured = _measured(setting)
        parts += [f"{setting.name}:" if setting.name else "", _sentence(setting)]
        parts += [tables.headline_lines(measured), _interval_note(measured)] if measured else []
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
    drawn = curves([(arm, looks[arm.name]) for arm in setting.arms], f"s{number}")
    styled = [(arm, looks[arm.name]) for arm in (measured or setting.arms)]
    first = plane(styled, f"s{number}-plane")
    read = (plane(styled, f"s{number}-transfer", UNSEEN), shares(styled, f"s{number}-shares"))
    every = tables.columns_of(measured, tables.COLUMNS)
    headline = [column for column in HEADLINE if column in every] or every
    return {
        "id": f"s{number}",
        "name": setting.name,
        "sentence": _sentence(setting),
        "measured": measured,
        "every": every,
        "headline": headline,
        "others": [column for column in every if column not in headline],
        "note": _interval_note(measured) if measured else "",
        "contrasts": _contrasts(setting),
        "claims": setting.claims,
        "configs": provenance.differing_keys(setting),
        "figures": [*filter(None, (first, *drawn))],
        "read": [*filter(None, (*read, matrix(styled, f"s{number}-matrix")))],
        "galleries": shown,
    }


def _interval_note(arms: Sequence[ArmRecord]) -> str:
    counts = {len({e.seed for e in arm.evaluations}) for arm in arms}
    number = f"{max(counts)} " if len(counts) == 1 else ""
    notes = [f"Mean over {number}seeds with its 95 % interval (Student's t)."] if max(counts) > 1 else []
    notes += ["One seed: 95 % bootstrap intervals over problems."] if min(counts) == 1 else []
    return " ".join(notes)


# --------------------------------------------------------------------------------------------------------- differences


def _differences(setting: Setting, say: Callable[[str], None]) -> list[ContrastRecord]:
    """The differences of every evaluated arm to the first one. If no arm is evaluated, the last evaluations during
    training are compared.

    Args:
        say: called with a sentence if two arms cannot be compared, as with other problems or another number of samples.
    """
    evaluated = any(arm.evaluations for arm in setting.arms)
    places = [(arm, here) for arm in setting.arms if (here := _places(arm, evaluated=evaluated))]
    found: list[ContrastRecord] = []
    for arm, here in places[1:]:
        first, there = places[0]
        pair, seeds = f"{arm.title} and {first.title}", [seed for seed in here if seed in there]
        if not seeds:
            say(f"{pair} are not compared: they have no seed in common.")
            continue
        if len(seeds) < len(here.keys() | there.keys()):
            say(f"{pair} are compared over the seeds of both only: {', '.join(seeds)}.")
        try:
            contrasts = compare(*([place for seed in seeds for place in side[seed]] for side in (here, there)))
        except (CompareError, ConfigError, EvalError) as error:
            say(f"{pair} cannot be compared: {error}")
            continue
        found += [ContrastRecord(each.phase, each.metric, arm.name, first.name, each.difference) for each in contrasts]
    return found


def _places(arm: ArmRecord, *, evaluated: bool) -> dict[str, dict[Path, None]]:
    """The folders (or, under names of their own, the files) of each seed's evaluations, in the order of the seeds; else
    the folders of the runs that have evaluated during training."""
    found = [(run.seed, run.folder) for run in arm.runs if last_texts(run.folder) is not None]
    if evaluated:
        found = [(each.seed, each.file.parent if each.file.stem in PHASES else each.file) for each in arm.evaluations]
    by_seed: dict[str, dict[Path, None]] = {}
    for seed, place in sorted(found, key=lambda each: natural(each[0])):
        by_seed.setdefault(seed, {})[place] = None
    return by_seed


def _contrasts(setting: Setting) -> list[list[dict[str, Any]]]:
    """The differences of a setting as text, by the arms that are compared: tandem against GRPO first, and of each two
    the columns of the table first."""
    by_pair: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in setting.contrasts:
        by_pair.setdefault((each.a, each.b), []).append(_contrast(each, setting))
    return [
        sorted(by_pair[pair], key=lambda row: not row["column"].phase)
        for pair in sorted(by_pair, key=lambda pair: (pair[0] != "tandem", pair[1] != "grpo"))
    ]


def _contrast(each: ContrastRecord, setting: Setting) -> dict[str, Any]:
    titles = {arm.name: arm.title for arm in setting.arms}
    shown = tables.rate if max(map(abs, each.difference)) < 1 else tables.nats
    own = Column(f"{each.phase}: {each.metric}", "", each.metric, shown=shown)
    column = next((c for c in tables.COLUMNS if (c.phase, c.metric) == (each.phase, each.metric)), own)
    mean, interval = tables.texts(each.difference, column.shown, sign=True)
    return {
        "column": column,
        "between": (titles.get(each.a, each.a), titles.get(each.b, each.b)),
        "mean": mean,
        "interval": interval,
        "verdict": judgement(each.metric, each.difference),
        "headline": column in HEADLINE or each.phase in get_args(InTraining),
    }


def _sentence(setting: Setting) -> str:
    """What the setting shows: how its tandem arm (else its first comparison) differs, else the numbers there are."""
    for rows in _contrasts(setting)[:1]:
        said: dict[str, list[str]] = {}
        for row in [row for row in rows if row["headline"]] or rows[:3]:
            amount = f"{row['mean']} {row['column'].unit}".rstrip()
            said.setdefault(row["verdict"], []).append(f"{row['column'].title} ({amount})")
        ordered = sorted(said, key=lambda verdict: verdict == UNDECIDED)
        told = "; ".join(f"{verdict} in {' and '.join(said[verdict])}" for verdict in ordered)
        return f"{' against '.join(rows[0]['between'])}: {told}."
    numbers = list[str]()
    for arm in _measured(setting):
        values = [(column, value) for column in HEADLINE if (value := estimate(arm, column)) is not None]
        told = ", ".join(f"{column.title} {column.shown(v.mean)} {column.unit}".rstrip() for column, v in values)
        numbers += [f"{arm.title}: {told}"] if values else []
    for arm in [] if numbers else (arm for arm in setting.arms if arm.runs):
        rewards = [(step["step"], step["reward/mean"]) for step in arm.runs[0].steps if "reward/mean" in step]
        reached = [f"{value:.3f} at step {step}" for step, value in dict([*rewards[:1], *rewards[-1:]]).items()]
        numbers += [f"{arm.title}: mean training reward {', '.join(reached)}"] if reached else []
    return f"{'; '.join(numbers)}." if numbers else "No step and no evaluation is finished."
