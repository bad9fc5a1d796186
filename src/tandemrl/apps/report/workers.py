"""How old the weights were that generated the rollouts, and what workers did: a table of the runs that had workers, or
generated rollouts ahead (``train.async_steps``)."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from tandemrl.apps.report.records import ArmRecord, RunRecord
from tandemrl.apps.report.tables import MISSING

HEAD = (
    "",
    "workers",
    "weights of the last rollouts, oldest",
    "staleness, mean",
    "most",
    "trainer idle",
    "workers idle",
    "units redone",
    "workers replaced",
)


def worker_rows(arms: Sequence[ArmRecord]) -> list[list[str]]:
    """A row of cells under ``HEAD`` for each run with rollout workers, or with rollouts that were generated ahead."""
    return [
        [f"{arm.title}, seed {run.seed}" if run.seed else arm.title, *cells]
        for arm in arms
        for run in arm.runs
        if (cells := _cells(run))
    ]


def _cells(run: RunRecord) -> list[str]:
    rollout, train = (run.config.get(section) or {} for section in ("rollout", "train"))
    steps = [step for step in run.steps if step.get("weights/version_lag") is not None]
    if not steps or not (train.get("async_steps") or any("fleet/staleness" in step for step in steps)):
        return []
    oldest = [step["weights/version_lag"] for step in steps]
    last = steps[-1]["step"]
    return [
        str(rollout.get("workers", MISSING)),
        f"version {last - 1 - oldest[-1]:g}, for step {last}",
        _mean(steps, "fleet/staleness", "{:.2f}"),
        f"{max(oldest):g}",
        *(_mean(steps, f"fleet/idle_{who}", "{:.0%}").replace("%", " %") for who in ("trainer", "workers")),
        *(_total(steps, f"fleet/{what}") for what in ("redone", "restarts")),
    ]


def _mean(steps: Sequence[Mapping[str, Any]], name: str, form: str) -> str:
    values = [step[name] for step in steps if step.get(name) is not None]
    return form.format(fmean(values)) if values else MISSING


def _total(steps: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [step[name] for step in steps if step.get(name) is not None]
    return f"{sum(values):.0f}" if values else MISSING
