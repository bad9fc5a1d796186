"""Experiments: pairs × seeds × arms, trained, evaluated and compared by the library's public functions.

An experiment is a value, which ``run_experiment(experiment, out)`` runs. Every seed builds its own pair. Every arm is
trained from that pair with the same seed, and evaluated on the same held-out problems with the same random numbers. The
work is divided over processes with one thread each. What is finished is never done twice: a killed experiment continues
when it is started again.

    OUT/experiment.json             what was asked for
    OUT/PAIR/seed-N/pair/           senior, junior, manifest.json; beside it what arms name (`makings`)
    OUT/PAIR/seed-N/ARM/            a training run, or the model of another arm at a temperature
    OUT/PAIR/readers/               models that read the texts of every arm and seed, and are never in training
    OUT/PAIR/seed-N/eval/ARM/       its evaluation; ``base`` is the senior before training, and the junior alone
    OUT/results.json                a row per pair, seed and arm; contrasts between arms; claims; the command,
                                    the date, and the commits that made them
    OUT/report.html
"""

import itertools
import json
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from functools import partial, reduce
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from tandemrl import evals
from tandemrl.apps import report
from tandemrl.apps.experiments import pretrained, tiny
from tandemrl.apps.experiments.arms import Arm, Experiment, ExperimentError
from tandemrl.apps.experiments.claims import claims_of
from tandemrl.apps.experiments.makings import MAKINGS, Making
from tandemrl.apps.experiments.pair import PairError, read_manifest
from tandemrl.apps.experiments.registered import paired_tests, verdicts
from tandemrl.apps.experiments.registered import stated as stated_before
from tandemrl.apps.experiments.sharpness import FITTED, match_entropy
from tandemrl.apps.report.records import BASE, JUNIOR
from tandemrl.apps.report.tables import MEASURES
from tandemrl.config import Config, load, stated_keys
from tandemrl.evals.compare import compare, to_json
from tandemrl.evals.transfer import SHARES, WAYS
from tandemrl.files import versions, write_text
from tandemrl.processes.child import cores
from tandemrl.tasks.generated import hops
from tandemrl.tasks.generated.synthetic import leaves_out, repairs, uses_jargon
from tandemrl.tasks.generated.word_problems import uses_shorthand
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
EXTENSIBLE = ("seeds", "pairs", "arms", "contrasts", "readers")
"""What may be added to an experiment that is there."""
READ = 128
"""How many problems' texts the readers get at most, one of each."""
READER_SEED = 1000
"""Of the first reader. No pair has it."""
START = "start"
"""Where, in an evaluation, the model before training reads the arm's texts."""
READINGS = (
    *(f"{way}/{given}" for way in WAYS for given in (*SHARES, "before")),
    "free/step",
    "free/masked",
    "copy/100",
)
"""The conditions of transfer that are in ``results.json``."""


# --------------------------------------------------------------------------------------------------------------- pairs


class Family(NamedTuple):
    """How the pairs of a family are built and measured.

    build: puts a pair into a folder, unless it is there, and returns its manifest. It is called with ``pair``,
    ``seed``, ``steps`` and ``device``. identity: what the manifest says of how a pair was built, from the first three
    of these. solo, handoff: what is measured of its solo texts and of its handoff texts beside the measures of every
    pair, each the mean of a function. evaluation_rows: how many texts an evaluation writes at once on a CPU; on a GPU,
    eight times as many. memory_gb: what a process that builds, trains or evaluates needs at most. readers: trains
    unseen readers into a folder, called with ``pair``, ``seed``, ``steps`` and ``count``; None if there are none.
    """

    build: Callable[..., dict[str, Any]]
    identity: Callable[..., dict[str, Any]]
    solo: Mapping[str, Callable[[str], float]]
    handoff: Mapping[str, Callable[[str], float]]
    evaluation_rows: int
    memory_gb: float
    readers: Callable[..., list[Path]] | None = None


# Of tiny models, large batches cost memory only.
WORDED = Family(
    tiny.build_tiny_pair,
    tiny.pair_identity,
    solo={"jargon_rate": uses_jargon},
    handoff={"handoff/repairs": repairs},
    evaluation_rows=1024,
    memory_gb=1.0,
    readers=tiny.build_tiny_readers,
)
SHORT = WORDED._replace(solo={"shorthand_rate": leaves_out}, handoff={})
AGENTS = WORDED._replace(solo={"jargon_rate": hops.uses_jargon}, handoff={}, readers=None)
PRETRAINED = Family(
    pretrained.build_pretrained_pair,
    pretrained.pretrained_identity,
    solo={"shorthand_rate": uses_shorthand},
    handoff={},
    evaluation_rows=64,
    memory_gb=7.0,
)

