"""The evaluations during a run: the senior alone on held-out problems, which choose ``hf/best``."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from tandemrl import evals
from tandemrl.config import EvalConfig
from tandemrl.data.rows import Prompt
from tandemrl.evals import Sample
from tandemrl.selection import solo
from tandemrl.training import checkpoint
from tandemrl.training.preflight import trainer_state
from tandemrl.training.state import Best, Run
from tandemrl.training.tracking import write_eval_texts
from tandemrl.types import Metrics, Rollout

EQUAL = 1e-9
"""Held-out scores that differ by less are equal: sums of the same rewards differ in their last bits."""


def evaluate(run: Run, step: int) -> Metrics:
    """Evaluate the senior alone on the held-out problems and on those of ``data.monitor``.

    If no held-out score so far is better (``train.select_by``), the policy is exported to ``hf/best``. The problems of
    ``data.monitor`` have no influence on that.
    """
    setup, _, progress = run
    settings = setup.config.eval
    ks = [k for k in settings.k if k <= settings.train_samples]
    heldout = evaluate_solo(run, setup.preflight.heldout.prompts, ks, step)
    macro, samples = heldout.metrics["macro"], {"eval": heldout.samples}
    at_k = f"pass@{max((k for k in ks if k <= 4), default=ks[0])}"
    rewards = _rewards(heldout.samples)
    values = {at_k: macro[at_k], "reward": macro["reward"]}
    best = Best(step, at_k, values, {kind: min(found) for kind, found in rewards.items()})
    if (setup.config.train.select_by or _allowed(rewards, progress.best)) == "reward":
        best = best._replace(by="reward")
        progress.best = progress.best and progress.best._replace(by="reward")
    if progress.best is None or best.values[best.by] >= progress.best.values[best.by] - EQUAL:
        progress.best = best
        checkpoint.export(run, "best", step)
    names = [*(f"pass@{k}" for k in ks), "reward", "length", "truncation_rate", "em", "f1"]
    names += [] if setup.judge is None else ["unscored"]
    metrics = {f"eval/{name}": macro[name] for name in names if name in macro}
    if monitored := setup.preflight.monitored.prompts:
        watched = evaluate_solo(run, monitored, ks, step)
        samples["monitor"], macro = watched.samples, watched.metrics["macro"]
        metrics |= {f"monitor/{name}": macro[name] for name in names if name in macro}
        for source, values in watched.metrics["by_set"].items():
            metrics |= {f"monitor/{source}/pass@{k}": values[f"pass@{k}"] for k in ks}
    if setup.world.main:
        write_eval_texts(Path(setup.config.output_dir), step, samples)
    return metrics


def evaluate_solo(run: Run, prompts: Sequence[Prompt], ks: Sequence[int], step: int) -> evals.EvalResult:
    """What the senior generates alone, graded, with the metrics of ``evals.summarise``.

    ``eval.train_samples`` responses to each prompt, sampled by ``eval.profile``, with the request keys
    (``eval.seed``, 0, position of the prompt, sample): the same in every evaluation of a run and of its rivals.
    """
    setup, settings = run.setup, run.setup.config.eval
    generated = evals.generate_samples(
        {"solo": solo("senior")},
        engine=run.models.engine,
        tokenizer=setup.tokenizer,
        prompts=prompts,
        profile=evals.profile_of(settings),
        samples=settings.train_samples,
        seed=settings.seed,
        episode_runner=setup.episode_runner,
    )
    state = trainer_state(setup.config, len(setup.prompts), step)
    marked = evals.grade(generated, prompts, setup.scorer, state)
    metrics = evals.summarise(marked, partial(evals.graded, k=ks), bootstrap=settings.bootstrap, seed=settings.seed)
    metrics["macro"]["reward"] = metrics["macro"]["score"]
    return evals.EvalResult(metrics, marked)


def _rewards(samples: Sequence[Sample]) -> dict[str, set[float]]:
    """The rewards of correct and of wrong responses, by source."""
    rewards: dict[str, set[float]] = {}
    for sample in samples:
        if sample.score is not None:
            kind = f"{sample.set}: {'correct' if sample.correct else 'wrong'}"
            rewards.setdefault(kind, set()).add(sample.score)
    return rewards


def _allowed(rewards: dict[str, set[float]], best: Best | None) -> Literal["pass@k", "reward"]:
    """``reward`` if rewards are graded: correct or not does not say them, here or in an earlier evaluation."""
    before = {} if best is None else best.rewards
    graded = any(len(values | {before.get(kind, min(values))}) > 1 for kind, values in rewards.items())
    return "reward" if graded or (best is not None and best.by == "reward") else "pass@k"


def truncated_at_eval(settings: EvalConfig, rollouts: Sequence[Rollout]) -> Metrics:
    """The share of a step's rollouts that an evaluation would have cut off, to compare with its own truncation: those
    that had not ended by its limit of tokens, or by their own."""
    limit = evals.profile_of(settings).sampling.max_tokens
    cut = sum(r.stop_reason == "length" or r.response_tokens > limit for r in rollouts)
    return {"response/truncated_at_eval": cut / len(rollouts)}
