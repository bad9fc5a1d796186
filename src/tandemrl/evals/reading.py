"""How the junior and the senior itself read the senior's texts: their cross-entropies, the KL between the two, and how
often the junior would have drawn the senior's token."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
from tandemrl.rollout.envs.rendering import Rendering
from tandemrl.selection.draws import SAMPLING, fold_in, stream
from tandemrl.selection.words import Vocabulary
from tandemrl.types import Author, Batch, Rollout, own_turns

LOGITS_ON_CPU = 2**22
"""How many logits a CPU computes at once: larger tensors are new memory for every operation, which costs more than the
operation."""
TOKENS = 8192
"""How many tokens are read at once, unless a text has more."""
UNLIKELY = 0.01
"""A token to which the junior gives less than this probability counts as unlikely."""
Channels = tuple[Tensor, ...]
"""Values of the authors' tokens of some texts, in nats or as truth."""


class TextReader(NamedTuple):
    """What a junior with a vocabulary of its own reads of a text.

    vocabulary: the junior's. tokenizer: the senior's, which spells a turn. rendering: says in the junior's tokens what
    the environment said between two turns; None where there is no environment.
    """

    vocabulary: Vocabulary
    tokenizer: PreTrainedTokenizerBase
    rendering: Rendering | None = None

    def pieces(self, sample: Sample) -> list[tuple[Sequence[int], Author]]:
        """A text in the junior's tokens: what the authors wrote, and CONTEXT between their turns.

        Bytes that are no character have become U+FFFD, as in ``Sample.plain``.
        """
        if self.rendering is None or sample.transcript is None or sample.author is None:
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
                pieces.append((self.rendering.context(answers[i - 1], ended=False).tokens, Author.CONTEXT))
            text = str(self.tokenizer.decode(turn.tolist(), skip_special_tokens=True))
            pieces.append((self.vocabulary.encode(text), Author.SENIOR))
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
    drawn = None if reader is not None else sampling

    def values(logits: Sequence[Float[Tensor, "c v"]], tokens: Tensor, keys: Tensor) -> Channels:
        channels = (_surprisal(logits[0].log_softmax(-1), tokens),)
        return channels if drawn is None else (*channels, _drawn(logits[0][:, :vocabulary], keys, drawn) == tokens)

    def read(sample: Sample, cross_entropy: np.ndarray, accepted: np.ndarray | None = None) -> dict[str, Any]:
        size = max(1, len(sample.response.plain.encode()))
        return {
            "cross_entropy": _mean(cross_entropy),
            "cross_entropy_per_byte": float(cross_entropy.sum(dtype=np.float64)) / size,
            "acceptance": None if accepted is None else _mean(accepted),
        }

    return _read(samples, readable(samples, prompts, [junior], context, reader), [junior], values, read, progress)


def read_drift(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    senior: PreTrainedModel,
    junior: PreTrainedModel,
    *,
    context: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Sample]:
    """Measure how far each text, and the senior's distribution at each of its tokens, is from the junior.

    Both models are at temperature 1. Texts are read as in ``read_legibility``, which gives the same ``cross_entropy``.
    """

    def values(logits: Sequence[Float[Tensor, "c v"]], tokens: Tensor, keys: Tensor) -> Channels:
        own, other = (each.log_softmax(-1) for each in logits)
        kl = (own.exp() * (own - other)).sum(-1).clamp(min=0.0)  # below 0 by rounding only
        return _surprisal(own, tokens), _surprisal(other, tokens), kl

    def read(_: Sample, surprisal: np.ndarray, cross_entropy: np.ndarray, kl: np.ndarray) -> dict[str, Any]:
        return {
            "surprisal": _mean(surprisal),
            "cross_entropy": _mean(cross_entropy),
            "kl": _mean(kl),
            "unlikely_rate": float(np.mean(cross_entropy > -math.log(UNLIKELY))),
        }

    models = [senior, junior]
    return _read(samples, readable(samples, prompts, models, context), models, values, read, progress)


