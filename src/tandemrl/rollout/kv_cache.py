"""The KV cache of a decoding model, and the attention of new tokens to it.

Column *p* of a cache is position *p* of its row, whoever wrote the token there: authorship never masks attention. A row
is filled by ``prefill``, then token by token by decoding steps, or with several tokens at once by ``extend``. ``take``
and ``put`` move a row out of a batch and back, so that nothing is computed twice. What a refused draft left here is not
erased: it lies behind the row's ``position``, where attention does not look, until the next
``decoding.DecodingBatch.step`` overwrites it. (In vLLM, ``vllm.planner.KVState.keep_prefix`` says how many tokens
still count as computed; the blocks behind them are overwritten, too.)
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from tandemrl.models.forward import hidden_states

PREFILL_TOKENS = 16384  # tokens computed in one prefill forward

Layers = dict[int, tuple[Tensor, Tensor]]
"""For each layer its keys and values, each of shape [rows, kv heads, columns, head dim]."""


def roomy(width: int, least: int = 64) -> int:
    """How many columns there is room for where ``width`` are needed, so that caches grow rarely: at most a quarter
    more, or up to a multiple of ``least``."""
    by = max(least, 1 << max(0, width.bit_length() - 3))
    return -(-width // by) * by


class KVCache:
    """Keys and values of one model, for the rows of a batch.

    ``layers`` are the rows in use. What lies behind them is never read for a row: zeros or old numbers, all of them
    finite, since a masked NaN is still a NaN.

    Args:
        rows, columns: round what is needed up to what there is room for.
    """

    def __init__(self, rows: Callable[[int], int] = int, columns: Callable[[int], int] = roomy) -> None:
        self.layers: Layers = {}
        self._rows, self._columns = rows, columns
        self._whole: Layers = {}
        self._wanted = 0, 0
        self.moves = 0
        """How often it has got another place in memory."""
        self.large = False
        """Whether it has more than a quarter of the memory that was free."""

    def clear(self, rows: int, width: int) -> None:
        """Forget all rows, and make ready for a call that may need so much room."""
        self.layers, self._wanted = {}, (self._rows(rows), self._columns(width))
        for pair in self._whole.values():
            for whole in pair:
                whole.zero_()

    def put(self, rows: Sequence[int], kept: Layers, source: Sequence[int] | None = None) -> None:
        """Write keys and values that were computed before, or that ``take`` has copied, into the first columns of some
        rows.

        Args:
            source: which of them each row gets; None: in their order.
        """
        at, of = torch.tensor([*rows]), torch.tensor([*(range(len(rows)) if source is None else source)])
        self.reserve(1 + max(keys.shape[2] for keys, _ in kept.values()), 1 + max(rows), kept)
        for layer, pair in kept.items():
            for whole, fresh in zip(self.layers[layer], pair, strict=True):
                whole[at.to(whole.device), :, : fresh.shape[2]] = fresh.index_select(0, of.to(fresh.device))

    def take(self, row: int, width: int) -> Layers:
        """A copy of the first ``width`` columns of a row."""
        return {
            layer: (keys[row : row + 1, :, :width].clone(), values[row : row + 1, :, :width].clone())
            for layer, (keys, values) in self.layers.items()
        }

    def keep(self, index: Int64[Tensor, " k"], width: int) -> None:
        """Keep only the rows of ``index``, and only their first ``width`` columns. A row that keeps its place is not
        copied."""
        to = (index != torch.arange(len(index))).nonzero().squeeze(1)
        for whole in (each for pair in self._whole.values() for each in pair if len(to)):
            at, of = to.to(whole.device), index[to].to(whole.device)
            whole[at, :, :width] = whole[of, :, :width]
        self.layers = self.room(len(index), width)

    def reserve(self, width: int = 0, rows: int = 0, like: Layers | None = None) -> None:
        """Make room for at least ``width`` columns and at least ``rows`` rows; if there are no layers yet, for those of
        ``like``."""
        shown, _, columns, _ = next(iter(self.layers.values()))[0].shape if self.layers else (0, 0, 0, 0)
        if rows > shown or width > columns or not self.layers:
            self.layers = self.room(max(rows, shown), width, like)

    def room(self, rows: int, width: int, like: Layers | None = None) -> Layers:
        """The first rows, those behind the ones in use included, with at least ``width`` columns."""
        most, columns = self._rows(rows), self._columns(width)
        if not self._whole and like:
            keys, _ = next(iter(like.values()))
            whole, longest = (max(pair) for pair in zip(self._wanted, (most, columns), strict=True))
            size = 2 * len(like) * whole * keys.shape[1] * longest * keys.shape[3] * keys.element_size()
            if keys.is_cuda:  # what is free, or held by torch for nothing
                held = torch.cuda.memory_reserved(keys.device) - torch.cuda.memory_allocated(keys.device)
                self.large = 4 * size > torch.cuda.mem_get_info(keys.device)[0] + held
            if not self.large:  # room for the whole call
                most, columns = whole, longest
            self._whole = {layer: (keys[:0, :, :0], values[:0, :, :0]) for layer, (keys, values) in like.items()}
        for layer, (keys, values) in self._whole.items():
            more, wider = max(0, most - keys.shape[0]), max(0, columns - keys.shape[2])
            more = max(more, keys.shape[0] // 4) if more else 0  # rows that come one by one are not copied each time
            if more or wider:
                extra = (0, 0, 0, wider, 0, 0, 0, more)
                self._whole[layer] = F.pad(keys, extra), F.pad(values, extra)
                self.moves += 1
        return {layer: (keys[:rows], values[:rows]) for layer, (keys, values) in self._whole.items()}


def column_mask(position: Int64[Tensor, "*b"], width: int, dtype: torch.dtype) -> Float[Tensor, "*b w"]:
    """An additive attention mask over ``width`` columns: 0 up to each position, -inf beyond."""
    seen = torch.arange(width, device=position.device) <= position[..., None]
    return torch.where(seen, torch.zeros((), dtype=dtype, device=position.device), -torch.inf)


# ----------------------------------------------------------------------------------------- the next tokens of every row


def _grouped_attention(
    query: Float[Tensor, "b h c d"],
    keys: Float[Tensor, "b g w d"],
    values: Float[Tensor, "b g w e"],
    mask: Float[Tensor, "b 1 c w"],
    scaling: float,
) -> Float[Tensor, "b h c e"]:
    """Attention in which the queries of one key head go into the kernel as one block of rows."""
    b, h, c, d = query.shape
    grouped = query.reshape(b, keys.shape[1], -1, d)
    repeated = mask if c == 1 else mask.repeat(1, 1, h // keys.shape[1], 1)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=repeated, scale=scaling)
    return out.reshape(b, h, c, out.shape[-1])


class _DecodeLayout:
    """Causal attention of each row's next tokens to its row of a KV cache and to each other."""

    def __init__(self, layers: Layers, columns: Int64[Tensor, "b c"], mask: Float[Tensor, "b 1 c w"]) -> None:
        self.layers, self.columns, self.mask = layers, columns, mask
        self.max_length = mask.shape[-1]
        self.rows = torch.arange(len(columns), device=columns.device)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = self.layers[layer]
        keys[self.rows, :, self.columns] = key.transpose(1, 2)
        values[self.rows, :, self.columns] = value.transpose(1, 2)
        keys, values = keys[:, :, : self.max_length], values[:, :, : self.max_length]
        return _grouped_attention(query, keys, values, self.mask, scaling).transpose(1, 2)


