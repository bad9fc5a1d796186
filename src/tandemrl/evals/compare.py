"""Paired comparison of evaluations: is A better than B, problem by problem and over training seeds?

Both sides answered the same problems under the same profile and with the same random numbers. So a metric has one value
per problem on each side, and differences are taken problem by problem. With one evaluation on each side, the interval
is the paired bootstrap over problems, which is conditional on the two checkpoints. With several evaluations (training
seeds) on each side, there is one difference per seed, and the interval is Student's t over the seeds, which says
something about the method. The verdict is "A > B" only if the interval excludes 0. There is no correction for several
rows: of twenty rows without any true difference, one excludes 0 by chance.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from tandemrl.evals import (
    PHASES,
    EvalError,
    Phase,
    differences,
    is_headline,
    measure_of,
    measure_sets,
    read_result,
    read_samples,
    silent_sets,
)
from tandemrl.evals.stats import Interval, paired_bootstrap, seed_interval
from tandemrl.files import hint, write_text

SCHEMA = 1
Verdict = Literal["A > B", "A < B", "no difference shown"]
Values = Mapping[str, Mapping[str, float]]
"""The values of one metric in one evaluation, by set and ``example_id``."""


class CompareError(ValueError):
    """Two evaluations cannot be compared. The message names what differs."""


class Contrast(NamedTuple):
    """A metric on both sides and their difference A - B.

    a, b: the macro means over the problems that have a value on both sides, then over seeds. difference: the mean
    difference, with the bootstrap interval over problems (one seed) or Student's t interval over seeds. per_seed: the
    paired difference of each seed with its bootstrap interval over problems. problems: the number of pairs in the seed
    that has the fewest.
    """

    phase: str
    metric: str
    a: float
    b: float
    difference: Interval
    per_seed: tuple[Interval, ...]
    verdict: Verdict
    problems: int


def compare(
    a: str | Path | Sequence[str | Path],
    b: str | Path | Sequence[str | Path],
    *,
    shown: Callable[[str], bool] = is_headline,
    varied: Collection[str] = (),
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> list[Contrast]:
    """Contrasts of every phase that both sides have, and of every metric that is ``shown``.

    Args:
        a: an evaluation folder (with ``PHASE.json``), a result file (of one phase), a folder of repetitions ``seed-N``,
            a path with a component ``seed-*`` that stands for all of them, or evaluations in the order of their seeds.
        b: the other side, in the same form.
        shown: whether to show a metric, by its name. The default shows the headline metrics.
        varied: the settings that may differ since they are what is compared (``retrieval``, ``environment``). All
            others have to be the same.
        resamples: number of resamples of the bootstrap.
        seed: seed of the bootstrap.
        level: confidence level of the intervals.

    Raises:
        CompareError: there is no evaluation, the two sides differ in seeds, problems or settings, they have no phase in
            common, or only some of the seeds have a phase.
        EvalError: a file cannot be read.
    """
    pairs = _match(repetitions(a), repetitions(b))
    phases = _phases(pairs)
    if not phases:
        had = (", ".join(dict.fromkeys(phase for pair in pairs for phase in pair[i])) for i in (0, 1))
        raise CompareError(f"{a} and {b} have no phase in common ({{}} and {{}})".format(*had))
    contrasts = []
    for phase in phases:
        loaded = [_load_pair(phase, *pair, varied) for pair in pairs]
        for metric in filter(shown, loaded[0][0]):
            if all(metric in side for sides in loaded for side in sides):
                values_a, values_b = ([sides[i][metric] for sides in loaded] for i in (0, 1))
                contrasts.append(
                    contrast(phase, metric, values_a, values_b, resamples=resamples, seed=seed, level=level)
                )
    return contrasts


def contrast(
    phase: str,
    metric: str,
    a: Sequence[Values],
    b: Sequence[Values],
    *,
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Contrast:
    """One contrast, from the values of each seed on both sides.

    Raises:
        CompareError: the two sides differ in seeds or sets, or no problem of a set has a value on both sides.
    """
    if len(a) != len(b) or not a:
        raise CompareError(f"{phase}, {metric}: {len(a)} seeds of A and {len(b)} of B; give the same, at least one")
    paired = [_pair(f"{phase}, {metric}", *sides) for sides in zip(a, b, strict=True)]
    per_seed = tuple(paired_bootstrap(x, y, resamples=resamples, seed=seed, level=level) for x, y in paired)
    difference = per_seed[0] if len(per_seed) == 1 else seed_interval([each.mean for each in per_seed], level=level)
    means = [[float(np.mean([values.mean() for values in sets])) for sets in sides] for sides in paired]
    mean_a, mean_b = np.mean(means, axis=0).tolist()
    problems = min(sum(values.size for values in sets) for sets, _ in paired)
    return Contrast(phase, metric, mean_a, mean_b, difference, per_seed, verdict(difference), problems)


def verdict(difference: Interval) -> Verdict:
    """The verdict that an interval of A - B supports. It states a difference only if the interval excludes 0.

    Examples:
        >>> verdict(Interval(0.2, 0.1, 0.3)), verdict(Interval(0.2, -0.1, 0.5))
        ('A > B', 'no difference shown')
    """
    if difference.low > 0:
        return "A > B"
    return "A < B" if difference.high < 0 else "no difference shown"


# ------------------------------------------------------------------------------------------------------------- showing

_HIGHER_IS_BETTER = (
    *("pass@", "maj@", "verified_pass@", "score", "acceptance"),
    *("em", "f1", "recall", "precision", "citation", "support_f1", "format"),
)
_LOWER_IS_BETTER = (
    *("truncation_rate", "rejected_rate", "cross_entropy", "unlikely_rate"),
    *("tool_errors", "invalid_calls", "tool_timeouts", "cut_results"),
)


def good_end(metric: str) -> Literal["higher", "lower"] | None:
    """Which values of a metric are better; None if neither end is.

    Examples:
        >>> good_end("senior_first/pass@1"), good_end("cross_entropy"), good_end("length")
        ('higher', 'lower', None)
    """
    name = metric.rpartition("/")[2]
    if name.startswith(_HIGHER_IS_BETTER):
        return "higher"
    return "lower" if name.startswith(_LOWER_IS_BETTER) else None


def judgement(contrast: Contrast) -> str:
    """The verdict in words: A is better or worse if the metric has a good end, else higher or lower.

    Examples:
        >>> judgement(Contrast("pass-at-k", "truncation_rate", 0.2, 0.1, Interval(0.1, 0.05, 0.15), (), "A > B", 9))
        'A > B: worse'
    """
    if contrast.verdict == "no difference shown":
        return contrast.verdict
    good = good_end(contrast.metric)
    if good is None:
        return contrast.verdict
    return f"{contrast.verdict}: {'better' if (contrast.verdict == 'A > B') == (good == 'higher') else 'worse'}"


def markdown_table(contrasts: Sequence[Contrast], *, a: str = "A", b: str = "B") -> str:
    """A Markdown table, a row per contrast; ``a`` and ``b`` are the titles of the two sides."""
    seeds = max((len(each.per_seed) for each in contrasts), default=1)
    over = f"t interval over {seeds} seeds" if seeds > 1 else "bootstrap interval over problems"
    lines = [f"| phase | metric | {a} | {b} | {a} - {b} ({over}) | |", "|---|---|---:|---:|---:|---|"]
    for each in contrasts:
        conclusion = each.verdict if each.verdict.startswith("no") else f"{a} {each.verdict[2]} {b}"
        figures = f"{each.a:.3f} | {each.b:.3f} | {show_interval(each.difference)}"
        lines.append(f"| {each.phase} | {each.metric} | {figures} | {conclusion} |")
    return "\n".join(lines) + "\n"


def show_interval(interval: Interval, digits: int = 3) -> str:
    """The text for the interval of a difference, with signs.

    Examples:
        >>> show_interval(Interval(0.2, -0.1, 0.5))
        '+0.200 [-0.100, +0.500]'
    """
    mean, low, high = (f"{bound:+.{digits}f}" for bound in interval)
    return f"{mean} [{low}, {high}]"


def to_json(contrasts: Sequence[Contrast]) -> list[dict[str, Any]]:
    """The contrasts as plain values. An interval becomes ``{"mean": …, "low": …, "high": …}``."""
    return [
        contrast._asdict()
        | {"difference": contrast.difference._asdict(), "per_seed": [each._asdict() for each in contrast.per_seed]}
        for contrast in contrasts
    ]


def write_comparison(file: Path, contrasts: Sequence[Contrast], *, a: str, b: str, level: float = 0.95) -> None:
    """Write ``{"schema", "a", "b", "level", "contrasts"}``, atomically."""
    stored = {"schema": SCHEMA, "a": a, "b": b, "level": level, "contrasts": to_json(contrasts)}
    write_text(Path(file), json.dumps(stored, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


# --------------------------------------------------------------------------------------------------------------- files


Evaluation = Mapping[str, Path]
"""The result files of an evaluation, by phase."""


def repetitions(source: str | Path | Sequence[str | Path]) -> dict[str, Evaluation]:
    """Evaluations by the name of their repetition. ``compare`` says what ``source`` may be.

    Raises:
        CompareError: there is no evaluation.
        EvalError: a file is not the result of an evaluation.
    """
    if not isinstance(source, str | Path):
        return {str(i): _evaluation(Path(place)) for i, place in enumerate(source)}
    place = Path(source)
    if "seed-*" in place.parts:
        at = place.parts.index("seed-*")
        before, after = Path(*place.parts[:at]), Path(*place.parts[at + 1 :])
        return {seed: _evaluation(before / seed / after) for seed in _seeds(before)}
    if not _results(place) and (seeds := _seeds(place, or_none=True)):
        return {seed: _evaluation(place / seed) for seed in seeds}
    return {"": _evaluation(place)}


def _seeds(folder: Path, *, or_none: bool = False) -> list[str]:
    names = [path.name for path in folder.glob("seed-*") if re.fullmatch(r"seed-\d+", path.name)]
    if not names and not or_none:
        raise CompareError(f"{folder}: no folder seed-N is there")
    return sorted(names, key=lambda name: int(name.removeprefix("seed-")))


def _results(place: Path) -> Evaluation:
    """The results in a folder, or the one in a file, which says its phase; empty if there are none."""
    if place.is_file():
        try:
            return {read_result(place)["phase"]: place}
        except EvalError:
            raise CompareError(
                f"{place}: not the result of an evaluation (PHASE.json, or the file of eval --out)"
            ) from None
    return {phase: file for phase in PHASES if (file := place / f"{phase}.json").exists()}


def _evaluation(place: Path) -> Evaluation:
    if results := _results(place):
        return results
    raise CompareError(
        f"{place}: no evaluation is there (no result file, no PHASE.json such as pass-at-k.json, no seed-N with one)"
        f"{hint(place) or '; make one: tandemrl eval all'}"
    )


def _match(a: dict[str, Evaluation], b: dict[str, Evaluation]) -> list[tuple[Evaluation, Evaluation]]:
    if a.keys() != b.keys():
        listed = (", ".join(side) or "one evaluation without seeds" for side in (a, b))
        raise CompareError("other repetitions on the two sides: {} and {}".format(*listed))
    return [(a[seed], b[seed]) for seed in a]


def _phases(pairs: Sequence[tuple[Evaluation, Evaluation]]) -> list[Phase]:
    """The phases that both sides have. It is an error if only some of the seeds have a phase."""
    common = []
    for phase in PHASES:
        sides = list(zip(*pairs, strict=True))
        if all(any(phase in each for each in side) for side in sides):
            if missing := [each for side in sides for each in side if phase not in each]:
                place = next(iter(missing[0].values())).parent / f"{phase}.json"
                raise CompareError(f"{place} is missing, other seeds have it; run the phase: tandemrl eval {phase}")
            common.append(phase)
    return common


def _load_pair(phase: Phase, a: Evaluation, b: Evaluation, varied: Collection[str]) -> list[dict[str, Values]]:
    """The values of every metric on both sides, which must be evaluations of the same problems in the same way."""
    files = [a[phase], b[phase]]
    configs = [read_result(file)["config"] for file in files]
    if changed := differences(*(_protocol(config, varied) for config in configs)):
        listed = "; ".join(f"{key}: {x!r} and {y!r}" for key, x, y in changed[:3])
        raise CompareError(f"{files[0]} and {files[1]} were made in different ways ({listed})")
    k = [m for m in configs[0]["eval"]["k"] if m in configs[1]["eval"]["k"]]
    samples = [read_samples(file.with_suffix(".samples.jsonl")) for file in files]
    ids = [{(sample.set, sample.example_id) for sample in side} for side in samples]
    for own, other, file in ((ids[0], ids[1], files[1]), (ids[1], ids[0], files[0])):
        if missing := sorted(own - other):
            raise CompareError(f"{file}: {len(missing)} problems of the other side are not there, e.g. {missing[0][1]}")
    silent = silent_sets([sample for side in samples for sample in side])  # of both sides, which need the same metrics
    measured = [measure_sets(side, measure_of(phase, k), silent=silent) for side in samples]
    return [
        {
            metric: {name: each.rates[metric] for name, each in sets.items() if metric in each.rates}
            for metric in dict.fromkeys(metric for each in sets.values() for metric in each.rates)
        }
        for sets in measured
    ]


def _protocol(config: Mapping[str, Any], varied: Collection[str]) -> dict[str, Any]:
    """The settings that two results must have in common, without those that are ``varied``.

    Junior and data are compared by their content if that is known.
    """
    digests = config.get("digests") or {}

    def content(source: str) -> str:
        return digests.get(str(Path(source)), source)

    own = ("model", "digests", "device", "dtype", "engine", "endpoint", "authors", "limit")
    common = {key: value for key, value in config.items() if key not in own and key not in varied}
    common["eval"] = {key: value for key, value in config["eval"].items() if key not in ("k", "bootstrap")}
    common["data"] = [content(source) for source in config["data"]]
    if "junior" in config:
        common["junior"] = content(config["junior"])
    return common


def _pair(what: str, a: Values, b: Values) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each set and side, the values of the problems that have one on both sides, in the same order."""
    if a.keys() != b.keys():
        raise CompareError(f"{what}: the sets of A are {', '.join(a)}, those of B {', '.join(b)}")
    shared = {name: [example for example in a[name] if example in b[name]] for name in a}
    if empty := [name for name, examples in shared.items() if not examples]:
        raise CompareError(f"{what}: no problem of set {empty[0]} has a value on both sides")
    sides = ([np.array([side[name][example] for example in shared[name]]) for name in shared] for side in (a, b))
    return next(sides), next(sides)
