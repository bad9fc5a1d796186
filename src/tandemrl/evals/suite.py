"""Whole phases: from model folders to result files. A finished phase is never run again; a killed run goes on."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tandemrl.config import EvalConfig, JudgeConfig, RewardConfig, RolloutConfig, SandboxConfig
from tandemrl.evals.files import (
    EvalResult,
    finished_result,
    read_result,
    read_samples,
    result_file,
    write_result,
)
from tandemrl.evals.measures import (
    EvalError,
    Measure,
    Sample,
    accepted,
    drifted,
    graded,
    legible,
    summarise,
)
from tandemrl.evals.protocol import (
    PHASES,
    Phase,
    check_k,
    grade,
    sampling_for,
    strategies,
    verify,
    write,
)
from tandemrl.evals.reading import read_drift, read_legibility
from tandemrl.evals.session import NEED_JUNIOR, Session, Setup
from tandemrl.types import Metrics

READ: tuple[Phase, ...] = ("legibility", "drift", "verified")
"""Phases about the texts of ``pass-at-k``: they take its samples if they are there, and write the same ones if not."""

UNSCORED: tuple[Phase, ...] = ("legibility", "drift")

Progress = Callable[[str, int, int], None]
"""Told ``(what, done, total)``, e.g. ``("tandem: tokens", 512, 4096)``; the total of tokens is an upper bound."""


def run_all(
    *,
    model: str,
    junior: str | None,
    data: Sequence[str],
    eval: EvalConfig,
    out: Path,
    phases: Sequence[Phase] | None = None,
    reward: RewardConfig | None = None,
    sandbox: SandboxConfig | None = None,
    judge: JudgeConfig | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    prompt_suffix: str = "",
    max_prompt_tokens: int = 1024,
    limit: int | None = None,
    threads: int | None = None,
    prob_senior: float = 0.5,
    max_gap_tokens: int = 32,
    rollout: RolloutConfig | None = None,
    stated: Collection[str] | None = None,
    progress: Progress | None = None,
) -> dict[Phase, dict[str, Any]]:
    """Run phases and write ``PHASE.json`` and ``PHASE.samples.jsonl`` of each; returns what is in the former, by phase.

    A phase whose result is there, of the same configuration, weights and data, is not run again: what a killed run has
    finished is kept, and the files of the next one are those of an uninterrupted one. Models and data are loaded once,
    and only when a phase needs them.

    Args:
        model, junior: HF folder or hub id of the senior and the junior.
        out: a folder; for a single phase, also the result file itself, if it ends in ``.json``.
        phases: None = all that can be run with this junior and this judge (see ``left_out``).
        sandbox: limits of programs, where the score is the tests that they pass.
        judge: marks the reasoning in the verified phase, and responses to rows that are scored by a judge.
        limit: rows of ``data`` (all sources, in order) that are used.
        threads: of torch, None = as it is.
        stated: dotted keys of ``reward.*`` that have to be of use for this data; None = all (see ``check_rewards``).

    Raises:
        ConfigError: a pattern of ``reward.scorers`` or a name in ``reward.weights`` is of no use.
        EvalError: unknown phase, no junior, no judge, or a result file of another configuration; names the fix.
        JudgeError: the judge is down or gives no marks.
        ModelError, DataError, EngineError: a model, a data source or a request cannot be used.
    """
    judge = judge or JudgeConfig()
    reasons = left_out(junior, judge)
    chosen = [phase for phase in PHASES if phase not in reasons] if phases is None else list(phases)
    for phase in chosen:
        if phase not in PHASES:
            raise EvalError(f"unknown phase {phase!r}; known: {', '.join(PHASES)}")
        if phase in reasons:
            raise EvalError(f"phase {phase} {reasons[phase]}")
    if Path(out).suffix == ".json" and len(chosen) != 1:
        raise EvalError(f"{out} is one file for {len(chosen)} phases; give a folder")
    check_k(eval.k, eval.samples)
    if threads is not None:
        torch.set_num_threads(threads)
    setup = Setup(
        model=model,
        junior=junior,
        data=(data,) if isinstance(data, str) else tuple(data),
        eval=eval,
        reward=reward or RewardConfig(),
        sandbox=sandbox or SandboxConfig(),
        judge=judge,
        dtype=dtype,
        device=device,
        prompt_suffix=prompt_suffix,
        max_prompt_tokens=max_prompt_tokens,
        limit=limit,
        prob_senior=prob_senior,
        max_gap_tokens=max_gap_tokens,
        rollout=rollout or RolloutConfig(),
    )
    session = Session(setup, chosen, stated)
    try:
        return {phase: _run(phase, session, Path(out), progress or _silent) for phase in chosen}
    finally:
        session.close_engine()


def run_phase(phase: Phase, *, out: Path, **settings: Any) -> dict[str, Any]:
    """``run_all`` of one phase: the same settings, the same files. Returns what is in ``PHASE.json``."""
    return run_all(phases=(phase,), out=out, **settings)[phase]


def left_out(junior: str | None, judge: JudgeConfig) -> dict[Phase, str]:
    """The phases that cannot be run with this junior and this judge, and what each of them needs."""
    reasons: dict[Phase, str] = {}
    if junior is None:
        reasons |= dict.fromkeys(NEED_JUNIOR, "needs a junior; give one (--junior)")
    if judge.url is None and judge.model is None:
        reasons["verified"] = "needs a judge; give judge.url=http://HOST:PORT/v1 or judge.model=FOLDER"
    elif judge.prompt == "tinyv":
        reasons["verified"] = "needs judge.prompt=rubric or reasoning; tinyv compares answers"
    return reasons


# ------------------------------------------------------------------------------------------------------------ one phase


def _run(phase: Phase, session: Session, out: Path, progress: Progress) -> dict[str, Any]:
    setup, file = session.setup, result_file(phase, out)
    config = session.config(phase)
    if (finished := finished_result(file, phase, config)) is not None:
        return finished
    prompts, dropped = session.prompts
    counters: Metrics = {"prompts_dropped": dropped}
    if phase not in UNSCORED:
        session.check_rewards()
    stored = _stored_samples(file.with_name("pass-at-k.json"), session.solo_config) if phase in READ else None
    samples = stored if stored is not None else _write(phase, session, progress)
    if phase in READ:
        session.close_engine()  # nothing more to write: vLLM's memory is for the models that read
    read: dict[str, Any] = {
        "context": session.profile.context,
        "progress": _meter(progress, f"{phase}: texts", len(samples)),
    }
    measure: Measure
    if phase == "legibility":
        samples, measure = read_legibility(samples, prompts, session.load(session.junior), **read), legible
    elif phase == "drift":
        models = session.load(setup.model), session.load(session.junior)
        samples, measure = read_drift(samples, prompts, *models, **read), drifted
    else:
        with session.scorer() as scorer:
            samples, measure = grade(samples, prompts, scorer), partial(graded, k=setup.eval.k)
            counters |= {"score_timeouts": scorer.timeouts, "score_failures": scorer.failures}
        if phase == "verified":
            samples, measure = verify(samples, prompts, session.judges), partial(accepted, k=setup.eval.k)
    metrics = summarise(samples, measure, bootstrap=setup.eval.bootstrap, seed=setup.eval.seed)
    metrics["macro"] |= counters
    seeds = {"sampling": setup.eval.seed, "step": 0, "bootstrap": setup.eval.seed}
    return write_result(file, phase, config, EvalResult(metrics, samples), seeds=seeds)


def _write(phase: Phase, session: Session, progress: Progress) -> list[Sample]:
    setup, (prompts, _), profile = session.setup, session.prompts, session.profile
    engine = session.engine(phase)
    arms = strategies(
        phase,
        session.tokenizer,
        vocabulary=engine.vocabulary,
        prob_senior=setup.prob_senior,
        max_gap_tokens=setup.max_gap_tokens,
    )
    most = len(arms) * setup.eval.samples * sum(sampling_for(profile, prompt).max_tokens for prompt in prompts)
    samples = write(
        arms,
        engine=engine,
        tokenizer=session.tokenizer,
        prompts=prompts,
        profile=profile,
        samples=setup.eval.samples,
        seed=setup.eval.seed,
        progress=_meter(progress, f"{phase}: tokens", most),
    )
    progress(f"{phase}: tokens", most, most)
    return samples


def _stored_samples(file: Path, solo_config: dict[str, Any]) -> list[Sample] | None:
    """What the pass-at-k phase wrote, if it was run with this configuration, with or without a judge."""
    if not file.exists():
        return None
    stored = read_result(file)
    samples = file.with_name(stored["samples"])
    config = {key: value for key, value in stored["config"].items() if key != "judge"}
    if stored["phase"] != "pass-at-k" or config != solo_config or not samples.exists():
        return None
    return read_samples(samples)


def _meter(progress: Progress, what: str, total: int) -> Callable[[int], None]:
    """A callback that adds up what it is told."""
    done = 0

    def advance(further: int) -> None:
        nonlocal done
        done += further
        progress(what, done, total)

    return advance


def _silent(what: str, done: int, total: int) -> None:
    pass
