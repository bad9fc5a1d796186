"""Attention over packed sequences, on one process or shared by many.

A *layout* says which keys the queries of one forward pass attend to. It travels through the keyword arguments of a
transformers model to the attention function that is registered here.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int32, Int64
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from tandemrl.types import Author, Batch

ATTENTION = "tandemrl"
HAS_GROUPS = "enable_gqa" in signature(varlen_attn).parameters
"""Whether torch's attention over packed sequences takes fewer heads of keys than of queries. That of 2.11 does not."""


class ModelError(ValueError):
    """A model or tokenizer cannot be used as asked. The message names it and the fix."""


@runtime_checkable
class Layout(Protocol):
    """Which keys and values the queries of one forward pass attend to."""

    @property
    def max_length(self) -> int: ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Float[Tensor, "b q h d"]:
        """The attention output of one layer, for query [b, h, q, d] and key and value [b, k, q, d] of this pass."""
        ...


def attention(
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
    """The attention function that transformers calls in every layer. It hands the work to ``layout``.

    Raises:
        ModelError: the layer asks for a kind of attention that layouts do not support.
    """
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
    return layout.attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]  # nn.Module has no layer_idx


AttentionInterface.register(ATTENTION, attention)


# ------------------------------------------------------------------------------------------------------------- packed


class Bucket(NamedTuple):
    """Sequences of similar length, as a rectangle of [rows, width] slots inside attention only."""

    gather: Int64[Tensor, " slots"]
    """The token in each slot; 0 in the padding behind a sequence."""
    tokens: Int64[Tensor, " k"]
    """The tokens whose output comes from this rectangle."""
    slots: Int64[Tensor, " k"]
    """The slot that each of them is read from."""
    width: int


class Varlen(NamedTuple):
    """The packed sequences as flash attention takes them: without padding, and a token that several sequences share is
    one query."""

    queries: Int64[Tensor, " t"] | None
    """The tokens in the order of the sequences that compute them; None = as they are packed."""
    keys: Int64[Tensor, " k"] | None
    """The tokens that each of those sequences sees, end to end; None = as they are packed."""
    query_starts: Int32[Tensor, " s+1"]
    key_starts: Int32[Tensor, " s+1"]
    max_queries: int
    max_keys: int
    outputs: Int64[Tensor, " t"] | None
    """For each packed token, its index among the queries; None = as they are packed."""


