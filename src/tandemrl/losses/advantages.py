"""How much better than expected a rollout (or a token) was.

Group estimators map one reward per rollout to one advantage per rollout. A group may have any size, its rollouts may
stand in any order, and groups never influence each other. Libraries differ in some conventions; these are ours. The
standard deviation of a group has ddof = 1, and epsilon 1e-6 is added to it. A group of one has no baseline, so its
advantage is 0. A group whose rewards are all equal gets advantages of exactly 0, not rounding noise. A NaN reward makes
the advantages of its own group NaN, and those of no other group.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from tandemrl.types import IntPerSequence, IntPerToken, PerSequence, PerToken, Scalar

Total = Callable[[Tensor], Tensor]
"""A function that adds up a tensor element by element over all processes, as ``all_reduce`` with SUM does."""


def _alone(x: Tensor) -> Tensor:
    return x


def group_normalised(rewards: PerSequence, group_ids: IntPerSequence) -> PerSequence:
    """GRPO: (R − group mean) / (group std + 1e-6), std with ddof = 1 (DeepSeekMath, arXiv 2402.03300, section 4.1.2).

    A group of one gets 0.

    Args:
        rewards: one reward per rollout.
        group_ids: the group of each rollout. Any integers: rollouts with equal ids are one group.

    Examples:
        >>> group_normalised(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([7, 7, 7]))
        tensor([ 1.0000, -1.0000,  0.0000])
    """
    centred = group_centred(rewards, group_ids)
    group, size = _groups(group_ids)
    squares = rewards.new_zeros(size.shape).index_add(0, group, centred.square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return centred / (std[group] + 1e-6)


def group_centred(rewards: PerSequence, group_ids: IntPerSequence) -> PerSequence:
    """Dr. GRPO: R − group mean (arXiv 2503.20783). A group of one gets 0."""
    group, size = _groups(group_ids)
    mean = rewards.new_zeros(size.shape).index_add(0, group, rewards) / size
    return torch.where(zero_variance_groups(rewards, group_ids), 0.0, rewards - mean[group])


def leave_one_out(rewards: PerSequence, group_ids: IntPerSequence) -> PerSequence:
    """RLOO: R − mean reward of the group's other rollouts = n/(n−1)·(R − group mean) (arXiv 2402.14740).

    A group of one gets 0, as in every estimator of this module (verl returns R).
    """
    group, size = _groups(group_ids)
    return group_centred(rewards, group_ids) * (size / (size - 1).clamp(min=1)).to(rewards.dtype)[group]


def zero_variance_groups(outcomes: PerSequence, group_ids: IntPerSequence) -> Bool[Tensor, " s"]:
    """True at every rollout whose group has equal outcomes throughout, so that its advantages carry no signal.

    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) leaves such groups out. To do so, set the weights of their
    tokens to 0 before counting ``totals``. A group of one is always such a group.
    """
    group, size = _groups(group_ids)
    blank = outcomes.new_zeros(size.shape)
    high = blank.scatter_reduce(0, group, outcomes, "amax", include_self=False)
    low = blank.scatter_reduce(0, group, outcomes, "amin", include_self=False)
    return (high == low)[group]


def whiten(x: Float[Tensor, " k"], weights: Float[Tensor, " k"], *, total: Total = _alone) -> Float[Tensor, " k"]:
    """(x − mean) / √(var + 1e-8) with weighted mean and unbiased variance; 0 where the weight is 0.

    An entry of weight w counts as w entries. So whitening the advantages of sequences, each weighted by the Σw of its
    tokens, gives the same as whitening their tokens with the token weights. Where all weights together are at most 1,
    the variance is the biased one.

    Args:
        x: all entries that this process holds of the batch, not those of one micro-batch: the mean and the variance
            are taken over them.
        weights: how often each entry counts, 0 or more.
        total: sums a tensor over the processes that hold the batch's other entries. The default suits one process.
    """
    centred, variance = _moments(x, weights, total)
    return centred * torch.rsqrt(variance + 1e-8)


def explained_variance(
    values: Float[Tensor, " k"], returns: Float[Tensor, " k"], weights: Float[Tensor, " k"], *, total: Total = _alone
) -> Scalar:
    """1 − Var(R − V) / Var(R) with weighted variances, and 0 where all returns are equal.

    At 1 the critic predicts every return; at 0 it is no better than predicting their mean.

    Args:
        values: the critic's predictions V.
        returns: the returns R.
        weights: how often each entry counts, 0 or more.
        total: as in ``whiten``.
    """
    _, left = _moments(returns - values, weights, total)
    _, variance = _moments(returns, weights, total)
    return torch.where(variance > 0, 1 - left / variance, torch.zeros_like(variance))


def _moments(x: Float[Tensor, " k"], weights: Float[Tensor, " k"], total: Total) -> tuple[Float[Tensor, " k"], Scalar]:
    """``x`` − weighted mean (0 where the weight is 0), and the unbiased weighted variance."""
    used = weights > 0
    x = torch.where(used, x, 0.0)
    weight, summed = total(torch.stack([weights.sum(), (weights * x).sum()]))
    count = torch.where(weight > 0, weight, 1.0)
    centred = torch.where(used, x - summed / count, 0.0)
    squares = total((weights * centred.square()).sum())
    return centred, squares / torch.where(weight > 1, weight - 1, count)


def gae(
    rewards: PerToken,
    values: PerToken,
    trained: Bool[Tensor, " t"],
    sequence_ids: IntPerToken,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[PerToken, PerToken]:
    """Generalised advantage estimation (GAE) over the trained tokens of each sequence (arXiv 1506.02438, equation 16).

    A_i = δ_i + γλ·A_j and δ_i = r_i + γ·V_j − V_i, where j is the next trained token of the same sequence. Without
    such a token, A_j and V_j are 0. Untrained tokens are not actions: they are not discounted, their values are not
    read, and their rewards go to the trained token before them. So the reward of a completion that the junior ended is
    not lost.

    Args:
        rewards: reward of each token, as ``token_rewards`` makes them.
        values: the critic's value of each token.
        trained: True at the tokens that are trained on, those of positive weight.
        sequence_ids: the sequence of each token, in ascending order.
        gamma: discount γ from one trained token to the next.
        lam: GAE's λ.

    Returns:
        advantages: not whitened; 0 at untrained tokens.
        returns: advantage plus value, so the value itself at untrained tokens.
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


def _reverse_scan(x: PerToken, decay: PerToken) -> PerToken:
    """y_i = x_i + decay_i·y_{i+1}, in log₂ t vectorised steps (Hillis and Steele 1986) instead of t."""
    step = 1
    while step < x.shape[0]:
        ahead = torch.nn.functional.pad(x[step:], (0, step))
        decay_ahead = torch.nn.functional.pad(decay[step:], (0, step))
        x, decay, step = x + decay * ahead, decay * decay_ahead, 2 * step
    return x


def _groups(group_ids: IntPerSequence) -> tuple[IntPerSequence, Int64[Tensor, " g"]]:
    """The group of each rollout as an index 0 … g−1, and the size of each group."""
    _, group, size = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return group, size
