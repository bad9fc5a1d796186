"""Paired differences between the arms of a report that no experiment has compared yet."""

from collections.abc import Callable
from pathlib import Path

from tandemrl.apps.report.records import ArmRecord, ContrastRecord, Setting, natural
from tandemrl.evals import PHASES, EvalError
from tandemrl.evals.compare import CompareError, compare


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
        try:
            contrasts = compare(_evaluations(arm), _evaluations(first))
        except (CompareError, EvalError) as error:
            say(f"{arm.title} and {first.title} cannot be compared: {error}")
            continue
        found += [ContrastRecord(each.phase, each.metric, arm.name, first.name, each.difference) for each in contrasts]
    return tuple(found)


def _evaluations(arm: ArmRecord) -> list[Path]:
    """The folder (or, under a name of its own, the file) of each seed's evaluation, in the order of the seeds."""
    ordered = sorted(arm.evaluations, key=lambda each: natural(each.seed))
    return list(dict.fromkeys(each.file.parent if each.file.stem in PHASES else each.file for each in ordered))
