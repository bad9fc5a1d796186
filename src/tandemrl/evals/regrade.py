"""Grades the texts of a finished evaluation again, with another grader: nothing is written anew by a model."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tandemrl.config import Config, ConfigError, load, stated_keys, to_dict
from tandemrl.config.plain import plain
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import Prompt
from tandemrl.evals.compare import repetitions, run_of
from tandemrl.evals.files import EvalResult, digests, read_result, read_samples, write_result
from tandemrl.evals.measures import EvalError, Sample, summarise
from tandemrl.evals.phases import PHASES
from tandemrl.evals.protocol import grade
from tandemrl.evals.session import grader_settings, judge_settings
from tandemrl.files import begin, publish, write_text
from tandemrl.rewards.scoring import Scorer
from tandemrl.rewards.services import code_scorer, judges

_OF_BRANCHES = "handover-effect"
"""Its result is of texts that no file holds."""
REGRADED = [name for name, phase in PHASES.items() if phase.graded and not phase.judge and name != _OF_BRANCHES]
_ALL = "*"
_READ = ("reward.", "judge.", "sandbox.", "data.columns")
_OF_SCORERS = ("scorers", "fallback", "weights", "parameters")
_OF_TEXTS = ("prompts_dropped", "untranslatable", "failed")
"""Counters of a result that are about its texts, and stay."""
CHANGED = "changed.jsonl"
"""The file of a new evaluation with the texts whose verdicts changed, with both verdicts."""


class Regraded(NamedTuple):
    """A phase that was graded again.

    file: the new result. before: the macro metrics as they were; metrics: those of the new result. changed: the samples
    whose verdict changed, each as it was and as it is. rescored: how many others got another score.
    """

    file: Path
    phase: str
    before: dict[str, float]
    metrics: dict[str, Any]
    samples: int
    changed: list[tuple[Sample, Sample]]
    rescored: int


def regrade(
    place: str | Path,
    *,
    grader: str | None = None,
    overrides: Sequence[str] = (),
    config: str | None = None,
    out: str | Path | None = None,
) -> list[Regraded]:
    """Grade the stored texts of an evaluation again. The result is a new evaluation; the old one stays as it is.

    Every phase that grades is graded again, but for those with a judge, which reads what the grader accepts, and for
    ``handover-effect``, whose branches are in no file. The new
    files are those that an evaluation with this grader would write, and say where their texts are from (``regraded``).
    The file ``changed.jsonl`` beside them has the texts whose verdict changed.

    Args:
        place: an evaluation (folder or result file), a run, or a folder of repetitions ``seed-N`` of either.
        grader: scores all rows, instead of the graders of the evaluation: a name of the library's, ``module:function``,
            or a sum, as in ``reward.scorers``. None: those of the evaluation, as ``overrides`` change them.
        overrides: ``key=value`` assignments, such as ``reward.gsm8k=tandem`` or ``judge.url=…``.
        config: take judge, sandbox and ``data.columns`` from this config. None: from that of the run, if it is one's.
        out: the new folder. None: beside the old one, with the name of the grader after its name.

    Raises:
        CompareError: no evaluation is there.
        ConfigError: a key or a value is not allowed, or has no effect.
        DataError, GraderError, JudgeError: the rows cannot be read or scored.
        EvalError: the new folder exists, the data changed, or a row is missing.
    """
    if grader is None and not overrides:
        raise EvalError("nothing to change: give a grader (--grader boxed, module:function) or reward.KEY=VALUE")
    if unread := next((each for each in overrides if not each.startswith(_READ)), None):
        raise ConfigError(f"{unread!r} has no effect here: the keys that are read are {'*, '.join(_READ)}*")
    found = repetitions(place)
    if out is not None and len(found) > 1:
        raise EvalError(f"{place} has {len(found)} evaluations, and --out is one folder; leave it out")
    how = (grader or "-".join(each.partition("=")[2] for each in overrides)).rpartition(":")[2]
    suffix = re.sub(r"[^A-Za-z0-9_.]+", "-", how).strip("-")
    regraded = []
    for evaluation in found.values():
        old = next(iter(evaluation.values())).resolve().parent
        names = [read_result(Path(place))["phase"]] if Path(place).is_file() else REGRADED
        files = [Path(place)] if Path(place).is_file() else [old / f"{name}.json" for name in REGRADED]
        files = [file for name, file in zip(names, files, strict=True) if name in REGRADED and file.is_file()]
        if not files:
            raise EvalError(f"{old}: no phase with grades; make one: tandemrl eval pass-at-k ({', '.join(REGRADED)})")
        new = Path(out) if out is not None else old.with_name(f"{old.name}-{suffix}")
        if new.exists():
            raise EvalError(f"{new} is there already, and nothing is overwritten; remove it or choose another --out")
        again = [_again(file, grader, overrides, config) for file in files]
        hidden = begin(new)
        for each, identity, samples in again:
            about = {"regraded": {"from": str(each.file), "changed": len(each.changed), "rescored": each.rescored}}
            seeds = {"bootstrap": identity["eval"]["seed"]}
            result = EvalResult(each.metrics, samples)
            write_result(hidden / f"{each.phase}.json", each.phase, identity, result, seeds=seeds, about=about)
        lines = [json.dumps(line, ensure_ascii=False) for each, _, _ in again for line in _changes(each)]
        write_text(hidden / CHANGED, "".join(f"{line}\n" for line in lines).encode(errors="replace").decode())
        publish(new)
        regraded += [each._replace(file=new / f"{each.phase}.json") for each, _, _ in again]
    return regraded


def _again(
    file: Path, grader: str | None, overrides: Sequence[str], config: str | None
) -> tuple[Regraded, dict[str, Any], list[Sample]]:
    """A phase that is graded again, the settings of its result, and its samples."""
    stored = read_result(file)
    settings, old = stored["config"], read_samples(file.with_name(stored["samples"]))
    chosen = _config(file, settings, grader, overrides, config)
    now = digests(chosen.data.eval)
    if changed := [source for source in now if settings.get("digests", {}).get(source, now[source]) != now[source]]:
        raise EvalError(f"{changed[0]} is not what {file} was evaluated on: it changed since; evaluate anew")
    rows = {(row.data_source, row.example_id): row for row in load_rows(chosen.data.eval, columns=chosen.data.columns)}
    if missing := next((one for one in old if (one.set, one.example_id) not in rows), None):
        raise EvalError(f"{file}: row {missing.example_id} of {missing.set} is not in {', '.join(chosen.data.eval)}")
    read = {one.problem: Prompt(rows[one.set, one.example_id], ()) for one in old}
    prompts = [read.get(i, read[old[0].problem]) for i in range(max(read) + 1)]  # of what is in no file, any
    judge = judges(chosen)
    with Scorer(chosen.reward, code=code_scorer(chosen), judge=judge) as scorer:
        episodes = any(one.transcript is not None for one in old)
        stated = {*stated_keys(overrides), *([f"reward.scorers.{_ALL}"] if grader else [])}
        scorer.check([each.row for each in read.values()], episodes=episodes, stated=stated)
        new = [one._replace(draws=None) for one in grade(old, prompts, scorer)]  # no file holds their texts
        counters = {"score_timeouts": scorer.timeouts, "score_failures": scorer.failures}
    measure = partial(PHASES[stored["phase"]].measure, k=chosen.eval.k)
    metrics = summarise(new, measure, bootstrap=chosen.eval.bootstrap, seed=chosen.eval.seed)
    kept = {name: x for name, x in stored["metrics"]["macro"].items() if name in _OF_TEXTS}
    metrics["macro"] |= kept | counters
    pairs = [*zip(old, new, strict=True)]
    other = [(a, b) for a, b in pairs if bool(a.correct) is not bool(b.correct)]
    rescored = sum(a.score != b.score for a, b in pairs) - sum(a.score != b.score for a, b in other)
    before, told = stored["metrics"]["macro"], len(old)
    identity = {key: value for key, value in settings.items() if key not in ("reward", "sandbox", "judge")}
    identity |= plain(grader_settings(chosen)) | ({"judge": plain(judge_settings(chosen))} if judge else {})
    return Regraded(file, stored["phase"], before, metrics, told, other, rescored), identity, new


def _config(
    file: Path, settings: Mapping[str, Any], grader: str | None, overrides: Sequence[str], config: str | None
) -> Config:
    """The config with which texts are graded again: the settings of their evaluation, with what is changed."""
    run = run_of(file)
    source = config if config is not None else None if run is None else str(run)
    tree = {} if source is None else to_dict(load(source))
    tree["data"] = tree.get("data", {}) | {"eval": settings["data"]}
    tree |= {name: settings[name] for name in ("eval", "reward", "sandbox") if name in settings}
    if grader is not None:
        own = {name: value for name, value in settings["reward"].items() if name not in _OF_SCORERS}
        tree["reward"] = own | {"scorers": {_ALL: grader}}
    return load(tree, overrides)


def _changes(one: Regraded) -> list[dict[str, Any]]:
    def verdict(sample: Sample) -> dict[str, Any]:
        return {"correct": sample.correct, "score": sample.score, "answer": sample.answer}

    named = ("set", "example_id", "arm", "sample")
    return [
        {"phase": one.phase, **{name: getattr(a, name) for name in named}, "before": verdict(a), "after": verdict(b)}
        | {"text": a.text}
        for a, b in one.changed
    ]
