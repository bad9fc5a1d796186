"""Says what the numbers of a report do not show, and what made them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandemrl.apps.report.records import SEED, ArmRecord, Records, RunRecord, Setting
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


def made_by(records: Records) -> list[tuple[str, str]]:
    """What was read, and the command, revision and versions of the code that made it; all of them, if they differ."""
    arms = [arm for setting in records.settings for arm in setting.arms]
    runs, evaluations = sum(len(arm.runs) for arm in arms), [e for arm in arms for e in arm.evaluations]
    problems = {e.result["metrics"]["macro"].get("problems") for e in evaluations} - {None}
    values: dict[str, dict[str, None]] = {
        "folder": {str(records.folder): None},
        "training runs": {str(runs): None},
        "evaluations": {str(len(evaluations)): None},
        "problems": dict.fromkeys(f"{count:g}" for count in sorted(problems)),
        "command": dict.fromkeys(filter(None, [records.experiment.get("command")])),
    }
    for versions in [e.result.get("versions") or {} for e in evaluations]:
        dirty = ", uncommitted changes" if versions.get("git_dirty") else ""
        values.setdefault("commit", {})[f"{versions.get('git_revision') or 'unknown'}{dirty}"] = None
        for name, value in versions.items():
            if not name.startswith("git_"):
                values.setdefault(name, {})[str(value)] = None
    return [(name, " and ".join(each)) for name, each in values.items() if each]


def differing_keys(setting: Setting) -> tuple[list[str], list[list[str]]]:
    """The config keys in which the runs of a setting's arms differ: (titles of the arms, rows of key and values)."""
    arms = [arm for arm in setting.arms if arm.runs and arm.runs[0].config]
    found = _differences([arm.runs[0].config for arm in arms])
    return [arm.title for arm in arms], [[key, *values] for key, values in sorted(found.items())]


def caveats(records: Records) -> list[str]:
    """What the numbers do not show, and what is unusual about the files."""
    named = [(f"{s.name}/{arm.name}" if s.name else arm.name, arm) for s in records.settings for arm in s.arms]
    runs = [said for name, arm in named for run in arm.runs for said in _of_run(name, run)]
    return [*runs, *_seeds(named), *(said for name, arm in named for said in _of_arm(name, arm))]


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
        yield f"{name} is at {where}."
    for argument, function in (run.config.get("functions") or {}).items():
        if isinstance(function, Mapping):
            by = f"was trained with a Python function as {argument}: {function['name']}"
            yield f"{name} {by}. Its config.yaml alone cannot repeat it."


def _seeds(named: Sequence[tuple[str, ArmRecord]]) -> Iterable[str]:
    few: dict[int, list[str]] = {}
    for name, arm in named:
        phases = {e.phase: len(arm.phase(e.phase)) for e in arm.evaluations}
        most = max(phases.values(), default=ENOUGH_SEEDS)
        if most < ENOUGH_SEEDS:
            few.setdefault(most, []).append(name)
        yield from (f"{name}: {phase} has {count} of {most} seeds." for phase, count in phases.items() if count < most)
    for count, names in sorted(few.items()):
        means = "is wide, and assumes that seeds vary normally"
        if count == 1:
            yield f"One seed ({', '.join(names)}): another training seed may give something else."
        else:
            yield f"{count} seeds ({', '.join(names)}): an interval over fewer than {ENOUGH_SEEDS} seeds {means}."


def _of_arm(name: str, arm: ArmRecord) -> Iterable[str]:
    """Yield sentences about seeds that were run differently, and about what went wrong in evaluations."""
    configs = [("train", run.config) for run in arm.runs if run.config]
    configs += [(e.phase, e.result["config"]) for e in arm.evaluations]
    for what in dict.fromkeys(each for each, _ in configs):
        if found := _differences([config for each, config in configs if each == what]):
            listed = [f"{key} ({' / '.join([*dict.fromkeys(values)][:3])})" for key, values in [*found.items()][:4]]
            yield f"The seeds of {name} differ in {what}: {', '.join(listed)}{', …' if len(found) > 4 else ''}."
    for each in arm.evaluations:
        macro = each.result["metrics"]["macro"]
        for count, meaning in TROUBLE.items():
            if macro.get(count):
                yield f"{name}{_of(each.seed)}, {each.phase}: {macro[count]:g} {meaning}."


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


def _of(seed: str) -> str:
    return f", seed {seed}" if seed else ""
