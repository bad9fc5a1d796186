"""Packs rollouts into batches: sequences end to end without padding, in micro-batches bounded by a token budget."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from tandemrl.types import Author, Batch, Rollout, WordEnds, taken_over

Cost = int | float
"""The weight of a sequence: its tokens, or what its tokens cost."""
ATTENTION_LENGTH = 12_288
"""A sequence of this many tokens costs as much for causal attention as for linear layers: 12·hidden where a layer has
12·hidden² parameters (24·hidden² against 2·length·hidden FLOPs per token); here for hidden 1,024."""
SLACK = 1.02
"""How many bins to use per bin's worth of tokens, which has an effect from about 25 bins on. Without any spare room,
every group would have to be split."""


def pack(rollouts: Sequence[Rollout], device: torch.device | str = "cpu") -> Batch:
    """Lay rollouts end to end in one batch. Its advantages are 0 until the trainer fills them.

    Raises:
        ValueError: there are no rollouts, one of them has no tokens, or they are of different strategies.
    """
    if not rollouts:
        raise ValueError("pack needs at least one rollout")
    for rollout in rollouts:
        if len(rollout.tokens) == 0:
            raise ValueError(f"rollout {rollout.example_id}/{rollout.index} has no tokens")
    lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts])
    told = [r.handover_logprobs for r in rollouts if r.handover_logprobs is not None]
    if told and len(told) < len(rollouts):
        raise ValueError("rollouts with and without handover_logprobs are not of one strategy; pack them apart")
    after = ends = None
    if told:
        after = torch.from_numpy(np.concatenate([taken_over(r.author) for r in rollouts])).to(device)
        junior = torch.from_numpy(np.concatenate([r.author for r in rollouts]) == Author.JUNIOR).to(device)
        places = (after & junior).nonzero().squeeze(1)
        ends = WordEnds(places, torch.from_numpy(np.concatenate(told)).to(device)[places])
    sequence_ids = torch.repeat_interleave(torch.arange(len(rollouts)), lengths)
    starts = torch.cumsum(lengths, 0) - lengths
    return Batch(
        tokens=torch.from_numpy(np.concatenate([rollout.tokens for rollout in rollouts])).to(device),
        positions=(torch.arange(len(sequence_ids)) - starts[sequence_ids]).to(device),
        sequence_ids=sequence_ids.to(device),
        author=torch.from_numpy(np.concatenate([rollout.author for rollout in rollouts])).to(device),
        advantages=torch.zeros(len(sequence_ids), device=device),
        behaviour_logprobs=torch.from_numpy(np.concatenate([r.behaviour_logprobs for r in rollouts])).to(device),
        lengths=lengths.to(device),
        taken_over=after,
        word_ends=ends,
    )


def pack_tokens(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Batch:
    """Lay plain token sequences end to end in one batch for scoring. All of their tokens are context."""
    rollouts = [
        Rollout(str(i), 0, i, 0, np.asarray(tokens), np.full(len(tokens), Author.CONTEXT), np.zeros(len(tokens)), 0.0)
        for i, tokens in enumerate(sequences)
    ]
    return pack(rollouts, device)


def attention_cost(length: int) -> float:
    """The cost of one sequence in a training step, in units of what the linear layers cost per token."""
    return length + length * length / ATTENTION_LENGTH


def micro_batches(
    lengths: Sequence[int],
    budget: int,
    *,
    parts: int = 1,
    cost: Callable[[int], float] = attention_cost,
    groups: Sequence[int] | None = None,
) -> list[list[int]]:
    """Split sequences into few micro-batches of at most ``budget`` tokens, for ``parts`` processes.

    It takes the fewest bins for which one of these deals fits the budget, tried in this order: largest differencing
    (Karmarkar and Karp 1982) of whole groups, then of ever smaller pieces of groups, down to single sequences, then
    first-fit decreasing (at most 11/9 of the optimum plus one, Johnson 1973). The function is pure and deterministic,
    so every process finds the same split.

    Args:
        lengths: how many tokens each sequence has.
        budget: how many tokens a micro-batch may have.
        parts: the number of processes. The number of bins is a multiple of it, and bin i belongs to process i % parts.
            Bins are sorted by falling cost, so that the ``parts`` bins of one round cost about the same.
        cost: gives the cost of a sequence from its length, in any unit.
        groups: the group of each sequence. Sequences of a group share a prompt, which is computed once per bin
            (``share_contexts``), and are kept together where that fits. None puts every sequence in a group of its own.

    Returns:
        Indices into ``lengths``, each exactly once; ascending within a bin. A bin is empty only where there are fewer
        sequences than bins.

    Raises:
        ValueError: a sequence is longer than the budget or empty, or ``groups`` has not one entry per sequence.

    Examples:
        >>> micro_batches([5, 3, 2, 4], budget=8)
        [[0, 2], [1, 3]]
        >>> micro_batches([2, 2, 2, 2], budget=4, parts=2, groups=[0, 1, 0, 1])
        [[0, 2], [1, 3]]
    """
    groups = range(len(lengths)) if groups is None else groups
    if len(groups) != len(lengths):
        raise ValueError(f"{len(lengths)} sequences but {len(groups)} group numbers")
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if longest_first and lengths[longest_first[0]] > budget:
        worst = longest_first[0]
        raise ValueError(
            f"sequence {worst} has {lengths[worst]} tokens, more than the micro-batch budget of {budget}; set "
            f"train.tokens_per_micro_batch to {lengths[worst]} or more"
        )
    if longest_first and lengths[longest_first[-1]] < 1:
        raise ValueError(f"sequence {longest_first[-1]} has no tokens")
    costs = [cost(length) for length in lengths]
    bins = sum(lengths) / budget
    count = max(math.ceil(bins), round(SLACK * bins))
    while True:
        count += -count % parts
        for deal in _deals(longest_first, count, lengths, costs, groups, budget):
            return sorted(deal, key=lambda bin_: (-_sum(costs, bin_), bin_))
        count += parts


# --------------------------------------------------------------------------------------------------------------------


def _deals(
    order: Sequence[int], count: int, lengths: Sequence[int], costs: Sequence[Cost], groups: Sequence[int], budget: int
) -> Iterator[list[list[int]]]:
    """Yield deals into ``count`` bins that fit the budget, in order of preference."""
    members: dict[int, list[int]] = {}
    for i in order:
        members.setdefault(groups[i], []).append(i)
    for limit in (budget, budget / 2, budget / 4, 0):  # groups as wholes, in ever smaller pieces, single sequences
        pieces = [piece for group in members.values() for piece in _first_fit(group, lengths, limit)]
        if len(pieces) < min(count, len(lengths)):
            continue  # some bin would be empty without need
        for weights in (costs, lengths):  # equal costs are not equal tokens: the budget may ask for these
            deal = _largest_differencing(pieces, [_sum(weights, piece) for piece in pieces], count)
            if all(_sum(lengths, bin_) <= budget for bin_ in deal):
                yield deal
    deal = _first_fit(order, lengths, budget)
    if len(deal) <= count:
        deal += [[] for _ in range(count - len(deal))]
        for bin_ in deal:
            fullest = max(deal, key=len)
            if not bin_ and len(fullest) > 1:
                bin_.append(fullest.pop())
        yield [sorted(bin_) for bin_ in deal]


def _first_fit(order: Sequence[int], lengths: Sequence[int], budget: Cost) -> list[list[int]]:
    """Put each sequence into the first bin with room. One that is longer than the budget gets a bin for itself."""
    bins: list[list[int]] = []
    room: list[Cost] = []
    for i in order:
        target = next((b for b, left in enumerate(room) if left >= lengths[i]), len(bins))
        if target == len(bins):
            bins.append([])
            room.append(budget)
        bins[target].append(i)
        room[target] -= lengths[i]
    return bins


def _largest_differencing(pieces: Sequence[list[int]], weights: Sequence[Cost], count: int) -> list[list[int]]:
    """Deal pieces into ``count`` bins of about equal weight.

    A partial deal is a list of bins, heaviest first. The two deals whose bins differ most are merged, the heaviest bin
    of one with the lightest of the other, until one is left (Karmarkar and Karp 1982, for more than two bins).
    """
    heap = [(-weight, n, [(weight, piece)]) for n, (weight, piece) in enumerate(zip(weights, pieces, strict=True))]
    heapq.heapify(heap)
    for n in range(len(pieces), 2 * len(pieces) - 1):
        (*_, a), (*_, b) = heapq.heappop(heap), heapq.heappop(heap)
        meets = [b[count - 1 - i] if count - 1 - i < len(b) else (0, []) for i in range(len(a))]
        merged = [(x + y, p + q) for (x, p), (y, q) in zip(a, meets, strict=True)] + b[: count - len(a)]
        merged.sort(key=lambda bin_: -bin_[0])
        spread = merged[0][0] - (merged[-1][0] if len(merged) == count else 0)
        heapq.heappush(heap, (-spread, n, merged))
    bins = [sorted(piece) for *_, deal in heap for _, piece in deal]
    return bins + [[] for _ in range(count - len(bins))]


def _sum(values: Sequence[Cost], indices: Sequence[int]) -> Cost:
    return sum(values[i] for i in indices)
