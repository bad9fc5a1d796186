"""Gates: checks that stop a run which would otherwise train something else than what was asked for."""

import math

from tandemrl.config import Config
from tandemrl.rollout.engine import Draws

SIGMAS = 6.0
"""How many standard deviations the share of senior draws may be off prob_senior: one false alarm in 10⁹ checks."""
MISMATCH = {"float32": 1e-3, "bfloat16": 2e-2}
"""The defaults of train.max_logprob_mismatch, by compute dtype: the mean of |trainer - engine| over the log-probs of
senior tokens, in nats."""


class TrainError(RuntimeError):
    """A check failed, and going on would train something else than what was asked for. The message gives the reason."""


def check_draws(draws: Draws, prob_senior: float | None) -> None:
    """Check that the senior's share of all author draws lies within 6σ of ``prob_senior``.

    The check counts draws, not tokens, since the length of a segment depends on who writes it.

    Args:
        draws: the author draws of a step.
        prob_senior: the probability to check against. None skips the check.

    Raises:
        TrainError: the share lies outside.
    """
    if prob_senior is None or draws.total == 0:
        return
    sigma = math.sqrt(prob_senior * (1 - prob_senior) / draws.total)
    share = draws.senior / draws.total
    if abs(share - prob_senior) > SIGMAS * sigma + 1e-12:
        raise TrainError(
            f"{draws.senior} of {draws.total} author draws fell to the senior ({share:.4f}); selection.prob_senior is "
            f"{prob_senior} (6σ = {SIGMAS * sigma:.4f}). Authors are not drawn as configured."
        )


def check_mismatch(config: Config, mean_abs: float) -> None:
    """Check that trainer and engine agree on the log-probs of senior tokens.

    Args:
        mean_abs: the mean absolute difference of their log-probs, in nats.

    Raises:
        TrainError: ``mean_abs`` is above train.max_logprob_mismatch, or not a number.
    """
    limit = config.train.max_logprob_mismatch
    limit = MISMATCH[config.model.dtype] if limit is None else limit
    if not mean_abs <= limit:
        raise TrainError(
            f"trainer and engine differ by {mean_abs:.3g} nats per senior token on average (limit {limit:g}): stale "
            "weights, another temperature or truncation, or a numerical fault. Raise train.max_logprob_mismatch only "
            "if the difference is understood."
        )


def check_gradient_norm(part: str, norm: float, loss: float) -> None:
    """Check that the norm of a gradient is finite, before the optimiser steps.

    Raises:
        TrainError: it is not; the weights are unchanged.
    """
    if not math.isfinite(norm):
        raise TrainError(
            f"the gradient norm of the {part} is {norm} (loss {loss}): stopped before it reached the weights"
        )
