"""Rollouts to packed batches: sequences end to end, no padding, micro-batches bounded by a token budget."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from tandemrl.types import Author, Batch, Rollout

Cost = int | float
"""Of sequences, in tokens or in what tokens cost."""
ATTENTION_LENGTH = 12_288
"""A sequence of this many tokens costs as much for causal attention as for linear layers: 12·hidden where a layer has
12·hidden² parameters (24·hidden² against 2·length·hidden FLOPs per token); here for hidden 1,024."""
SLACK = 1.02
"""Bins per bin's worth of tokens, from about 25 bins on: without any room, every group would have to be torn apart."""
MAX_IDLE = 0.03
"""Share of the processes' time that groups may cost by being kept together; more, and they are cut."""


def pack(rollouts: Sequence[Rollout], device: torch.device | str = "cpu") -> Batch:
    """Lay rollouts end to end; entry i of every channel still describes token i. Advantages are still 0.

    Raises:
        ValueError: no rollouts, or an empty one.
    """
    if not rollouts:
        raise ValueError("pack needs at least one rollout")
    for rollout in rollouts:
        if len(rollout.tokens) == 0:
            raise ValueError(f"rollout {rollout.example_id}/{rollout.index} has no tokens")
    lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts])
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
    )


def pack_tokens(sequences: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Batch:
    """Lay plain token sequences end to end for scoring: all of them are context."""
    rollouts = [
        Rollout(str(i), 0, i, 0, np.asarray(tokens), np.full(len(tokens), Author.CONTEXT), np.zeros(len(tokens)), 0.0)
        for i, tokens in enumerate(sequences)
    ]
    return pack(rollouts, device)


def attention_cost(length: int) -> float:
    """Cost of one sequence in a training step, in tokens of linear layers."""
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

    The fewest bins for which one of these deals fits the budget: largest differencing (Karmarkar and Karp 1982) of
    whole groups; of ever smaller pieces of groups, down to single sequences; first-fit decreasing (at most 11/9 of the
    optimum plus one, Johnson 1973). Pure and deterministic: every process finds the same split.

    Args:
        lengths: tokens per sequence.
        parts: the number of bins is a multiple of it; bin i belongs to process i % parts. Bins come by falling cost, so
            that the ``parts`` bins of one round cost about the same.
        cost: length of a sequence -> its cost, in any unit.
        groups: sequences with the same number share a prompt, which is computed once per bin (``share_contexts``), and
            are kept together where that fits. None: every sequence by itself.

    Returns:
        Indices into ``lengths``, each exactly once; ascending within a bin. A bin is empty only where there are fewer
        sequences than bins.

    Raises:
        ValueError: one sequence alone is longer than the budget, one is empty, or the group numbers are not as many.

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
        deals = []
        for deal in _deals(longest_first, count, lengths, costs, groups, budget):
            deals.append(sorted(deal, key=lambda bin_: (-_sum(costs, bin_), bin_)))
            if _idle(deals[-1], costs, parts) <= MAX_IDLE:
                return deals[-1]
        if deals:
            return min(deals, key=lambda deal: _idle(deal, costs, parts))
        count += parts


# --------------------------------------------------------------------------------------------------------------------


def _deals(
    order: Sequence[int],
    count: int,
    lengths: Sequence[int],
    costs: Sequence[Cost],
    groups: Sequence[int],
    budget: int,
) -> Iterator[list[list[int]]]:
    """Deals into ``count`` bins that fit the budget, in order of preference."""
    for pieces in _cuts(order, lengths, groups, budget):
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


def _cuts(
    order: Sequence[int], lengths: Sequence[int], groups: Sequence[int], budget: int
) -> Iterator[list[list[int]]]:
    """Groups as wholes, then in ever smaller pieces, at last every sequence by itself."""
    members: dict[int, list[int]] = {}
    for i in order:
        members.setdefault(groups[i], []).append(i)
    limit, pieces = float(budget), 0
    while pieces < len(lengths):
        cut = [piece for group in members.values() for piece in _first_fit(group, lengths, limit)]
        if len(cut) > pieces:
            yield cut
        limit, pieces = limit / 1.5, len(cut)


def _first_fit(order: Sequence[int], lengths: Sequence[int], budget: Cost) -> list[list[int]]:
    """Each sequence into the first bin with room; one that is longer than the budget has a bin for itself."""
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


def _idle(deal: Sequence[list[int]], costs: Sequence[Cost], parts: int) -> float:
    """Share of the time of ``parts`` processes in which one waits for another, if they meet after each round."""
    loads = [_sum(costs, bin_) for bin_ in deal]
    busy = parts * sum(max(loads[i : i + parts]) for i in range(0, len(loads), parts))
    return 1 - sum(loads) / busy if busy else 0.0


def _sum(values: Sequence[Cost], indices: Sequence[int]) -> Cost:
    return sum(values[i] for i in indices)
