"""How the junior and the senior itself read the senior's texts: their cross-entropies, the KL between the two, and how
often the junior would have drawn the senior's token."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandemrl.data.messages import Message
from tandemrl.data.rows import Prompt
from tandemrl.evals.measures import EvalError, Sample, authors_of
from tandemrl.models.attention import PackedLayout, share_contexts
from tandemrl.models.batching import micro_batches, pack
from tandemrl.models.forward import hidden_states
from tandemrl.models.head import LOGITS_PER_CHUNK
from tandemrl.models.loading import context_of
from tandemrl.models.sampling import Truncation, draw_token, kept_tokens
from tandemrl.rollout.engine import Sampling
from tandemrl.selection.draws import SAMPLING, fold_in, stream
from tandemrl.selection.words import Vocabulary
from tandemrl.types import Author, Batch, Rollout, own_turns

LOGITS_ON_CPU = 2**22
"""How many logits a CPU computes at once: larger tensors are new memory for every operation, which costs more than the
operation."""
UNLIKELY = 0.01
"""A token to which the junior gives less than this probability counts as unlikely."""


class Divergence(NamedTuple):
    """Values per token of some texts, in nats.

    They are: surprisal, which is -log senior(token); cross_entropy, which is -log junior(token); and
    KL(senior || junior) of the distributions of the token, over the whole vocabulary.
    """

    surprisal: Float[Tensor, " t"]
    cross_entropy: Float[Tensor, " t"]
    kl: Float[Tensor, " t"]


class Legibility(NamedTuple):
    """Values per token of some texts: cross_entropy, which is -log junior(token) in nats, and accepted, whether the
    junior draws the token, too."""

    cross_entropy: Float[Tensor, " t"]
    accepted: Bool[Tensor, " t"]


class TextReader(NamedTuple):
    """What a junior with a vocabulary of its own reads of a text.

    vocabulary: the junior's. turn_text: spells a turn in the senior's tokens, without special tokens. observed: the
    answers of the environment to a turn -> the junior's tokens of them, from the end of the turn to the beginning of
    the next one; None where there is no environment.
    """

    vocabulary: Vocabulary
    turn_text: Callable[[Sequence[int]], str]
    observed: Callable[[Sequence[Message]], Sequence[int]] | None = None

    def pieces(self, sample: Sample) -> list[tuple[Sequence[int], Author]]:
        """A text in the junior's tokens: what the authors wrote, and CONTEXT between their turns.

        Bytes that are no character have become U+FFFD, as in ``Sample.plain``.
        """
        if self.observed is None or sample.transcript is None or sample.author is None:
            return [(self.vocabulary.encode(sample.response.plain), Author.SENIOR)]
        answers: list[list[Message]] = []
        for message in sample.transcript["messages"]:
            if message["role"] == "assistant":
                answers.append([])
            else:
                answers[-1].append(message)
        pieces: list[tuple[Sequence[int], Author]] = []
        for i, turn in enumerate(own_turns(np.array(sample.tokens), authors_of(sample.author))):
            if i:
                pieces.append((self.observed(answers[i - 1]), Author.CONTEXT))
            pieces.append((self.vocabulary.encode(self.turn_text(turn.tolist())), Author.SENIOR))
        return pieces


def read_legibility(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    junior: PreTrainedModel,
    *,
    sampling: Sampling | None = None,
    vocabulary: int | None = None,
    reader: TextReader | None = None,
    context: int | None = None,
    tokens_per_micro_batch: int = 8192,
    progress: Callable[[int], None] | None = None,
) -> list[Sample]:
    """Measure how well the junior reads each text, after the same prompt.

    The results are the junior's mean cross-entropy in nats per token, its cross-entropy of the whole text in nats per
    byte, and the acceptance, which is the share of tokens that the junior also draws after the same prefix and from the
    same random numbers. The EOS that ends a text is not part of it. Empty texts, and texts that are longer than the
    context together with their prompt, get None.

    Args:
        sampling: the sampling that the texts were drawn with. None means that it is unknown, so that there is no
            acceptance.
        vocabulary: the junior draws among the token ids below this number, which both models can write. None means all
            of the junior's.
        reader: how the junior gets a text, if it has a vocabulary of its own. It then reads the text in its own tokens,
            after the prompt in its own chat template, and there is no acceptance.
        context: the context of the profile in tokens; the junior's own context is a limit, too.
        progress: called with the number of further texts that were read.

    Raises:
        EvalError: ``sampling`` has penalties, or it is unknown who wrote a text.
    """
    if sampling is not None and sampling.penalised:
        raise EvalError("acceptance under penalties is not known: what they count is not read; give sampling=None")
    read = list(samples)
    limit = longest(context, junior)
    texts = readable(samples, prompts, limit) if reader is None else retokenised(samples, prompts, reader, limit)
    for indices, batch in _batches(texts, tokens_per_micro_batch, junior):
        keys = None if sampling is None or reader is not None else _token_keys([texts[i] for i in indices])
        tokens = legibility(junior, batch, keys=keys, sampling=sampling or Sampling(), vocabulary=vocabulary)
        columns = (_by_text(channel, batch) for channel in tokens)
        for i, (cross_entropy, accepted) in zip(indices, zip(*columns, strict=True), strict=True):
            acceptance = None if keys is None else _mean(accepted)
            characters = read[i].response.plain.encode()
            read[i] = read[i]._replace(
                cross_entropy=_mean(cross_entropy),
                cross_entropy_per_byte=float(cross_entropy.sum(dtype=np.float64)) / max(1, len(characters)),
                acceptance=acceptance,
            )
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
    """Measure how far each text, and the senior's distribution at each of its tokens, is from the junior.

    Both models are at temperature 1. Texts are read as in ``read_legibility``, which gives the same ``cross_entropy``.
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
def legibility(
    junior: PreTrainedModel,
    batch: Batch,
    *,
    keys: Int64[Tensor, " i"] | None,
    sampling: Sampling,
    vocabulary: int | None = None,
) -> Legibility:
    """The junior's cross-entropy and draws at the authors' tokens of a batch; 0 at other tokens.

    Logits are computed in chunks, so [t, v] is never materialised.

    Args:
        keys: the keys of the draws of the authors' tokens, in order (see ``draws.fold_in``). None draws nothing.
        sampling: see ``read_legibility``.
        vocabulary: see ``read_legibility``.
    """
    index = (batch.author >= 0).nonzero().squeeze(1)
    (prefixes,) = _prefixes([junior], batch, index)
    head = junior.get_output_embeddings()
    ids = head.weight.shape[0]
    device = batch.tokens.device
    out = Legibility(torch.zeros(len(batch.tokens), device=device), torch.zeros_like(batch.tokens, dtype=torch.bool))
    plain = sampling.temperature == 1 and not sampling.truncated and (vocabulary is None or vocabulary >= ids)
    for rows in _chunks(len(index), ids, device):
        logits, tokens = _logits(prefixes[rows], head, ids), index[rows]
        written, logprobs = batch.tokens[tokens], logits.log_softmax(-1)
        out.cross_entropy[tokens] = -logprobs.gather(1, written[:, None]).squeeze(1)
        if keys is not None:
            key = keys.to(device)[rows]
            drawn = draw_token(logprobs, key) if plain else _drawn(logits[:, :vocabulary], key, sampling)
            out.accepted[tokens] = drawn == written
    return out


