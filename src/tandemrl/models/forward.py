"""Causal LMs run without padding: packed hidden states, and log-probs without [t, v] logits.

Both users of a model, the trainer (packed sequences) and the reference engine (one token per row over a KV cache), call
the same stock transformers module. What differs is the *layout* (``attention``), an object that travels through the
model's keyword arguments to the registered attention function and says which keys each query attends to.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int8, Int64
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tandemrl.models.attention import Layout, PackedLayout, SharedSum, UlyssesLayout, share_contexts
from tandemrl.models.head import PLAIN, WORD_END, ForwardOptions, HeadSettings, linear_logprobs
from tandemrl.processes.world import WHOLE, Shards
from tandemrl.types import Batch


def hidden_states(
    model: PreTrainedModel, tokens: Int64[Tensor, "..."], positions: Int64[Tensor, "..."], layout: Layout
) -> Float[Tensor, "... h"]:
    """Last hidden states of packed [t] or row-wise [b, q] tokens (after the final norm, before the LM head)."""
    rows = tokens if tokens.ndim == 2 else tokens[None]
    out = model.get_decoder()(
        input_ids=rows, position_ids=positions.reshape(rows.shape), use_cache=False, layout=layout
    ).last_hidden_state
    return out if tokens.ndim == 2 else out[0]


def packed_logits(
    model: PreTrainedModel, head: nn.Linear, tokens: Int64[Tensor, " t"], positions: Int64[Tensor, " t"], layout: Layout
) -> Float[Tensor, "t v"]:
    """The output of a linear ``head`` for every token. Only for probes of a few tokens, since it is [t, v]."""
    logits: Tensor = head(hidden_states(model, tokens, positions, layout))
    return logits


def with_gathered_parameters(function: Callable[..., Any], model: PreTrainedModel) -> Callable[..., Any]:
    """``function`` with ``model`` bound as its first argument.

    A sharded model has the function as a method of the same name, around which FSDP gathers and frees the parameters
    (see ``sharding.shard``); then the result is that method.
    """
    return getattr(model, function.__name__, None) or partial(function, model)


class Scores(NamedTuple):
    """Log-probs and entropies of a batch, in nats and float32: of its tokens, and of its ``word_ends``, if it has any.

    The entropy at the end of a word is that of the distribution which the dropped token was proposed from.
    """

    logprobs: Float[Tensor, " t"]
    entropy: Float[Tensor, " t"]
    end_logprobs: Float[Tensor, " e"]
    end_entropy: Float[Tensor, " e"]

    def differences(self, batch: Batch, select: Bool[Tensor, " t"]) -> Float[Tensor, " n"]:
        """How far they are from the engine's, at the selected tokens and at all ends of words."""
        tokens = (self.logprobs.detach() - batch.behaviour_logprobs)[select]
        if batch.word_ends is None:
            return tokens
        return torch.cat([tokens, self.end_logprobs.detach() - batch.word_ends.behaviour_logprobs])


def token_scores(
    model: PreTrainedModel,
    batch: Batch,
    *,
    select: Bool[Tensor, " t"],
    options: ForwardOptions = PLAIN,
    shards: Shards = WHOLE,
) -> Scores:
    """The log-prob of every selected token given its prefix, and the entropy of the distribution it was drawn from.

    Entries that are not selected are 0.0. Entry i describes token i. Logits are computed in chunks and recomputed in
    backward, so [t, v] is never materialised. The ``word_ends`` of the batch are always scored.

    Args:
        select: True at the tokens to score.
        options: the distribution that the tokens were drawn from, and how it is computed.
        shards: the processes that compute this together. All of them pass the same batch and get the same result.

    Raises:
        ValueError: the batch has tokens that were drawn from ``starts``, and ``options`` has no such table.
    """
    index = (select & (batch.positions > 0)).nonzero().squeeze(1)  # the first has no prefix
    count = len(batch.tokens)
    targets, slots, ends, events = batch.tokens, index, index[:0], None
    if batch.taken_over is not None:
        if options.starts is None:
            raise ValueError(
                "the batch has tokens after a handover before a word; pass the table of their ids as starts"
            )
        ends = ends if batch.word_ends is None else batch.word_ends.places
        slots = torch.cat([index, count + torch.arange(len(ends), device=index.device)])
        targets = torch.cat([targets, targets[ends]])
        events = torch.cat([batch.taken_over.to(torch.int8), torch.full_like(ends, WORD_END, dtype=torch.int8)])
    part = part_of(batch, torch.cat([index, ends]), shards.sequence, slots)
    packed, events = with_gathered_parameters(packed_logprobs, model), None if events is None else events[part.slots]
    channels = packed(part, targets.index_select(0, part.slots), options, shards.tensor, events)
    whole = [
        channel_of(values, part, count + len(ends), shards.sequence).split([count, len(ends)]) for values in channels
    ]
    return Scores(whole[0][0], whole[1][0], whole[0][1], whole[1][1])


