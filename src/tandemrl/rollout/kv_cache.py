"""The KV cache of a decoding model, and the attention of new tokens to it.

Column *p* of a cache is position *p* of its row, whoever wrote the token there: authorship never masks attention. A row
is filled by ``prefill``, then token by token by decoding steps, or with several tokens at once by ``extend``. ``take``
and ``put`` move a row out of a batch and back, so that nothing is computed twice. What a refused draft left here is not
erased: it lies behind the row's ``position``, where attention does not look, until the next
``decoding.DecodingBatch.step`` overwrites it. (In vLLM, ``vllm.kv_state.KVState.keep_prefix`` says how many tokens
still count as computed; the blocks behind them are overwritten, too.)
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor
from transformers import PreTrainedModel

from tandemrl.models.compile import eagerly, require_compiler
from tandemrl.models.forward import hidden_states

PREFILL_TOKENS = 16384  # tokens computed in one prefill forward
CACHE_STEP = 64  # columns by which caches grow

Layers = dict[int, tuple[Tensor, Tensor]]
"""For each layer its keys and values, each of shape [rows, kv heads, columns, head dim]."""


class KVCache:
    """Keys and values of one model, for the rows of a batch."""

    def __init__(self) -> None:
        self.layers: Layers = {}

    def append(self, prompts: Layers, source: Int64[Tensor, " b"], rows: int) -> None:
        """Add one row per entry of ``source``, filled from the prefilled prompts."""
        for layer, pair in prompts.items():
            old = self.layers.get(layer)
            keys, values = (
                self._join(
                    old[i] if old is not None else None, pair[i].index_select(0, source.to(pair[i].device)), rows
                )
                for i in (0, 1)
            )
            self.layers[layer] = keys, values

    @staticmethod
    def _join(old: Tensor | None, new: Tensor, rows: int) -> Tensor:
        # Zeros, not whatever the memory holds: a masked NaN is still a NaN.
        width = max(new.shape[2] + CACHE_STEP, 0 if old is None else old.shape[2])
        out = new.new_zeros(rows + new.shape[0], new.shape[1], width, new.shape[3])
        if old is not None:
            out[:rows, :, : old.shape[2]] = old
        out[rows:, :, : new.shape[2]] = new
        return out

    def keep(self, index: Int64[Tensor, " k"], width: int) -> None:
        """Keep only the rows of ``index``, and only their first ``width`` columns, with room to grow."""
        for layer, (keys, values) in self.layers.items():
            on_device = index.to(keys.device)
            keys, values = (x[:, :, : width + CACHE_STEP].index_select(0, on_device) for x in (keys, values))
            self.layers[layer] = keys, values

    def reserve(self, width: int = 0, rows: int = 0) -> None:
        """Make room for at least ``width`` columns and at least ``rows`` rows."""
        for layer, (keys, values) in self.layers.items():
            more_rows, missing = max(0, rows - keys.shape[0]), width - keys.shape[2]
            more_columns = max(missing, CACHE_STEP, keys.shape[2] // 4) if missing > 0 else 0
            if more_rows or more_columns:
                extra = (0, 0, 0, more_columns, 0, 0, 0, more_rows)
                self.layers[layer] = F.pad(keys, extra), F.pad(values, extra)

    def take(self, row: int, width: int) -> Layers:
        """A copy of the first ``width`` columns of a row."""
        return {
            layer: (keys[row : row + 1, :, :width].clone(), values[row : row + 1, :, :width].clone())
            for layer, (keys, values) in self.layers.items()
        }

    def put(self, row: int, kept: Layers) -> None:
        """Write what ``take`` has copied into the first columns of a row."""
        self.reserve(max((keys.shape[2] for keys, _ in kept.values()), default=0))  # it may have been cut since
        for layer, pair in kept.items():
            for old, new in zip(self.layers[layer], pair, strict=True):
                old[row, :, : new.shape[2]] = new[0]


def column_mask(position: Int64[Tensor, "*b"], width: int, dtype: torch.dtype) -> Float[Tensor, "*b w"]:
    """An additive attention mask over ``width`` columns: 0 up to each position, -inf beyond."""
    seen = torch.arange(width, device=position.device) <= position[..., None]
    return torch.where(seen, torch.zeros((), dtype=dtype, device=position.device), -torch.inf)


# ----------------------------------------------------------------------------------------- the next tokens of every row


class _DecodeLayout:
    """Causal attention of each row's next tokens to its row of a KV cache and to each other.

    In grouped-query attention, the queries of one key head go into the kernel as one block of rows.
    """

    def __init__(self, layers: Layers, columns: Int64[Tensor, "b c"], mask: Float[Tensor, "b 1 c w"]) -> None:
        self.layers, self.columns, self.mask = layers, columns, mask
        self.max_length = mask.shape[-1]
        self.rows = torch.arange(len(columns), device=columns.device)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        b, h, c, d = query.shape
        keys, values = self.layers[layer]
        keys[self.rows, :, self.columns] = key.transpose(1, 2)
        values[self.rows, :, self.columns] = value.transpose(1, 2)
        keys, values = keys[:, :, : self.max_length], values[:, :, : self.max_length]
        grouped = query.reshape(b, keys.shape[1], -1, d)
        mask = self.mask if c == 1 else self.mask.repeat(1, 1, h // keys.shape[1], 1)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
        return out.reshape(b, h, c, out.shape[-1]).transpose(1, 2)


def _last_hidden(
    model: PreTrainedModel,
    last: Int64[Tensor, " b"],
    position: Int64[Tensor, " b"],
    layers: Layers,
    mask: Float[Tensor, "b 1 1 w"],
) -> Float[Tensor, "b h"]:
    """The hidden state of every row's last token. Its keys and values are written into the cache."""
    columns = position[:, None]
    return hidden_states(model, last[:, None], columns, _DecodeLayout(layers, columns, mask))[:, 0]