@torch.no_grad()
def divergence(
    senior: PreTrainedModel, junior: PreTrainedModel, batch: Batch, *, select: Bool[Tensor, " t"]
) -> Divergence:
    """The divergence at the selected tokens, at temperature 1; 0.0 at other tokens and at the first of a sequence.

    Both models must be on one device. Logits are computed in chunks, so [t, v] is never materialised. If the models
    have different numbers of logits, the distributions are over the ids that both have.
    """
    index = (select & (batch.positions > 0)).nonzero().squeeze(1)
    device = batch.tokens.device
    prefixes = _prefixes([senior, junior], batch, index)
    heads = [model.get_output_embeddings() for model in (senior, junior)]
    vocabulary = min(head.weight.shape[0] for head in heads)
    out = Divergence(*torch.zeros(3, len(batch.tokens), device=device))
    for rows in _chunks(len(index), vocabulary, device):
        tokens = index[rows]
        logits = (_logits(p[rows], head, vocabulary) for p, head in zip(prefixes, heads, strict=True))
        own, other = (each.log_softmax(-1) for each in logits)
        for channel, logprobs in ((out.surprisal, own), (out.cross_entropy, other)):
            channel[tokens] = -logprobs.gather(1, batch.tokens[tokens, None]).squeeze(1)
        out.kl[tokens] = (own.exp() * (own - other)).sum(-1).clamp(min=0.0)  # below 0 by rounding only
    return out


def longest(context: int | None, *models: PreTrainedModel) -> float:
    """How many tokens a prompt and its text may have together, by the profile's context and what the models can see."""
    return min(context or math.inf, *(context_of(model.config) for model in models))


