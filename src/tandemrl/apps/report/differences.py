"""Paired differences between the arms of a report that no experiment has compared yet."""

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from tandemrl.apps.report.records import ArmRecord, ContrastRecord, Setting
from tandemrl.config import ConfigError
from tandemrl.evals import PHASES, EvalError
from tandemrl.evals.compare import CompareError, Contrast, compare, last_texts


def paired_differences(setting: Setting, say: Callable[[str], None]) -> tuple[ContrastRecord, ...]:
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
        sides = _evaluations(arm), _evaluations(first)
        seeds = [seed for seed in sides[0] if seed in sides[1]]
        if not seeds:
            say(f"{arm.title} and {first.title} are not compared: they have no seed in common.")
            continue
        if len(seeds) < len(sides[0].keys() | sides[1].keys()):
            say(f"{arm.title} and {first.title} are compared over the seeds of both only: {', '.join(seeds)}.")
        if not arm.evaluations and _steps(arm, seeds) != _steps(first, seeds):
            say(f"{arm.title} and {first.title}: their last evaluations, which are compared, are of different steps.")
        paired = (tuple(place for seed in seeds for place in side[seed]) for side in sides)
        contrasts = _contrasts(*paired, _state(arm), _state(first))
        if isinstance(contrasts, str):
            say(f"{arm.title} and {first.title} cannot be compared: {contrasts}")
            continue
        found += [ContrastRecord(each.phase, each.metric, arm.name, first.name, each.difference) for each in contrasts]
    return tuple(found)


@lru_cache(maxsize=1024)
def _contrasts(a: tuple[Path, ...], b: tuple[Path, ...], *state: object) -> list[Contrast] | str:
    """``compare``, or its error, once for each state of the files: a watched report is built anew with every step."""
    try:
        return compare(a, b)
    except (CompareError, ConfigError, EvalError) as error:
        return str(error)


def _evaluations(arm: ArmRecord) -> dict[str, list[Path]]:
    """The folders (or, under names of their own, the files) of each seed's evaluations, in the order of the seeds;
    without any, the folders of the runs."""
    found = [(each.seed, each.file.parent if each.file.stem in PHASES else each.file) for each in arm.evaluations]
    by_seed: dict[str, list[Path]] = {seed: [] for seed in arm.seeds}
    for seed, place in found or [(run.seed, run.folder) for run in arm.runs]:
        if place not in by_seed[seed]:
            by_seed[seed].append(place)
    return {seed: places for seed, places in by_seed.items() if places}


def _steps(arm: ArmRecord, seeds: Collection[str]) -> list[str]:
    """The names of the texts of the last evaluations during the runs of some seeds."""
    return [file.name for run, file in zip(arm.runs, _texts(arm), strict=True) if run.seed in seeds]


def _texts(arm: ArmRecord) -> list[Path]:
    """The texts of the last evaluation during each run of an arm; none unless all runs have some."""
    found = [last_texts(run.folder) for run in arm.runs]
    return [file for file in found if file is not None] if None not in found else []


def _state(arm: ArmRecord) -> tuple[object, ...]:
    """The names, times and sizes of the files of an arm's evaluations."""
    found: list[object] = []
    files = sorted(each.file for each in arm.evaluations)
    for each in (*files, *(file.with_suffix(".samples.jsonl") for file in files), *([] if files else _texts(arm))):
        with suppress(OSError):  # replaced while we look
            stat = os.stat(each)
            found.append((each, stat.st_mtime_ns, stat.st_size))
    return tuple(found)
