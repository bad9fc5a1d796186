"""Rollouts to packed batches: sequences end to end, no padding, micro-batches bounded by a token budget."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from tandemrl.types import Author, Batch, Rollout


def pack(rollouts: Sequence[Rollout], advantages: Float[Tensor, " s"], device: torch.device | str = "cpu") -> Batch:
    """Lay rollouts end to end; entry i of every channel still describes token i.

    Args:
        advantages: one per rollout; repeated on its response tokens, 0 on context.

    Raises:
        ValueError: no rollouts, an empty one, or another number of advantages.
    """
    if len(rollouts) == 0 or len(rollouts) != len(advantages):
        raise ValueError(
            f"pack needs at least one rollout and one advantage each, got {len(rollouts)}, {len(advantages)}"
        )
    for rollout in rollouts:
        if len(rollout.tokens) == 0:
            raise ValueError(f"rollout {rollout.example_id}/{rollout.index} has no tokens")
    lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts])
    sequence_ids = torch.repeat_interleave(torch.arange(len(rollouts)), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    author = torch.from_numpy(np.concatenate([rollout.author for rollout in rollouts]))
    per_token = advantages.detach().cpu()[sequence_ids]
    return Batch(
        tokens=torch.from_numpy(np.concatenate([rollout.tokens for rollout in rollouts])).to(device),
        positions=(torch.arange(len(sequence_ids)) - starts[sequence_ids]).to(device),
        sequence_ids=sequence_ids.to(device),
        author=author.to(device),
        advantages=torch.where(author >= 0, per_token, torch.zeros_like(per_token)).to(device),
        behaviour_logprobs=torch.from_numpy(np.concatenate([r.behaviour_logprobs for r in rollouts])).to(device),
        lengths=lengths.to(device),
    )


def pack_tokens(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Batch:
    """Lay plain token sequences end to end for scoring: all context, no advantages."""
    rollouts = [
        Rollout(
            example_id=str(i),
            group=0,
            index=i,
            seed=0,
            tokens=np.asarray(tokens),
            author=np.full(len(tokens), Author.CONTEXT),
            behaviour_logprobs=np.zeros(len(tokens)),
            reward=0.0,
            reward_parts={},
        )
        for i, tokens in enumerate(sequences)
    ]
    return pack(rollouts, torch.zeros(len(rollouts)), device)


def unpack(channel: Shaped[Tensor, " t"], lengths: Int64[Tensor, " s"]) -> list[Tensor]:
    """The sequences of a packed channel, in order; views, not copies.

    Raises:
        ValueError: the lengths do not add up to the channel.
    """
    sizes = lengths.tolist()
    if sum(sizes) != len(channel):
        raise ValueError(f"lengths add up to {sum(sizes)}, the channel has {len(channel)} entries")
    return list(torch.split(channel, sizes))


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Split sequences into few micro-batches of at most ``budget`` tokens each, of about equal size.

    First-fit decreasing chooses how many bins (at most 11/9 of the optimum plus one, Johnson 1973); the sequences are
    then dealt again, longest first, to the emptiest bin, and that deal is used when it fits. Deterministic.

    Returns:
        Indices into ``lengths``, each exactly once; ascending within a micro-batch.

    Raises:
        ValueError: one sequence alone is longer than the budget.

    Example:
        >>> micro_batches([5, 3, 2, 4], budget=8)
        [[0, 2], [1, 3]]
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if longest_first and lengths[longest_first[0]] > budget:
        worst = longest_first[0]
        raise ValueError(
            f"sequence {worst} has {lengths[worst]} tokens, more than the micro-batch budget of {budget}; set "
            f"train.tokens_per_micro_batch to {lengths[worst]} or more"
        )
    fitted = _first_fit(longest_first, lengths, budget)
    balanced = _emptiest_first(longest_first, lengths, len(fitted))
    fits = all(sum(lengths[i] for i in bin_) <= budget for bin_ in balanced)
    return sorted(sorted(bin_) for bin_ in (balanced if fits else fitted))


# --------------------------------------------------------------------------------------------------------------------


def _first_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        target = next((b for b, left in enumerate(room) if left >= lengths[i]), len(bins))
        if target == len(bins):
            bins.append([])
            room.append(budget)
        bins[target].append(i)
        room[target] -= lengths[i]
    return bins


def _emptiest_first(order: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    for i in order:
        target = totals.index(min(totals))
        bins[target].append(i)
        totals[target] += lengths[i]
    return bins