def readable(samples: Sequence[Sample], prompts: Sequence[Prompt], longest: float) -> dict[int, Rollout]:
    """The texts to read, by the position of their sample: each after its prompt, without the EOS that ends it.

    What the environment says between turns is context, like the prompt.
    """
    texts = {}
    for i, sample in enumerate(samples):
        prompt = prompts[sample.problem].tokens
        text = sample.tokens[:-1] if sample.stop_reason == "eos" else sample.tokens
        if sample.author is None:
            raise EvalError(f"sample of {sample.example_id}: it has no authors, so there is nothing of theirs to read")
        author = authors_of(sample.author)[: len(text)]
        if (author >= 0).any() and len(prompt) + len(text) <= longest:
            texts[i] = _rollout(sample, prompt, text, author)
    return texts


def retokenised(
    samples: Sequence[Sample], prompts: Sequence[Prompt], reader: TextReader, longest: float
) -> dict[int, Rollout]:
    """The texts to read, by the position of their sample, in another vocabulary than that of their authors."""
    texts = {}
    for i, sample in enumerate(samples):
        prompt, pieces = prompts[sample.problem].junior, reader.pieces(sample)
        text = [token for tokens, _ in pieces for token in tokens]
        author = np.repeat([who for _, who in pieces], [len(tokens) for tokens, _ in pieces])
        if (author >= 0).any() and len(prompt) + len(text) <= longest:
            texts[i] = _rollout(sample, prompt, text, author)
    return texts


def _rollout(sample: Sample, prompt: Sequence[int], text: Sequence[int], author: np.ndarray) -> Rollout:
    return Rollout(
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


# --------------------------------------------------------------------------------------------------------------------


def _batches(
    texts: dict[int, Rollout], tokens_per_micro_batch: int, model: PreTrainedModel
) -> Iterator[tuple[list[int], Batch]]:
    """Yield micro-batches of texts, each with the keys that its texts have in ``texts``.

    The texts of a problem stay together where they fit, since their prompt is computed once in a micro-batch.
    """
    keys = list(texts)
    lengths = [len(texts[key].tokens) for key in keys]
    device = next(model.parameters()).device
    problems = [texts[key].group for key in keys]
    for rows in micro_batches(lengths, max(tokens_per_micro_batch, *lengths, 1), groups=problems):
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


def _prefixes(
    models: Sequence[PreTrainedModel], batch: Batch, index: Int64[Tensor, " i"]
) -> list[Float[Tensor, "i h"]]:
    """For each model, the hidden states that predict the tokens at the indices ``index``."""
    device = batch.tokens.device
    spans, *indices = share_contexts(batch)
    kept, where = (torch.from_numpy(each).to(device) for each in indices)
    layout = PackedLayout(spans, device)
    return [  # the shift: the logits at i - 1 predict token i
        hidden_states(model, batch.tokens[kept], batch.positions[kept], layout).index_select(0, where[index - 1])
        for model in models
    ]


def _chunks(count: int, vocabulary: int, device: torch.device) -> Iterator[Int64[Tensor, " c"]]:
    """The numbers 0 … ``count`` − 1 in chunks whose logits are in memory together, with some tensors of their size."""
    logits = LOGITS_ON_CPU if device.type == "cpu" else LOGITS_PER_CHUNK // 2
    yield from torch.arange(count, device=device).split(max(1, logits // vocabulary))


def _logits(hidden: Float[Tensor, "c h"], head: nn.Linear, vocabulary: int) -> Float[Tensor, "c v"]:
    bias = None if head.bias is None else head.bias[:vocabulary]
    return F.linear(hidden, head.weight[:vocabulary], bias).float()


def _token_keys(texts: Sequence[Rollout]) -> Int64[Tensor, " i"]:
    """The keys of the draws of all own tokens, text by text.

    Counters continue from turn to turn, and tokens of the environment have none.
    """
    own = [int((text.author >= 0).sum()) for text in texts]
    streams = stream(torch.tensor([text.key for text in texts], dtype=torch.int64), SAMPLING)
    return fold_in(streams.repeat_interleave(torch.tensor(own)), torch.cat([torch.arange(count) for count in own]))


def _drawn(logits: Float[Tensor, "c v"], keys: Int64[Tensor, " c"], sampling: Sampling) -> Int64[Tensor, " c"]:
    """The tokens that an engine would draw from these logits with these keys."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits / sampling.temperature
    if sampling.truncated:
        kept = kept_tokens(logits, Truncation(sampling.top_k, sampling.top_p, sampling.min_p))
        logits = logits.masked_fill(~kept, -torch.inf)
    return draw_token(logits.log_softmax(-1), keys)
