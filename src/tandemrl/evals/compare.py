"""Paired comparison of evaluations or training runs: is A better than B, problem by problem and over training seeds?

Both sides answered the same problems under the same profile and with the same random numbers. So a metric has one value
per problem on each side, and differences are taken problem by problem. With one evaluation on each side, the interval
is the paired bootstrap over problems, which is conditional on the two checkpoints. With several evaluations (training
seeds) on each side, there is one difference per seed, and the interval is Student's t over the seeds, which says
something about the method (``stats.seed_interval``). The verdict is "A > B" only if the interval excludes 0. There is
no correction for several rows: of twenty rows without any true difference, one excludes 0 by chance.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from tandemrl.config import difference, load, to_dict
from tandemrl.config.hints import hint
from tandemrl.config.plain import flatten
from tandemrl.evals.files import EVAL_TEXTS, differences, read_result, read_samples
from tandemrl.evals.measures import EvalError, Sample, ends_of, good_end, is_headline, measure_sets, silent_sets
from tandemrl.evals.phases import PHASES
from tandemrl.evals.stats import Interval, macro_interval, seed_interval, standard_error
from tandemrl.evals.transfer import ALONE, TEXT
from tandemrl.files import write_text
from tandemrl.rollout.engine import LOST
from tandemrl.types import Metrics

Verdict = Literal["A > B", "A < B", "no difference shown"]
UNDECIDED: Verdict = "no difference shown"
Match = Literal["truncation", "problems"]
"""A subset that is the same on both sides. ``truncation``: the samples that ended by themselves on both sides, in every
arm. ``problems``: the problems that both sides have."""
CUT = ("length", "turns")
"""How a text ends that a limit cut off."""
Values = Mapping[str, Mapping[str, float]]
"""The values of one metric in one evaluation, by set and ``example_id``."""
InTraining = Literal["held-out", "monitored"]
"""The last evaluation during a run, of the senior alone, on ``data.eval`` or on ``data.monitor``. It stands for a phase
where two runs have none in common."""


class CompareError(ValueError):
    """Two evaluations cannot be compared. The message names what differs."""


class Contrast(NamedTuple):
    """A metric on both sides and their difference A - B.

    a, b: the macro means over the problems that have a value on both sides, then over seeds. difference: the mean
    difference, with the bootstrap interval over problems (one seed) or Student's t interval over seeds. per_seed: the
    paired difference of each seed with its bootstrap interval over problems. problems: the number of pairs in the seed
    that has the fewest. truncated: for each side, the share of the texts behind the metric that a limit cut off.
    """

    phase: str
    metric: str
    a: float
    b: float
    difference: Interval
    per_seed: tuple[Interval, ...]
    verdict: Verdict
    problems: int
    truncated: tuple[float, float] | None = None


def compare(
    a: str | Path | Sequence[str | Path],
    b: str | Path | Sequence[str | Path],
    *,
    shown: Callable[[str], bool] = is_headline,
    varied: Collection[str] = (),
    match: Collection[Match] = (),
    resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> list[Contrast]:
    """Contrasts of every phase that both sides have, and of every metric that is ``shown``.

    Args:
        a: a run's folder, an evaluation folder (with ``PHASE.json``), a result file (of one phase), a folder of
            repetitions ``seed-N``, a path with a component ``seed-*`` that stands for all of them, or any of these in
            the order of their seeds. A run has the evaluation in its folder ``eval`` (or in ``eval/NAME`` beside it, as
            in an experiment), else its last one during training.
        b: the other side, in the same form.
        shown: whether to show a metric, by its name. The default shows the headline metrics.
        varied: the settings that may differ since they are what is compared (``retrieval``, ``environment``). All
            others have to be the same.
        match: the subsets to which both sides are cut. A problem then has the metrics for which it has enough samples.
        resamples: number of resamples of the bootstrap.
        seed: seed of the bootstrap.
        level: confidence level of the intervals.

    Raises:
        CompareError: there is no evaluation, the two sides differ in seeds, problems or settings, they have no phase in
            common, or only some of the seeds have a phase.
        ConfigError, EvalError: a file cannot be read.
    """
    pairs = _match(repetitions(a), repetitions(b))
    phases = _phases(pairs)
    if not phases:
        had = [", ".join(dict.fromkeys(phase for pair in pairs for phase in pair[i])) for i in (0, 1)]
        none = f"{a} and {b} have no phase in common ({had[0]} and {had[1]})"
        raise CompareError(f"{none}; run one for both: tandemrl eval PHASE")
    contrasts = []
    for phase in phases:
        read = [_load_pair(phase, *pair, varied, match) for pair in pairs]
        loaded = [values for values, _ in read]
        for metric in filter(shown, loaded[0][0]):
            if all(metric in side for sides in loaded for side in sides):
                values_a, values_b = ([sides[i][metric] for sides in loaded] for i in (0, 1))
                found = contrast(phase, metric, values_a, values_b, resamples=resamples, seed=seed, level=level)
                a_cut, b_cut = np.mean([[_cut(side, metric) for side in samples] for _, samples in read], axis=0)
                contrasts.append(found._replace(truncated=(float(a_cut), float(b_cut))))
    return contrasts


def config_differences(
    a: str | Path | Sequence[str | Path], b: str | Path | Sequence[str | Path]
) -> dict[str, tuple[Any, Any]]:
    """The dotted config keys in which two sides of ``compare`` differ, with both values; of seeds, the first ones'.

    If both evaluations are of runs, as far as their folders tell, these are the configs of the runs, else those of the
    evaluations.

    Raises:
        CompareError, ConfigError, EvalError: as for ``compare``.
    """
    first, *_ = _match(repetitions(a), repetitions(b))
    files = [next(iter(side.values())) for side in first]
    runs = [run for file in files if (run := run_of(file)) is not None]
    if len(runs) == len(files):
        found = difference(*(load(run) for run in runs))
    else:
        common = [phase for phase in first[0] if phase in first[1]]
        configs = (read_result(side[common[0]])["config"] for side in first)
        found = {key: (x, y) for key, x, y in differences(*configs)}
    return {key: values for key, values in found.items() if key != "output_dir" and not key.startswith("digests.")}


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
    """One contrast, from the values of each seed on both sides, of which there is at least one.

    Raises:
        CompareError: the two sides differ in sets, or no problem of a set has a value on both sides.
    """
    paired = [_pair(f"{phase}, {metric}", *sides) for sides in zip(a, b, strict=True)]
    ends = ends_of(metric)
    apart = ends and (ends[0] - ends[1], ends[1] - ends[0])
    interval = partial(macro_interval, resamples=resamples, seed=seed, level=level, ends=apart)
    per_seed = tuple(interval([x - y for x, y in zip(*sides, strict=True)], names) for *sides, names in paired)
    difference = per_seed[0]
    if len(per_seed) > 1:
        errors = [standard_error(each, level=level) for each in per_seed]
        difference = seed_interval([each.mean for each in per_seed], errors=errors, level=level)
    means = [[float(np.mean([values.mean() for values in sets])) for sets in sides] for *sides, _ in paired]
    mean_a, mean_b = np.mean(means, axis=0).tolist()
    problems = min(len({name for each in names for name in each}) for _, _, names in paired)
    if difference.low == difference.high and 0.5**problems > (1 - level) / 2:  # by a sign test: they may be luck
        difference = Interval(difference.mean, min(0.0, difference.mean), max(0.0, difference.mean))
    return Contrast(phase, metric, mean_a, mean_b, difference, per_seed, verdict(difference), problems)


def verdict(difference: Interval) -> Verdict:
    """The verdict that an interval of A - B supports. It states a difference only if the interval excludes 0.

    Examples:
        >>> verdict(Interval(0.2, 0.1, 0.3)), verdict(Interval(0.2, -0.1, 0.5))
        ('A > B', 'no difference shown')
    """
    if difference.low > 0:
        return "A > B"
    return "A < B" if difference.high < 0 else UNDECIDED


# ------------------------------------------------------------------------------------------------------------- showing


def judgement(metric: str, difference: Interval) -> str:
    """What the interval of A - B says of A: better or worse if the metric has a good end, else higher or lower.

    Examples:
        >>> judgement("truncation_rate", Interval(0.1, 0.05, 0.15)), judgement("length", Interval(-2, -3, -1))
        ('worse', 'lower')
    """
    if verdict(difference) == UNDECIDED:
        return UNDECIDED
    good, high = good_end(metric), difference.mean > 0
    if good is None:
        return "higher" if high else "lower"
    return "better" if high == (good == "higher") else "worse"


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
        | {"truncated": contrast.truncated and [*contrast.truncated]}
        for contrast in contrasts
    ]


def write_contrasts(file: Path, contrasts: Sequence[Contrast], about: Mapping[str, Any]) -> None:
    """Write contrasts, and what they are of, as JSON."""
    write_text(file, json.dumps({**about, "contrasts": to_json(contrasts)}, indent=2, ensure_ascii=False) + "\n")


# --------------------------------------------------------------------------------------------------------------- files


_EVALUATE = "tandemrl eval all --config {0} --model {0}/hf/best --out {0}/eval"
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
    named = "seed-*" in place.parts
    parts = place.parts if named else (*place.parts, "seed-*")
    before, after = Path(*parts[: parts.index("seed-*")]), Path(*parts[parts.index("seed-*") + 1 :])
    seeds = [each for each in before.glob("seed-*") if each.name.removeprefix("seed-").isdecimal()]
    if not named and (_results(place) or not seeds):
        return {"": _evaluation(place)}
    if not seeds:
        raise CompareError(f"{before}: no folder seed-N is there")
    seeds.sort(key=lambda each: (len(each.name), each.name))
    return {each.name: _evaluation(each / after) for each in seeds}


def step_of_texts(source: str | Path) -> int:
    """The training step of the texts that ``compare`` reads of a run without an evaluation of its own."""
    file = next(iter(repetitions(source).values()))[get_args(InTraining)[0]]
    return int(file.stem.removeprefix("step_"))


def _results(place: Path) -> Evaluation:
    """The results in a folder, or the one in a file, which says its phase; empty if there are none."""
    if place.is_file():
        try:
            return {read_result(place)["phase"]: place}
        except EvalError:
            what = "not the result of an evaluation (PHASE.json, or the file of eval --out)"
            raise CompareError(f"{place}: {what}") from None
    of_both = [name for name, phase in PHASES.items() if not phase.by_junior]  # which is the same for both
    return {name: file for name in of_both if (file := place / f"{name}.json").exists()}


def _evaluation(place: Path) -> Evaluation:
    if results := _results(place):
        return results
    if _is_run(place):
        folders = (place / "eval", place.parent / "eval" / place.name)
        results = {**next(filter(None, map(_results, folders)), {}), **_texts(place)}
        if results:
            return results
        raise CompareError(f"{place}: this run has no evaluation yet; make one: {_EVALUATE.format(place)}")
    fix = hint(place) or f"; make one: tandemrl eval all --model FOLDER --data FILE --out {place}"
    raise CompareError(f"{place}: no evaluation is there (no result file, PHASE.json, run, or seed-N with one){fix}")


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def run_of(result: Path) -> Path | None:
    """The run whose evaluation a file holds (see ``_evaluation``), or None if its folders do not say."""
    folder = result.parent
    places = (folder, folder.parent, folder.parent.parent / folder.name) if folder.name else ()
    return next(filter(_is_run, places), None)


def last_texts(run: Path) -> Path | None:
    """The file with the texts of a run's last evaluation during training, or None if it has kept none."""
    files = {int(file.stem.removeprefix("step_")): file for file in (run / EVAL_TEXTS).glob("step_*.jsonl")}
    return files[max(files)] if files else None


