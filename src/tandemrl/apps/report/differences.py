"""Paired differences between the arms of a report that no experiment has compared yet."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from tandemrl.apps.report.records import ArmRecord, ContrastRecord, Setting, natural
from tandemrl.evals import PHASES, EvalError
from tandemrl.evals.compare import CompareError, Contrast, compare


def paired_differences(setting: Setting, say: Callable[[str], None]) -> tuple[ContrastRecord, ...]:
    """The differences of every evaluated arm to the first one, or those of ``results.json`` if it has some.

    Args:
        say: called with a sentence if two arms cannot be compared, as with other problems or another number of samples.
    """
    evaluated = [arm for arm in setting.arms if arm.evaluations]
    if setting.contrasts or not evaluated:
        return setting.contrasts
    first, *others = evaluated
    found: list[ContrastRecord] = []
    for arm in others:
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
    except (CompareError, EvalError) as error:
        return str(error)


def _evaluations(arm: ArmRecord) -> tuple[Path, ...]:
    """The folder (or, under a name of its own, the file) of each seed's evaluation, in the order of the seeds."""
    ordered = sorted(arm.evaluations, key=lambda each: natural(each.seed))
    return tuple(dict.fromkeys(each.file.parent if each.file.stem in PHASES else each.file for each in ordered))


def _state(arm: ArmRecord) -> tuple[object, ...]:
    """The names, times and sizes of the files of an arm's evaluations."""
    found: list[object] = []
    for file in sorted(each.file for each in arm.evaluations):
        for each in (file, file.with_suffix(".samples.jsonl")):
            with suppress(OSError):  # replaced while we look
                stat = os.stat(each)
                found.append((each, stat.st_mtime_ns, stat.st_size))
    return tuple(found)
