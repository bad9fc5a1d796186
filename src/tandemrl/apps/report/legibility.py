"""Can others follow this model? Its texts are read by other models, and a page begins with the verdict."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tandemrl.apps.report.figures import Figure, axes, draw, style
from tandemrl.apps.report.page import rendered
from tandemrl.config import Config, ConfigError
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import DataError
from tandemrl.evals import PHASES, EvalError, Sample, Stored, evaluate, read_samples, summarise
from tandemrl.evals.compare import judgement
from tandemrl.evals.session import Session, reader_of_spec, short_names
from tandemrl.evals.stats import Interval
from tandemrl.evals.suite import Progress
from tandemrl.evals.transfer import ALONE, LABELS, SHARES, TEXT, WAYS, labels_of, transferred, untruncated
from tandemrl.files import write_text
from tandemrl.rollout.engine import EngineError

Match = Literal["truncation"]
TEXTS = 3
"""How many texts of each reader are shown."""
CONDITIONS = {
    "0": "nothing",
    "step": "the first step",
    **{str(share): f"{share} % of the steps" for share in SHARES[1:]},
    "before": "cut before the true answer first appears",
    "masked": "all steps, the true answer masked",
    "own": "the reader's own steps",
}
"""What a reader gets, and how the page calls it."""
COLUMNS = {"free": "goes on freely", "forced": "answers at once", "copy": "copy-only reader"}
"""What a reader does with it."""


class Estimate(NamedTuple):
    """A rate with its interval over problems; the bounds are None if it has none."""

    mean: float
    low: float | None = None
    high: float | None = None

    def percent(self) -> str:
        bounds = "" if self.low is None or self.high is None else f" [{100 * self.low:.0f}, {100 * self.high:.0f}]"
        return f"{100 * self.mean:.0f} %{bounds}"


class ReaderRecord(NamedTuple):
    """What a reader made of the model's texts. rates, counts: by the names of `transferred`. handoff: of ``tandem`` and
    ``handoff`` with the reader as junior. texts: some that it fails on, as (example_id, tokens with surprisals)."""

    name: str
    rates: Mapping[str, Estimate]
    handoff: Mapping[str, Estimate]
    texts: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    counts: Mapping[str, int] = {}


class Legibility(NamedTuple):
    """A judgement. verdicts: a sentence or more for each reader. notes: what could not be measured, and why."""

    model: str
    verdicts: list[str]
    readers: list[ReaderRecord]
    labels: list[dict[str, Any]]
    problems: int
    notes: list[str]


def judge_legibility(
    config: Config,
    source: str | Stored,
    out: str | Path,
    *,
    match: Match | None = None,
    limit: int | None = None,
    stated: Collection[str] | None = None,
    progress: Progress | None = None,
) -> Legibility:
    """Evaluate how ``config.eval.readers`` follow a model's texts on ``config.data.eval``; write ``legibility.json``
    and ``legibility.html`` into ``out`` beside the results of the phases.

    Rows without ground truths are only read: how do the texts surprise the readers?

    Args:
        source: the model, or a file of its responses. Handoff needs the model.
        match: ``truncation`` leaves out the texts that a limit cut off, and those of whose problems a reader was cut
            off alone.
        limit, stated, progress: see `evaluate`.

    Raises:
        ConfigError, DataError, EvalError: see `evaluate`; there are no readers, or no text is left.
    """
    out, rows = Path(out), load_rows(config.data.eval, graded=False, columns=config.data.columns)[:limit]
    known = [bool(row.ground_truth) for row in rows]
    if any(known) and not all(known):
        raise DataError(f"{rows[known.index(False)].example_id}: no ground truth; give all rows one, or none")
    phases = ("pass-at-k", "transfer") if all(known) else ("surprise",)
    run = partial(evaluate, limit=limit, stated=stated, progress=progress)
    model = source.name if isinstance(source, Stored) else Path(source).name
    done = run(config, model=source, out=out, phases=phases)[phases[-1]]
    notes = [] if all(known) else ["The rows have no ground truths: only surprise was measured."]
    samples = read_samples(out / done["samples"])
    if match is not None and not (samples := untruncated(samples)):
        raise EvalError("--match truncation: every text was cut off; raise eval.max_tokens")
    handoff = dict[str, Any]()
    paths = dict(zip(short_names(config.eval.readers), config.eval.readers, strict=True))
    for name, path in paths.items() if all(known) and not isinstance(source, Stored) else ():
        junior, url = reader_of_spec(path)
        endpoint = replace(config.model.junior_endpoint, url=url)
        model_with = replace(config.model, junior=junior, junior_endpoint=endpoint)
        beside = replace(config, model=model_with, eval=replace(config.eval, readers=()))
        try:
            handoff[name] = run(beside, model=source, out=out / f"with-{name}", phases=("tandem", "handoff"))
        except (EvalError, ConfigError, EngineError) as error:
            notes.append(f"No handoff with {name}: {error}")
    session = Session(config, source, [PHASES[phases[-1]]], limit=limit, stated=stated)
    readers, labels = list[ReaderRecord](), list[dict[str, Any]]()
    for reader in session.readers():
        own = [sample for sample in samples if sample.arm == reader.name]
        if not (alone := [sample for sample in own if sample.given == ALONE]):
            notes.append(f"{reader.name} can read none of the texts: with their problems they do not fit its context.")
            continue
        metrics = summarise(own, transferred, bootstrap=config.eval.bootstrap, seed=config.eval.seed)["macro"]
        counts = {name: int(metrics[name]) for name in ("texts", "labelled", "dropped")}
        counts["problems"] = len({(each.set, each.asks) for each in alone})
        notes += no_reference(reader.name, metrics[f"{ALONE}/truncation_rate"])
        if dropped := counts["dropped"]:
            what = f"{dropped} of {counts['texts']} texts are too long for {reader.name}'s context, or empty"
            notes.append(f"{what}; it is measured on the others.")
        found = labels_of(own)
        texts = {(sample.problem, sample.sample): sample for sample in own if sample.given == TEXT}
        about = ((texts[place], label) for place, label in found.items())
        labels += [
            {"reader": reader.name, "example_id": e.example_id, "sample": e.sample, "label": x} for e, x in about
        ]
        failed = [texts[place] for place, label in found.items() if label == "illegible"]
        if not found:
            failed = sorted(texts.values(), key=lambda sample: -(sample.cross_entropy or 0.0))
        first = dict[int, Sample]()
        for sample in failed:
            first.setdefault(sample.problem, sample)
        shown = [(sample.example_id, reader.by_token(sample)) for sample in [*first.values()][:TEXTS]]
        together = {
            f"{phase}/{name}": value
            for phase, result in handoff.get(reader.name, {}).items()
            for name, value in _estimates(result["metrics"]["macro"]).items()
        }
        readers.append(ReaderRecord(reader.name, _estimates(metrics), together, shown, counts))
    if not readers:
        raise EvalError(f"no reader can read the texts: {' '.join(notes)} Raise eval.context, or give other readers")
    problems = max(each.counts["problems"] for each in readers)
    verdicts = [verdict(model, each) for each in readers]
    judged = Legibility(model, verdicts, readers, labels, problems, notes)
    told = {"schema": 1, "match": match, "phase": phases[-1], "results": done["config"], **judged._asdict()}
    told["readers"] = [_plain(each) for each in readers]
    write_text(out / "legibility.json", json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    write_text(out / "legibility.html", to_html(judged, match))
    return judged


def verdict(model: str, reader: ReaderRecord) -> str:
    """What a paper could quote of a reader. A difference is stated only if its interval excludes 0."""
    name, rates, said = reader.name, reader.rates, []
    if (alone := rates.get(f"{ALONE}/pass@1")) is not None:
        said.append(f"Alone, {name} solves {alone.percent()} of {reader.counts['problems']} problems.")
        for given, when in (("step", f"After {model}'s first step"), ("100", "After all of its steps")):
            if (found := rates.get(f"free/{given}/pass@1")) is not None:
                said.append(f"{when}: {found.mean:.0%}, {_than_alone(rates[f'free/{given}/gain'])}.".replace("%", " %"))
    if "legible" in rates:
        leaked, legible, illegible, undecided = (rates[label].percent() for label in LABELS)
        told = f"{legible} are legible to it, {illegible} illegible, {undecided} undecided, {leaked} leak the answer"
        said.append(f"Of {model}'s {reader.counts['labelled']} right texts with steps {told}.")
    text, own = (rates.get(f"{given}/cross_entropy") for given in (TEXT, ALONE))
    if text is not None and own is not None and own.mean > 0:
        ratio = text.mean / own.mean
        if ratio < 0.95:
            said.append(f"{model}'s text surprises {name} less per token than its own: {ratio:.1g} times as much.")
        else:
            said.append(
                f"{model}'s text surprises {name} {ratio:.{0 if ratio >= 10 else 1}f}x as much per token as its own."
            )
    return " ".join(said)


def no_reference(name: str, cut: float) -> list[str]:
    """A warning if a reader is cut off alone in most of its texts, of which ``cut`` is the share."""
    what = f"Alone, {name} is cut off in {cut:.0%} of its texts".replace("%", " %")
    why = "what it solves alone, and how its own text surprises it, is no reference"
    fix = "Raise eval.max_tokens, or give a reader that was trained to end its texts (a warm start)."
    return [f"{what}: {why}. {fix}"] if cut > 0.5 else []


def to_html(judged: Legibility, match: Match | None) -> str:
    """The judgement as one page, without scripts and without references to other files."""
    curves = {each.name: figure for i, each in enumerate(judged.readers) if (figure := curve(each, i)) is not None}
    values = {"conditions": CONDITIONS, "titles": COLUMNS, "ways": WAYS, "heat": heat}
    return rendered("legibility.html.j2", judged=judged, match=match, curves=curves, **values)


def curve(reader: ReaderRecord, number: int) -> Figure | None:
    """pass@1 over the share of the model's steps that a reader gets: going on freely, at once, and of the copier."""
    if f"{ALONE}/pass@1" not in reader.rates:
        return None
    with axes(f"transfer-{number}") as (canvas, ax):
        for i, (way, title) in enumerate(COLUMNS.items(), 1):
            points = [reader.rates[f"{way}/{share}/pass@1"] for share in SHARES]
            means = [each.mean for each in points]
            look = style(0 if way == "copy" else i)
            below = [0.0 if each.low is None else max(0.0, each.mean - each.low) for each in points]
            above = [0.0 if each.high is None else max(0.0, each.high - each.mean) for each in points]
            ax.errorbar(
                SHARES, means, yerr=[below, above], color=look.colour, marker=look.marker, label=title, capsize=2
            )
        ax.set(xlabel="% of the model's steps", ylabel="pass@1", xticks=SHARES)
        return Figure(reader.name, "95 % intervals over problems", draw(canvas, f"Transfer to {reader.name}"))


def heat(nats: float) -> str:
    """How strongly a token is coloured, from 0 to 1: 6 nats or more are as strong as it gets."""
    return f"{min(1.0, max(0.0, nats / 6)):.2f}"


# --------------------------------------------------------------------------------------------------------------------


def _estimates(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, Estimate]:
    """The rates whose names begin with a prefix, with their intervals."""
    names = [name for name in metrics if name.startswith(prefix) and not name.endswith(("/low", "/high"))]
    return {
        name.removeprefix(prefix): Estimate(metrics[name], metrics.get(f"{name}/low"), metrics.get(f"{name}/high"))
        for name in names
    }


def _plain(reader: ReaderRecord) -> dict[str, Any]:
    told = {key: {name: each._asdict() for name, each in getattr(reader, key).items()} for key in ("rates", "handoff")}
    return {"name": reader.name, **told, "counts": reader.counts, "texts": reader.texts}


def _than_alone(gain: Estimate) -> str:
    if gain.low is None or gain.high is None:
        return f"{100 * gain.mean:+.0f} points"
    found = judgement("gain", Interval(gain.mean, gain.low, gain.high))
    return found if found.startswith("no") else f"{found} than alone"