def next_hidden(
    model: PreTrainedModel,
    tokens: Int64[Tensor, "b c"],
    columns: Int64[Tensor, "b c"],
    layers: Layers,
    mask: Float[Tensor, "b 1 c w"],
) -> Float[Tensor, "b c h"]:
    """The hidden states of every row's next tokens, which the model reads at once.

    Their keys and values are written into the cache ``layers`` at ``columns``. If a column occurs twice in a row, it
    holds the later token, so no token that is used may have to attend to the earlier one.
    """
    return hidden_states(model, tokens, columns, _DecodeLayout(layers, columns, mask))


# ----------------------------------------------------------------------------------------------- many tokens of a row


class _PrefillLayout:
    """Causal attention over right-padded prompts. It collects the keys and values of every layer."""

    def __init__(self, width: int) -> None:
        self.max_length = width
        self.layers: Layers = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.layers[layer] = key, value
        gqa = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
        return out.transpose(1, 2).contiguous()


def prefill(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> Layers:
    """The keys and values of all prompt tokens but the last one, which the first decoding step reads."""
    device = model.get_output_embeddings().weight.device
    width = max(1, *(len(p) - 1 for p in prompts))
    parts: list[Layers] = []
    size = max(1, PREFILL_TOKENS // width)
    for start in range(0, len(prompts), size):
        texts = [torch.tensor([*prompt[:-1]], dtype=torch.int64) for prompt in prompts[start : start + size]]
        tokens = pad_sequence(texts, batch_first=True)
        tokens = F.pad(tokens, (0, width - tokens.shape[1]))
        layout = _PrefillLayout(width)
        positions = torch.arange(width, device=device).expand(len(tokens), width)
        hidden_states(model, tokens.to(device), positions, layout)
        parts.append(layout.layers)
    return {
        layer: (torch.cat([p[layer][0] for p in parts]), torch.cat([p[layer][1] for p in parts])) for layer in parts[0]
    }


class _ExtendLayout:
    """Causal attention of some rows' next tokens, packed into [t], to their rows of a KV cache and to each other.

    Only in the attention itself are the tokens padded to [k, c]: each row of the cache, or of those that take part if
    these are few, with as many tokens as the longest has.
    """

    def __init__(
        self, layers: Layers, rows: Int64[Tensor, " k"], starts: Int64[Tensor, " k"], counts: Int64[Tensor, " k"]
    ) -> None:
        self.layers, (keys, _) = layers, next(iter(layers.values()))
        device, self.max_length = keys.device, int((starts + counts).max())
        of = torch.repeat_interleave(torch.arange(len(rows)), counts)
        place = torch.arange(len(of)) - (counts.cumsum(0) - counts)[of]
        self.columns, self.rows = (starts[of] + place).to(device), rows[of].to(device)
        # Most rows: their keys and values are read where they are. Few rows: they are copied.
        self.taken = None if 2 * len(rows) > keys.shape[0] else rows.to(device)
        first = starts if self.taken is not None else torch.zeros(keys.shape[0]).long().index_copy(0, rows, starts)
        self.query = (self.rows if self.taken is None else of.to(device)), place.to(device)
        columns = first[:, None] + torch.arange(int(counts.max()))
        self.mask: Float[Tensor, "r 1 c w"] = column_mask(columns.to(device), self.max_length, keys.dtype)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        pair = self.layers[layer]
        for cached, new in zip(pair, (key, value), strict=True):
            cached[self.rows, :, self.columns] = new[0].transpose(0, 1)
        keys, values = ((x if self.taken is None else x[self.taken])[:, :, : self.max_length] for x in pair)
        _, heads, _, size = query.shape
        (rows, _, most, _), (row, place) = self.mask.shape, self.query
        padded = query.new_zeros(rows, heads, most, size)
        padded[row, :, place] = query[0].transpose(0, 1)
        out = _grouped_attention(padded, keys, values, self.mask, scaling)
        return out[row, :, place][None]


def extend(
    model: PreTrainedModel, cache: KVCache, rows: Sequence[int], starts: Sequence[int], chunks: Sequence[Sequence[int]]
) -> Float[Tensor, "k h"]:
    """Let a model read further tokens of some rows; their keys and values are written into the cache.

    The tokens ``chunks[i]``, at least one, go into row ``rows[i]``, from column ``starts[i]`` on.

    Returns:
        the hidden state of the last token of each row.
    """
    device = model.get_output_embeddings().weight.device
    counts, first, places = (torch.tensor([*each]) for each in (map(len, chunks), starts, rows))
    cache.reserve(int((first + counts).max()))
    size, last = max(1, PREFILL_TOKENS // int(counts.max())), list[Tensor]()
    for some in (slice(i, i + size) for i in range(0, len(rows), size)):
        layout = _ExtendLayout(cache.layers, places[some], first[some], counts[some])
        tokens = torch.tensor([token for chunk in chunks[some] for token in chunk]).to(device)
        hidden = hidden_states(model, tokens, layout.columns, layout)
        last.append(hidden[counts[some].cumsum(0).to(device) - 1])
    return torch.cat(last)
