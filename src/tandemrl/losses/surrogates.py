"""What is minimised at each token: functions of log-probs and advantages that return a result per token.

All policy surrogates share one signature, ``Surrogate``, so that a recipe can swap them. With r = exp(logprobs −
old_logprobs), clip ranges are distances from 1: r is kept in [1 − clip_low, 1 + clip_high], and None leaves that side
open. A surrogate raises ValueError when given a range that it would not use.

Non-finite values are treated as follows. Log-ratios are clamped to ±20, which makes ±inf finite, and have no gradient
outside of that range. NaN passes through to the loss, where the caller sees it. What a token of weight 0 holds does not
matter: ``policy_loss`` and ``reduce`` mask it. Here are also sums over sequences, which all losses use.
"""

from collections.abc import Callable
from math import inf
from typing import Any, get_args

import torch
from torch import Tensor

from tandemrl.config.recipes import RatioLevel
from tandemrl.types import IntPerToken, PerSequence, PerToken


def sequence_sum(x: PerToken, sequence_ids: IntPerToken, *, num_sequences: int) -> PerSequence:
    """The sum of ``x`` over the tokens of each sequence, and 0 for a sequence without tokens."""
    return x.new_zeros(num_sequences).index_add(0, sequence_ids, x)


def divisor(count: float | Tensor, like: Tensor) -> Tensor:
    """``count`` as a denominator: 1 where the count is 0, since the numerator is 0 there too.

    Args:
        count: A number or a tensor.
        like: the result gets this tensor's dtype and device.
    """
    count = torch.as_tensor(count, dtype=like.dtype, device=like.device)
    return torch.where(count > 0, count, torch.ones_like(count))


def require_one_of(name: str, value: str, allowed: Any) -> None:
    """Refuse a ``value`` that is not in the Literal type ``allowed``.

    Raises:
        ValueError: the value is not allowed; the message names the argument and the allowed values.
    """
    if value not in get_args(allowed):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(get_args(allowed))}")


# ----------------------------------------------------------------------------------------------------------- surrogates

MAX_LOG_RATIO = 20.0

Surrogate = Callable[..., Tensor]
"""A policy surrogate: ``(logprobs, old_logprobs, advantages, *, clip_low, clip_high, dual_clip)`` -> the loss of each
token, which training minimises."""