def _texts(run: Path) -> dict[str, Path]:
    """``last_texts`` by ``InTraining``."""
    if (last := last_texts(run)) is None:
        return {}
    held_out, monitored = get_args(InTraining)
    return {held_out: last} | ({monitored: last} if '{"source": "monitor"' in last.read_text(encoding="utf-8") else {})


def _match(a: dict[str, Evaluation], b: dict[str, Evaluation]) -> list[tuple[Evaluation, Evaluation]]:
    if a.keys() != b.keys():
        listed = (", ".join(side) or "one evaluation without seeds" for side in (a, b))
        raise CompareError("other repetitions on the two sides: {} and {}".format(*listed))
    return [(a[seed], b[seed]) for seed in a]


def _phases(pairs: Sequence[tuple[Evaluation, Evaluation]]) -> list[str]:
    """The phases that both sides have, else the evaluations during training. It is an error if only some of the seeds
    have a phase."""

    for names in ([*PHASES], get_args(InTraining)):
        found = [name for name in names if all(any(name in pair[i] for pair in pairs) for i in (0, 1))]
        for name, each in product(found, chain(*pairs)):
            if name not in each:
                file = next(iter(each.values())).parent / f"{name}.json"
                raise CompareError(f"{file} is missing, other seeds have it; run the phase: tandemrl eval {name}")
        if found:
            return found
    return []


