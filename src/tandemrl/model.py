"""Causal LMs from transformers, run without padding: loading, packed attention, and log-probs without [t, v] logits.

Both users of a model, the trainer (packed sequences) and the reference engine (one token per row over a KV cache), call
the same stock transformers module. What differs is the *layout*: an object that travels through the model's keyword
arguments to the registered attention function and says how queries meet keys. Nothing of the model is patched.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int64
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from tandemrl.rollout.sampling import Truncation, kept_tokens
from tandemrl.types import Author, Batch

ATTENTION = "tandemrl"
REMOVED = -1e30  # logit of a truncated token: probability 0 like -inf, but p·logit stays 0 and not NaN
LOGITS_PER_CHUNK = 2**25  # float32 logits alive at once in the LM head: 128 MiB


class ModelError(ValueError):
    """A model or tokenizer that cannot be used as asked; the message names it and the fix."""


# ---------------------------------------------------------------------------------------------------------- attention


@runtime_checkable
class Layout(Protocol):
    """How the queries of one forward pass meet keys and values."""

    @property
    def max_length(self) -> int: ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Float[Tensor, "b q h d"]:
        """query [b, h, q, d], key and value [b, k, q, d] of this pass -> attention output."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: Layout | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    name = type(module).__name__
    if layout is None:
        raise ModelError(
            f"{name}: the model did not pass `layout` on to its attention; this architecture is unsupported"
        )
    if softcap is not None or s_aux is not None:
        raise ModelError(f"{name}: attention soft-capping and attention sinks are not supported")
    if sliding_window is not None and sliding_window < layout.max_length:
        raise ModelError(f"{name}: sliding window {sliding_window} is shorter than the sequences ({layout.max_length})")
    if dropout:
        raise ModelError(f"{name}: attention dropout {dropout} would make log-probs random; set it to 0")
    return layout.attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, _attention)


class Bucket(NamedTuple):
    """Sequences of similar length, as a rectangle of [rows, width] slots inside attention only."""

    gather: Int64[Tensor, " slots"]
    """The token in each slot; 0 in the padding behind a sequence."""
    tokens: Int64[Tensor, " k"]
    """The tokens whose output comes from this rectangle."""
    slots: Int64[Tensor, " k"]
    """The slot that each of them is read from."""
    width: int


class PackedLayout:
    """Causal attention inside each of many sequences that are packed without padding.

    Every linear layer sees the packed tokens. For attention, sequences become the rows of a rectangle: with a causal
    mask no real token can see the padding behind it, so that the fused kernels run without any mask tensor on every
    device. Sequences shorter than half of a rectangle's width get a rectangle of their own, which bounds the waste.
    A token may belong to several sequences, as the prompt of a group does: it is then computed once.

    Args:
        spans: per sequence, the indices of its tokens in the packed batch, in order.
    """

    def __init__(self, spans: Sequence[np.ndarray], device: torch.device | str = "cpu") -> None:
        self.max_length = max(map(len, spans))
        self.buckets: list[Bucket] = []
        done = np.zeros(max(int(span[-1]) for span in spans if len(span)) + 1, dtype=bool)
        order = sorted(range(len(spans)), key=lambda i: -len(spans[i]))
        while order:
            width = len(spans[order[0]])
            members = [i for i in order if 2 * len(spans[i]) > width]
            order = order[len(members) :]
            gather = np.zeros((len(members), width), dtype=np.int64)
            real = np.zeros((len(members), width), dtype=bool)
            for row, i in enumerate(sorted(members)):
                gather[row, : len(spans[i])], real[row, : len(spans[i])] = spans[i], True
            slots = np.flatnonzero(real)
            tokens, first = np.unique(gather.reshape(-1)[slots], return_index=True)
            new = ~done[tokens]
            done[tokens] = True
            indices = (gather.reshape(-1), tokens[new], slots[first[new]])
            g, t, s = (torch.from_numpy(x).to(device) for x in indices)
            self.buckets.append(Bucket(gather=g, tokens=t, slots=s, width=width))
        self.order = torch.cat([bucket.tokens for bucket in self.buckets]).argsort()  # from buckets to packed tokens

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        q, k, v = (rearrange(x, "1 h t d -> t h d") for x in (query, key, value))
        parts = []
        for bucket in self.buckets:
            padded = (
                rearrange(x.index_select(0, bucket.gather), "(rows width) h d -> rows h width d", width=bucket.width)
                for x in (q, k, v)
            )
            flat = rearrange(_causal(*padded, scaling=scaling), "rows h width d -> (rows width) h d")
            parts.append(flat.index_select(0, bucket.slots))
        out = parts[0] if len(parts) == 1 else torch.cat(parts).index_select(0, self.order)
        return out.unsqueeze(0)


