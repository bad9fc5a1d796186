"""Does the senior still know how to stop? In tandem the junior ends most texts, so the reward hardly shows it."""

import math
from collections.abc import Mapping, Sequence

from tandemrl.types import Rollout

MARGIN, SIGMAS = 0.1, 3.0
"""By how much more of its solo texts than of the rollouts a senior may leave unfinished: as a share, and in standard
errors of the difference."""


def unfinished(rollouts: Sequence[Rollout], limit: int) -> float:
    """The share of rollouts that had not ended after ``limit`` tokens, or at their own limit of tokens."""
    return sum(r.stop_reason == "length" or r.response_tokens > limit for r in rollouts) / len(rollouts)


def part(solo: float, rollouts: float, *, solo_texts: int, rollout_texts: int) -> bool:
    """Whether more solo texts are unfinished than rollouts, by more than `MARGIN` and by more than chance.

    Args:
        solo, rollouts: the shares that are unfinished.
        solo_texts, rollout_texts: how many texts these are shares of.
    """
    counts = (solo, solo_texts), (rollouts, rollout_texts)
    shares = [(share * n + 1) / (n + 2) for share, n in counts]  # Agresti and Caffo (2000): good for shares near 0
    error = math.sqrt(sum(p * (1 - p) / (n + 2) for p, (_, n) in zip(shares, counts, strict=True)))
    return solo - rollouts > MARGIN and shares[0] - shares[1] > SIGMAS * error


def warning(metrics: Mapping[str, float], *, solo_texts: int, rollout_texts: int) -> str | None:
    """What to say if the two `part` at an evaluation during tandem training; else None.

    Args:
        metrics: the metrics of the step.
        solo_texts: how many texts the evaluation has.
        rollout_texts: how many rollouts the step has.
    """
    solo, rollouts = metrics["eval/truncation_rate"], metrics["response/truncated_at_eval"]
    if metrics["tandem/senior_frac"] == 1 or not part(
        solo, rollouts, solo_texts=solo_texts, rollout_texts=rollout_texts
    ):
        return None
    return (
        f"warning: the limit of tokens cuts off {solo:.0%} of the held-out texts that the senior writes alone "
        f"(eval/truncation_rate), but {rollouts:.0%} of the rollouts (response/truncated_at_eval). In tandem the "
        "junior ends most texts, so the reward hardly teaches the senior to stop. Let it write alone in the end "
        "(selection.prob_senior_final=1 with selection.anneal_steps), and see that the reward does not pay for texts "
        "that go on after their answer. If the texts are good and only long, raise the limit (eval.profile=custom with "
        "eval.max_tokens)"
    )
