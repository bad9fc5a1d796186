"""Says where the numbers of a report come from, and what they do not show."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandemrl.apps.report.records import SEED, ArmRecord, EvaluationRecord, Records, RunRecord, Setting
from tandemrl.config import Config, leaves
from tandemrl.config.fields import is_own
from tandemrl.config.plain import flatten

ENOUGH_SEEDS = 5
"""The report points out arms with fewer seeds than this."""
SEEDED = {"train.seed", "output_dir", "digests", "threads"}
"""Config keys (or their first parts) in which the seeds of one arm may differ."""
TROUBLE = {
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
"""Counts of an evaluation that are worth a sentence, if they are not 0."""

_COMPONENTS = {key.key for key in leaves(Config()) if key.allowed and key.allowed.names}
"""Config keys that name a component, which may be the user's own."""


def sources(records: Records) -> list[tuple[str, str, str]]:
    """A row per arm: its name with that of its setting, its seeds, its last steps."""
    rows = []
    for setting, arm in _arms(records):
        last = sorted({run.steps[-1].get("step", len(run.steps)) for run in arm.runs if run.steps})
        seeds = ", ".join(seed or "–" for seed in arm.seeds)
        rows.append((f"{setting.name} / {arm.title}".removeprefix(" / "), seeds, ", ".join(map(str, last)) or "–"))
    return rows


def code(records: Records) -> list[tuple[str, str]]:
    """The revision and the versions of the code that wrote the results. If results differ, every value is listed."""
    values: dict[str, dict[str, None]] = {}
    stored = [e.result.get("versions") or {} for _, _, e in _evaluations(records)]
    for versions in [*stored, records.experiment.get("versions") or {}]:
        for name, value in versions.items():
            values.setdefault(name, {})["unknown" if value is None else str(value)] = None
    titles = {"git_revision": "commit"}
    return [(titles.get(name, name), " and ".join(sorted(v))) for name, v in values.items() if name != "git_dirty"]


def commands(records: Records) -> list[str]:
    """The commands that repeat the experiment, or the run of the first seed of each arm, and make this page."""
    lines = []
    if name := records.experiment.get("name"):
        command = records.experiment.get("command") or f"tandemrl experiment {shlex.quote(str(name))}"
        lines.append(f"{command} --out {shlex.quote(str(records.folder))}")
    lines += [_train_command(run) for _, arm in _arms(records) for run in arm.runs[:1]]
    return [*dict.fromkeys(lines), f"tandemrl report {shlex.quote(str(records.folder))}"]


def differing_keys(setting: Setting) -> tuple[list[str], list[list[str]]]:
    """The config keys in which the runs of a setting's arms differ: (titles of the arms, rows of key and values)."""
    arms = [arm for arm in setting.arms if arm.runs and arm.runs[0].config]
    found = _differences([arm.runs[0].config for arm in arms])
    return [arm.title for arm in arms], [[key, *values] for key, values in sorted(found.items())]


def caveats(records: Records) -> list[str]:
    """What the numbers do not show, and what is unusual about the files."""
    runs = [said for setting, arm in _arms(records) for run in arm.runs for said in _of_run(_name(setting, arm), run)]
    return [*runs, *_seeds(records), *_unequal(records), *_trouble(records), *_revisions(records)]


def _of_run(name: str, run: RunRecord) -> Iterable[str]:
    file, where = run.folder / "metrics.jsonl", run.unfinished
    name += _of(run.seed)
    if run.torn:
        yield f"{file}: the last line is incomplete and was left out; the run is in progress."
    elif not run.steps:
        yield f"{file} is empty: no step is finished."
    if where and run.stopped:
        yield f"{name} stopped at {where}: {run.stopped}"
    elif where and run.steps:
        yield f"{name} stands at {where}."
    for argument, function in _passed(run).items():
        trained = "was trained" + (f" (as far as {where})" if where else "")
        by = f"{trained} with a Python function as {argument}: {function}"
        yield f"{name} {by}. Its config.yaml alone cannot repeat it."
    named = ((key, value) for key, value in flatten(run.config).items() if _names_component(key))
    if own := ", ".join(f"{key}={value}" for key, value in named if is_own(str(value))):
        yield f"{name} was trained with {own}, in modules that its folder lacks."


def _names_component(key: str) -> bool:
    return key in _COMPONENTS or key.startswith("reward.scorers.")


def _seeds(records: Records) -> Iterable[str]:
    few: dict[int, list[str]] = {}
    for setting, arm in _arms(records):
        phases = {e.phase: len(arm.phase(e.phase)) for e in arm.evaluations}
        most = max(phases.values(), default=ENOUGH_SEEDS)
        if most < ENOUGH_SEEDS:
            few.setdefault(most, []).append(_name(setting, arm))
        for phase, count in phases.items():
            if count < most:
                yield f"{_name(setting, arm)}: {phase} has {count} of {most} seeds."
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
            if differing := _differences([config for name, config in configs if name == what]):
                yield f"The seeds of {_name(setting, arm)} differ in {_listed(what, differing)}."
    for setting in records.settings:
        for phase in dict.fromkeys(e.phase for arm in setting.arms for e in arm.evaluations):
            firsts = [next(iter(arm.phase(phase).values()), None) for arm in setting.arms]
            if differing := _differences([_task(result["config"]) for result in firsts if result]):
                where = f"in {setting.name}" if setting.name else "here"
                yield f"The arms {where} were not evaluated alike: they differ in {_listed(phase, differing)}."


def _trouble(records: Records) -> Iterable[str]:
    for setting, arm, evaluation in _evaluations(records):
        macro = evaluation.result["metrics"]["macro"]
        for name, meaning in TROUBLE.items():
            if macro.get(name):
                yield f"{_name(setting, arm)}{_of(evaluation.seed)}, {evaluation.phase}: {macro[name]:g} {meaning}."


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


def _task(config: Mapping[str, Any]) -> dict[str, Any]:
    """What compared arms must share: everything except the models, and of the hashes only those of the data."""
    digests = {source: config.get("digests", {}).get(source) for source in config.get("data") or ()}
    return {k: v for k, v in config.items() if k not in ("model", "junior")} | {"data files": digests}


def _differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The config keys that have several values, each with the value of every config, without those that differ by
    seed."""
    flat = [flatten(config) for config in configs]
    values = {
        key: [re.sub(SEED.pattern, "seed-N", str(each.get(key))) for each in flat]
        for key in dict.fromkeys(key for each in flat for key in each)
        if key.split(".")[0] not in SEEDED and key not in SEEDED
    }
    return {key: each for key, each in values.items() if len(set(each)) > 1}


def _listed(what: str, differing: Mapping[str, Sequence[str]], most: int = 4) -> str:
    shown = [f"{key} ({' / '.join([*dict.fromkeys(values)][:3])})" for key, values in [*differing.items()][:most]]
    more = f" and {len(differing) - most} more" if len(differing) > most else ""
    return f"{what}: {', '.join(shown)}{more}"


def _arms(records: Records) -> Iterable[tuple[Setting, ArmRecord]]:
    return ((setting, arm) for setting in records.settings for arm in setting.arms)


def _evaluations(records: Records) -> Iterable[tuple[Setting, ArmRecord, EvaluationRecord]]:
    return ((setting, arm, e) for setting, arm in _arms(records) for e in arm.evaluations)


def _name(setting: Setting, arm: ArmRecord) -> str:
    return f"{setting.name}/{arm.name}" if setting.name else arm.name


def _of(seed: str) -> str:
    return f", seed {seed}" if seed else ""