def share_contexts(batch: Batch) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Equal leading contexts (the prompt of a group) need to be computed only once.

    Returns:
        spans: the tokens of each sequence, as indices into the kept tokens, for ``PackedLayout``.
        kept: indices of the kept tokens in the packed batch.
        where: for every packed token, its index among the kept ones.
    """
    tokens, author = batch.tokens.cpu().numpy(), batch.author.cpu().numpy()
    where = np.empty(len(tokens), dtype=np.int64)
    contexts: dict[bytes, np.ndarray] = {}
    spans, kept, start, count = [], [], 0, 0
    for length in batch.lengths.tolist():
        written = np.flatnonzero(author[start : start + length] != Author.CONTEXT)
        context = int(written[0]) if len(written) else length
        key = tokens[start : start + context].tobytes()
        shared = contexts.get(key)
        own = np.arange(context if shared is not None else 0, length)
        indices = np.arange(count, count + len(own))
        if shared is None:
            contexts[key] = indices[:context]
        span = indices if shared is None else np.concatenate([shared, indices])
        where[start : start + length] = span
        spans.append(span)
        kept.append(start + own)
        start, count = start + length, count + len(own)
    return spans, np.concatenate(kept), where


def _causal(q: Tensor, k: Tensor, v: Tensor, *, scaling: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])


# ------------------------------------------------------------------------------------------------------------ loading


def resolve_device(device: str) -> torch.device:
    """``auto`` is cuda where there is one, else cpu.

    Raises:
        ModelError: not a device, or not one of this machine.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ModelError(f"model.device={device}: not a torch device; use auto, cpu or cuda") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"model.device={device}: torch {torch.__version__} sees no CUDA device; use model.device=cpu")
    return resolved


def load_model(path: str | Path, *, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """A causal LM in eval mode, on ``device``, wired to this library's attention.

    Raises:
        ModelError: not loadable, not a causal LM with standard attention, or its head does more than a linear map.
    """
    _check_folder(path)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"model {str(path)!r} could not be loaded: {str(error).splitlines()[0]}") from None
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    model.to(resolve_device(device))  # type: ignore[arg-type]  # transformers' annotation of `to` lacks its arguments
    return prepare(model, name=str(path))


def _check_folder(path: str | Path) -> None:
    """Say what is wrong with a local path before it is taken for a hub id.

    Raises:
        ModelError: a folder without a model, or a local path that does not exist.
    """
    folder = Path(path)
    local = folder.is_absolute() or len(folder.parts) > 2 or str(path).startswith((".", "~"))
    if folder.is_dir():
        if not any((folder / name).is_file() for name in ("config.json", "tokenizer_config.json")):
            best = folder / "hf" / "best"
            hint = f"; did you mean {best}?" if best.is_dir() else ""
            raise ModelError(f"{path}: neither a model nor a tokenizer is there{hint}")
    elif local:  # a hub id is NAME or OWNER/NAME
        hint = f"; build it: tandemrl model tiny --out {folder.parent}" if folder.parent.name.startswith("tiny") else ""
        raise ModelError(f"{path}: no such folder{hint}")


