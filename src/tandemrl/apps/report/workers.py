"""What the rollout workers of runs did: a table from the ``fleet/…`` metrics of runs that had some."""

from collections.abc import Sequence
from statistics import fmean

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
    """A row of cells under ``HEAD`` for each run with rollout workers."""
    return [
        [f"{arm.title}, seed {run.seed}" if run.seed else arm.title, *cells]
        for arm in arms
        for run in arm.runs
        if (cells := _cells(run))
    ]


def _cells(run: RunRecord) -> list[str]:
    steps = [step for step in run.steps if step.get("fleet/staleness") is not None]
    if not steps:
        return []
    oldest = [step["weights/version_lag"] for step in steps]
    last = steps[-1]["step"]
    return [
        str((run.config.get("rollout") or {}).get("workers", MISSING)),
        f"version {last - 1 - oldest[-1]:g}, for step {last}",
        f"{fmean(step['fleet/staleness'] for step in steps):.2f}",
        f"{max(oldest):g}",
        *(f"{100 * fmean(step[f'fleet/{what}'] for step in steps):.0f} %" for what in ("idle_trainer", "idle_workers")),
        *(f"{sum(step[f'fleet/{what}'] for step in steps):.0f}" for what in ("redone", "restarts")),
    ]
