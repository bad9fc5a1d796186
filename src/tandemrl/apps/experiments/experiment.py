"""Experiments: pairs × seeds × arms, trained, evaluated and compared by the library's public functions.

An experiment is a value, which ``run_experiment(experiment, out)`` runs. Every seed builds its own pair. Every arm is
trained from that pair with the same seed, and evaluated on the same held-out problems with the same random numbers. The
work is divided over processes with one thread each. What is finished is never done twice: a killed experiment continues
when it is started again.

    OUT/experiment.json             what was asked for
    OUT/PAIR/seed-N/pair/           senior, junior, manifest.json
    OUT/PAIR/seed-N/ARM/            a training run
    OUT/PAIR/seed-N/eval/ARM/       its evaluation; ``base`` is the senior before training, and the junior alone
    OUT/results.json                a row per pair, seed and arm; contrasts between arms; claims; the command,
                                    the date, and the commits that made them
    OUT/report.html
"""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from tandemrl import evals
from tandemrl.apps import report
from tandemrl.apps.experiments.arms import BASE, DEFAULT_SIZE, Arm, Experiment, ExperimentError
from tandemrl.apps.experiments.claims import claims_of
from tandemrl.apps.experiments.families import PAIRS, Recipe
from tandemrl.apps.experiments.pair import PairError, read_manifest
from tandemrl.apps.experiments.tiny import SIZES, lr_scale
from tandemrl.apps.experiments.warm_start import Progress, note_of
from tandemrl.apps.report.records import JUNIOR
from tandemrl.apps.report.tables import MEASURES
from tandemrl.config import load, stated_keys
from tandemrl.evals.compare import compare, to_json
from tandemrl.files import versions, write_text
from tandemrl.processes.child import cores
from tandemrl.training.loop import train
from tandemrl.training.tracking import time_left

SCHEMA = 2
OF_RUN = frozenset(
    ("model.senior", "model.junior", "model.device", "data.train", "data.eval", "train.seed", "output_dir")
)
"""Keys that say which run it is. No override of an experiment may set them, as none may set those of an arm."""
OF_TASK = (
    *("data.prompt_suffix", "data.template_arguments", "reward.", "judge.", "sandbox.", "retrieval."),
    *("rollout.environment", "rollout.tools", "rollout.max_turns", "rollout.turn_tokens", "rollout.observation_tokens"),
    *("rollout.result_tokens", "rollout.tool_timeout_s", "rollout.keep_turns"),
)
"""How the keys begin whose overrides hold for the evaluations of an experiment, too."""
EXTENSIBLE = ("seeds", "pairs", "arms", "contrasts")
"""What may be added to an experiment that is there."""


# ------------------------------------------------------------------------------------------------------------- running


class Job(NamedTuple):
    """A unit of work: build the models of a pair and seed (if ``arm`` is None), or train and evaluate one arm."""

    pair: str
    seed: int
    arm: Arm | None = None

    def __str__(self) -> str:
        return f"{self.pair}/seed-{self.seed}/{self.arm.name if self.arm else 'pair'}"


