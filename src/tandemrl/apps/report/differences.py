"""Paired differences between the arms of a report that no experiment has compared yet."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from tandemrl.apps.report.records import ArmRecord, ContrastRecord, Setting, natural
from tandemrl.config import ConfigError
from tandemrl.evals import PHASES, EvalError
from tandemrl.evals.compare import CompareError, Contrast, compare, last_texts


def paired_differences(setting: Setting, say: Callable[[str], None]) -> tuple[ContrastRecord, ...]:
    """The differences of every evaluated arm to the first one, or those of ``results.json`` if it has some.

    If no arm is evaluated, the last evaluations during training are compared, if they are of the same steps.

    Args:
        say: called with a sentence if two arms cannot be compared, as with other problems or another number of samples.
    """
    evaluated = [arm for arm in setting.arms if arm.evaluations] or [arm for arm in setting.arms if _texts(arm)]
    if setting.contrasts or not evaluated:
        return setting.contrasts
    first, *others = evaluated
    found: list[ContrastRecord] = []
    for arm in others:
        if [file.name for file in _texts(arm)] != [file.name for file in _texts(first)] and not arm.evaluations:
            say(f"{arm.title} and {first.title} are not compared: their last evaluations are of different steps.")
            continue
        contrasts = _contrasts(_evaluations(arm), _evaluations(first), _state(arm), _state(first))
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


def _evaluations(arm: ArmRecord) -> tuple[Path, ...]:
    """The folder (or, under a name of its own, the file) of each seed's evaluation, in the order of the seeds; without
    any, the folders of the runs."""
    ordered = sorted(arm.evaluations, key=lambda each: natural(each.seed))
    folders = [each.file.parent if each.file.stem in PHASES else each.file for each in ordered]
    return tuple(dict.fromkeys(folders or [run.folder for run in arm.runs]))


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
