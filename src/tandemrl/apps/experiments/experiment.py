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
import math
import multiprocessing
import os
import platform
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from tandemrl import evals
from tandemrl.apps import report
from tandemrl.apps.experiments.claims import BASE, claims_of
from tandemrl.apps.experiments.families import PAIRS, Recipe
from tandemrl.apps.experiments.pair import PairError, read_manifest
from tandemrl.apps.experiments.tiny import DEFAULT_SIZE, SIZES, lr_scale
from tandemrl.apps.experiments.warm_start import Pace, Progress, progress_line
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
NUMERIC_VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


class ExperimentError(RuntimeError):
    """An experiment cannot be run, or parts of it failed. The message names them."""


class Arm(NamedTuple):
    """One way to train.

    ``overrides`` are assignments of config keys. If ``junior_steps`` is set, the arm trains with a junior whose warm
    start took that many steps, instead of with the pair's own (evaluation keeps the pair's).
    """

    name: str
    title: str
    overrides: tuple[str, ...] = ()
    junior_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Experiment:
    """What to compare.

    contrasts: pairs of arms (a, b), for paired differences a - b. config, overrides: the config of every run, and
    assignments of keys on top of it. pair_steps: the number of warm-start steps; None means the pair's own. size: the
    size of the models, one of ``tiny.SIZES``. device: where everything runs. problems, samples: the number of held-out
    problems of every evaluation, and of samples for each. evaluation, evaluation_overrides: the config of every
    evaluation (None means the defaults), and assignments of keys on top of it. packaged_pairs: a pair that comes with
    the library is copied instead of built.
    """

    name: str
    arms: tuple[Arm, ...]
    pairs: tuple[str, ...] = ("jargon",)
    contrasts: tuple[tuple[str, str], ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    config: str = "quickstart"
    overrides: tuple[str, ...] = ()
    pair_steps: int | None = None
    size: str = DEFAULT_SIZE
    device: str = "cpu"
    problems: int = 512
    samples: int = 4
    evaluation: str | None = None
    evaluation_overrides: tuple[str, ...] = ()
    packaged_pairs: bool = False

    def only(self, names: Sequence[str]) -> "Experiment":
        """The experiment with only these arms, in this order, and the contrasts between them or with the model before
        training.

        Raises:
            ExperimentError: one of the names is not an arm of the experiment.
        """
        arms = {arm.name: arm for arm in self.arms}
        if unknown := [name for name in names if name not in arms]:
            raise ExperimentError(f"{self.name}: unknown arms {', '.join(unknown)}; known: {', '.join(arms)}")
        contrasts = tuple(pair for pair in self.contrasts if set(pair) <= {*names, BASE})
        return replace(self, arms=tuple(arms[name] for name in names), contrasts=contrasts)


GRPO = Arm("grpo", "GRPO", ("selection.strategy=solo", "model.junior=null"))
KL = Arm("kl", "GRPO, KL", (*GRPO.overrides, "loss.kl_coef=0.05"))
TANDEM = Arm("tandem", "tandem")


def _arm(name: str, *overrides: str) -> Arm:
    return Arm(name, name.replace("_", " "), overrides)


SENTENCE = Arm("sentence", "tandem by steps", ("selection.strategy=sentence",))
RECIPE = ("train.mini_batch_prompts=8",)
"""Two updates per rollout batch, as in the paper. The quickstart config has 50 steps."""
LONGER = (*RECIPE, "train.steps=80", "train.eval_every=20")
"""For claims about solo skill, in which tandem is still a little behind after 50 steps, and for what is learnt late."""

MISREAD = ("selection.max_untranslatable=0.1",)
"""A junior that has never seen jargon writes anything after it, half characters included."""

TURNS = Arm("turns", "tandem by turns", ("selection.strategy=turn",))
WORDS = Arm("words", "tandem by words", ("selection.strategy=word",))

ABLATIONS = (
    _arm("word_aligned", "selection.strategy=word_aligned"),
    SENTENCE,
    _arm("chunk_8", "selection.strategy=chunk", "selection.chunk_size=8"),
    _arm("bernoulli", "selection.strategy=bernoulli"),
    _arm("p_0.25", "selection.prob_senior=0.25"),
    _arm("p_0.75", "selection.prob_senior=0.75"),
    _arm("p_0.9_to_0.5", "selection.prob_senior=0.9", "selection.prob_senior_final=0.5", "selection.anneal_steps=40"),
    _arm("K_2", "selection.max_gap_tokens=2"),
    _arm("K_8", "selection.max_gap_tokens=8"),
    _arm("junior_weight_0.5", "loss.junior_weight=0.5"),
    _arm("junior_weight_1", "loss.junior_weight=1.0"),
    _arm("junior_kl_0.1", "loss.junior_kl_coef=0.1"),
    Arm("weak_junior", "weaker junior", junior_steps=250),
)
"""The arms of the ablations. Each changes one thing about tandem GRPO, and is compared with it."""

SMOLLM2 = Experiment(
    "smollm2",
    (
        GRPO,
        KL,
        Arm("tandem_self", "tandem, self-paired", ("model.junior=null",)),
        TANDEM,
        SENTENCE,
        Arm("grpo_8", "GRPO, half batch", (*GRPO.overrides, "train.prompts_per_step=8")),
    ),
    pairs=("word_problems",),
    contrasts=(
        *((arm, BASE) for arm in ("grpo", "grpo_8", "tandem_self", "tandem", "sentence")),
        *((arm, "grpo") for arm in ("kl", "grpo_8", "tandem_self", "tandem", "sentence")),
        *((arm, "grpo_8") for arm in ("tandem_self", "tandem", "sentence")),
        *((arm, "tandem") for arm in ("tandem_self", "sentence")),
    ),
    seeds=(0, 1, 2),
    config="smollm2",
    overrides=("train.steps=12",),
    problems=256,
    samples=4,
    evaluation="smollm2",
)
"""A pretrained model on a laptop: for every seed a pair, six arms of a quarter of an hour on a core, and seven
evaluations of three times that."""

EXPERIMENTS: dict[str, Experiment] = {
    "quickstart": Experiment(
        "quickstart", (GRPO, TANDEM), contrasts=(("tandem", "grpo"),), seeds=(0,), overrides=RECIPE, packaged_pairs=True
    ),
    "paper-claims": Experiment(
        "paper-claims",
        (GRPO, KL, TANDEM),
        contrasts=(("tandem", "grpo"), ("tandem", "kl"), ("kl", "grpo")),
        overrides=LONGER,
    ),
    "two-tokenizers": Experiment(
        "two-tokenizers",
        (GRPO, TANDEM._replace(overrides=("selection.strategy=before_word",))),
        pairs=("jargon_two_tokenizers",),
        contrasts=(("tandem", "grpo"),),
        overrides=(*LONGER, *MISREAD),
        evaluation_overrides=MISREAD,
    ),
    "repair": Experiment(
        "repair",
        (GRPO, TANDEM, SENTENCE),
        pairs=("repair",),
        contrasts=(("tandem", "grpo"), ("sentence", "grpo")),
        overrides=LONGER,
    ),
    "ablations": Experiment(
        "ablations",
        (GRPO, TANDEM, *ABLATIONS),
        contrasts=(("tandem", "grpo"), *((arm.name, "tandem") for arm in ABLATIONS)),
        seeds=(0, 1, 2),
        overrides=LONGER,
    ),
    "hops": Experiment(
        "hops",
        (GRPO, TURNS, WORDS),
        pairs=("hops_jargon",),
        contrasts=(("turns", "grpo"), ("words", "grpo"), ("turns", "words")),
        config="hops_tandem",
        overrides=("train.eval_every=25",),
        problems=1024,
        samples=2,
        evaluation="hops_tandem",
    ),
    "smollm2": SMOLLM2,
    "smollm2-quick": replace(
        SMOLLM2.only(("grpo", "tandem_self")),
        name="smollm2-quick",
        seeds=(0,),
        problems=128,
        samples=1,
    ),
}


# ------------------------------------------------------------------------------------------------------------- running


class Job(NamedTuple):
    """A unit of work: build the models of a pair and seed (if ``arm`` is None), or train and evaluate one arm."""

    pair: str
    seed: int
    arm: Arm | None = None

    def __str__(self) -> str:
        return f"{self.pair}/seed-{self.seed}/{self.arm.name if self.arm else 'pair'}"


def run_experiment(
    experiment: Experiment, out: str | Path, *, workers: int | None = None, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Run what is not finished yet of an experiment, and write and return the results.

    Args:
        out: the folder of the experiment.
        workers: how many processes run at once. None means one per core, but no more than the free memory is enough
            for, or one on a GPU; 1 means this process.
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
    if line := _reserve_folder(experiment, out):
        say(line)
    jobs = [Job(pair, seed) for pair in experiment.pairs for seed in experiment.seeds]
    workers = workers or _workers(experiment)
    missing = [job for job in jobs if not _is_built(experiment, job, _home(job, out))]
    for family in dict.fromkeys(PAIRS[job.pair] for job in missing):
        family.prepare(say)
    started = time.perf_counter()

    def after(job: Job) -> list[Job]:
        return [] if job.arm else [job._replace(arm=arm) for arm in (*experiment.arms, Arm(BASE, "before training"))]

    parts = [part for job in jobs for part in (job, *after(job))]
    total = len(parts)
    there = {part for part in parts if _is_there(experiment, part, out)}
    left = dict.fromkeys(part for part in parts if part not in there)
    times: dict[Job, float] = {}
    failed: dict[str, BaseException] = {}
    refused: dict[Job, str] = {}
    ended = _run_jobs(jobs, after, lambda job: (_timed, run_job, experiment, job, out), workers)
    for finished, (job, outcome) in enumerate(ended, 1):
        if isinstance(outcome, BaseException):
            if isinstance(outcome, PairError):
                refused[job] = str(outcome)
            else:
                failed[str(job)] = outcome
            shown, over = f"{type(outcome).__name__}: {outcome}", [job, *after(job)]
        else:
            shown, seconds = outcome
            over = [job]
            if job not in there:
                times[job] = seconds
        for part in over:
            left.pop(part, None)
        spent = [f"{time.perf_counter() - started:.0f} s", about_left(times, [*left], workers)]
        say(f"[{finished}/{total}, {', '.join(filter(None, spent))}] {job}: {shown}")
    if failed:
        listed = "; ".join(f"{job}: {type(error).__name__}: {error}" for job, error in failed.items())
        raise ExperimentError(
            f"{len(failed)} of {total} parts failed ({listed}); what is finished is kept: fix it and run again"
        ) from next(iter(failed.values()))
    if len(refused) == len(jobs):
        raise ExperimentError(f"every pair was refused: {'; '.join(refused.values())}")
    results = collect_results(experiment, out, refused=refused)
    return reported(results, out, say)


def reported(results: dict[str, Any], out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The results, once they are in ``results.json`` and on the page of the experiment."""
    write_text(out / "results.json", json.dumps(results, indent=2, allow_nan=False) + "\n")
    page = report.build_report(out)
    report.write_report(page)
    say(report.headlines(page, report.headline_lines))
    return results


def about_left(times: Mapping[Job, float], left: Sequence[Job], workers: int) -> str:
    """About how long the parts take that are left, or "" if no part of some kind has been finished.

    A part takes as long as the finished ones of the same pair and arm in the median, or else as those of all arms.

    Args:
        times: how long each finished part took, in seconds.
        workers: how many parts run at once.

    Examples:
        >>> grpo, tandem = Job("jargon", 0, GRPO), Job("jargon", 0, TANDEM)
        >>> about_left({grpo: 600.0}, [tandem, grpo._replace(seed=1), tandem._replace(seed=1)], 2)
        'about 15 min left'
    """

    def estimate(job: Job) -> float:
        alike = [seconds for done, seconds in times.items() if (done.pair, done.arm) == (job.pair, job.arm)]
        arms = [seconds for done, seconds in times.items() if job.arm and done.arm and done.arm.name != BASE]
        return median(alike or arms or [math.nan])

    parts = [estimate(job) for job in left]
    seconds = max(sum(parts) / workers, max(parts, default=0.0))
    return time_left(seconds) if parts and math.isfinite(sum(parts)) else ""


def _timed(function: Callable[..., str], *arguments: Any) -> tuple[str, float]:
    """What a function returns, and how long it took, in seconds."""
    started = time.monotonic()
    return function(*arguments), time.monotonic() - started


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
                packaged=experiment.packaged_pairs,
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
        out=home / "eval" / job.arm.name,
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
    file, pace, written = home / "pair.progress.json", Pace(), 0.0

    def note(step: int, steps: int, loss: float) -> None:
        nonlocal written
        now, times = time.monotonic(), pace.times()
        if now - written >= 1 or step == steps:
            written = now
            line = progress_line(step, steps, loss, times)
            says = f"building the {job.pair} pair of seed {job.seed}: {line}"
            write_text(file, json.dumps({"says": says}) + "\n")

    try:
        yield note
    finally:
        file.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------- results


def collect_results(experiment: Experiment, out: Path, *, refused: Mapping[Job, str] | None = None) -> dict[str, Any]:
    """The content of ``results.json``, collected from the files of a finished experiment.

    Args:
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
        "experiment": _to_json(experiment),
        "command": command_line(experiment),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "numerics": numerics(),
        "refused": [{"pair": job.pair, "seed": job.seed, "reason": reason} for job, reason in refused.items()],
        "evaluated_by": evaluated_by(
            out / row["pair"] / f"seed-{row['seed']}" / "eval" / row["arm"] for row in rows if row["arm"] != JUNIOR
        ),
        "rows": rows,
        "contrasts": contrasts,
        "claims": claims,
    }


def command_line(experiment: Experiment) -> str | None:
    """The ``tandemrl experiment`` command that runs this experiment, or None if there is none."""
    packaged = EXPERIMENTS.get(experiment.name)
    names = [arm.name for arm in experiment.arms]
    if packaged is None or not set(names) <= {arm.name for arm in packaged.arms}:
        return None
    common = packaged.overrides
    settable = ("pairs", "seeds", "overrides", "problems", "samples", "size", "device")
    reached = replace(packaged.only(names), **{field: getattr(experiment, field) for field in settable})
    if reached != experiment or experiment.overrides[: len(common)] != common:
        return None

    def options(of: Experiment) -> dict[str, list[str]]:
        plain = {f"--{field}": [str(getattr(of, field))] for field in ("problems", "samples", "size", "device")}
        seeds, arms = ",".join(map(str, of.seeds)), ",".join(arm.name for arm in of.arms)
        return {"--pair": list(of.pairs), "--seeds": [seeds], "--arms": [arms], **plain}

    default = options(packaged)
    changed = {option: values for option, values in options(experiment).items() if values != default[option]}
    words = ["tandemrl", "experiment", experiment.name, *experiment.overrides[len(common) :]]
    return shlex.join(words + [word for option in changed for value in changed[option] for word in (option, value)])


def numerics() -> dict[str, str | int]:
    """What the last bits of a result depend on: the CPU, the instructions that torch uses, and what was set by hand."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.is_file() else []
    chosen = {name: os.environ[name] for name in NUMERIC_VARIABLES if name in os.environ}
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        **chosen,
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
    names = [arm.name for arm in experiment.arms]
    if unknown := set(experiment.pairs) - set(PAIRS):
        raise ExperimentError(f"{experiment.name}: unknown pairs {sorted(unknown)}; known: {', '.join(PAIRS)}")
    if experiment.size not in SIZES:
        raise ExperimentError(f"{experiment.name}: unknown size {experiment.size!r}; known: {', '.join(SIZES)}")
    for pair in experiment.pairs:
        if experiment.size != DEFAULT_SIZE and experiment.size not in PAIRS[pair].sizes:
            raise ExperimentError(f"{experiment.name}: the pair {pair} has no sizes; leave out size {experiment.size}")
        if experiment.packaged_pairs and not PAIRS[pair].packaged:
            raise ExperimentError(
                f"{experiment.name} takes a pair that comes with the library, and {pair} is built; choose another "
                "experiment, such as smollm2"
            )
    for what, values in (("pairs", experiment.pairs), ("seeds", experiment.seeds), ("arms", names)):
        if not values or len(set(values)) != len(values):
            raise ExperimentError(f"{experiment.name}: {what} must be one or more different ones, got {list(values)}")
    for taken, what in ((BASE, "the model before training"), (JUNIOR, "the junior alone")):
        if taken in names:
            raise ExperimentError(f"{experiment.name}: an arm cannot be called {taken!r}, {what}")
    unknown = {arm for contrast in experiment.contrasts for arm in contrast} - {BASE, *names}
    if unknown:
        raise ExperimentError(f"{experiment.name}: contrasts name unknown arms {sorted(unknown)}; arms: {names}")
    load(experiment.config, experiment.overrides)  # a bad key is found before an hour of work
    stated = stated_keys(experiment.overrides)
    if "train.epochs" in stated:
        raise ExperimentError(f"{experiment.name}: train.epochs is not for experiments; say train.steps=N")
    if of_run := sorted(stated & OF_RUN):
        raise ExperimentError(f"{experiment.name}: {', '.join(of_run)} is set for each run; leave it out")
    for arm in experiment.arms:
        if of_arm := sorted(stated & stated_keys(arm.overrides)):
            raise ExperimentError(
                f"{experiment.name}: {', '.join(of_arm)} is what the arm {arm.name} sets; leave it out, or train other "
                "arms: --arms"
            )
        load(experiment.config, [*arm.overrides, *experiment.overrides])


def _reserve_folder(experiment: Experiment, out: Path) -> str:
    """Write ``experiment.json``, or check that it is of this experiment. Seeds, pairs, arms, contrasts may be added.

    Returns:
        a line about what earlier commands named and this one does not, or "".
    """
    left_out = list[str]()
    file, description = out / "experiment.json", _to_json(experiment)
    if file.exists():
        older = {"size": "tiny", "device": "cpu", "packaged_pairs": False, "evaluation_overrides": []}
        stored = older | json.loads(file.read_text())
        fixed = [key for key in description if key not in ("seeds", "pairs", "arms", "contrasts")]
        changed = [key for key in fixed if stored.get(key) != description[key]]
        arms = {arm["name"]: arm for arm in stored["arms"]}
        asked = {arm["name"]: arm for arm in description["arms"]}
        changed += [
            f"arm {name}" for name, arm in asked.items() if arms.get(name, arm) | {"title": arm["title"]} != arm
        ]
        if changed:
            raise ExperimentError(f"{out} holds an experiment with another {', '.join(changed)}; choose another folder")
        named = {"seeds": stored["seeds"], "pairs": stored["pairs"], "arms": [*arms]}
        now = {"seeds": experiment.seeds, "pairs": experiment.pairs, "arms": [arm.name for arm in experiment.arms]}
        left_out = [
            f"{what} {', '.join(map(str, missing))}"
            for what, values in named.items()
            if (missing := [value for value in values if value not in now[what]])
        ]
    out.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps({"command": command_line(experiment)} | description, indent=2) + "\n")
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


def _is_built(experiment: Experiment, job: Job, home: Path) -> bool:
    """Whether the pair of a job, by this recipe, is there."""
    stored = read_manifest(home / "pair")
    return stored is not None and stored.items() >= PAIRS[job.pair].identity(_recipe(experiment, job)).items()


def _is_there(experiment: Experiment, job: Job, out: Path) -> bool:
    """Whether a part was finished by an earlier command, so that it takes no time now."""
    home = _home(job, out)
    return _is_built(experiment, job, home) if job.arm is None else (home / "eval" / job.arm.name).is_dir()


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


def _to_json(experiment: Experiment) -> dict[str, Any]:
    """The experiment as it is after writing it to JSON and reading it back."""
    arms = [arm._asdict() for arm in experiment.arms]
    return json.loads(json.dumps(asdict(experiment) | {"arms": arms, "contrasts": experiment.contrasts}))
