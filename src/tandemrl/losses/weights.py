"""Which entries of the loss are trained on, and how much each counts.

An entry is a token, weighted by who wrote it, or the end of a word: what a senior chose where the junior took over
(``Strategy.starts``). There, the text has the likelihood P·q: P is the probability that the senior proposes any token
that begins a word, and q the junior's of the token that stands instead. P depends on the senior's weights, so the
gradient has a term ∇log P. It goes through the whole loss chain as a token of the senior does: with a ratio, a clip and
an importance weight of its own, the rollout's advantage and the weight 1. It counts in Σw, but is no token of the
response (``normalise_by="response"``). ``loss.word_ends=false`` leaves these entries out.

Two kinds of rollouts are apart (``training.experience.make_experience``). Without a score, or left out by
``filter_zero_variance``, a rollout is not used: weight 0. One whose advantages are 0, where no other term needs it,
counts in Σw but is not computed. ``loss.junior_weight`` is 0 by default.

The losses treat senior and junior differently in one other place: ``policy_loss`` adds the λ_jun term over the junior's
tokens if ``junior_kl_coef`` is not 0. Everywhere else they use ``author`` only to tell responses from context
(``reduce``, ``totals``, ``token_rewards``).
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int8, Shaped
from torch import Tensor

from tandemrl.types import Author, Batch, PerSequence, PerToken


def token_weights(author: Int8[Tensor, " t"], *, junior_weight: float) -> PerToken:
    """The loss weight of every token: 0 for context, ``junior_weight`` for the junior's, 1 for the senior's.

    ``junior_weight=0`` is tandem GRPO (arXiv 2606.28166); ``junior_weight=1`` is plain GRPO on every response token.

    Examples:
        >>> token_weights(torch.tensor([-1, 0, 1], dtype=torch.int8), junior_weight=0.25).tolist()
        [0.0, 0.25, 1.0]
    """
    senior = (author == Author.SENIOR).to(torch.float32)
    junior = (author == Author.JUNIOR).to(torch.float32)
    return senior + junior_weight * junior


def sequence_weights(
    senior: PerSequence, junior: PerSequence, ends: PerSequence, *, junior_weight: float
) -> PerSequence:
    """Σw of sequences: the sum of ``token_weights`` and of the ends of words.

    Args:
        senior, junior: how many tokens of each sequence they wrote.
        ends: how many ends of words each sequence has.
    """
    return senior + ends + junior_weight * junior


def with_word_ends(
    batch: Batch, weights: PerToken, *channels: tuple[Shaped[Tensor, " t"], Shaped[Tensor, " e"]]
) -> tuple[Batch, Float[Tensor, " n"], list[Shaped[Tensor, " n"]]]:
    """A batch whose ``word_ends`` are entries behind its tokens, for ``policy_loss`` and ``kl_penalty``.

    The entries have the author CONTEXT, since they are no tokens, and the advantage of the token at their place. The
    batch is no longer sorted by sequence. A batch without ``word_ends`` is returned as it is.

    Args:
        weights: those of the tokens. The result has those of all entries.
        channels: further channels, each of the tokens and of the ends, to be joined in the same way.
    """
    ends = batch.word_ends
    if ends is None:
        return batch, weights, [tokens for tokens, _ in channels]

    def at(channel: Tensor) -> Tensor:
        return torch.cat([channel, channel[ends.places]])

    def joined(tokens: Tensor | None, own: Tensor | None) -> Tensor | None:
        return None if tokens is None or own is None else torch.cat([tokens, own])

    none = torch.zeros_like(ends.behaviour_logprobs)
    own: dict[str, Any] = dict.fromkeys(("old_values", "returns", "taken_over", "word_ends"))
    own |= {name: at(getattr(batch, name)) for name in ("tokens", "positions", "sequence_ids", "advantages")}
    extended = replace(
        batch,
        **own,
        author=torch.cat([batch.author, torch.full_like(ends.places, Author.CONTEXT, dtype=torch.int8)]),
        behaviour_logprobs=torch.cat([batch.behaviour_logprobs, ends.behaviour_logprobs]),
        old_logprobs=joined(batch.old_logprobs, ends.old_logprobs),
        ref_logprobs=joined(batch.ref_logprobs, ends.ref_logprobs),
        junior_logprobs=joined(batch.junior_logprobs, none),
    )
    return extended, torch.cat([weights, torch.ones_like(none)]), [torch.cat(each) for each in channels]
