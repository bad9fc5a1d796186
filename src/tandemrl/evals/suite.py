"""Runs whole phases, from model folders to result files. A finished phase is never run again."""

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tandemrl.config import Config, warn_of_reward_function
from tandemrl.data.rows import Prompt
from tandemrl.evals.files import EvalResult, finished_result, read_result, read_samples, result_file, write_result
from tandemrl.evals.measures import EvalError, Sample, summarise
from tandemrl.evals.protocol import (
    PHASES,
    Phase,
    check_k,
    generate_samples,
    grade,
    measure_of,
    sampling_for,
    strategies,
    verify,
)
from tandemrl.evals.reading import read_drift, read_legibility
from tandemrl.evals.remote import Endpoint, play
from tandemrl.evals.session import NEED_JUNIOR, UNSCORED, WRITTEN_TOGETHER, Session
from tandemrl.models.sampling import DRAW
from tandemrl.processes.calls import ThreadCalls
from tandemrl.rollout.envs.environment import Environment, check_instance
from tandemrl.rollout.envs.episodes import make_caller
from tandemrl.rollout.envs.factory import make_environment
from tandemrl.rollout.envs.worker import answering
from tandemrl.rollout.partner import check_untranslatable
from tandemrl.types import Metrics

READ: tuple[Phase, ...] = ("legibility", "drift", "verified")
"""The phases that evaluate the texts of ``pass-at-k``. They use its samples if they exist, and else write the same."""

Progress = Callable[[str, int, int], None]
"""A function that is called with ``(what, done, total)``, such as ``("tandem: tokens", 512, 4096)``. The total of
tokens is an upper bound."""


def evaluate(
    config: Config,
    *,
    model: str | Path,
    out: str | Path,
    phases: Sequence[Phase] | None = None,
    leave_out: Collection[Phase] = (),
    limit: int | None = None,
    stated: Collection[str] | None = None,
    environment: Environment | None = None,
    progress: Progress | None = None,
) -> dict[Phase, dict[str, Any]]:
    """Evaluate a model, alone and with ``config.model.junior``, on the rows of ``config.data.eval``.

    Each phase writes ``PHASE.json`` and ``PHASE.samples.jsonl``. A phase whose result exists for the same
    configuration, weights and data is not run again. So a killed evaluation continues when it is started again, and
    ends with the files of an uninterrupted one. Models and data are loaded once, and only when a phase needs them.

    Args:
        config: a configuration such as the ``config.yaml`` of a run. ``model.senior`` and keys about training alone
            are not used.
        model: Hugging Face folder or hub id of the senior.
        out: a folder. For a single phase it may also be the result file itself, ending in ``.json``.
        phases: the phases to run. None means all that can be run with this junior and this judge (see ``left_out``).
        leave_out: of all phases, those that are not run.
        limit: how many rows of ``data.eval`` are used (of all sources, in order). None means all.
        stated: dotted keys of ``reward.*`` that must be used for this data. None means all (see ``check_rewards``).
        environment: what the authors act in, instead of ``rollout.environment``.
        progress: called as the phases advance.

    Returns:
        the content of each ``PHASE.json``, by phase.

    Raises:
        ConfigError: a pattern of ``reward.scorers`` or a name in ``reward.weights`` is not used.
        EvalError: a phase is unknown or needs a junior or a judge that is missing, or a result file is of another
            configuration; the message names the fix.
        JudgeError: the judge is down or gives no scores.
        ModelError, DataError, EngineError: a model, a data source or a request cannot be used.

    Examples:
        >>> config = load("runs/mine/config.yaml")
        >>> results = evaluate(config, model="runs/mine/hf/best", out="runs/mine/eval")
        >>> results["pass-at-k"]["metrics"]["macro"]["pass@1"]
    """
    warn_of_reward_function(config)
    _refuse_unknown_environment(config, environment)
    out = Path(out)
    reasons = left_out(config)
    every = [phase for phase in PHASES if phase not in (*reasons, *leave_out)]
    chosen = every if phases is None else list(phases)
    for phase in chosen:
        if phase not in PHASES:
            raise EvalError(f"unknown phase {phase!r}; known: {', '.join(PHASES)}")
        if phase in reasons:
            raise EvalError(f"phase {phase} {reasons[phase]}")
    if out.suffix == ".json" and len(chosen) != 1:
        raise EvalError(f"{out} is one file for {len(chosen)} phases; give a folder")
    check_k(config.eval.k, config.eval.samples)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    session = Session(config, str(model), chosen, limit=limit, stated=stated, environment=environment)
    try:
        if phases is not None and (refused := [phase for phase in chosen if phase in session.refused]):
            raise EvalError(f"phase {refused[0]} {session.refused[refused[0]]}")
        able = [phase for phase in chosen if phase not in session.refused]
        return {phase: _run(phase, session, out, progress or _silent) for phase in able}
    finally:
        session.close()


