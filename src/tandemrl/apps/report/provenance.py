"""Says where the numbers of a report come from, and what they do not show."""

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tandemrl.apps.report.records import SEED, ArmRecord, EvaluationRecord, Records, RunRecord, Setting
from tandemrl.config import Config, leaves
from tandemrl.config.fields import is_own
from tandemrl.config.plain import flatten

ENOUGH_SEEDS = 5
"""The report points out arms with fewer seeds than this."""
SUITE = {"pass-at-k", "tandem", "handoff", "legibility", "drift"}
"""The phases of ``tandemrl eval all``, without that of a judge."""
SEEDED = {"train.seed", "output_dir", "digests", "threads"}
"""Config keys (or their first parts) in which the seeds of one arm may differ."""

_COMPONENTS = {key.key for key in leaves(Config()) if key.allowed and key.allowed.names}
"""Config keys that name a component, which may be the user's own."""


class Source(NamedTuple):
    """One arm of a setting and the configurations behind it, by short hash."""

    setting: str
    arm: str
    seeds: str
    steps: str
    runs: str
    evaluations: str


def sources(records: Records) -> list[Source]:
    """One row per arm. Equal configurations have equal hashes; those of evaluations cover weights and data, too."""
    rows = []
    for setting in records.settings:
        for arm in setting.arms:
            last = [run.steps[-1].get("step", len(run.steps)) for run in arm.runs if run.steps]
            rows.append(
                Source(
                    setting.name,
                    arm.title,
                    ", ".join(seed or "–" for seed in arm.seeds),
                    ", ".join(map(str, sorted(set(last)))) or "–",
                    ", ".join(_digest(run.config) for run in arm.runs if run.config) or "–",
                    _digest([e.result["config"] for e in arm.evaluations]) if arm.evaluations else "–",
                )
            )
    return rows


def code(records: Records) -> list[tuple[str, str]]:
    """The revision and the versions of the code that wrote the results. If results differ, every value is listed."""
    values_of: dict[str, set[str]] = {}
    stored = [e.result.get("versions") or {} for _, _, e in _evaluations(records)]
    for versions in [*stored, records.experiment.get("versions") or {}]:
        for name, value in versions.items():
            if name != "git_dirty":
                values_of.setdefault(name, set()).add("unknown" if value is None else str(value))
    titles = {"git_revision": "commit"}
    return [(titles.get(name, name), " and ".join(sorted(values))) for name, values in values_of.items()]


def commands(records: Records) -> list[str]:
    """The commands that repeat the runs and evaluations of the first seed of each arm, and that make this page."""
    lines = []
    if name := records.experiment.get("name"):
        command = records.experiment.get("command") or f"tandemrl experiment {shlex.quote(str(name))}"
        lines.append(f"{command} --out {shlex.quote(str(records.folder))}")
    for setting in records.settings:
        for arm in setting.arms:
            lines += [_train_command(run) for run in arm.runs[:1]]
            first = [e for e in arm.evaluations if e.seed == arm.evaluations[0].seed]
            standard = [e for e in first if e.phase in SUITE]
            if len(standard) == len(SUITE) and all(e.file.stem == e.phase for e in standard):
                handoff = next(e for e in standard if e.phase == "handoff")  # it has both models
                lines.append(_eval_command(handoff, "all", handoff.file.parent))
                first = [e for e in first if e not in standard and e.phase != "junior"]
            lines += [_eval_command(e, e.phase, e.file) for e in first]
    return [*dict.fromkeys(lines), f"tandemrl report {shlex.quote(str(records.folder))}"]


def caveats(records: Records) -> list[str]:
    """What the numbers do not show, and what is unusual about the files."""
    return [
        *_torn(records),
        *_functions(records),
        *_modules(records),
        *_seeds(records),
        *_unequal(records),
        *_trouble(records),
        *_unaccepted(records),
        *_revisions(records),
    ]


def _torn(records: Records) -> Iterable[str]:
    for setting, arm in _arms(records):
        for run in arm.runs:
            if run.torn:
                file = run.folder / "metrics.jsonl"
                yield f"{file}: the last line is incomplete and was left out; the run is in progress."
            elif not run.steps:
                yield f"{run.folder / 'metrics.jsonl'} is empty: no step is finished."
            where = run.unfinished
            if where and run.stopped:
                yield f"{_name(setting, arm)}{_of(run.seed)} stopped at {where}: {run.stopped}"
            elif where and run.steps:
                yield f"{_name(setting, arm)}{_of(run.seed)} stands at {where}."


