"""How much better than expected a rollout (or a token) was.

Group estimators map one reward per rollout to one advantage per rollout; groups may have any size and order, and never
influence each other. Conventions that differ between libraries, chosen here: the group's standard deviation has
ddof = 1 and epsilon 1e-6 is added to it; a group of one has no baseline, so its advantage is 0; a group whose rewards
are all equal has exactly 0, not rounding noise. A NaN reward makes its own group NaN and no other.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

Total = Callable[[Tensor], Tensor]
"""Adds up what every process has of a tensor."""


def _alone(x: Tensor) -> Tensor:
    return x


def group_normalised(
    rewards: Float[Tensor, " s"], group_ids: Int64[Tensor, " s"], *, epsilon: float = 1e-6
) -> Float[Tensor, " s"]:
    """GRPO: (R − group mean) / (group std + ε), std with ddof = 1 (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    Group of one: 0.

    Examples:
        >>> group_normalised(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([7, 7, 7]))
        tensor([ 1.0000, -1.0000,  0.0000])
    """
    centred = group_centred(rewards, group_ids)
    group, size = _groups(group_ids)
    squares = rewards.new_zeros(size.shape).index_add(0, group, centred.square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return centred / (std[group] + epsilon)


def group_centred(rewards: Float[Tensor, " s"], group_ids: Int64[Tensor, " s"]) -> Float[Tensor, " s"]:
    """Dr. GRPO: R − group mean (arXiv 2503.20783). Group of one: 0."""
    group, size = _groups(group_ids)
    mean = rewards.new_zeros(size.shape).index_add(0, group, rewards) / size
    return torch.where(zero_variance_groups(rewards, group_ids), 0.0, rewards - mean[group])


def leave_one_out(rewards: Float[Tensor, " s"], group_ids: Int64[Tensor, " s"]) -> Float[Tensor, " s"]:
    """RLOO: R − mean of the others' rewards = n/(n−1)·(R − group mean) (arXiv 2402.14740).

    Group of one: 0, as everywhere here (verl returns R).
    """
    group, size = _groups(group_ids)
    return group_centred(rewards, group_ids) * (size / (size - 1).clamp(min=1)).to(rewards.dtype)[group]


def zero_variance_groups(outcomes: Float[Tensor, " s"], group_ids: Int64[Tensor, " s"]) -> Bool[Tensor, " s"]:
    """True at every rollout whose group has one and the same outcome throughout, so no signal.

    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) leaves such groups out: set their token weights to 0 before
    counting ``totals``. A group of one is always such a group.
    """
    group, size = _groups(group_ids)
    blank = outcomes.new_zeros(size.shape)
    high = blank.scatter_reduce(0, group, outcomes, "amax", include_self=False)
    low = blank.scatter_reduce(0, group, outcomes, "amin", include_self=False)
    return (high == low)[group]


def whiten(
    x: Float[Tensor, " k"], weights: Float[Tensor, " k"], *, epsilon: float = 1e-8, total: Total = _alone
) -> Float[Tensor, " k"]:
    """(x − mean) / √(var + ε) with weighted mean and unbiased variance; 0 where the weight is 0.

    Weights count repetitions: advantages of ``k`` tokens with their token weights, or of ``k`` sequences with their
    Σw, give the same result. With Σw ≤ 1 the variance is left biased. Statistics are over the tensor given, on all
    processes: pass all that this one has of the batch, not a micro-batch.

    Args:
        total: sums over the processes that have other entries of ``x``.
    """
    centred, variance = _moments(x, weights, total)
    return centred * torch.rsqrt(variance + epsilon)


def explained_variance(
    values: Float[Tensor, " k"], returns: Float[Tensor, " k"], weights: Float[Tensor, " k"], *, total: Total = _alone
) -> Float[Tensor, ""]:
    """1 − Var(R − V) / Var(R), weighted: 1 = the critic knows every return, 0 = it knows no more than their mean.

    Returns that are all equal: 0. ``total``: as for ``whiten``.
    """
    _, left = _moments(returns - values, weights, total)
    _, variance = _moments(returns, weights, total)
    return torch.where(variance > 0, 1 - left / variance, torch.zeros_like(variance))


def _moments(
    x: Float[Tensor, " k"], weights: Float[Tensor, " k"], total: Total
) -> tuple[Float[Tensor, " k"], Float[Tensor, ""]]:
    """x − mean, 0 where the weight is 0, and the unbiased variance."""
    used = weights > 0
    x = torch.where(used, x, 0.0)
    weight, summed = total(torch.stack([weights.sum(), (weights * x).sum()]))
    count = torch.where(weight > 0, weight, 1.0)
    centred = torch.where(used, x - summed / count, 0.0)
    squares = total((weights * centred.square()).sum())
    return centred, squares / torch.where(weight > 1, weight - 1, count)


def gae(
    rewards: Float[Tensor, " t"],
    values: Float[Tensor, " t"],
    trained: Bool[Tensor, " t"],
    sequence_ids: Int64[Tensor, " t"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Float[Tensor, " t"], Float[Tensor, " t"]]:
    """Generalised advantage estimation over the trained tokens of each sequence: (advantages, returns), not whitened.

    A_i = δ_i + γλ·A_j and δ_i = r_i + γ·V_j − V_i, where j is the next trained token of the same sequence (absent:
    0) (arXiv 1506.02438, equation 16). Untrained tokens are no actions: they take no discount, their values are not
    read, and their rewards go to the trained token before them, so the reward of a completion that the junior ended
    is not lost. At untrained tokens the advantage is 0 and the return is the value. ``sequence_ids`` is sorted.
    """
    same = torch.zeros_like(trained)
    same[:-1] = sequence_ids[:-1] == sequence_ids[1:]
    next_trained = torch.zeros_like(trained)
    next_trained[:-1] = trained[1:]
    next_trained &= same
    next_value = torch.zeros_like(values)
    next_value[:-1] = values[1:]

    # Each of the three is a linear recurrence that runs backwards over the packed tokens and stops at sequence ends.
    over_untrained = (same & ~next_trained).to(values.dtype)
    reward = _reverse_scan(rewards, over_untrained)
    value = _reverse_scan(torch.where(next_trained, next_value, 0.0), over_untrained)
    delta = torch.where(trained, reward + gamma * value - values, 0.0)
    carry = same.to(values.dtype)
    advantages = _reverse_scan(delta, torch.where(trained, gamma * lam * carry, carry))
    advantages = torch.where(trained, advantages, 0.0)
    return advantages, advantages + values


def _reverse_scan(x: Float[Tensor, " t"], decay: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
    """y_i = x_i + decay_i·y_{i+1}, in log₂ t vectorised steps (Hillis and Steele 1986) instead of t."""
    step = 1
    while step < x.shape[0]:
        ahead = torch.nn.functional.pad(x[step:], (0, step))
        decay_ahead = torch.nn.functional.pad(decay[step:], (0, step))
        x, decay, step = x + decay * ahead, decay * decay_ahead, 2 * step
    return x


def _groups(group_ids: Int64[Tensor, " s"]) -> tuple[Int64[Tensor, " s"], Int64[Tensor, " g"]]:
    """Each rollout's group as an index 0 … g−1, and the groups' sizes."""
    _, group, size = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return group, size