def _load_pair(
    phase: str, a: Evaluation, b: Evaluation, varied: Collection[str], match: Collection[Match]
) -> tuple[list[dict[str, Values]], list[list[Sample]]]:
    """The values of every metric on both sides, which must be evaluations of the same problems in the same way, and
    the samples that they are of."""
    files = [a[phase], b[phase]]
    protocols, ks, samples = zip(*(_read(phase, file, varied) for file in files), strict=True)
    anew = "evaluate one again with the --config and options of the other, into a new folder"
    again = anew if phase in PHASES else f"evaluate both alike: {_EVALUATE.format('RUN')}"
    if changed := differences(*protocols):
        listed = "; ".join(f"{key}: {x!r} and {y!r}" for key, x, y in changed[:3])
        raise CompareError(f"{files[0]} and {files[1]} were made in different ways ({listed}); {again}")
    ids = [{(sample.set, sample.example_id) for sample in side} for side in samples]
    if ids[0] != ids[1] and "problems" not in match:
        both, either = len(ids[0] & ids[1]), len(ids[0] | ids[1])
        again = f"{again}, or compare what both have: --match problems"
        raise CompareError(f"{files[0]} and {files[1]}: only {both} of {either} problems are in both; {again}")
    kept = [[one for one in side if (one.set, one.example_id) in ids[0] & ids[1]] for side in samples]
    if "truncation" in match:
        cut = {
            _place(one)
            for side in kept
            for one in side
            if one.stop_reason in (*CUT, *LOST) and one.given in (None, ALONE, TEXT)
        }
        kept = [[one for one in side if _place(one) not in cut] for side in kept]
    if not kept[0]:
        raise CompareError(f"{files[0]} and {files[1]}: no text is left by --match {', '.join(match)}")
    k = [each for each in ks[0] if each in ks[1]]
    silent = silent_sets([sample for side in kept for sample in side])  # of both sides, which need the same metrics
    of_phase = PHASES[phase if phase in PHASES else "pass-at-k"].measure

    def measure(problem: Sequence[Sample]) -> tuple[Metrics, Metrics]:
        return of_phase(problem, k=[each for each in k if each <= len(problem)] if match else k)

    measured = [measure_sets(side, measure, silent=silent) for side in kept]
    values: list[dict[str, Values]] = [
        {
            metric: {name: each.rates[metric] for name, each in sets.items() if metric in each.rates}
            for metric in dict.fromkeys(metric for each in sets.values() for metric in each.rates)
        }
        for sets in measured
    ]
    return values, kept


