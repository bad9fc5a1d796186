"""Runs whole phases, from model folders to result files. A finished phase is never run again."""

from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tandemrl.config import Config, warn_of_reward_function
from tandemrl.evals.files import EvalResult, finished_result, read_result, read_samples, result_file, write_result
from tandemrl.evals.measures import EvalError, Sample, summarise
from tandemrl.evals.phases import PHASES, Phase, Texts
from tandemrl.evals.protocol import generate_samples, sampling_for, strategies
from tandemrl.evals.remote import play
from tandemrl.evals.session import Endpoint, Session, reader_of_spec, short_names
from tandemrl.evals.stored import Stored, stored_samples
from tandemrl.rollout.envs.environment import Environment, check_instance
from tandemrl.rollout.relay import check_untranslatable
from tandemrl.types import Metrics

Progress = Callable[[str, int, int], None]
"""A function that is called with ``(what, done, total)``, such as ``("tandem: tokens", 512, 4096)``. The total of
tokens is an upper bound."""


def evaluate(
    config: Config,
    *,
    model: str | Path | Endpoint | Stored,
    out: str | Path,
    phases: Sequence[str] | None = None,
    leave_out: Collection[str] = (),
    limit: int | None = None,
    stated: Collection[str] | None = None,
    environment: Environment | None = None,
    progress: Progress | None = None,
) -> dict[str, dict[str, Any]]:
    """Evaluate a model, alone and with ``config.model.junior``, on the rows of ``config.data.eval``.

    Each phase writes ``PHASE.json`` and ``PHASE.samples.jsonl``. A phase whose result exists for the same
    configuration, weights and data is not run again. So a killed evaluation continues when it is started again, and
    ends with the files of an uninterrupted one. Models and data are loaded once, and only when a phase needs them.

    Args:
        config: a configuration such as the ``config.yaml`` of a run. ``model.senior`` and keys about training alone
            are not used.
        model: Hugging Face folder or hub id of the senior. A model behind an endpoint is evaluated without a junior, in
            an environment. The authors of its tokens are unknown, and the result says so (``engine: endpoint``,
            ``authors: unknown``). A file of responses (`Stored`) is judged as it is, without a junior.
        out: a folder. For a single phase it may also be the result file itself, ending in ``.json``.
        phases: the phases to run. None means all that can be run with this junior, this judge and these readers (see
            ``left_out``), without those that are run by name only.
        leave_out: of all phases, those that are not run.
        limit: how many rows of ``data.eval`` are used (of all sources, in order). None means all.
        stated: dotted keys of ``reward.*`` that must be used for this data. None means all (see ``check_rewards``).
        environment: what the authors act in, instead of ``rollout.environment``.
        progress: called as the phases advance.

    Returns:
        the content of each ``PHASE.json``, by phase.

    Raises:
        ConfigError: a pattern of ``reward.scorers`` or a name in ``reward.weights`` is not used.
        EvalError: a phase is unknown or needs a junior or a judge that is missing, an endpoint cannot be used, or a
            result file is of another configuration; the message names the fix.
        JudgeError: the judge is down or gives no scores.
        ModelError, DataError, EngineError: a model, a data source or a request cannot be used.

    Examples:
        >>> config = load("runs/mine/config.yaml")
        >>> results = evaluate(config, model="runs/mine/hf/best", out="runs/mine/eval")
        >>> results["pass-at-k"]["metrics"]["macro"]["pass@1"]
    """
    warn_of_reward_function(config)
    check_instance(environment)
    recorded = config.functions.environment
    if recorded is not None and environment is None and not config.rollout.environment_kind.turns:
        what = f"functions.environment: the run took turns with {recorded.name}, which no file holds"
        raise EvalError(f"{what}; pass evaluate(environment=…), or set rollout.environment=module:factory")
    if isinstance(model, Endpoint):
        config = replace(config, model=replace(config.model, junior=None))
        if environment is None and not config.has_episodes:
            raise EvalError("a model behind an endpoint is evaluated in an environment; set rollout.environment")
    if isinstance(model, Stored):
        config = replace(config, model=replace(config.model, junior=None))
    out, reasons = Path(out), left_out(config)
    every = [name for name, phase in PHASES.items() if not phase.by_name and name not in (*reasons, *leave_out)]
    names = every if phases is None else [*phases]
    for name in names:
        if name not in PHASES:
            raise EvalError(f"unknown phase {name!r}; known: {', '.join(PHASES)}")
        if name in reasons:
            raise EvalError(f"phase {name} {reasons[name]}")
        if PHASES[name].itself and isinstance(model, Endpoint | Stored):
            raise EvalError(f"phase {name} reads with the model itself, which is not here; give its folder or hub id")
    if out.suffix == ".json" and len(names) != 1:
        raise EvalError(f"{out} is one file for {len(names)} phases; give a folder")
    k, most = config.eval.k, config.eval.samples
    if not k or not all(1 <= m <= most for m in k):  # of a config that was made in Python, which nothing has checked
        raise EvalError(f"eval.k={list(k)}: each k must be between 1 and eval.samples ({most})")
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    chosen = [PHASES[name] for name in names]
    session = Session(config, model, chosen, limit=limit, stated=stated, passed=environment)
    with closing(session):
        refused = {phase.name: reason for phase in chosen if (reason := session.refusal(phase)) is not None}
        if phases is not None and refused:
            raise EvalError("phase {} {}".format(*next(iter(refused.items()))))
        return {
            phase.name: _run(phase, session, out, progress or (lambda *_: None))
            for phase in chosen
            if phase.name not in refused
        }