PAIRS: dict[str, Family] = {
    **{pair: AGENTS if pair in hops.PAIRS else WORDED for pair in tiny.WARM_STARTS},
    "shorthand": SHORT,
    **dict.fromkeys(pretrained.STEPS, PRETRAINED),
}
"""The family of each pair."""


# ------------------------------------------------------------------------------------------------------------- running


class Job(NamedTuple):
    """A unit of work: build the models of a pair and seed (if ``arm`` is None), or train and evaluate one arm."""

    pair: str
    seed: int
    arm: Arm | None = None

    def __str__(self) -> str:
        return f"{self.pair}/seed-{self.seed}/{self.arm.name if self.arm else 'pair'}"

    @property
    def needs(self) -> set[str]:
        """The jobs that come before it, by name."""
        return {f"{self.pair}/seed-{self.seed}/{name}" for name in (self.arm.needs if self.arm else ())}

    def home(self, out: Path) -> Path:
        """The folder of the pair and seed."""
        return out / self.pair / f"seed-{self.seed}"


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
    for problem in _problems(experiment):
        raise ExperimentError(f"{experiment.name}: {problem}")
    names = [arm.name for arm in experiment.arms]
    for line in stated_before(experiment.name, experiment.pairs, names, len(experiment.seeds)):
        say(line)
    for arm in experiment.arms:  # a bad key is found before an hour of work
        load(experiment.config, [*arm.overrides, *experiment.overrides])
    _reserve_folder(experiment, out, command)
    jobs = [Job(pair, seed) for pair in experiment.pairs for seed in experiment.seeds]
    arms = (*experiment.arms, Arm(BASE, "before training"))
    started, numbers, total = time.monotonic(), itertools.count(1), len(jobs) * (1 + len(arms))
    failed: dict[str, BaseException] = {}
    refused: dict[Job, str] = {}

    def run(jobs: Sequence[Job]) -> list[Job]:
        """Run jobs, and return those that have not failed."""
        unfinished = {job for job in jobs if job.arm and not _evaluation(job, out).is_dir()}
        to_do, succeeded = len(unfinished), list[Job]()
        for job, outcome in _run_jobs(jobs, partial(run_job, experiment, out=out), workers or _workers(experiment)):
            unfinished.discard(job)
            shown = outcome
            if isinstance(outcome, BaseException):
                shown = f"{type(outcome).__name__}: {outcome}"
                if isinstance(outcome, PairError):
                    refused[job] = str(outcome)
                else:
                    failed[f"{job}: {shown}"] = outcome
            else:
                succeeded.append(job)
            seconds, done = time.monotonic() - started, to_do - len(unfinished)
            left = f", {time_left(seconds / done * len(unfinished))}" if done and unfinished else ""
            say(f"[{next(numbers)}/{total}, {seconds:.0f} s{left}] {job}: {shown}")
        return succeeded

    for pair in experiment.pairs:
        _readers(experiment, pair, out)
    of_arms = [job._replace(arm=arm) for job in run(jobs) for arm in arms]
    done = {*map(str, run([job for job in of_arms if not job.needs]))}
    run([job for job in of_arms if job.needs and job.needs <= done])
    if failed:
        raise ExperimentError(
            f"{len(failed)} of {total} parts failed ({'; '.join(failed)}); what is finished is kept: fix it and run "
            "again"
        ) from next(iter(failed.values()))
    if len(refused) == len(jobs):
        raise ExperimentError(f"every pair was refused: {'; '.join(refused.values())}")
    return reported(collect_results(experiment, out, command=command, refused=refused), out, say)