def eager_step(model: PreTrainedModel) -> Callable[..., Tensor]:
    """The decoding step of a model without compilation: (last tokens, positions, layers, mask) -> hidden states [b, h].

    The step writes the keys and values of the last tokens into the cache ``layers``.
    """

    def step(last: Tensor, position: Tensor, layers: Layers, mask: Tensor) -> Tensor:
        with eagerly(model):
            return _last_hidden(model, last, position, layers, mask)

    return step


def compiled_step(model: PreTrainedModel) -> Callable[..., Tensor]:
    """The decoding step of a model, compiled to one graph for any width and any number of rows above one.

    A single row would be compiled to a graph of its own, so it takes the eager step.
    """
    require_compiler(model, "rollout.compile")

    def step(last: Tensor, position: Tensor, layers: Layers, mask: Tensor) -> Tensor:
        return _last_hidden(model, last, position, layers, mask)

    compiled, eager, dynamic = torch.compile(step), eager_step(model), torch._dynamo.maybe_mark_dynamic

    def any_step(last: Tensor, position: Tensor, layers: Layers, mask: Tensor) -> Tensor:
        if len(last) == 1:
            return eager(last, position, layers, mask)
        for tensor in (last, position):
            dynamic(tensor, 0)
        dynamic(mask, [0, 3])
        for pair in layers.values():
            for tensor in pair:
                dynamic(tensor, [0, 2])
        return compiled(last, position, layers, mask)

    return any_step


def chunk_hidden(
    model: PreTrainedModel, tokens: Int64[Tensor, "b c"], columns: Int64[Tensor, "b c"], cache: KVCache
) -> Float[Tensor, "b c h"]:
    """The hidden states of every row's next tokens, which the model reads at once.

    Their keys and values are written into the cache at ``columns``. If a column occurs twice in a row, it holds the
    later token, so no token that is used may have to attend to the earlier one.
    """
    width = int(columns.max()) + 1
    cache.reserve(width)
    dtype = next(iter(cache.layers.values()))[0].dtype
    mask = column_mask(columns, width, dtype)[:, None]
    with eagerly(model):
        return hidden_states(model, tokens, columns, _DecodeLayout(cache.layers, columns, mask))


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
        tokens = _padded([prompt[:-1] for prompt in prompts[start : start + size]], width)
        layout = _PrefillLayout(width)
        positions = torch.arange(width, device=device).expand(len(tokens), width)
        with eagerly(model):
            hidden_states(model, tokens.to(device), positions, layout)
        parts.append(layout.layers)
    return {
        layer: (torch.cat([p[layer][0] for p in parts]), torch.cat([p[layer][1] for p in parts])) for layer in parts[0]
    }


class _ExtendLayout:
    """Causal attention of some rows' next tokens to their rows of a KV cache and to each other."""

    def __init__(self, layers: Layers, rows: Int64[Tensor, " k"], columns: Int64[Tensor, "k c"], width: int) -> None:
        self.layers, self.rows, self.columns, self.max_length = layers, rows, columns, width
        dtype = next(iter(layers.values()))[0].dtype
        self.mask: Float[Tensor, "k 1 c w"] = column_mask(columns, width, dtype)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        for cached, new in zip(self.layers[layer], (key, value), strict=True):
            cached[self.rows[:, None], :, self.columns] = new.transpose(1, 2)
        keys, values = (cached[self.rows, :, : self.max_length] for cached in self.layers[layer])
        gqa = query.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=self.mask, scale=scaling, enable_gqa=gqa)
        return out.transpose(1, 2).contiguous()


def extend(
    model: PreTrainedModel, cache: KVCache, rows: Sequence[int], starts: Sequence[int], chunks: Sequence[Sequence[int]]
) -> None:
    """Compute the keys and values of further tokens of some rows, and write them into the cache.

    The tokens ``chunks[i]`` go into row ``rows[i]``, from column ``starts[i]`` on.
    """
    device = model.get_output_embeddings().weight.device
    longest = max(map(len, chunks))
    width = max(start + len(chunk) for start, chunk in zip(starts, chunks, strict=True))
    cache.reserve(max(starts) + longest)
    size = max(1, PREFILL_TOKENS // longest)
    for some in (slice(i, i + size) for i in range(0, len(rows), size)):
        start, count = torch.tensor(starts[some])[:, None], torch.tensor([*map(len, chunks[some])])[:, None]
        # Padding takes columns that its row overwrites before it reads them; its position must be one of the model's.
        columns = start + torch.arange(longest)
        positions = columns.minimum(start + count - 1)
        layout = _ExtendLayout(cache.layers, torch.tensor(rows[some], device=device), columns.to(device), width)
        tokens = _padded(chunks[some], longest)
        with eagerly(model):
            hidden_states(model, tokens.to(device), positions.to(device), layout)


def _padded(texts: Sequence[Sequence[int]], width: int) -> Int64[Tensor, "b w"]:
    """The texts as one tensor of ``width`` columns, right-padded with zeros."""
    tokens = torch.zeros(len(texts), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text, dtype=torch.int64)
    return tokens