class Part(NamedTuple):
    """The part of a batch that one process computes: its tokens, and which log-probs they give."""

    tokens: Int64[Tensor, " k"]
    positions: Int64[Tensor, " k"]
    layout: Layout
    slots: Int64[Tensor, " i"]
    """What gets a log-prob: the indices in the batch of tokens, followed by ends of words."""
    prefixes: Int64[Tensor, " i"]
    """For each of them, the index in ``tokens`` of the token before it, whose hidden state predicts it."""


def part_of(batch: Batch, index: Tensor, group: dist.ProcessGroup | None, slots: Tensor | None = None) -> Part:
    """The whole batch, or the share of this process in a sequence-parallel group.

    Args:
        index: indices in the batch of the tokens that get a log-prob.
        group: the sequence-parallel group, if there is one.
        slots: the indices in the resulting channel; None stands for ``index``.
    """
    slots = index if slots is None else slots
    device = batch.tokens.device
    spans, kept, where = share_contexts(batch)
    kept_on, where_on = torch.from_numpy(kept).to(device), torch.from_numpy(where).to(device)
    tokens, positions = batch.tokens[kept_on], batch.positions[kept_on]
    prefixes = where_on[index - 1]  # the shift: the logits at i - 1 predict token i
    if group is None:
        return Part(tokens, positions, PackedLayout(spans, device), slots, prefixes)
    if padding := -len(kept) % group.size():
        spans = [*spans, np.arange(len(kept), len(kept) + padding)]
        tokens, positions = F.pad(tokens, (0, padding)), F.pad(positions, (0, padding))
    size = len(tokens) // group.size()
    first = size * group.rank()
    mine = (prefixes >= first) & (prefixes < first + size)
    layout = UlyssesLayout(PackedLayout(spans, device), group)
    here = slice(first, first + size)
    return Part(tokens[here], positions[here], layout, slots[mine], prefixes[mine] - first)


def channel_of(
    values: Float[Tensor, " i"], part: Part, length: int, group: dist.ProcessGroup | None
) -> Float[Tensor, " n"]:
    """The values as a channel of ``length`` slots, over all processes of ``group``; 0.0 elsewhere."""
    channel = values.new_zeros(length).index_copy(0, part.slots, values)
    return channel if group is None else SharedSum.apply(channel, group)


def packed_logprobs(
    model: PreTrainedModel,
    part: Part,
    targets: Int64[Tensor, " i"],
    options: ForwardOptions,
    group: dist.ProcessGroup | None = None,
    events: Int8[Tensor, " i"] | None = None,
) -> tuple[Float[Tensor, " i"], Float[Tensor, " i"]]:
    """The log-prob of ``targets[i]`` after token ``part.prefixes[i]``, and the entropy there.

    This function holds all that a scoring pass does with the model's parameters (see ``with_gathered_parameters``).

    Args:
        group: the processes that share the rows of the LM head, if they do.
        events: see ``head.linear_logprobs``.
    """
    hidden = prefix_states(model, part, options)
    head = model.get_output_embeddings()
    weight, bias = (x.to_local() if isinstance(x, DTensor) else x for x in (head.weight, head.bias))
    return linear_logprobs(hidden, weight, bias, targets, HeadSettings(head.out_features, options, group), events)


def prefix_states(model: PreTrainedModel, part: Part, options: ForwardOptions) -> Float[Tensor, "i h"]:
    """The last hidden states of the tokens at the indices ``part.prefixes``."""
    # The inputs of the layers, with gradient checkpointing. torch.autograd.graph.save_on_cpu would also copy weights,
    # and gather distributed tensors.
    offload = saved_tensors_hooks(_to_host, _from_host) if options.activation_offload else nullcontext()
    device = part.tokens.device.type
    with offload, torch.autocast(device, dtype=options.autocast, enabled=options.autocast is not None):
        return hidden_states(model, part.tokens, part.positions, part.layout).index_select(0, part.prefixes)


def _to_host(saved: Tensor) -> Any:
    """What is kept of a tensor that autograd saves for backward: a copy in host memory, or a parameter itself."""
    origin = saved if saved._base is None else saved._base
    if isinstance(origin, nn.Parameter) or not saved.is_floating_point():
        return saved
    local = saved.to_local() if isinstance(saved, DTensor) else saved
    # Copies of pinned memory wait for the kernels before them on the stream, and those behind wait for the copies.
    host = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda).copy_(local, non_blocking=True)
    return host, local.device, saved._spec if isinstance(saved, DTensor) else None


def _from_host(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    host, device, spec = kept
    local = host.to(device, non_blocking=True)
    return local if spec is None else DTensor(local, spec, requires_grad=False)
