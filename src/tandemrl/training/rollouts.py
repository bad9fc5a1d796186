"""The rollouts of a step: scored, replaced where they teach nothing (dynamic sampling), and measured."""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from tandemrl.rewards.protocol import NO_SCORE
from tandemrl.rollout.collect import CompletionBatch, score_rollouts
from tandemrl.rollout.engine import LOST, Draws, Passes
from tandemrl.training.gates import TrainError
from tandemrl.training.preflight import trainer_state
from tandemrl.training.state import Run, RunSetup
from tandemrl.types import Author, Group, Metrics, Rollout, taken_over


def score(setup: RunSetup, completions: CompletionBatch, step: int) -> list[Group]:
    """Score the completions of a step."""
    ends = () if setup.episode_runner is None else setup.episode_runner.ends
    state = trainer_state(setup.config, len(setup.prompts), step - 1)
    return score_rollouts(completions, setup.scorer, setup.tokenizer, ends=ends, state=state)


def check_scored(setup: RunSetup, completions: CompletionBatch, groups: Sequence[Group]) -> None:
    """Check that reward functions gave a score to any response of a step.

    Raises:
        TrainError: they returned None for all; the message names them.
    """
    rollouts = [r for group in groups for r in group.rollouts]
    none = [r for r in rollouts if r.reward_parts == NO_SCORE.parts and r.stop_reason not in LOST]
    if none and not any(r.scored for r in rollouts):
        terms = chain(*(setup.scorer.terms_of(prompt.row) for prompt in completions.prompts))
        names = ", ".join(dict.fromkeys(term.name for term in terms if term.own))
        raise TrainError(
            f"{names} gave none of the {len(rollouts)} responses a score (None leaves a response out of training); "
            "return a number for some, or route these rows to another scorer (reward.scorers)"
        )


def resample(
    run: Run, generate: Callable[..., CompletionBatch], step: int, completions: CompletionBatch, groups: Sequence[Group]
) -> tuple[CompletionBatch, list[Group], int]:
    """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2).

    Groups whose rewards are all equal, or of which fewer than two rollouts are scored, are replaced by the groups of
    the next prompts, in at most ``train.max_resamples`` rounds.

    Args:
        generate: writes the completions of (step, examples, drawn=how many prompts the step had so far).

    Returns:
        the completions with the draws and passes of all rounds, the groups, and how many prompts were drawn as
        replacements.
    """
    setup, _, progress = run
    groups, drawn = list(groups), 0
    for _ in range(setup.config.train.max_resamples):
        flat = [i for i, group in enumerate(groups) if len({r.reward for r in group.scored.rollouts}) < 2]
        if not flat:
            break
        more = generate(step, progress.sampler.next(len(flat)), drawn=len(groups) + drawn)
        drawn += len(flat)
        draws = Draws(*(a + b for a, b in zip(completions.draws, more.draws, strict=True)))
        completions = completions._replace(draws=draws, passes=completions.passes + more.passes)
        for i, fresh in zip(flat, score(setup, more, step), strict=True):
            groups[i] = fresh._replace(rollouts=tuple(r.in_group(i) for r in fresh.rollouts))
    return completions, groups, drawn


def rollout_metrics(completions: CompletionBatch, groups: Sequence[Group], step: int) -> Metrics:
    """Metrics of a step's rollouts, such as their rewards, lengths and authors."""
    rollouts = [r for group in groups for r in group.rollouts]
    scored = [r for r in rollouts if r.scored]
    rewards = np.array([r.reward for r in scored])
    response = np.array([sum(each.response_tokens for each in r.sequences) for r in rollouts])
    senior = sum(int((each.author == Author.SENIOR).sum()) for r in rollouts for each in r.sequences)
    parts = sorted({name for r in scored for name in r.reward_parts})
    draws = completions.draws
    told = [r for r in rollouts if r.handover_logprobs is not None]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": 0.0 if len(set(rewards.tolist())) == 1 else float(rewards.std()),  # exactly, though sums round
        **{f"reward/{name}": _mean_part(name, scored) for name in parts},
        **{f"logged/{name}": _mean_logged(name, groups) for group in groups for name in group.logged},
        "reward/unscored": 1 - len(scored) / len(rollouts),
        "tandem/senior_frac": senior / max(1, int(response.sum())),
        **({"tandem/senior_draw_frac": draws.senior / draws.total} if draws.total else {}),
        **({"tandem/handovers": float(np.mean([taken_over(r.author).sum() for r in told]))} if told else {}),
        **{f"tandem/{how}": float(np.mean([r.stop_reason == how for r in told])) for how in LOST if told},
        "response/length": float(response.mean()),
        "response/truncated": float(np.mean([r.stop_reason == "length" for r in rollouts])),
        "weights/version_lag": float(step - 1 - min(r.policy_version for r in rollouts)),
        "tokens/response": float(response.sum()),
        "tokens/total": float(sum(len(each.tokens) for r in rollouts for each in r.sequences)),
        "scoring/timeouts": float(sum("timeout" in r.reward_parts for r in rollouts)),
        "scoring/failures": float(sum("failure" in r.reward_parts for r in rollouts)),
        **episode_metrics(rollouts),
        **pass_metrics(completions.passes),
    }


def _mean_part(name: str, scored: Sequence[Rollout]) -> float:
    """The mean of a part; a missing one counts as 0, that of a reward that gives no score does not count."""
    return float(np.mean([r.reward_parts.get(name, 0.0) for r in scored if f"{name}/none" not in r.reward_parts]))


def _mean_logged(name: str, groups: Sequence[Group]) -> float:
    """The mean of what reward functions logged by this name (TRL's ``log_metric``)."""
    return float(np.mean([x for group in groups for x in group.logged.get(name, ())]))


def pass_metrics(passes: Passes) -> Metrics:
    """Metrics of the forward passes that the rollouts of a step took, and of how often the senior accepted drafts.

    There are none if the engine does not count passes, no acceptance rate if no token of the senior was drafted, and
    no asks if the junior is not behind an endpoint.
    """
    metrics: Metrics = {}
    if passes.senior or passes.junior:
        metrics |= {"passes/senior": float(passes.senior), "passes/junior": float(passes.junior)}
    if passes.senior:
        metrics["draft/tokens_per_senior_pass"] = passes.tokens / passes.senior
    if passes.acceptance is not None:
        metrics["draft/acceptance"] = passes.acceptance
    if passes.spans:
        metrics["tandem/asks_per_span"] = passes.asks / passes.spans
    return metrics


def episode_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Metrics of what happened in the environment, as means over rollouts; none without an environment."""
    transcripts = [r.transcript for r in rollouts if r.transcript is not None]
    if not transcripts:
        return {}
    counts = sorted({name for transcript in transcripts for name in transcript.counts})
    observed = [len(r.tokens) - r.context_tokens - r.response_tokens for r in rollouts]
    return {
        "env/observation_tokens": float(np.mean(observed)),
        **{_counted(name): float(np.mean([t.counts.get(name, 0.0) for t in transcripts])) for name in counts},
        "response/stopped_turns": float(np.mean([r.stop_reason == "turns" for r in rollouts])),
    }


def _counted(name: str) -> str:
    return name if "/" in name else f"env/{name}"  # those of agents have their own
