"""Warnings about a run that goes on: its rewards teach nothing, or the senior alone does not end its texts.

Rewards teach nothing if they do not differ where they are compared. A senior can forget how to stop because in tandem
the junior ends most texts, so that the reward hardly shows it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from tandemrl.config import Config
from tandemrl.losses import Recipe
from tandemrl.types import Metrics

AFTER = 3
"""After how many steps in a row with hardly a lesson a run warns; then after twice as many, and so on."""
LITTLE = 0.1
"""A step has hardly a lesson if less than this share of its rollouts can teach anything."""
MARGIN, SIGMAS = 0.1, 3.0
"""By how much more of its solo texts than of the rollouts a senior may leave unfinished: as a share, and in standard
errors of the difference."""


def watcher(config: Config, recipe: Recipe, heldout: int) -> Callable[[Metrics], list[str]]:
    """A function to call with the metrics of each step, which returns the warnings that are due.

    Args:
        heldout: how many held-out problems an evaluation has.
    """
    lesson_warning, told = no_signal_warning(config, recipe), False
    texts = heldout * config.eval.train_samples, config.train.prompts_per_step * config.rollout.group_size

    def warnings(metrics: Metrics) -> list[str]:
        nonlocal told
        stopping = None if told else stopping_warning(metrics, *texts)
        told = told or stopping is not None
        return [line for line in (stopping, lesson_warning(metrics)) if line]

    return warnings


def lessons(metrics: Mapping[str, Any], recipe: Recipe) -> float:
    """The share of a step's rollouts that can teach anything, as far as rewards tell.

    It is 0 if all rewards are equal. A recipe that compares the rollouts of a group can learn only from groups in which
    rewards differ.
    """
    if metrics.get("reward/unscored") == 1 or metrics.get("reward/std") == 0:
        return 0.0
    flat = metrics.get("groups/zero_variance")
    return 1.0 - flat if recipe.grouped and flat is not None else 1.0


def no_signal_warning(config: Config, recipe: Recipe) -> Callable[[Metrics], str | None]:
    """A function to call with the metrics of each step, which returns a warning where one is due."""
    shares: list[float] = []

    def warning(metrics: Metrics) -> str | None:
        share = lessons(metrics, recipe)
        if share >= LITTLE:
            shares.clear()
            return None
        shares.append(share)
        times = len(shares) // AFTER
        if len(shares) % AFTER or times & (times - 1):
            return None
        amount = "hardly anything" if any(shares) else "nothing"
        return f"  {amount} to learn from the rewards of the last {len(shares)} steps: {cause(metrics, config)}"

    return warning


def cause(metrics: Mapping[str, Any], config: Config) -> str:
    """Why the rewards of a step teach nothing, and what to do about it, as far as its metrics tell."""
    if metrics.get("reward/unscored") == 1:
        return "the judge scored no text: see its output"
    mean, right = metrics.get("reward/mean") or 0.0, metrics.get("reward/acc") or 0.0
    found, cut = metrics.get("reward/answer_present"), metrics.get("response/truncated") or 0.0
    rewards = f"every reward is {mean:g}" if metrics.get("reward/std") == 0 else f"the mean reward is {mean:.3f}"
    look = f"look at {config.output_dir}/samples.jsonl"
    if right > 1 - LITTLE:
        return f"{rewards}: the problems are too easy for this model, or the scorer accepts anything; {look}"
    if cut > 1 - LITTLE:
        return f"{rewards}, and {cut:.0%} of the texts are cut off at rollout.max_tokens={config.rollout.max_tokens}"
    if found is not None and found < LITTLE:
        return (
            f"{rewards}: the scorer finds an answer in {found:.0%} of the texts. The prompt must ask for the form that "
            f"it reads (data.prompt_suffix), and the model must be able to write it; {look}"
        )
    if right < LITTLE:
        return (
            f"{rewards}: hardly an answer is right. The problems are too hard for this model, or the scorer reads "
            f"another form of answer (try it: tandemrl score); {look}"
        )
    return (
        f"{rewards}, and nearly all rollouts of a prompt have the same one: raise rollout.group_size, or take problems "
        "that the model solves now and then"
    )


def stopping_warning(metrics: Mapping[str, float], solo_texts: int, rollout_texts: int) -> str | None:
    """What to say if more solo texts than rollouts are unfinished, by more than `MARGIN` and by more than chance.

    Args:
        metrics: the metrics of the step. Without an evaluation there is nothing to say.
        solo_texts: how many texts the evaluation has.
        rollout_texts: how many rollouts the step has.
    """
    if "response/truncated_at_eval" not in metrics:
        return None
    solo, rollouts = metrics["eval/truncation_rate"], metrics["response/truncated_at_eval"]
    counts = (solo, solo_texts), (rollouts, rollout_texts)
    (p, _), (q, _) = shares = [((share * n + 1) / (n + 2), n + 2) for share, n in counts]  # Agresti and Caffo (2000)
    error = math.sqrt(sum(share * (1 - share) / n for share, n in shares))
    if metrics["tandem/senior_frac"] == 1 or solo - rollouts <= MARGIN or p - q <= SIGMAS * error:
        return None
    return (
        f"warning: the limit of tokens cuts off {solo:.0%} of the held-out texts that the senior writes alone "
        f"(eval/truncation_rate), but {rollouts:.0%} of the rollouts (response/truncated_at_eval). In tandem the "
        "junior ends most texts, so the reward hardly teaches the senior to stop. Let it write alone in the end "
        "(selection.prob_senior_final=1 with selection.anneal_steps), and see that the reward does not pay for texts "
        "that go on after their answer. If the texts are good and only long, raise the limit (eval.profile=custom with "
        "eval.max_tokens)"
    )