def run_experiment(
    experiment: Experiment,
    out: str | Path,
    *,
    workers: int | None = None,
    command: str | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run what is not finished yet of an experiment, and write and return the results.

    Args:
        out: the folder of the experiment.
        workers: how many processes run at once. None means one per core, but no more than the free memory is enough
            for, or one on a GPU; 1 means this process.
        command: the command line that runs it, to be recorded.
        say: called with a line for each finished part, which says about how long the others take, and with the headline
            tables at the end.

    Raises:
        ConfigError: the overrides of an arm are not valid.
        ExperimentError: the experiment is not valid (its overrides may not set what an arm or each run sets), ``out``
            holds another one, a part failed, or every pair was refused. (Some refused pairs are recorded in the
            results, and the rest is compared.)
    """
    out = Path(out)
    _check_experiment(experiment)
    if line := _reserve_folder(experiment, out, command):
        say(line)
    jobs = [Job(pair, seed) for pair in experiment.pairs for seed in experiment.seeds]
    workers = workers or _workers(experiment)
    missing = [job for job in jobs if not _is_built(experiment, job, _home(job, out))]
    for family in dict.fromkeys(PAIRS[job.pair] for job in missing):
        family.prepare(say)

    def after(job: Job) -> list[Job]:
        return [] if job.arm else [job._replace(arm=arm) for arm in (*experiment.arms, Arm(BASE, "before training"))]

    total = sum(1 + len(after(job)) for job in jobs)
    unfinished = {part for job in jobs for part in after(job) if not _evaluation(part, out).is_dir()}
    started, to_do = time.monotonic(), len(unfinished)
    failed: dict[str, BaseException] = {}
    refused: dict[Job, str] = {}
    ended = _run_jobs(jobs, after, lambda job: (run_job, experiment, job, out), workers)
    for finished, (job, outcome) in enumerate(ended, 1):
        if isinstance(outcome, PairError):
            refused[job] = str(outcome)
        elif isinstance(outcome, BaseException):
            failed[str(job)] = outcome
        shown = f"{type(outcome).__name__}: {outcome}" if isinstance(outcome, BaseException) else outcome
        unfinished -= {job, *(after(job) if isinstance(outcome, BaseException) else ())}
        seconds, done = time.monotonic() - started, to_do - len(unfinished)
        left = f", {time_left(seconds / done * len(unfinished))}" if done and unfinished else ""
        say(f"[{finished}/{total}, {seconds:.0f} s{left}] {job}: {shown}")
    if failed:
        listed = "; ".join(f"{job}: {type(error).__name__}: {error}" for job, error in failed.items())
        raise ExperimentError(
            f"{len(failed)} of {total} parts failed ({listed}); what is finished is kept: fix it and run again"
        ) from next(iter(failed.values()))
    if len(refused) == len(jobs):
        raise ExperimentError(f"every pair was refused: {'; '.join(refused.values())}")
    results = collect_results(experiment, out, command=command, refused=refused)
    return reported(results, out, say)


def reported(results: dict[str, Any], out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The results, once they are in ``results.json`` and on the page of the experiment."""
    write_text(out / "results.json", json.dumps(results, indent=2, allow_nan=False) + "\n")
    page = report.build_report(out)
    report.write_report(page)
    say(report.headlines(page, report.headline_lines))
    return results


def run_job(experiment: Experiment, job: Job, out: Path) -> str:
    """Run one job, unless its files exist already, and return a line about it."""
    home = _home(job, out)
    if job.arm is None:
        _check_pair_of_runs(experiment, job, home)
        with _building(home, job) as progress:
            manifest = PAIRS[job.pair].build(
                home / "pair",
                _recipe(experiment, job),
                device=experiment.device,
                progress=progress,
            )
        return ", ".join(f"{name} {value:.3g}" for name, value in manifest["base"].items())
    model = home / "pair" / "senior"
    if job.arm.name != BASE:
        config = load(
            experiment.config, [*_run_overrides(experiment, job, home), *job.arm.overrides, *experiment.overrides]
        )
        model = home / job.arm.name / "hf" / f"step_{config.train.steps}"
        if not model.is_dir():
            train(config, quiet=True)
    settings = [
        f"model.junior={home}/pair/junior",
        f"model.device={experiment.device}",
        f"data.eval=[synthetic:{job.pair}:heldout:{experiment.problems}]",
        f"eval.samples={experiment.samples}",
        f"eval.k={[k for k in (1, 2, 4, 8, 16) if k <= experiment.samples]}",
        f"rollout.max_rows={PAIRS[job.pair].evaluation_rows * (1 if experiment.device == 'cpu' else 8)}",
        "train.threads=1",
        *experiment.evaluation_overrides,
        *(item for item in experiment.overrides if any(key.startswith(OF_TASK) for key in stated_keys([item]))),
    ]
    leave_out: tuple[evals.Phase, ...] = () if job.arm.name == BASE else ("junior",)  # the same for all arms
    phases = evals.evaluate(
        load(experiment.evaluation, settings),
        model=model,
        out=_evaluation(job, out),
        leave_out=leave_out,
    )
    return f"solo pass@1 {phases['pass-at-k']['metrics']['macro']['pass@1']:.3f}"


def _check_pair_of_runs(experiment: Experiment, job: Job, home: Path) -> None:
    """Refuse to build a pair anew where arms were trained from one of another recipe.

    Raises:
        ExperimentError: the folder holds such runs.
    """
    if read_manifest(home / "pair") is None or not any(home.glob("*/metrics.jsonl")):
        return
    if not _is_built(experiment, job, home):
        raise ExperimentError(
            f"{home}: its runs began with a pair of another recipe, which would be replaced; choose another folder"
        )


@contextmanager
def _building(home: Path, job: Job) -> Iterator[Progress]:
    """A context in which a warm start writes its progress to a file, at most once a second. ``heartbeat`` reads it."""
    file, written = home / "pair.progress.json", 0.0

    def note(step: int, steps: int, loss: float) -> None:
        nonlocal written
        if time.monotonic() - written >= 1 or step == steps:
            written = time.monotonic()
            says = (
                f"building the {job.pair} pair of seed {job.seed}: step {step} of {steps}{note_of(step, steps, loss)}"
            )
            write_text(file, json.dumps({"says": says}) + "\n")

    try:
        yield note
    finally:
        file.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------- results


def collect_results(
    experiment: Experiment, out: Path, *, command: str | None = None, refused: Mapping[Job, str] | None = None
) -> dict[str, Any]:
    """The content of ``results.json``, collected from the files of a finished experiment.

    Args:
        command: the command line that made it.
        refused: the pairs that did not meet their criteria, with the reason. Nothing else is known of them.
    """
    refused = refused or {}
    accepted = {
        pair: [seed for seed in experiment.seeds if Job(pair, seed) not in refused] for pair in experiment.pairs
    }
    rows: list[dict[str, Any]] = [
        {"pair": pair, "seed": seed, "arm": arm} | measures_of(pair, out / pair / f"seed-{seed}" / "eval" / arm)
        for pair in experiment.pairs
        for arm in (BASE, *(arm.name for arm in experiment.arms))
        for seed in accepted[pair]
    ]
    rows += [
        {"pair": pair, "seed": seed, "arm": JUNIOR} | measures
        for pair in experiment.pairs
        for seed in accepted[pair]
        if (measures := measures_of_junior(out / pair / f"seed-{seed}" / "eval" / BASE))
    ]
    metrics = {metric for _, metric in MEASURES.values()}
    contrasts = [
        {"pair": pair, "A": a, "B": b, **contrast}
        for pair in experiment.pairs
        if accepted[pair]
        for a, b in experiment.contrasts
        for contrast in to_json(
            compare(
                *([out / pair / f"seed-{n}" / "eval" / arm for n in accepted[pair]] for arm in (a, b)),
                shown=metrics.__contains__,
            )
        )
    ]
    claims = [
        {"pair": pair} | claim._asdict() | {"values": list(claim.values)}
        for pair in experiment.pairs
        for claim in claims_of(pair, rows, contrasts, refused=len(experiment.seeds) - len(accepted[pair]))
    ]
    return {
        "schema": SCHEMA,
        "experiment": experiment.to_json(),
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "refused": [{"pair": job.pair, "seed": job.seed, "reason": reason} for job, reason in refused.items()],
        "evaluated_by": evaluated_by(
            out / row["pair"] / f"seed-{row['seed']}" / "eval" / row["arm"] for row in rows if row["arm"] != JUNIOR
        ),
        "rows": rows,
        "contrasts": contrasts,
        "claims": claims,
    }


def evaluated_by(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """The revisions of the code that evaluated the arms. There are several if the code was updated in between."""
    stored = [evals.read_result(folder / "pass-at-k.json")["versions"] for folder in folders]
    revisions = {(each["git_revision"], each["git_dirty"]) for each in stored}
    return [{"git_revision": revision, "git_dirty": dirty} for revision, dirty in sorted(revisions, key=str)]


def measures_of(pair: str, folder: Path) -> dict[str, float]:
    """The measures of one evaluation, as a row of ``results.json``: ``MEASURES``, and what the family of the pair has
    to say of the texts (see ``families``)."""
    files = {phase: folder / f"{phase}.json" for phase, _ in MEASURES.values()}
    # Models of two tokenizers have no drift.
    results = {phase: evals.read_result(file) for phase, file in files.items() if file.exists()}
    row = {
        name: results[phase]["metrics"]["macro"][metric]
        for name, (phase, metric) in MEASURES.items()
        if phase in results and metric in results[phase]["metrics"]["macro"]
    }
    solo, handoff = (
        [sample.text for sample in evals.read_samples(folder / results[phase]["samples"])]
        for phase in ("pass-at-k", "handoff")
    )
    return row | PAIRS[pair].measures(results["pass-at-k"]["metrics"]["macro"], solo, handoff)


def measures_of_junior(folder: Path) -> dict[str, float]:
    """The measures of the junior alone, which an evaluation has beside its own; {} if it has none."""
    if not (file := folder / "junior.json").exists():
        return {}
    macro = evals.read_result(file)["metrics"]["macro"]
    own = {name: metric for name, (phase, metric) in MEASURES.items() if phase in ("pass-at-k", "legibility")}
    return {name: macro[metric] for name, metric in own.items() if metric in macro}


# --------------------------------------------------------------------------------------------------------------------


def _check_experiment(experiment: Experiment) -> None:
    for problem in _problems(experiment):
        raise ExperimentError(f"{experiment.name}: {problem}")
    for arm in experiment.arms:  # a bad key is found before an hour of work
        load(experiment.config, [*arm.overrides, *experiment.overrides])


def _problems(experiment: Experiment) -> Iterator[str]:
    names, stated = [arm.name for arm in experiment.arms], stated_keys(experiment.overrides)
    if unknown := set(experiment.pairs) - set(PAIRS):
        yield f"unknown pairs {sorted(unknown)}; known: {', '.join(PAIRS)}"
    if experiment.size not in SIZES:
        yield f"unknown size {experiment.size!r}; known: {', '.join(SIZES)}"
    for pair in experiment.pairs:
        if experiment.size != DEFAULT_SIZE and experiment.size not in PAIRS[pair].sizes:
            yield f"the pair {pair} has no sizes; leave out size {experiment.size}"
    for what, values in (("pairs", experiment.pairs), ("seeds", experiment.seeds), ("arms", names)):
        if not values or len(set(values)) != len(values):
            yield f"{what} must be one or more different ones, got {list(values)}"
    for taken, what in ((BASE, "the model before training"), (JUNIOR, "the junior alone")):
        if taken in names:
            yield f"an arm cannot be called {taken!r}, {what}"
    if unknown := {arm for contrast in experiment.contrasts for arm in contrast} - {BASE, *names}:
        yield f"contrasts name unknown arms {sorted(unknown)}; arms: {names}"
    if "train.epochs" in stated:
        yield "train.epochs is not for experiments; say train.steps=N"
    if of_run := sorted(stated & OF_RUN):
        yield f"{', '.join(of_run)} is set for each run; leave it out"
    for arm in experiment.arms:
        if of_arm := sorted(stated & stated_keys(arm.overrides)):
            yield f"{', '.join(of_arm)} is what the arm {arm.name} sets; leave it out, or train other arms: --arms"


def _reserve_folder(experiment: Experiment, out: Path, command: str | None = None) -> str:
    """Write ``experiment.json``, or check that it is of this experiment. Seeds, pairs, arms, contrasts may be added.

    Returns:
        a line about what earlier commands named and this one does not, or "".
    """
    left_out = list[str]()
    file, description = out / "experiment.json", experiment.to_json()
    if file.exists():
        stored = json.loads(file.read_text())
        arms, now = ({arm["name"]: arm for arm in each["arms"]} for each in (stored, description))
        changed = [key for key in description if key not in EXTENSIBLE and stored.get(key) != description[key]]
        changed += [f"arm {name}" for name, arm in now.items() if arms.get(name, arm) != arm]
        if changed:
            raise ExperimentError(f"{out} holds an experiment with another {', '.join(changed)}; choose another folder")
        for what, named, here in (
            *((what, stored[what], description[what]) for what in ("seeds", "pairs")),
            ("arms", arms, now),
        ):
            if missing := [str(value) for value in named if value not in here]:
                left_out.append(f"{what} {', '.join(missing)}")
    write_text(file, json.dumps({"command": command} | description, indent=2) + "\n")
    if not left_out:
        return ""
    return f"results.json will be without {'; '.join(left_out)} of earlier commands: name them, too, to compare all"


def _workers(experiment: Experiment) -> int:
    """How many processes run at once if nobody says: as many as there are cores, and as free memory is enough for."""
    if experiment.device != "cpu":
        return 1
    if (free_gb := _free_gb()) is None:
        return cores()
    return max(1, min(cores(), int(free_gb / max(PAIRS[pair].memory_gb for pair in experiment.pairs))))


def _free_gb() -> float | None:
    """The memory that programs can have, the file cache included, in GB; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 1e6
    except (OSError, StopIteration, ValueError):
        return None


def _home(job: Job, out: Path) -> Path:
    """The folder of a pair and seed."""
    return out / job.pair / f"seed-{job.seed}"


def _evaluation(job: Job, out: Path) -> Path:
    """The folder of an arm's evaluation."""
    assert job.arm is not None
    return _home(job, out) / "eval" / job.arm.name


def _is_built(experiment: Experiment, job: Job, home: Path) -> bool:
    """Whether the pair of a job, by this recipe, is there."""
    stored = read_manifest(home / "pair")
    return stored is not None and stored.items() >= PAIRS[job.pair].identity(_recipe(experiment, job)).items()


def _recipe(experiment: Experiment, job: Job) -> Recipe:
    return Recipe(job.pair, job.seed, experiment.pair_steps, experiment.size)


def _run_overrides(experiment: Experiment, job: Job, home: Path) -> list[str]:
    assert job.arm is not None
    junior = home / "pair" / "junior"
    if job.arm.junior_steps is not None:
        weak = home / f"pair-{job.arm.junior_steps}"
        recipe = _recipe(experiment, job)._replace(steps=job.arm.junior_steps)
        PAIRS[job.pair].build(weak, recipe, device=experiment.device)
        junior = weak / "junior"
    tuned = load(experiment.config).train.lr
    return [
        f"model.senior={home}/pair/senior",
        f"model.junior={junior}",
        f"model.device={experiment.device}",
        f"train.lr={tuned * lr_scale(experiment.size)}",
        f"data.train=[synthetic:{job.pair}:train]",
        f"data.eval=[synthetic:{job.pair}:heldout]",
        f"train.seed={job.seed}",
        "train.threads=1",
        f"output_dir={home}/{job.arm.name}",
    ]


def _run_jobs(
    jobs: Iterable[Job], after: Callable[[Job], list[Job]], call: Callable[[Job], tuple[Any, ...]], workers: int
) -> Iterable[tuple[Job, Any]]:
    """Run jobs, and after each success the jobs that follow it. Yields (job, result or exception) as they end."""
    if workers == 1:
        queue = list(jobs)
        while queue:
            job = queue.pop(0)
            function, *arguments = call(job)
            try:
                yield job, function(*arguments)
            except Exception as error:
                yield job, error
            else:
                queue[:0] = after(job)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_exit_with_parent, initargs=(os.getpid(),)) as pool:
        running: dict[Future[Any], Job] = {pool.submit(*call(job)): job for job in jobs}
        try:
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    job = running.pop(future)
                    failure = future.exception()
                    if failure is None:
                        running |= {pool.submit(*call(following)): following for following in after(job)}
                    yield job, failure or future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _exit_with_parent(parent: int) -> None:
    """End this worker when its parent is gone, so that it does not write into a folder that a new run uses."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
