"""Packs rollouts into batches: sequences end to end without padding, in micro-batches bounded by a token budget."""

import heapq
import math
from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np
import torch

from tandemrl.types import Author, Batch, Rollout, WordEnds, taken_over

ATTENTION_LENGTH = 12_288
"""A sequence of this many tokens costs as much for causal attention as for linear layers: 12·hidden where a layer has
12·hidden² parameters (24·hidden² against 2·length·hidden FLOPs per token); here for hidden 1,024."""
SLACK = 1.02
"""How many bins to use per bin's worth of tokens, which has an effect from about 25 bins on. Without any spare room,
many groups would have to be split."""


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
    lengths: Sequence[int], budget: int, *, parts: int = 1, groups: Sequence[int] | None = None
) -> list[list[int]]:
    """Split sequences into few micro-batches of at most ``budget`` tokens, for ``parts`` processes.

    It takes the fewest bins into which `_deal` puts the groups or, if it cannot, single sequences (then as few as
    first-fit decreasing, at most 11/9 of the optimum plus one, Johnson 1973). The function is pure and deterministic,
    so every process finds the same split.

    Args:
        lengths: how many tokens each sequence has.
        budget: how many tokens a micro-batch may have.
        parts: the number of processes. The number of bins is a multiple of it, and bin i belongs to process i % parts.
            Bins are sorted by falling cost, so that the ``parts`` bins of one round cost about the same.
        groups: the group of each sequence. Sequences of a group share a prompt, which is computed once per bin
            (``share_contexts``), and are kept together where that fits. None puts every sequence in a group of its own.

    Returns:
        Indices into ``lengths``, each exactly once; ascending within a bin. A bin is empty only where there are fewer
        sequences than bins.

    Raises:
        ValueError: a sequence is longer than the budget.

    Examples:
        >>> micro_batches([5, 3, 2, 4], budget=8)
        [[0, 2], [1, 3]]
        >>> micro_batches([2, 2, 2, 2], budget=4, parts=2, groups=[0, 1, 0, 1])
        [[0, 2], [1, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if order and lengths[order[0]] > budget:
        raise ValueError(
            f"sequence {order[0]} has {lengths[order[0]]} tokens, more than the micro-batch budget of {budget}; set "
            f"train.tokens_per_micro_batch to {lengths[order[0]]} or more"
        )
    members: dict[int, list[int]] = {}
    for i in order:
        members.setdefault(i if groups is None else groups[i], []).append(i)
    bins = sum(lengths) / budget
    count = max(math.ceil(bins), round(SLACK * bins))
    while True:
        count += -count % parts
        for pieces, even in product((list(members.values()), [[i] for i in order]), (True, False)):
            if (deal := _deal(pieces, count, lengths, budget, even=even)) is not None:
                return sorted(map(sorted, deal), key=lambda bin_: (-_cost(bin_, lengths), bin_))
        count += parts


# --------------------------------------------------------------------------------------------------------------------


def _deal(
    pieces: Iterable[list[int]], count: int, lengths: Sequence[int], budget: int, *, even: bool
) -> list[list[int]] | None:
    """Put pieces into ``count`` bins, the costliest first, or return None if a sequence fits nowhere.

    A piece goes into the bin of lowest cost (``even``), or else the first, of those with room. A piece that fits
    nowhere is halved, as are some if there are fewer than bins.
    """
    bins, room, load = [list[int]() for _ in range(count)], [budget] * count, [0.0] * count
    left = [(-_cost(piece, lengths), piece) for piece in pieces]
    heapq.heapify(left)
    while left:
        cost, piece = heapq.heappop(left)
        size, empty = sum(lengths[i] for i in piece), bins.count([])
        # Once no more pieces are left than bins are empty, each gets one of these.
        fitting = [b for b in range(count) if room[b] >= size and (len(left) >= empty or not bins[b])]
        if len(piece) > 1 and (not fitting or len(left) + 1 < empty):
            for half in (piece[::2], piece[1::2]):
                heapq.heappush(left, (-_cost(half, lengths), half))
        elif fitting:
            chosen = min(fitting, key=load.__getitem__) if even else fitting[0]
            bins[chosen] += piece
            room[chosen] -= size
            load[chosen] -= cost
        else:
            return None
    return bins


def _cost(piece: Sequence[int], lengths: Sequence[int]) -> float:
    return sum((attention_cost(lengths[i]) for i in piece), 0.0)