class PackedLayout:
    """Causal attention inside each of many sequences that are packed without padding.

    Every linear layer sees the packed tokens. A token may belong to several sequences, as the prompt of a group does:
    it is then computed once. On CUDA in 16 bits attention is flash attention over the packed sequences. Elsewhere
    sequences become the rows of a rectangle: with a causal mask no real token can see the padding behind it, so that
    the fused kernels run without any mask tensor. Sequences shorter than 3/4 of a rectangle's width get a rectangle of
    their own, which bounds the waste.

    Args:
        spans: per sequence, the indices of its tokens in the packed batch, in order. A sequence may begin with tokens
            of earlier ones, but only begin.
    """

    def __init__(self, spans: Sequence[np.ndarray], device: torch.device | str = "cpu") -> None:
        self.spans, self.device = spans, torch.device(device)
        self.max_length = max(map(len, spans))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        q, k, v = (rearrange(x, "1 h t d -> t h d") for x in (query, key, value))
        device = q.device.type
        if torch.is_autocast_enabled(device):  # custom operators do not cast
            q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
        attend = self._flash if _has_flash(q.device, q.dtype, q.shape[-1], v.shape[-1]) else self._rectangular
        return attend(q, k, v, scaling).unsqueeze(0)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Float[Tensor, "t h d"]:
        x = self.varlen
        q, k, v = (_at(each, places).contiguous() for each, places in ((q, x.queries), (k, x.keys), (v, x.keys)))
        grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        if grouped and not HAS_GROUPS:
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
            grouped = {}
        # Causal, the last query on the last key: a sequence's own tokens are its end.
        starts, most = (x.query_starts, x.key_starts), (x.max_queries, x.max_keys)
        out = varlen_attn(q, k, v, *starts, *most, scale=scaling, window_size=(-1, 0), **grouped)
        assert isinstance(out, Tensor)
        return _at(out, x.outputs)

    def _rectangular(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Float[Tensor, "t h d"]:
        parts, grouped = [], q.shape[1] != k.shape[1]
        for bucket in self.buckets:
            rows, keys, values = (
                rearrange(x.index_select(0, bucket.gather), "(rows width) h d -> rows h width d", width=bucket.width)
                for x in (q, k, v)
            )
            out = F.scaled_dot_product_attention(rows, keys, values, is_causal=True, scale=scaling, enable_gqa=grouped)
            parts.append(rearrange(out, "rows h width d -> (rows width) h d").index_select(0, bucket.slots))
        return parts[0] if len(parts) == 1 else torch.cat(parts).index_select(0, self.order)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The rectangles, widest first."""
        return list(self._buckets())

    def _buckets(self) -> Iterator[Bucket]:
        done = np.zeros(max(int(span[-1]) for span in self.spans if len(span)) + 1, dtype=bool)
        order = sorted(range(len(self.spans)), key=lambda i: -len(self.spans[i]))
        while order:
            width = len(self.spans[order[0]])
            members = [i for i in order if 4 * len(self.spans[i]) > 3 * width]
            order = order[len(members) :]
            gather = np.zeros((len(members), width), dtype=np.int64)
            real = np.zeros((len(members), width), dtype=bool)
            for row, i in enumerate(sorted(members)):
                gather[row, : len(self.spans[i])], real[row, : len(self.spans[i])] = self.spans[i], True
            slots = np.flatnonzero(real)
            tokens, first = np.unique(gather.reshape(-1)[slots], return_index=True)
            new = ~done[tokens]
            done[tokens] = True
            g, t, s = (self._put(x) for x in (gather.reshape(-1), tokens[new], slots[first[new]]))
            yield Bucket(gather=g, tokens=t, slots=s, width=width)

    @cached_property
    def order(self) -> Int64[Tensor, " t"]:
        """For each packed token, its index among the tokens of all rectangles in turn."""
        return torch.cat([bucket.tokens for bucket in self.buckets]).argsort()

    @cached_property
    def varlen(self) -> Varlen:
        """What flash attention needs: each sequence computes the tokens that no earlier one has."""
        total = max(int(span.max()) for span in self.spans if len(span)) + 1
        done = np.zeros(total, dtype=bool)
        queries, keys = [], []
        for span in self.spans:
            own = span[int(done[span].sum()) :]
            assert not done[own].any(), "shared tokens are not at the beginning of a sequence"
            done[own] = True
            if len(own):
                queries.append(own)
                keys.append(span)

        def joined(parts: list[np.ndarray]) -> Tensor | None:
            flat = np.concatenate(parts)
            return None if np.array_equal(flat, np.arange(total)) else self._put(flat)

        def starts(parts: list[np.ndarray]) -> Tensor:
            return self._put(np.cumsum([0, *map(len, parts)]).astype(np.int32))

        order = joined(queries)
        return Varlen(
            queries=order,
            keys=joined(keys),
            query_starts=starts(queries),
            key_starts=starts(keys),
            max_queries=max(map(len, queries)),
            max_keys=max(map(len, keys)),
            outputs=None if order is None else order.argsort(),
        )

    def _put(self, indices: np.ndarray) -> Tensor:
        return torch.from_numpy(indices).to(self.device)


def _at(x: Tensor, places: Tensor | None) -> Tensor:
    return x if places is None else x.index_select(0, places)


def _has_flash(device: torch.device, dtype: torch.dtype, *head_sizes: int) -> bool:
    """Whether torch's flash kernels can be used. They need 16 bits, an Ampere GPU or later, and heads of one size up to
    256."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and len(set(head_sizes)) == 1
        and head_sizes[0] % 8 == 0
        and head_sizes[0] <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def share_contexts(batch: Batch) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Find equal leading contexts (the prompt of a group), which need to be computed only once.

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


# ----------------------------------------------------------------------------------------------------- many processes


class UlyssesLayout:
    """Sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509, section 3).

    The processes divide the tokens among themselves outside of attention, and the heads inside of it. This takes two
    exchanges (all-to-all) per layer: before attention and after it. ``inner`` attends over whole sequences.

    If the number of key and value heads is not a multiple of the number of processes, the heads are repeated until it
    is, so that each process has those that its query heads read. The gradients of the copies are summed.
    """

    def __init__(self, inner: Layout, group: dist.ProcessGroup) -> None:
        self.inner, self.group, self.size = inner, group, group.size()
        self.max_length = inner.max_length

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        repeats = math.lcm(key.shape[1], self.size) // key.shape[1]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        q, k, v = (
            rearrange(self._exchange(rearrange(x, "1 (p h) t d -> p t h d", p=self.size)), "p t h d -> 1 h (p t) d")
            for x in (query, key, value)
        )
        out = rearrange(self.inner.attend(layer, q, k, v, scaling), "1 (p t) h d -> p t h d", p=self.size)
        return rearrange(self._exchange(out), "p t h d -> 1 t (p h) d")

    def _exchange(self, x: Tensor) -> Tensor:
        """Send part i of the first dimension to process i."""
        return all_to_all_single_autograd(x.contiguous(), None, None, self.group)


class SharedSum(torch.autograd.Function):
    """The sum of a tensor over processes that all compute the same loss from it.

    Backward passes the gradient on unchanged, as that of the process's own part.
    """

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None