def log_ratio(logprobs: PerToken, old_logprobs: PerToken) -> PerToken:
    """logprobs − old_logprobs (nats), clamped to ±20."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_range(clip_low: float | None, clip_high: float | None) -> tuple[float, float]:
    """The interval [1 − clip_low, 1 + clip_high] in which a ratio is kept; None leaves that side open.

    Examples:
        >>> clip_range(0.2, None)
        (0.8, inf)
    """
    return (0.0 if clip_low is None else 1.0 - clip_low, inf if clip_high is None else 1.0 + clip_high)


def ppo_clip(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    *,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None = None,
) -> PerToken:
    """max(−r·A, −clip(r)·A) (PPO, arXiv 1707.06347, equation 7).

    With a ``dual_clip`` of c, the loss is at most −c·A where A < 0 (arXiv 1912.09729). ``clip_high > clip_low`` is
    DAPO's clip-higher (arXiv 2503.14476).

    Raises:
        ValueError: ``dual_clip`` is not above 1.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip={dual_clip}: must be above 1")
    ratio = log_ratio(logprobs, old_logprobs).exp()
    low, high = clip_range(clip_low, clip_high)
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(low, high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def cispo(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    *,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None = None,
) -> PerToken:
    """−sg(clip(r))·A·logprobs, where sg stops the gradient (MiniMax-M1, arXiv 2506.13585, equation 4).

    Unlike in ``ppo_clip``, tokens whose ratio is clipped keep a gradient.

    Raises:
        ValueError: ``dual_clip`` is set, although the clipped ratio is bounded already.
    """
    if dual_clip is not None:
        raise ValueError(f"dual_clip={dual_clip}: cispo does not use it, leave it unset")
    low, high = clip_range(clip_low, clip_high)
    ratio = log_ratio(logprobs, old_logprobs).exp().clamp(low, high)
    return -ratio.detach() * advantages * logprobs


def reinforce(
    logprobs: PerToken,
    old_logprobs: PerToken,
    advantages: PerToken,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> PerToken:
    """−A·logprobs (Williams 1992).

    It does not read ``old_logprobs``, so it suits a single on-policy update per batch of rollouts.

    Raises:
        ValueError: ``clip_low``, ``clip_high`` or ``dual_clip`` is set, although there is no ratio to clip.
    """
    if clip_low is not None or clip_high is not None or dual_clip is not None:
        raise ValueError("clip_low, clip_high, dual_clip: reinforce has no ratio to clip, leave them unset")
    return -advantages * logprobs


def sequence_old_logprobs(
    logprobs: PerToken, old_logprobs: PerToken, weights: PerToken, sequence_ids: IntPerToken, *, num_sequences: int
) -> PerToken:
    """Old log-probs under which every token has its sequence's ratio s = exp(Σ w·(logprobs − old) / Σw).

    They are sg(logprobs − log s), where sg stops the gradient. A surrogate that reads them in place of the old
    log-probs sees the ratio s at every token, with a gradient through the token's own log-prob (arXiv 2507.18071,
    equation 14). ``ppo_clip`` with them is GSPO (equation 5 in the token form of section 4.3): under
    ``sequence_mean_token_mean`` its gradient is that of clip(s)·A.

    A token of weight 0 does not count in s. With a junior weight of 0, log s is therefore a mean over senior tokens. A
    sequence with Σw = 0 has s = 1.
    """
    differences = torch.where(weights > 0, (logprobs - old_logprobs).detach(), 0.0)
    weight = sequence_sum(weights, sequence_ids, num_sequences=num_sequences)
    log_s = sequence_sum(weights * differences, sequence_ids, num_sequences=num_sequences) / divisor(weight, weight)
    return logprobs.detach() - log_s[sequence_ids]


def importance_weights(
    old_logprobs: PerToken,
    behaviour_logprobs: PerToken,
    weights: PerToken,
    sequence_ids: IntPerToken,
    *,
    num_sequences: int,
    level: RatioLevel,
    cap: float,
) -> PerToken:
    """Weights of truncated importance sampling: min(exp(old − behaviour), cap), detached; 1 at tokens of weight 0.

    They correct for a sampler whose probabilities differ from the trainer's (Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training"). With ``level="sequence"`` all tokens of a sequence share the
    ratio exp(Σ w·(old − behaviour)); with a junior weight of 0 only senior tokens enter it. Where junior tokens are
    trained on (weight > 0), the junior is their behaviour policy, and the ratio corrects for that as well.
    """
    differences = torch.where(weights > 0, (old_logprobs - behaviour_logprobs).detach(), 0.0)
    if level == "sequence":
        summed = sequence_sum(weights * differences, sequence_ids, num_sequences=num_sequences)
        differences = torch.where(weights > 0, summed[sequence_ids], 0.0)
    ratio = differences.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)
    return torch.where(weights > 0, ratio, 1.0)


def value_loss(values: PerToken, old_values: PerToken, returns: PerToken, *, clip: float | None = 0.5) -> PerToken:
    """½·max((V − R)², (V_clipped − R)²) at each token, where V_clipped is V kept within ``clip`` of ``old_values``.

    This is the value clipping of the PPO implementation (Engstrom et al., arXiv 2005.12729, section 3). If ``clip`` is
    None, the loss is ½·(V − R)².
    """
    error = (values - returns).square()
    if clip is None:
        return 0.5 * error
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return 0.5 * torch.maximum(error, (clipped - returns).square())
