"""How the junior and the senior itself read the senior's texts: their cross-entropies, the KL between the two, and how
often the junior would have drawn the senior's token."""

import math
from collections.abc import Callable, Iterator, Sequence
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
Values = Callable[[Sequence[Tensor], Tensor, Tensor], dict[str, Tensor]]
"""What readers say of tokens: a function of the logits [c, v] of each model, the tokens and the keys of their draws. It
returns values of the tokens by the names of fields of `Sample`, with ``cross_entropy`` among them."""


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


def by_junior(sampling: Sampling | None = None, vocabulary: int | None = None) -> Values:
    """How well the junior, the one model, reads a text: its cross-entropy, and the acceptance, which is the share of
    tokens that it also draws after the same prefix and from the same random numbers.

    Args:
        sampling: the sampling that the texts were drawn with, without penalties. None means that it is unknown, or that
            the junior reads other tokens, so that there is no acceptance.
        vocabulary: the junior draws among the token ids below this number, which both models can write. None means all
            of the junior's.
    """

    def values(logits: Sequence[Float[Tensor, "c v"]], tokens: Tensor, keys: Tensor) -> dict[str, Tensor]:
        found = {"cross_entropy": _surprisal(logits[0].log_softmax(-1), tokens)}
        if sampling is not None:
            found["acceptance"] = _drawn(logits[0][:, :vocabulary], keys, sampling) == tokens
        return found

    return values


def by_both(logits: Sequence[Float[Tensor, "c v"]], tokens: Tensor, _: Tensor) -> dict[str, Tensor]:
    """How far a text, and the senior's distribution at each of its tokens, is from the junior: of both models, the
    senior first, at temperature 1."""
    own, other = (each.log_softmax(-1) for each in logits)
    cross_entropy = _surprisal(other, tokens)
    return {
        "surprisal": _surprisal(own, tokens),
        "cross_entropy": cross_entropy,
        "kl": (own.exp() * (own - other)).sum(-1).clamp(min=0.0),  # below 0 by rounding only
        "unlikely_rate": cross_entropy > -math.log(UNLIKELY),
    }


def by_itself(sampling: Sampling) -> Values:
    """How sure the one model was of a text that it drew itself: the entropy of the distributions that the tokens were
    drawn from, after temperature and truncation, without penalties. The cross-entropy is at temperature 1: a token may
    be truncated here that rounding kept when it was drawn."""

    def values(logits: Sequence[Float[Tensor, "c v"]], tokens: Tensor, _: Tensor) -> dict[str, Tensor]:
        found = {"cross_entropy": _surprisal(logits[0].log_softmax(-1), tokens)}
        return found | {"entropy": torch.special.entr(_tempered(logits[0], sampling).softmax(-1)).sum(-1)}

    return values


def read_texts(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    models: Sequence[PreTrainedModel],
    values: Values,
    *,
    reader: TextReader | None = None,
    context: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Sample]:
    """The samples, each with the means over the authors' tokens of its text of what ``values`` says, in nats or shares,
    and with ``cross_entropy_per_byte``, of the whole text in nats per byte.

    Each text is read after its prompt. The EOS that ends it is not part of it. Texts that are empty, or longer than the
    context together with their prompt, get None. The texts of a problem stay together where they fit, since their
    prompt is computed once in a micro-batch.

    Args:
        models: those that read, on one device. Their logits are over the ids that all of them have.
        reader: how the junior gets a text, if it has a vocabulary of its own. It then reads the text in its own tokens,
            after the prompt in its own chat template.
        context: the context of the profile in tokens; the models' own contexts are limits, too.
        progress: called with the number of further texts that were read.

    Raises:
        EvalError: it is unknown who wrote a text.
    """
    out = list(samples)
    for i, of_text in read_tokens(samples, prompts, models, values, reader=reader, context=context, progress=progress):
        means: dict[str, Any] = {name: float(np.mean(each, dtype=np.float64)) for name, each in of_text.items()}
        size = max(1, len(samples[i].response.plain.encode()))
        per_byte = float(of_text["cross_entropy"].sum(dtype=np.float64)) / size
        out[i] = samples[i]._replace(**means, cross_entropy_per_byte=per_byte)
    return out


@torch.no_grad()
def read_tokens(
    samples: Sequence[Sample],
    prompts: Sequence[Prompt],
    models: Sequence[PreTrainedModel],
    values: Values,
    *,
    reader: TextReader | None = None,
    context: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """As `read_texts`: for every text that can be read, its position and what ``values`` says of each own token."""
    device = next(models[0].parameters()).device
    texts = readable(samples, prompts, models, context, reader)
    positions, rollouts = [*texts], [*texts.values()]
    lengths = [len(text.tokens) for text in rollouts]
    groups = [text.group for text in rollouts]
    for rows in micro_batches(lengths, max(TOKENS, *lengths, 1), groups=groups):
        some = [rollouts[row] for row in rows]
        batch, own = pack(some, device), [int((text.author >= 0).sum()) for text in some]
        index = (batch.author >= 0).nonzero().squeeze(1)
        keys, tokens = _token_keys(some, own).to(device), batch.tokens[index]
        chunks = [values(logits, tokens[part], keys[part]) for part, logits in _logits(models, batch, index)]
        found = {name: torch.cat([chunk[name] for chunk in chunks]).cpu().split(own) for name in chunks[0]}
        for number, row in enumerate(rows):
            yield positions[row], {name: each[number].numpy() for name, each in found.items()}
        if progress is not None:
            progress(len(rows))


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
            place = sample.example_id, sample.problem, sample.sample, sample.key
            texts[i] = Rollout(*place, tokens, whole, np.zeros(len(tokens)), reward=0.0)  # without log-probs
    return texts


# --------------------------------------------------------------------------------------------------------------------


def _surprisal(logprobs: Float[Tensor, "c v"], tokens: Int64[Tensor, " c"]) -> Float[Tensor, " c"]:
    return -logprobs.gather(1, tokens[:, None]).squeeze(1)


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
    return draw_token(_tempered(logits, sampling).log_softmax(-1), keys)


def _tempered(logits: Float[Tensor, "c v"], sampling: Sampling) -> Float[Tensor, "c v"]:
    """The logits of the tokens that are kept, after the temperature; at temperature 0 those of the best one."""
    if sampling.temperature == 0:
        return torch.where(logits == logits.amax(-1, keepdim=True), 0.0, -torch.inf)
    logits = logits / sampling.temperature
    if sampling.truncated:
        kept = kept_tokens(logits, Truncation(sampling.top_k, sampling.top_p, sampling.min_p))
        logits = logits.masked_fill(~kept, -torch.inf)
    return logits
