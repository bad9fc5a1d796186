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
    results = [each.result for arm in arms for each in arm.evaluations]
    problems = {result["metrics"]["macro"].get("problems") for result in results} - {None}
    found = {
        "folder": [str(records.folder)],
        "training runs": [str(sum(len(arm.runs) for arm in arms))],
        "evaluations": [str(len(results))],
        "problems": [f"{count:g}" for count in sorted(problems)],
        "command": [*filter(None, [records.experiment.get("command")])],
    }
    for versions in (dict(result.get("versions") or {}) for result in results):
        commit = str(versions.pop("git_revision", None)) + ", uncommitted changes" * bool(versions.pop("git_dirty", 0))
        for name, value in {"commit": commit, **versions}.items():
            found.setdefault(name, []).append(str(value))
    return [(name, " and ".join(dict.fromkeys(each))) for name, each in found.items() if each]


def differing_keys(setting: Setting) -> tuple[list[str], list[list[str]]]:
    """The config keys in which the runs of a setting's arms differ: (titles of the arms, rows of key and values)."""
    arms = [arm for arm in setting.arms if arm.runs and arm.runs[0].config]
    found = _differences([arm.runs[0].config for arm in arms])
    return [arm.title for arm in arms], [[key, *values] for key, values in sorted(found.items())]


def caveats(records: Records) -> list[str]:
    """What the numbers do not show, and what is unusual about the files."""
    named = [(f"{s.name}/{arm.name}" if s.name else arm.name, arm) for s in records.settings for arm in s.arms]
    runs = [said for name, arm in named for run in arm.runs for said in _of_run(name + _of(run.seed), run)]
    return [*runs, *_seeds(named), *(said for name, arm in named for said in _of_arm(name, arm))]


def _of_run(name: str, run: RunRecord) -> Iterable[str]:
    if run.unfinished:
        yield f"{name} stopped at {run.unfinished}: {run.stopped}" if run.stopped else f"{name} is at {run.unfinished}."
    for argument, function in (run.config.get("functions") or {}).items():
        if isinstance(function, Mapping):
            by = f"was trained with a Python function as {argument}: {function['name']}"
            yield f"{name} {by}. Its config.yaml alone cannot repeat it."


def _seeds(named: Sequence[tuple[str, ArmRecord]]) -> Iterable[str]:
    few: dict[int, list[str]] = {}
    for name, arm in named:
        phases = {e.phase: len(arm.phase(e.phase)) for e in arm.evaluations}
        most = max(phases.values(), default=ENOUGH_SEEDS)
        few.setdefault(most, []).append(name)
        yield from (f"{name}: {phase} has {count} of {most} seeds." for phase, count in phases.items() if count < most)
    for count, names in sorted(few.items()):
        if count == 1:
            yield f"One seed ({', '.join(names)}): another training seed may give something else."
        elif count < ENOUGH_SEEDS:
            means = "is wide, and assumes that seeds vary normally"
            yield f"{count} seeds ({', '.join(names)}): an interval over fewer than {ENOUGH_SEEDS} seeds {means}."


def _of_arm(name: str, arm: ArmRecord) -> Iterable[str]:
    """Yield sentences about seeds that were run differently, and about what went wrong in evaluations."""
    configs: dict[str, list[Mapping[str, Any]]] = {"train": [run.config for run in arm.runs if run.config]}
    for each in arm.evaluations:
        configs.setdefault(each.phase, []).append(each.result["config"])
    for what, own in configs.items():
        if found := _differences(own):
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