def _place(sample: Sample) -> tuple[str, str, int]:
    """What the samples of all arms and of both sides have in common that had the same random numbers."""
    return sample.set, sample.example_id, sample.sample


def _cut(samples: Sequence[Sample], metric: str) -> float:
    """The share of texts that a limit cut off, of those that a metric is of: of its arm and condition, if it has one.
    An answer that was begun for a reader is not cut off: it has few tokens by design."""
    own = [one for one in samples if metric.startswith(f"{one.arm}/")] or samples
    own = [one for one in own if one.given and f"/{one.given}/" in f"/{metric}"] or own
    own = [one for one in own if not (one.given or "").startswith(("forced/", "copy/"))]
    if not own:
        return 0.0
    return sum(one.stop_reason in CUT for one in own) / len(own)


_ON_TEXTS = (
    *("eval", "reward", "judge", "sandbox", "retrieval", "functions.reward", "functions.environment"),
    *("data.prompt_suffix", "data.max_prompt_tokens", "data.template_arguments", "rollout.tools", "rollout.max_turns"),
    *("rollout.environment", "rollout.environment_parameters", "rollout.turn_tokens", "rollout.observation_tokens"),
    *("rollout.result_tokens", "rollout.tool_timeout_s", "rollout.keep_turns"),
)
"""The keys and sections of a run's config on which the texts of its evaluations and their grades depend, beside the
model and the data."""
_NOT_ON_TEXTS = (
    *("eval.k", "eval.samples", "eval.bootstrap", "eval.train_problems", "eval.branches", "eval.handover"),
    "reward.workers",
    *("judge.url", "judge.wait_s", "judge.api_key_env", "judge.concurrency", "judge.timeout_s"),
)