def prepare(model: PreTrainedModel, *, name: str = "model") -> PreTrainedModel:
    """Wire a loaded model to the library's attention, in place, and prove on a probe that it decodes as before.

    Raises:
        ModelError: the architecture ignores the attention interface, carries state other than attention from token to
            token, or transforms its logits after the LM head.
    """
    model.eval()
    if model.config._attn_implementation == ATTENTION:
        return model
    rope = (getattr(model.config.get_text_config(), "rope_parameters", None) or {}).get("rope_type")
    if rope in ("dynamic", "longrope"):
        raise ModelError(
            f"{name}: rope_type {rope} makes a text depend on its neighbours in a batch; it is unsupported"
        )
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{name}: no linear LM head; only causal LMs are supported")
    # Two sequences: state other than attention (recurrences, convolutions) would leak from the first into the second.
    lengths, device = [4, 3], head.weight.device
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    probe = torch.arange(sum(lengths), device=device) % head.out_features
    with torch.no_grad():
        alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in probe.split(lengths)]
        wanted = torch.cat(alone).float()
        try:
            model.set_attn_implementation(ATTENTION)
            spans = [np.arange(4), np.arange(4, 7)]
            found = head(hidden_states(model, probe, positions, PackedLayout(spans, device))).float()
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{name}: {type(model).__name__} does not support custom attention: {error}") from None
    tolerance = 1e-3 if head.weight.dtype == torch.float32 else 0.1
    if not torch.allclose(wanted, found, atol=tolerance * max(1.0, wanted.abs().max().item())):
        raise ModelError(
            f"{name}: {type(model).__name__} gives other logits through the packed path (max difference "
            f"{(wanted - found).abs().max().item():.3g}): its attention or its LM head is not a standard one"
        )
    return model


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id.

    Raises:
        ModelError: not loadable.
    """
    _check_folder(path)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"tokenizer of {str(path)!r} could not be loaded: {str(error).splitlines()[0]}") from None


def vocabulary_check(senior: PreTrainedTokenizerBase, junior: PreTrainedTokenizerBase) -> None:
    """Two models can share a text only if they share every token id.

    Raises:
        ModelError: names how many ids differ and the first of them.
    """
    a, b = senior.get_vocab(), junior.get_vocab()
    if a != b:
        differing = sorted(set(a.items()) ^ set(b.items()), key=lambda item: item[1])
        token, index = differing[0]
        raise ModelError(
            f"senior and junior have different vocabularies: {len(differing)} entries differ, the first is {token!r} "
            f"(id {index}). Tandem decoding needs one vocabulary; choose a junior of the same tokenizer family."
        )


def eos_token_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a completion: those of the model's generation config and the tokenizer's own."""
    configured = generation.eos_token_id if generation is not None else None
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return tuple(sorted(i for i in ids if i is not None))


# ------------------------------------------------------------------------------------------------------------ scoring


def hidden_states(
    model: PreTrainedModel, tokens: Int64[Tensor, "..."], positions: Int64[Tensor, "..."], layout: Layout
) -> Float[Tensor, "... h"]:
    """Last hidden states of packed [t] or row-wise [b, q] tokens (after the final norm, before the LM head)."""
    rows = tokens if tokens.ndim == 2 else tokens[None]
    out = model.get_decoder()(
        input_ids=rows, position_ids=positions.reshape(rows.shape), use_cache=False, layout=layout
    ).last_hidden_state
    return out if tokens.ndim == 2 else out[0]


def token_logprobs(
    model: PreTrainedModel,
    batch: Batch,
    *,
    select: Bool[Tensor, " t"],
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    vocabulary: int | None = None,
    autocast: torch.dtype | None = None,
) -> tuple[Float[Tensor, " t"], Float[Tensor, " t"]]:
    """Log-prob of every selected token given its prefix, and the entropy of the distribution it was drawn from.

    The distribution is ``softmax(logits / temperature)``, restricted to the kept tokens when ``truncation`` is given
    (the token itself is always kept). Entries that are not selected are 0.0. Logits live in chunks only and are
    recomputed in backward: [t, v] is never materialised.

    Args:
        vocabulary: number of logits, where the model has more than the engine that sampled; None = all.

    Returns:
        logprobs and entropy, nats, float32; entry i describes token i.
    """
    select = select & (batch.positions > 0)  # the first token of a sequence has no prefix
    index = select.nonzero().squeeze(1)
    device = batch.tokens.device
    spans, kept, where = share_contexts(batch)
    kept_on, where_on = torch.from_numpy(kept).to(device), torch.from_numpy(where).to(device)
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        hidden = hidden_states(model, batch.tokens[kept_on], batch.positions[kept_on], PackedLayout(spans, device))
    head = model.get_output_embeddings()
    prefix = hidden.index_select(0, where_on[index - 1])  # the shift: the logits at i - 1 predict token i
    logprobs, entropy = _LinearLogprobs.apply(
        prefix,
        head.weight[:vocabulary],
        None if head.bias is None else head.bias[:vocabulary],
        batch.tokens.index_select(0, index),
        temperature,
        truncation,
        autocast,
    )
    empty = torch.zeros(batch.tokens.shape[0], dtype=torch.float32, device=device)
    return empty.index_copy(0, index, logprobs), empty.index_copy(0, index, entropy)