def _refuse_unknown_environment(config: Config, environment: Environment | None) -> None:
    check_instance(environment)
    recorded = config.functions.environment
    if recorded is not None and environment is None and not config.rollout.environment_kind.turns:
        raise EvalError(
            f"functions.environment: this config's run took turns with {recorded.name}, which no file holds; pass it "
            "as evaluate(environment=…), or name a factory of it as rollout.environment=module:factory"
        )


def evaluate_remote(
    config: Config,
    endpoint: Endpoint,
    *,
    out: str | Path,
    limit: int | None = None,
    stated: Collection[str] | None = None,
    environment: Environment | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate a model behind an endpoint alone in the environment of a config: the phase ``pass-at-k`` of `evaluate`.

    The authors of its tokens are unknown, and the result says so (``engine: endpoint``, ``authors: unknown``).

    Args:
        config: as for `evaluate`. Keys about models, engines and training are not used.

    Raises:
        EvalError: the endpoint cannot be used, there is no environment, or a result file is of another configuration.
        ConfigError, DataError, EngineError: as for `evaluate`.
    """
    phase, out, settings = PHASES[0], Path(out), config.eval
    check_k(settings.k, settings.samples)
    acting = environment or make_environment(config)
    if acting is None:
        raise EvalError("a model behind an endpoint is evaluated in an environment; set rollout.environment")
    client = endpoint.client()
    model = client.model(endpoint.model)
    session = Session(config, model, [phase], limit=limit, stated=stated, environment=environment)
    file = result_file(phase, out)
    identity = session.identity(phase) | {"engine": "endpoint", "endpoint": endpoint.url, "authors": "unknown"}
    if (finished := finished_result(file, phase, identity)) is not None:
        return finished
    rows = session.rows[:limit]
    session.check_rewards(rows)
    most = len(rows) * settings.samples * session.profile.sampling.max_tokens
    own = None if environment is None else ThreadCalls(answering(environment), limit_s=config.rollout.tool_timeout_s)
    samples = play(
        client,
        model,
        rows,
        config=config,
        environment=acting,
        caller=own or make_caller(config),
        profile=session.profile,
        samples=settings.samples,
        seed=settings.seed,
        progress=_meter(progress or _silent, f"{phase}: tokens", most),
    )
    with session.scorer() as scorer:
        samples = grade(samples, [Prompt(row, ()) for row in rows], scorer)
        counters: Metrics = {"score_timeouts": scorer.timeouts, "score_failures": scorer.failures}
    metrics = summarise(samples, measure_of(phase, settings.k), bootstrap=settings.bootstrap, seed=settings.seed)
    metrics["macro"] |= {"prompts_dropped": 0, **counters}
    seeds = {"sampling": settings.seed, "step": 0, "bootstrap": settings.seed}
    return write_result(file, phase, identity, EvalResult(metrics, samples), seeds=seeds)


def left_out(config: Config) -> dict[Phase, str]:
    """The phases that cannot be run with the junior and the judge of a config, and what each of them would need."""
    reasons: dict[Phase, str] = {}
    judge = config.judge
    if config.model.junior is None:
        reasons |= dict.fromkeys(NEED_JUNIOR, "needs a junior; give one (--junior)")
    if judge.url is None and judge.model is None:
        reasons["verified"] = "needs a judge; give judge.url=http://HOST:PORT/v1 or judge.model=FOLDER"
    elif judge.prompt == "tinyv":
        reasons["verified"] = "needs judge.prompt=rubric or reasoning; tinyv compares answers"
    return reasons


# ------------------------------------------------------------------------------------------------------------ one phase


def _run(phase: Phase, session: Session, out: Path, progress: Progress) -> dict[str, Any]:
    if phase != "junior":
        return _run_phase(phase, session, out, progress)
    session.close_engine()
    with closing(session.of_junior()) as alone:
        return _run_phase(phase, alone, out, progress)


def _run_phase(phase: Phase, session: Session, out: Path, progress: Progress) -> dict[str, Any]:
    config, settings, file = session.config, session.config.eval, result_file(phase, out)
    identity = session.identity(phase)
    if (finished := finished_result(file, phase, identity)) is not None:
        return finished
    prompts, dropped = session.prompts
    counters: Metrics = {"prompts_dropped": dropped}
    if phase not in UNSCORED:
        session.check_rewards()
    stored = _stored(file.with_name("pass-at-k.json"), session.solo_identity) if phase in READ else None
    samples = _generate(phase, session, progress) if stored is None else read_samples(stored.samples)
    if phase in WRITTEN_TOGETHER and session.junior_tokenizer is not None:
        counters["untranslatable"] = check_untranslatable(
            [sample.stop_reason for sample in samples], config.selection.max_untranslatable, EvalError
        )
        counters["failed"] = sum(sample.stop_reason == "failed" for sample in samples)
    draw = DRAW if stored is None else stored.draw
    if phase in READ:
        session.close_engine()  # nothing more to write: vLLM's memory is for the models that read
    read: dict[str, Any] = {
        "context": session.profile.context and session.profile.context + session.observation_tokens,
        "progress": _meter(progress, f"{phase}: texts", len(samples)),
    }
    if phase == "legibility":
        reader = session.reader
        if draw != DRAW and reader is None:
            warnings.warn(
                f"{file} has no acceptance: pass-at-k.json beside it does not say that its tokens were drawn as they "
                "are now (seeds.draw); delete both and run the phases again to have it",
                stacklevel=4,
            )
        read |= {"vocabulary": session.vocabulary} if reader is None else {"reader": reader}
        sampling = session.profile.sampling if draw == DRAW else None
        samples = read_legibility(samples, prompts, session.load(session.junior), sampling=sampling, **read)
    elif phase == "drift":
        samples = read_drift(samples, prompts, session.load(session.model), session.load(session.junior), **read)
    else:
        with session.scorer() as scorer:
            samples = grade(samples, prompts, scorer)
            counters |= {"score_timeouts": scorer.timeouts, "score_failures": scorer.failures}
        if phase == "verified":
            samples = verify(samples, prompts, session.judges)
        if phase == "junior":
            session.close_engine()
            by_junior = [s._replace(author=s.author and s.author.replace("S", "J"), senior_share=0.0) for s in samples]
            samples = read_legibility(by_junior, prompts, session.load(session.junior), **read)
    metrics = summarise(samples, measure_of(phase, settings.k), bootstrap=settings.bootstrap, seed=settings.seed)
    metrics["macro"] |= counters
    seeds = {"sampling": settings.seed, "step": 0, "bootstrap": settings.seed}
    seeds |= {} if draw is None else {"draw": draw}
    return write_result(file, phase, identity, EvalResult(metrics, samples), seeds=seeds)


def _generate(phase: Phase, session: Session, progress: Progress) -> list[Sample]:
    config, (prompts, _), profile = session.config, session.prompts, session.profile
    engine = session.engine(phase)
    arms = strategies(
        phase,
        session.tokenizer,
        vocabulary=engine.vocabulary,
        selection=config.selection,
        episodes=session.has_episodes,
        by_text=session.junior_tokenizer is not None,
    )
    most = len(arms) * config.eval.samples * sum(sampling_for(profile, prompt).max_tokens for prompt in prompts)
    samples = generate_samples(
        arms,
        engine=engine,
        tokenizer=session.tokenizer,
        prompts=prompts,
        profile=profile,
        samples=config.eval.samples,
        seed=config.eval.seed,
        episode_runner=session.episode_runner,
        progress=_meter(progress, f"{phase}: tokens", most),
    )
    progress(f"{phase}: tokens", most, most)
    return samples


class _Stored(NamedTuple):
    """A file of samples, and the version of the sampling method (``sampling.DRAW``) if it is known."""

    samples: Path
    draw: int | None


def _stored(file: Path, solo_identity: dict[str, Any]) -> _Stored | None:
    """The samples of the pass-at-k phase, if it was run with this configuration, with or without a judge."""
    if not file.exists():
        return None
    stored = read_result(file)
    samples = file.with_name(stored["samples"])
    config = {key: value for key, value in stored["config"].items() if key != "judge"}
    if stored["phase"] != "pass-at-k" or config != solo_identity or not samples.exists():
        return None
    return _Stored(samples, stored["seeds"].get("draw"))


def _meter(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    """A callback that adds up the amounts it is called with, and reports the sum to ``progress``."""
    done = 0

    def advance(further: int) -> None:
        nonlocal done
        done += further
        progress(what, done, total)

    return advance


def _silent(what: str, done: int, total: int) -> None:
    pass
