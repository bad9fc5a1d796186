"""What the junior, and the senior itself, make of the senior's texts: cross-entropies and the KL between the two."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandemrl.data.rows import Prompt
from tandemrl.evals.measures import EvalError, Sample, authors_of
from tandemrl.models.attention import PackedLayout, share_contexts
from tandemrl.models.batching import micro_batches, pack
from tandemrl.models.forward import hidden_states, token_logprobs
from tandemrl.models.head import LOGITS_PER_CHUNK
from tandemrl.types import Author, Batch, Rollout

UNLIKELY = 0.01
"""A token to which the junior gives less than this probability counts as unlikely."""


class Divergence(NamedTuple):
    """Per token of some texts, nats: surprisal -log senior(token), cross_entropy -log junior(token), and
    KL(senior || junior) of the distributions that the token comes from, over the whole vocabulary."""

    surprisal: Float[Tensor, " t"]
    cross_entropy: Float[Tensor, " t"]
    kl: Float[Tensor, " t"]


def read_legibility(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    junior: PreTrainedModel,
    *,
    context: int | None = None,
    tokens_per_micro_batch: int = 8192,
    progress: Callable[[int], None] | None = None,
) -> list[Sample]:
    """The junior's mean cross-entropy on each text, in nats per token, given the chat prefix.

    The EOS that ends a text is not part of it. Texts that are empty or, with their prompt, longer than ``context`` (the
    profile's) or than the junior's own context get None. ``progress(k)`` is called with the number of further texts.
    """
    read = list(samples)
    texts = readable(samples, prompts, longest(context, junior))
    for indices, batch in _batches(texts, tokens_per_micro_batch, junior):
        with torch.no_grad():
            logprobs, _ = token_logprobs(junior, batch, select=batch.author >= 0)
        for i, values in zip(indices, _by_text(-logprobs, batch), strict=True):
            read[i] = read[i]._replace(cross_entropy=_mean(values))
        if progress is not None:
            progress(len(indices))
    return read


def read_drift(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    senior: PreTrainedModel,
    junior: PreTrainedModel,
    *,
    context: int | None = None,
    tokens_per_micro_batch: int = 8192,
    progress: Callable[[int], None] | None = None,
) -> list[Sample]:
    """How far each text, and the senior at each of its tokens, is from the junior; both at temperature 1.

    Texts are read as in ``read_legibility``, which gives the same ``cross_entropy``.
    """
    read = list(samples)
    texts = readable(samples, prompts, longest(context, senior, junior))
    for indices, batch in _batches(texts, tokens_per_micro_batch, senior):
        tokens = divergence(senior, junior, batch, select=batch.author >= 0)
        columns = (_by_text(channel, batch) for channel in tokens)
        for i, (surprisal, cross_entropy, kl) in zip(indices, zip(*columns, strict=True), strict=True):
            read[i] = read[i]._replace(
                surprisal=_mean(surprisal),
                cross_entropy=_mean(cross_entropy),
                kl=_mean(kl),
                unlikely_rate=float(np.mean(cross_entropy > -math.log(UNLIKELY))),
            )
        if progress is not None:
            progress(len(indices))
    return read


@torch.no_grad()
def divergence(
    senior: PreTrainedModel, junior: PreTrainedModel, batch: Batch, *, select: Bool[Tensor, " t"]
) -> Divergence:
    """The divergence at the selected tokens, 0.0 at the others and at the first of a sequence; temperature 1.

    Both models on one device. Logits live in chunks only: [t, v] is never materialised. Where the models have different
    numbers of logits, all is over the ids that both have.
    """
    index = (select & (batch.positions > 0)).nonzero().squeeze(1)
    device = batch.tokens.device
    spans, *indices = share_contexts(batch)
    kept, where = (torch.from_numpy(each).to(device) for each in indices)
    layout = PackedLayout(spans, device)
    prefixes = [  # the shift: the logits at i - 1 predict token i
        hidden_states(model, batch.tokens[kept], batch.positions[kept], layout).index_select(0, where[index - 1])
        for model in (senior, junior)
    ]
    heads = [model.get_output_embeddings() for model in (senior, junior)]
    vocabulary = min(head.weight.shape[0] for head in heads)
    out = Divergence(*torch.zeros(3, len(batch.tokens), device=device))
    for rows in torch.arange(len(index), device=device).split(max(1, LOGITS_PER_CHUNK // (2 * vocabulary))):
        tokens = index[rows]
        own, other = (_log_softmax(p[rows], head, vocabulary) for p, head in zip(prefixes, heads, strict=True))
        for channel, logprobs in ((out.surprisal, own), (out.cross_entropy, other)):
            channel[tokens] = -logprobs.gather(1, batch.tokens[tokens, None]).squeeze(1)
        out.kl[tokens] = (own.exp() * (own - other)).sum(-1).clamp(min=0.0)  # below 0 by rounding only
    return out


def longest(context: int | None, *models: PreTrainedModel) -> float:
    """Tokens that a profile and the models have room for, prompt and text together."""
    own = [getattr(model.config, "max_position_embeddings", None) or math.inf for model in models]
    return min(context or math.inf, *own)


def readable(samples: Sequence[Sample], prompts: Sequence[Prompt], longest: float) -> dict[int, Rollout]:
    """The texts to be read, behind their prompts and without the EOS that ends them, by the sample's position. What the
    world says between turns is context, like the prompt."""
    texts = {}
    for i, sample in enumerate(samples):
        prompt = prompts[sample.problem].tokens
        text = sample.tokens[:-1] if sample.stop_reason == "eos" else sample.tokens
        if sample.author is None:
            raise EvalError(f"sample of {sample.example_id}: it has no authors, so there is nothing of theirs to read")
        author = authors_of(sample.author)[: len(text)]
        if (author >= 0).any() and len(prompt) + len(text) <= longest:
            texts[i] = Rollout(
                example_id=sample.example_id,
                group=sample.problem,
                index=sample.sample,
                key=sample.key,
                tokens=np.array([*prompt, *text], dtype=np.int64),
                author=np.concatenate([np.full(len(prompt), Author.CONTEXT), author]),
                behaviour_logprobs=np.zeros(len(prompt) + len(text), dtype=np.float32),
                reward=0.0,
                reward_parts={},
            )
    return texts


# --------------------------------------------------------------------------------------------------------------------


def _batches(
    texts: dict[int, Rollout], tokens_per_micro_batch: int, model: PreTrainedModel
) -> Iterator[tuple[list[int], Batch]]:
    """Micro-batches of texts with the keys they have in ``texts``."""
    keys = list(texts)
    lengths = [len(texts[key].tokens) for key in keys]
    device = next(model.parameters()).device
    for rows in micro_batches(lengths, max(tokens_per_micro_batch, *lengths, 1)):
        indices = [keys[row] for row in rows]
        yield indices, pack([texts[i] for i in indices], device)


def _by_text(channel: Float[Tensor, " t"], batch: Batch) -> list[np.ndarray]:
    """The values of the response tokens of each sequence."""
    values, written = channel.cpu(), (batch.author >= 0).cpu()
    lengths: Int64[Tensor, " s"] = batch.lengths.cpu()
    split = zip(values.split(lengths.tolist()), written.split(lengths.tolist()), strict=True)
    return [sequence[mask].numpy() for sequence, mask in split]


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values, dtype=np.float64))


def _log_softmax(hidden: Float[Tensor, "c h"], head: nn.Linear, vocabulary: int) -> Float[Tensor, "c v"]:
    bias = None if head.bias is None else head.bias[:vocabulary]
    return F.linear(hidden, head.weight[:vocabulary], bias).float().log_softmax(-1)