class _LinearLogprobs(torch.autograd.Function):
    """(log-prob of the target, entropy) of softmax(hidden Wᵀ / T) per row, chunked over rows, logits recomputed.

    With z the scaled logits, p = softmax(z) and H the entropy: ∂logp_y/∂z = 1_y − p and ∂H/∂z = −p(log p + H).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, truncation, dtype):
        ctx.set_materialize_grads(False)
        ctx.settings = (temperature, truncation)
        ctx.dtype = dtype
        logprobs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        entropy, normaliser = torch.empty_like(logprobs), torch.empty_like(logprobs)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy)
        weight, bias = _cast(weight, bias, dtype)
        for rows in _chunks(hidden.shape[0], weight.shape[0]):
            z = _logits(hidden[rows], weight, bias, targets[rows], *ctx.settings)
            normaliser[rows] = z.logsumexp(-1)
            logprobs[rows] = z.gather(1, targets[rows, None]).squeeze(1) - normaliser[rows]
            p = (z - normaliser[rows, None]).exp_()
            entropy[rows] = normaliser[rows] - p.mul_(z).sum(-1)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, bias, targets, normaliser, entropy = ctx.saved_tensors
        temperature, dtype = ctx.settings[0], ctx.dtype
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        like = weight
        weight, bias = _cast(weight, bias, dtype)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normaliser)
        for rows in _chunks(hidden.shape[0], weight.shape[0]):
            z = _logits(hidden[rows], weight, bias, targets[rows], *ctx.settings)
            g = grad_logprobs[rows, None]
            logp = z.sub_(normaliser[rows, None])
            if grad_entropy is None:
                grad = logp.exp_().mul_(-g)
            else:
                h = grad_entropy[rows, None]
                grad = logp.exp().mul_(-g - h * (logp + entropy[rows, None]))
            grad = grad.scatter_add_(1, targets[rows, None], g)
            if temperature != 1.0:
                grad = grad.div_(temperature)
            grad = grad.to(weight.dtype)
            grad_hidden[rows] = (grad @ weight).to(hidden.dtype)
            grad_weight += grad.T @ hidden[rows].to(weight.dtype)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        return (
            grad_hidden,
            grad_weight.to(like.dtype),
            None if grad_bias is None else grad_bias.to(like.dtype),
            *(None,) * 4,
        )


def _cast(weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """The LM head in the compute dtype, once per pass and not once per chunk."""
    return (weight, bias) if dtype is None else (weight.to(dtype), None if bias is None else bias.to(dtype))


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, LOGITS_PER_CHUNK // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    truncation: Truncation | None,
) -> Tensor:
    logits = F.linear(hidden.to(weight.dtype), weight, bias).float()
    if temperature != 1.0:
        logits = logits / temperature
    if truncation is not None:
        keep = kept_tokens(logits, truncation).scatter_(1, targets[:, None], True)
        logits = logits.masked_fill(~keep, REMOVED)
    return logits


@torch.no_grad()
def sequence_logprobs(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    *,
    tokens_per_micro_batch: int = 8192,
    temperature: float = 1.0,
) -> list[np.ndarray]:
    """Log-prob of every token of plain sequences given its prefix; nats, float32, entry 0 is 0.0."""
    from tandemrl.batching import micro_batches, pack_tokens

    device = model.get_output_embeddings().weight.device
    budget = max(tokens_per_micro_batch, max(map(len, sequences), default=1))
    out: list[np.ndarray] = [np.zeros(0, np.float32)] * len(sequences)
    for rows in micro_batches([len(s) for s in sequences], budget):
        batch = pack_tokens([sequences[i] for i in rows], device=device)
        logprobs, _ = token_logprobs(model, batch, select=batch.author >= int(Author.CONTEXT), temperature=temperature)
        for i, values in zip(rows, logprobs.cpu().split(batch.lengths.tolist()), strict=True):
            out[i] = values.numpy()
    return out