def _read(phase: str, file: Path, varied: Collection[str]) -> tuple[dict[str, Any], list[int], list[Sample]]:
    """What an evaluation must have in common with another one, the k of its pass@k, and its samples."""
    if phase != "held-out" and phase != "monitored":
        stored = read_result(file)["config"]
        return _protocol(stored, varied), stored["eval"]["k"], read_samples(file.with_suffix(".samples.jsonl"))
    config, source = load(file.parents[1]), "eval" if phase == "held-out" else "monitor"
    sections = tuple(f"{name}." for name in (*_ON_TEXTS, f"data.{source}"))
    settings = {key: x for key, x in flatten(to_dict(config)).items() if f"{key}.".startswith(sections)}
    k = [each for each in config.eval.k if each <= config.eval.train_samples]
    return {key: x for key, x in settings.items() if key not in _NOT_ON_TEXTS}, k, read_samples(file, source)


def _protocol(config: Mapping[str, Any], varied: Collection[str]) -> dict[str, Any]:
    """The settings that two results must have in common, without those that are ``varied``.

    Junior and data are compared by their content if that is known.
    """
    digests = config.get("digests") or {}

    def content(source: str) -> str:
        return digests.get(str(Path(source)), source)

    own = {*("model", "digests", "device", "dtype", "engine", "draw", "endpoint", "authors", "limit")}
    own |= {"responses", "response_digests"}
    common = {key: value for key, value in config.items() if key not in own and key not in varied}
    common["eval"] = {key: value for key, value in config["eval"].items() if key not in ("k", "bootstrap")}
    common["data"] = [content(source) for source in config["data"]]
    if "junior" in config:
        common["junior"] = content(config["junior"])
    return common


def _pair(what: str, a: Values, b: Values) -> tuple[list[np.ndarray], list[np.ndarray], list[list[str]]]:
    """For each set and side, the values of the problems that have one on both sides, and these, in the same order."""
    if a.keys() != b.keys():
        raise CompareError(f"{what}: the sets of A are {', '.join(a)}, those of B {', '.join(b)}")
    shared = {name: [example for example in a[name] if example in b[name]] for name in a}
    if empty := [name for name, examples in shared.items() if not examples]:
        raise CompareError(f"{what}: no problem of set {empty[0]} has a value on both sides")
    x, y = ([np.array([side[name][example] for example in shared[name]]) for name in shared] for side in (a, b))
    return x, y, [*shared.values()]