def _functions(records: Records) -> Iterable[str]:
    for setting, arm in _arms(records):
        for run in arm.runs:
            trained = "was trained" + (f" (as far as {run.unfinished})" if run.unfinished else "")
            for name, function in _passed(run).items():
                yield (
                    f"{_name(setting, arm)}{_of(run.seed)} {trained} with a Python function as {name}: {function}. Its "
                    "config.yaml alone cannot repeat it."
                )


def _modules(records: Records) -> Iterable[str]:
    for setting, arm in _arms(records):
        for run in arm.runs:
            named = ((key, str(value)) for key, value in flatten(run.config).items() if _names_component(key))
            if own := ", ".join(f"{key}={value}" for key, value in named if is_own(value)):
                yield f"{_name(setting, arm)}{_of(run.seed)} was trained with {own}, in modules that its folder lacks."


def _names_component(key: str) -> bool:
    return key in _COMPONENTS or key.startswith("reward.scorers.")


def _seeds(records: Records) -> Iterable[str]:
    few: dict[int, list[str]] = {}
    for setting, arm in _arms(records):
        phases = {e.phase: len(arm.phase(e.phase)) for e in arm.evaluations}
        if not phases:
            continue
        most = max(phases.values())
        if most < ENOUGH_SEEDS:
            few.setdefault(most, []).append(_name(setting, arm))
        yield from (
            f"{_name(setting, arm)}: {phase} has {count} of {most} seeds."
            for phase, count in phases.items()
            if count < most
        )
    for count, names in sorted(few.items()):
        if count == 1:
            yield (
                f"One seed ({', '.join(names)}): intervals are over problems only. They say nothing about what another "
                "training seed would give."
            )
        else:
            yield (
                f"{count} seeds ({', '.join(names)}): an interval over fewer than {ENOUGH_SEEDS} seeds is "
                "wide, and rests on seeds varying normally."
            )


def _unequal(records: Records) -> Iterable[str]:
    """Yield sentences about seeds of an arm that were run differently, and arms of a setting that were evaluated
    differently."""
    for setting, arm in _arms(records):
        configs = [("train", run.config) for run in arm.runs if run.config]
        configs += [(e.phase, e.result["config"]) for e in arm.evaluations]
        for what in dict.fromkeys(name for name, _ in configs):
            differing = _differences([config for name, config in configs if name == what])
            if differing:
                yield f"The seeds of {_name(setting, arm)} differ in {_listed(what, differing)}."
    for setting in records.settings:
        for phase in dict.fromkeys(e.phase for arm in setting.arms for e in arm.evaluations):
            firsts = [next(iter(arm.phase(phase).values()), None) for arm in setting.arms]
            compared = [_task(result["config"]) for result in firsts if result]
            if differing := _differences(compared):
                where = f"in {setting.name}" if setting.name else "here"
                yield f"The arms {where} were not evaluated alike: they differ in {_listed(phase, differing)}."


def _trouble(records: Records) -> Iterable[str]:
    for setting, arm, evaluation in _evaluations(records):
        macro = evaluation.result["metrics"]["macro"]
        counts = {
            "prompts_dropped": "prompts were too long and left out",
            "dropped": "texts were too long for the junior to read",
            "score_timeouts": "answers could not be scored in time and count as wrong",
            "score_failures": "answers could not be scored and count as wrong",
            "unscored": "answers got no score from the judge and count as 0",
            "untranslatable": "texts could not be expressed in both vocabularies and count as wrong",
            "failed": "texts got no words from the junior's endpoint and count as wrong",
            "out_of_turns": "episodes ended because rollout.max_turns allows no further turn",
            "judge_failures": "correct answers got no mark from the judge and count as rejected",
        }
        for name, meaning in counts.items():
            if macro.get(name):
                yield f"{_name(setting, arm)}{_of(evaluation.seed)}, {evaluation.phase}: {macro[name]:g} {meaning}."