def readable(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    models: Sequence[PreTrainedModel],
    context: int | None = None,
    reader: TextReader | None = None,
) -> dict[int, Rollout]:
    """The texts to read, by the position of their sample: each after its prompt, without the EOS that ends it.

    What the environment says between turns is context, like the prompt. Texts that are empty, or longer than a model or
    the profile's context allows, are left out.
    """
    longest = min(context or math.inf, *(context_of(model.config) for model in models))
    texts = {}
    for i, sample in enumerate(samples):
        if sample.author is None:
            raise EvalError(f"sample of {sample.example_id}: it has no authors, so there is nothing of theirs to read")
        if reader is None:
            prompt = prompts[sample.problem].tokens
            text = sample.tokens[:-1] if sample.stop_reason == "eos" else sample.tokens
            author = authors_of(sample.author)[: len(text)]
        else:
            prompt, pieces = prompts[sample.problem].junior, reader.pieces(sample)
            text = [token for tokens, _ in pieces for token in tokens]
            author = np.repeat([who for _, who in pieces], [len(tokens) for tokens, _ in pieces])
        if (author >= 0).any() and len(prompt) + len(text) <= longest:
            tokens, whole = np.array([*prompt, *text]), np.pad(author, (len(prompt), 0), constant_values=Author.CONTEXT)
            unknown = np.zeros(len(tokens))
            place = sample.example_id, sample.problem, sample.sample, sample.key
            texts[i] = Rollout(*place, tokens, whole, unknown, reward=0.0)
    return texts


# --------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _read(
    samples: Sequence[Sample],
    texts: Mapping[int, Rollout],
    models: Sequence[PreTrainedModel],
    values: Callable[[Sequence[Tensor], Tensor, Tensor], Channels],
    read: Callable[..., dict[str, Any]],
    progress: Callable[[int], None] | None,
) -> list[Sample]:
    """The samples, each with what ``read`` says of the ``values`` at the authors' tokens of its text, which the models
    (on one device) predict by their logits, over the ids that all of them have.

    The texts of a problem stay together where they fit, since their prompt is computed once in a micro-batch.
    """
    out, device = list(samples), next(models[0].parameters()).device
    positions, rollouts = [*texts], [*texts.values()]
    lengths = [len(text.tokens) for text in rollouts]
    groups = [text.group for text in rollouts]
    for rows in micro_batches(lengths, max(TOKENS, *lengths, 1), groups=groups):
        some = [rollouts[row] for row in rows]
        batch, own = pack(some, device), [int((text.author >= 0).sum()) for text in some]
        index = (batch.author >= 0).nonzero().squeeze(1)
        keys, tokens = _token_keys(some, own).to(device), batch.tokens[index]
        chunks = [values(logits, tokens[part], keys[part]) for part, logits in _logits(models, batch, index)]
        channels = [torch.cat(each).cpu().split(own) for each in zip(*chunks, strict=True)]
        for row, of_text in zip(rows, zip(*channels, strict=True), strict=True):
            i = positions[row]
            out[i] = out[i]._replace(**read(out[i], *(channel.numpy() for channel in of_text)))
        if progress is not None:
            progress(len(rows))
    return out


def _surprisal(logprobs: Float[Tensor, "c v"], tokens: Int64[Tensor, " c"]) -> Float[Tensor, " c"]:
    return -logprobs.gather(1, tokens[:, None]).squeeze(1)


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values, dtype=np.float64))


def _logits(
    models: Sequence[PreTrainedModel], batch: Batch, index: Int64[Tensor, " i"]
) -> Iterator[tuple[Int64[Tensor, " c"], list[Float[Tensor, "c v"]]]]:
    """Yield for chunks of the tokens at the indices ``index`` the numbers of these, and for each model the logits that
    predict them, over the ids that all models have. So [t, v] is never materialised."""
    device = batch.tokens.device
    spans, *indices = share_contexts(batch)
    kept, where = (torch.from_numpy(each).to(device) for each in indices)
    layout = PackedLayout(spans, device)
    prefixes = [  # the shift: the logits at i - 1 predict token i
        hidden_states(model, batch.tokens[kept], batch.positions[kept], layout).index_select(0, where[index - 1])
        for model in models
    ]
    heads = [model.get_output_embeddings() for model in models]
    vocabulary = min(head.weight.shape[0] for head in heads)
    biases = [None if head.bias is None else head.bias[:vocabulary] for head in heads]
    most = LOGITS_ON_CPU if device.type == "cpu" else LOGITS_PER_CHUNK // 2
    for rows in torch.arange(len(index), device=device).split(max(1, most // vocabulary)):
        yield (
            rows,
            [
                F.linear(prefix[rows], head.weight[:vocabulary], bias).float()
                for prefix, head, bias in zip(prefixes, heads, biases, strict=True)
            ],
        )


def _token_keys(texts: Sequence[Rollout], own: Sequence[int]) -> Int64[Tensor, " i"]:
    """The keys of the draws of all own tokens, text by text, of which each has ``own``.

    Counters continue from turn to turn, and tokens of the environment have none.
    """
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