def left_out(config: Config) -> dict[str, str]:
    """The phases that cannot be run with the junior and the judge of a config, and what each of them would need."""
    judge, reasons = config.judge, dict[str, str]()
    for name, phase in PHASES.items():
        readers = config.eval.readers
        if phase.readers and not readers:
            reasons[name] = "needs other readers; give eval.readers=[MODEL,…]"
        elif phase.readers and len({*short_names(readers)}) < len(readers):
            reasons[name] = "needs readers that differ; name each once in eval.readers"
        elif phase.log_probs and (served := [each for each in readers if reader_of_spec(each)[1] is not None]):
            reasons[name] = f"needs log-probs, which the endpoint of reader {served[0]} does not give; leave out @URL"
        elif (phase.readers or phase.itself) and config.has_episodes:
            reasons[name] = "reads single responses; set rollout.environment=single"
        elif phase.junior and config.model.junior is None:
            reasons[name] = "needs a junior; give one (--junior)"
        elif phase.judge and judge.url is None:
            reasons[name] = "needs a judge; give judge.url=http://HOST:PORT/v1"
        elif name == "judge-legibility" and judge.prompt != "legibility" and judge.template is None:
            reasons[name] = "needs judge.prompt=legibility"
        elif phase.judge and judge.prompt in ("tinyv", "legibility") and name == "verified":
            does = "compares answers" if judge.prompt == "tinyv" else "asks how well texts can be followed"
            reasons[name] = f"needs judge.prompt=rubric or reasoning; {judge.prompt} {does}"
    return reasons


# ------------------------------------------------------------------------------------------------------------ one phase


def _run(phase: Phase, session: Session, out: Path, progress: Progress) -> dict[str, Any]:
    if not phase.by_junior:
        return _run_phase(phase, session, out, progress)
    session.close_engine()
    with closing(session.of_junior(phase)) as alone:
        return _run_phase(phase, alone, out, progress)


def _run_phase(phase: Phase, session: Session, out: Path, progress: Progress) -> dict[str, Any]:
    config, settings, file = session.config, session.config.eval, result_file(phase.name, out)
    identity = session.identity(phase)
    if (finished := finished_result(file, phase.name, identity)) is not None:
        return finished
    prompts, dropped = session.prompts
    if phase.graded:
        session.check_rewards()
    samples = _solo_texts(file.with_name("pass-at-k.json"), session) if phase.of_solo else None
    if samples is None:
        samples = _write(phase, session, progress)
    counters: Metrics = {"prompts_dropped": dropped}
    if phase.both and session.junior_tokenizer is not None:
        ends = [sample.stop_reason for sample in samples]
        counters["untranslatable"] = check_untranslatable(ends, config.selection.max_untranslatable, EvalError)
        counters["failed"] = ends.count("failed")
    if phase.of_solo:
        session.close_engine()  # nothing more to write: vLLM's memory is for the models that read
    reads, meter = len(samples) * (len(settings.readers) if phase.readers else 1), partial(_meter, progress)
    texts = Texts(session, samples, prompts, meter(f"{phase.name}: texts", reads), counters, meter)
    samples = phase.read(texts)
    measure = partial(phase.measure, k=settings.k)
    metrics = summarise(samples, measure, bootstrap=settings.bootstrap, seed=settings.seed)
    metrics["macro"] |= counters | (
        {} if phase.whole is None else phase.whole(samples, settings.bootstrap, settings.seed)
    )
    seeds = {"sampling": settings.seed, "step": 0, "bootstrap": settings.seed}
    return write_result(file, phase.name, identity, EvalResult(metrics, samples), seeds=seeds)


def _write(phase: Phase, session: Session, progress: Progress) -> list[Sample]:
    """The texts of a phase: one call of the engine for each of its arms."""
    config, (prompts, _), what = session.config, session.prompts, f"{phase.name}: tokens"
    if session.stored is not None:
        own = [*map(Path, config.data.eval)] == [Path(session.stored.file)]
        return stored_samples(session.stored, session.rows, prompts, config.eval.seed, own=own)
    if session.remote is not None:
        most = len(prompts) * config.eval.samples * session.profile.sampling.max_tokens
        return play(session, progress=_meter(progress, what, most))
    engine = session.engine(phase)
    arms = strategies(
        phase.name,
        session.tokenizer,
        vocabulary=engine.vocabulary,
        selection=config.selection,
        episodes=session.has_episodes,
        by_text=session.junior_tokenizer is not None,
    )
    most = sum(sampling_for(session.profile, prompt).max_tokens for prompt in prompts)
    most *= len(arms) * config.eval.samples
    samples = generate_samples(
        arms,
        engine=engine,
        tokenizer=session.tokenizer,
        prompts=prompts,
        profile=session.profile,
        samples=config.eval.samples,
        seed=config.eval.seed,
        episode_runner=session.episode_runner,
        progress=_meter(progress, what, most),
    )
    progress(what, most, most)
    return samples


def _solo_texts(file: Path, session: Session) -> list[Sample] | None:
    """The samples of the pass-at-k phase, if it was run with this configuration, with or without a judge."""
    stored = read_result(file) if file.exists() else None
    if stored is not None and stored["phase"] == "pass-at-k":
        samples = file.with_name(stored["samples"])
        config = {key: value for key, value in stored["config"].items() if key != "judge"}
        if config == session.solo_identity and samples.exists():
            return read_samples(samples)
    return None


def _meter(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    """A callback that adds up the amounts it is called with, and reports the sum to ``progress``."""
    done = 0

    def advance(further: int) -> None:
        nonlocal done
        done += further
        progress(what, done, total)

    return advance