def _unaccepted(records: Records) -> Iterable[str]:
    read = [each for each in _evaluations(records) if each[2].phase == "legibility"]
    without = [each for each in read if "acceptance" not in each[2].result["metrics"]["macro"]]
    for setting, arm, evaluation in without if len(without) < len(read) else ():
        yield (
            f"{_name(setting, arm)}{_of(evaluation.seed)}, legibility has no acceptance: it is older, or its samples "
            "do not say how they were drawn."
        )


def _revisions(records: Records) -> Iterable[str]:
    stored = [e.result.get("versions") or {} for _, _, e in _evaluations(records)]
    revisions = {str(versions.get("git_revision")) for versions in stored}
    if len(revisions) > 1:
        yield f"The evaluations were made by {len(revisions)} revisions of the code."
    if any(versions.get("git_dirty") for versions in stored):
        yield "Some evaluations were made by code with uncommitted changes."


def _train_command(run: RunRecord) -> str:
    """The training command of a run. It is a comment if the run had Python functions, which no command can pass."""
    file, functions = str(run.folder / "config.yaml"), _passed(run)
    if not functions:
        return f"tandemrl train --config {shlex.quote(file)}"
    arguments = "".join(f", {name}=FUNCTION" for name in functions)
    return f"# in Python: train(load({file!r}){arguments}), with " + "; ".join(
        f"{name}: {function}" for name, function in functions.items()
    )


def _passed(run: RunRecord) -> dict[str, str]:
    """The name and signature of the functions that took the place of config keys in a run, by argument of ``train``."""
    records = run.config.get("functions") or {}
    return {
        name: f"{function['name']} [{function['signature']}]"
        for name, function in records.items()
        if isinstance(function, Mapping)
    }


def _eval_command(evaluation: EvaluationRecord, phase: str, out: Path) -> str:
    """The command of a phase, or of all phases, with the settings that differ most often. The result file has the
    others."""
    config = evaluation.result["config"]
    settings = config.get("eval") or {}
    endpoint = ["--endpoint", "URL"] if config.get("engine") == "endpoint" else []
    words = ["tandemrl", "eval", "qa" if endpoint else phase, *endpoint, "--model", str(config.get("model"))]
    words += ["--junior", str(config["junior"])] if config.get("junior") else []
    words += [word for source in config.get("data") or () for word in ("--data", str(source))]
    for option in ("samples", "profile", "seed"):
        words += [f"--{option}", str(settings[option])] if option in settings else []
    words += ["--k", ",".join(map(str, settings["k"]))] if "k" in settings else []
    acting = [f"rollout.{name}={config[name]}" for name in ("environment", "max_turns") if name in config]
    return shlex.join([*words, "--out", str(out), *acting])


def _task(config: Mapping[str, Any]) -> dict[str, Any]:
    """What compared arms must share: everything except the models, and of the hashes only those of the data."""
    digests = {source: config.get("digests", {}).get(source) for source in config.get("data") or ()}
    return {k: v for k, v in config.items() if k not in ("model", "junior")} | {"data files": digests}


def _differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The config keys that have several values, without those that differ by seed."""
    flat = [flatten(config) for config in configs]
    values: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for each in flat for key in each):
        if key.split(".")[0] not in SEEDED and key not in SEEDED:
            values[key] = list(dict.fromkeys(_seedless(each.get(key)) for each in flat))
    return {key: different for key, different in values.items() if len(different) > 1}


def _listed(what: str, differing: Mapping[str, Sequence[str]], most: int = 4) -> str:
    shown = [f"{key} ({' / '.join(values[:3])})" for key, values in list(differing.items())[:most]]
    more = f" and {len(differing) - most} more" if len(differing) > most else ""
    return f"{what}: {', '.join(shown)}{more}"


def _seedless(value: Any) -> str:
    return re.sub(SEED.pattern, "seed-N", str(value))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _arms(records: Records) -> Iterable[tuple[Setting, ArmRecord]]:
    return ((setting, arm) for setting in records.settings for arm in setting.arms)


def _evaluations(records: Records) -> Iterable[tuple[Setting, ArmRecord, EvaluationRecord]]:
    return ((setting, arm, e) for setting, arm in _arms(records) for e in arm.evaluations)


def _name(setting: Setting, arm: ArmRecord) -> str:
    return f"{setting.name}/{arm.name}" if setting.name else arm.name


def _of(seed: str) -> str:
    return f", seed {seed}" if seed else ""