def reported(results: dict[str, Any], out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The results, once they are in ``results.json`` and on the page of the experiment."""
    write_text(out / "results.json", json.dumps(results, indent=2, allow_nan=False) + "\n")
    page = report.build_report(out)
    report.write_report(page)
    say(report.headlines(page))
    return results


def run_job(experiment: Experiment, job: Job, out: Path) -> str:
    """Run one job, unless its files exist already, and return a line about it.

    Raises:
        ExperimentError: arms were trained from a pair of another recipe, which would be replaced.
    """
    home, family = job.home(out), PAIRS[job.pair]
    if job.arm is None:
        recipe = {"pair": job.pair, "seed": job.seed, "steps": experiment.pair_steps}
        stored = read_manifest(home / "pair")
        if stored and not stored.items() >= family.identity(**recipe).items() and any(home.glob("*/metrics.jsonl")):
            raise ExperimentError(f"{home}: its runs began with a pair of another recipe; choose another folder")
        manifest = family.build(home / "pair", **recipe, device=experiment.device)
        return ", ".join(f"{name} {value:.3g}" for name, value in manifest["base"].items())
    leave_out: tuple[str, ...] = () if job.arm.name == BASE else ("junior",)  # the same for all arms
    config = _evaluation_config(experiment, job, home)
    if job.arm.name == BASE:
        model = home / "pair" / "senior"
    elif job.arm.needs:
        of, target = (
            _trained(experiment, job._replace(arm=arm), home)
            for name in (job.arm.of, job.arm.matched_to)
            for arm in experiment.arms
            if arm.name == name
        )
        model = match_entropy(config, of, target, home / job.arm.name / "hf" / "matched")
    else:
        model = _trained(experiment, job, home)
    phases = evals.evaluate(config, model=model, out=_evaluation(job, out), leave_out=leave_out)
    if experiment.readers:
        folders = [home / "pair" / "junior", *_readers(experiment, job.pair, out)]
        few = f"data.eval=[synthetic:{job.pair}:heldout:{min(READ, experiment.problems)}]"
        read = (few, "eval.samples=1", "eval.k=[1]", "eval.draws=0", f"eval.readers=[{','.join(map(str, folders))}]")
        config, file = _evaluation_config(experiment, job, home, *read), _evaluation(job, out) / "transfer.json"
        if file.exists():
            before = evals.read_result(file)["config"]["readers"]
            if len(before) < len(folders) and before == [*map(str, folders[: len(before)])]:
                file.unlink()  # readers were added: all read again
        evals.evaluate(config, model=model, out=file.parent, phases=["transfer"])
        config = _evaluation_config(experiment, job, home, *read[:-1], f"model.junior={home}/pair/senior")
        evals.evaluate(config, model=model, out=file.parent / START, phases=["drift"])
    return f"solo pass@1 {phases['pass-at-k']['metrics']['macro']['pass@1']:.3f}"


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
    jobs = [Job(pair, seed) for pair in experiment.pairs for seed in experiment.seeds]
    accepted = [job for job in jobs if job not in refused]
    homes = {pair: [job.home(out) / "eval" for job in accepted if job.pair == pair] for pair in experiment.pairs}
    names = (BASE, *(arm.name for arm in experiment.arms))
    rows: list[dict[str, Any]] = [
        {"pair": pair, "seed": job.seed, "arm": arm} | _row(job, job.home(out) / "eval", arm)
        for pair in experiment.pairs
        for arm in (*names, JUNIOR)
        for job in accepted
        if job.pair == pair
    ]
    stored = [evals.read_result(job.home(out) / "eval" / arm / "pass-at-k.json") for job in accepted for arm in names]
    revisions = {(each["versions"]["git_revision"], each["versions"]["git_dirty"]) for each in stored}
    contrasts = contrasts_of(homes, experiment.contrasts, MEASURES)
    claims = [
        {"pair": pair} | claim._asdict() | {"values": list(claim.values)}
        for pair in experiment.pairs
        for claim in claims_of(pair, rows, contrasts, refused=len(experiment.seeds) - len(homes[pair]))
    ]
    tests = paired_tests(experiment.name, rows)
    claims += verdicts(experiment.name, tests)
    return {
        "schema": SCHEMA,
        "experiment": experiment.to_json(),
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "refused": [{"pair": job.pair, "seed": job.seed, "reason": reason} for job, reason in refused.items()],
        # Several, if the code was updated in between.
        "evaluated_by": [{"git_revision": each, "git_dirty": dirty} for each, dirty in sorted(revisions, key=str)],
        "rows": rows,
        "contrasts": contrasts,
        "claims": claims,
        "tests": tests,
    }


def measured(folder: Path, measures: Mapping[str, tuple[str, str]]) -> dict[str, float]:
    """Those of the measures, each a metric of a phase, that an evaluation has."""
    files = {phase: folder / f"{phase}.json" for phase, _ in measures.values()}
    macros = {phase: evals.read_result(file)["metrics"]["macro"] for phase, file in files.items() if file.exists()}
    return {name: macros[p][metric] for name, (p, metric) in measures.items() if metric in macros.get(p, ())}


def contrasts_of(
    homes: Mapping[str, Sequence[Path]],
    arms: Iterable[tuple[str, str]],
    measures: Mapping[str, tuple[str, str]],
    *,
    varied: Collection[str] = (),
) -> list[dict[str, Any]]:
    """The paired differences between arms in each of the measures.

    Args:
        homes: by pair, the folders of its seeds, which have a folder for each arm.
        varied: see `compare`.
    """
    shown = {metric for _, metric in measures.values()}.__contains__
    return [
        {"pair": pair, "A": a, "B": b, **contrast}
        for pair, folders in homes.items()
        for a, b in (arms if folders else ())
        for contrast in to_json(
            compare(*([home / arm for home in folders] for arm in (a, b)), shown=shown, varied=varied)
        )
    ]


def _row(job: Job, home: Path, arm: str) -> dict[str, float]:
    """The measures of an arm: those of ``MEASURES``, and what the family of the pair has to say of the texts. The
    junior alone, which the evaluation of the model before training has beside its own, has those of a solo model."""
    if arm == JUNIOR:
        own = {name: ("junior", metric) for name, (p, metric) in MEASURES.items() if p in ("pass-at-k", "legibility")}
        return measured(home / BASE, own)
    found, family = measured(home / arm, MEASURES) | _readings(home / arm / "transfer.json"), PAIRS[job.pair]
    fitted = home.parent / arm / "hf" / "matched" / FITTED
    found |= json.loads(fitted.read_text()) if fitted.exists() else {}
    found |= measured(home / arm / START, {"start/kl": ("drift", "kl")})
    for phase, further in (("pass-at-k", family.solo), ("handoff", family.handoff)):
        file = evals.read_result(home / arm / f"{phase}.json")["samples"]
        texts = [each.text for each in evals.read_samples(home / arm / file)] if further else []
        found |= {name: fmean(map(of, texts)) for name, of in further.items()}
    return found


def _readers(experiment: Experiment, pair: str, out: Path) -> list[Path]:
    """The folders of the unseen readers, which are trained unless they are there."""
    recipe = {"pair": pair, "seed": READER_SEED, "steps": experiment.pair_steps, "count": experiment.readers}
    train_readers = PAIRS[pair].readers if experiment.readers else None
    return [] if train_readers is None else train_readers(out / pair / "readers", **recipe)


def _readings(file: Path) -> dict[str, float]:
    """What readers make of an arm's texts: the junior (``seen``), and those that were never in training (``unseen``), a
    mean over them. By condition their pass@1; without one, that of going on freely from the text before its true answer
    appears, beside the share that is cut off then. Nothing of an experiment without readers."""
    macro = evals.read_result(file)["metrics"]["macro"] if file.exists() else {}
    unseen = sorted({metric.partition("/")[0] for metric in macro if metric.startswith("reader-")})
    found: dict[str, float] = {}
    for who, names in (("seen", [JUNIOR]), ("unseen", unseen)) if macro else ():
        wanted = {given: f"{given}/pass@1" for given in READINGS}
        wanted |= {"pass@1": "free/before/pass@1", "truncation_rate": "free/before/truncation_rate"}
        found |= {f"{who}/{name}": fmean(macro[f"{each}/{of}"] for each in names) for name, of in wanted.items()}
    return found


# --------------------------------------------------------------------------------------------------------------------


def _problems(experiment: Experiment) -> Iterator[str]:
    names, stated = [arm.name for arm in experiment.arms], stated_keys(experiment.overrides)
    if unknown := set(experiment.pairs) - set(PAIRS):
        yield f"unknown pairs {sorted(unknown)}; known: {', '.join(PAIRS)}"
    for what, values in (("pairs", experiment.pairs), ("seeds", experiment.seeds), ("arms", names)):
        if not values or len(set(values)) != len(values):
            yield f"{what} must be one or more different ones, got {list(values)}"
    if experiment.readers and (deaf := [pair for pair in experiment.pairs if PAIRS[pair].readers is None]):
        known = ", ".join(pair for pair, family in PAIRS.items() if family.readers is not None)
        yield f"there are no readers for {', '.join(deaf)}; choose among {known}"
    if taken := {BASE, JUNIOR} & {*names}:
        yield f"an arm cannot be called {taken.pop()!r}, which names a model of every experiment"
    if unknown := {arm for contrast in experiment.contrasts for arm in contrast} - {BASE, *names}:
        yield f"contrasts name unknown arms {sorted(unknown)}; arms: {names}"
    if "train.epochs" in stated:
        yield "train.epochs is not for experiments; say train.steps=N"
    if of_run := sorted(stated & OF_RUN):
        yield f"{', '.join(of_run)} is set for each run; leave it out"
    for arm in experiment.arms:
        if of_arm := sorted(stated & stated_keys(arm.overrides)):
            yield f"{', '.join(of_arm)} is what the arm {arm.name} sets; leave it out, or train other arms: --arms"
        if missing := sorted(arm.needs - {each.name for each in experiment.arms if not each.needs}):
            yield f"the arm {arm.name} is made of {' and '.join(missing)}, which must be arms that are trained: --arms"


def _reserve_folder(experiment: Experiment, out: Path, command: str | None = None) -> None:
    """Write ``experiment.json``, or check that it is of this experiment. Seeds, pairs, arms, contrasts may be added."""
    file, description = out / "experiment.json", experiment.to_json()
    if file.exists():
        stored = json.loads(file.read_text())
        changed = [key for key in description if key not in EXTENSIBLE and stored.get(key) != description[key]]
        arms = {arm["name"]: arm for arm in stored["arms"]}
        changed += [f"arm {arm['name']}" for arm in description["arms"] if arm | arms.get(arm["name"], {}) != arm]
        if changed:
            raise ExperimentError(f"{out} holds an experiment with another {', '.join(changed)}; choose another folder")
    write_text(file, json.dumps({"command": command} | description, indent=2) + "\n")


def _workers(experiment: Experiment) -> int:
    """How many processes run at once if nobody says: as many as there are cores, and as free memory is enough for."""
    if experiment.device != "cpu":
        return 1
    memory = Path("/proc/meminfo")  # free, the file cache included
    free_kb = re.search(r"MemAvailable:\s+(\d+)", memory.read_text(encoding="utf-8") if memory.exists() else "")
    needed_kb = 1e6 * max(PAIRS[pair].memory_gb for pair in experiment.pairs)
    return max(1, min(cores(), int(int(free_kb[1]) / needed_kb))) if free_kb else cores()


def _evaluation(job: Job, out: Path) -> Path:
    """The folder of an arm's evaluation."""
    assert job.arm is not None
    return job.home(out) / "eval" / job.arm.name


def _trained(experiment: Experiment, job: Job, home: Path) -> Path:
    """The model of an arm, which is trained unless it is there."""
    assert job.arm is not None
    config = load(experiment.config, _run_overrides(experiment, job, home))
    model = home / job.arm.name / "hf" / f"step_{config.train.steps}"
    if not model.is_dir():
        train(config, quiet=True)
    return model


def _evaluation_config(experiment: Experiment, job: Job, home: Path, *further: str) -> Config:
    """The config of all evaluations of a pair and seed, with further assignments."""
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
    return load(experiment.evaluation, [*settings, *further])


def _run_overrides(experiment: Experiment, job: Job, home: Path) -> list[str]:
    assert job.arm is not None
    junior, steps = home / "pair" / "junior", job.arm.junior_steps
    if steps is not None:
        weak = home / f"pair-{steps}"
        PAIRS[job.pair].build(weak, pair=job.pair, seed=job.seed, steps=steps, device=experiment.device)
        junior = weak / "junior"
    named = {"{junior}": str(junior)}
    for name, make in MAKINGS.items():
        if any(name in each for each in job.arm.overrides):
            made = Making(_evaluation_config(experiment, job, home), home, job.pair, job.seed, experiment.pair_steps)
            named[name] = make(made)
    arm = [reduce(lambda text, name: text.replace(name, named[name]), named, each) for each in job.arm.overrides]
    return [
        f"model.senior={home}/pair/senior",
        f"model.junior={junior}",
        f"model.device={experiment.device}",
        f"data.train=[synthetic:{job.pair}:train]",
        f"data.eval=[synthetic:{job.pair}:heldout]",
        f"train.seed={job.seed}",
        "train.threads=1",
        f"output_dir={home}/{job.arm.name}",
        *arm,
        *experiment.overrides,
    ]


def _run_jobs(jobs: Sequence[Job], call: Callable[[Job], str], workers: int) -> Iterator[tuple[Job, Any]]:
    """Run jobs, and yield each, as it ends, with its result or its exception."""
    if workers == 1:
        for job in jobs:
            try:
                yield job, call(job)
            except Exception as error:
                yield job, error
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_exit_with_parent) as pool:
        running = {pool.submit(call, job): job for job in jobs}
        try:
            for future in as_completed(running):
                yield running[future], future.exception() or future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _exit_with_parent() -> None:
    """End this worker when its parent is gone, so that it does not write into a folder that a new run uses."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
