"""The ends of words as entries of the loss: what a senior chose where the junior took over (``Strategy.starts``).

There, the text has the likelihood P·q: P is the probability that the senior proposes any token that begins a word, and
q the junior's of the token that stands instead. P depends on the senior's weights, so the gradient has a term ∇log P.
It goes through the whole loss chain as a token of the senior does: with a ratio, a clip and an importance weight of
its own, the rollout's advantage and the weight 1. It counts in Σw, but is no token of the response
(``normalise_by="response"``).
"""

from dataclasses import replace

import torch
from jaxtyping import Shaped
from torch import Tensor

from tandemrl.types import Author, Batch


def with_word_ends(
    batch: Batch, *channels: tuple[Shaped[Tensor, " t"], Shaped[Tensor, " e"]]
) -> tuple[Batch, list[Shaped[Tensor, " n"]]]:
    """A batch whose ``word_ends`` are entries behind its tokens, for ``policy_loss`` and ``kl_penalty``.

    The entries have the author CONTEXT, since they are no tokens, and the advantage of the token at their place. The
    batch is no longer sorted by sequence. A batch without ``word_ends`` is returned as it is.

    Args:
        channels: further channels, each of the tokens and of the ends, to be joined in the same way.
    """
    ends = batch.word_ends
    if ends is None:
        return batch, [tokens for tokens, _ in channels]

    def at(channel: Tensor) -> Tensor:
        return torch.cat([channel, channel[ends.places]])

    def joined(tokens: Tensor | None, own: Tensor | None) -> Tensor | None:
        return None if tokens is None or own is None else torch.cat([tokens, own])

    none = torch.zeros_like(ends.behaviour_logprobs)
    extended = replace(
        batch,
        tokens=at(batch.tokens),
        positions=at(batch.positions),
        sequence_ids=at(batch.sequence_ids),
        author=torch.cat([batch.author, torch.full_like(ends.places, Author.CONTEXT, dtype=torch.int8)]),
        advantages=at(batch.advantages),
        behaviour_logprobs=torch.cat([batch.behaviour_logprobs, ends.behaviour_logprobs]),
        old_logprobs=joined(batch.old_logprobs, ends.old_logprobs),
        ref_logprobs=joined(batch.ref_logprobs, ends.ref_logprobs),
        junior_logprobs=joined(batch.junior_logprobs, none),
        old_values=None,
        returns=None,
        taken_over=None,
        word_ends=None,
    )
    return extended, [torch.cat(each) for each in channels]
