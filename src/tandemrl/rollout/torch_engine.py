"""The reference engine: two transformers models, a KV cache each, batched tandem decoding. Readable, exact, CPU or GPU.

Each step feeds the last token of every row to both models, picks each row's logits from the model that writes its next
token, and draws that token by a counter-based key. Bookkeeping lives on the host; the device sees rows only.
Column *p* of a KV cache is position *p* of its row, whoever wrote the token there: authorship never masks attention.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.distributed.watchdog import stamp
from tandemrl.models.compile import eagerly, require_compiler
from tandemrl.models.forward import hidden_states
from tandemrl.models.loading import eos_token_ids
from tandemrl.models.sampling import Truncation, draw, kept_tokens, penalise, race_times
from tandemrl.rollout.engine import Aborts, Completion, EngineError, EngineInfo, Request, StopReason, check_request
from tandemrl.rollout.sync import fingerprint
from tandemrl.selection import Who
from tandemrl.selection.draws import SAMPLING, fold_in, stream
from tandemrl.selection.live import LiveSelection

_WRITERS = {"both": (0, 1), "senior": (1,), "junior": (0,)}
PREFILL_TOKENS = 16384  # prompt tokens computed in one prefill forward
CACHE_STEP = 64  # columns by which KV caches grow
RACES_AHEAD = 16  # steps whose random numbers are made at once, fewer where there are many rows


class TorchEngine:
    """Tandem decoding with two models that share a vocabulary; see ``rollout.engine.Engine`` for the contract.

    Args:
        senior: from ``load_model`` or ``prepare``; the engine owns it (``load_weights`` changes it).
        junior: the frozen partner, of any size, family or device; None if only the senior ever writes.
        tokenizer: used for stop strings only.
        max_rows: completions decoded at once; further ones join when an eighth of the rows is free.
        compile: ``torch.compile`` of each model's decoding step, all layers in one graph; the first steps take long.

    Raises:
        EngineError: the models cannot cover the tokenizer's vocabulary.
        ModelError: ``compile`` on a CPU without a C++ compiler.
    """

    def __init__(
        self,
        senior: PreTrainedModel,
        junior: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int = 256,
        policy_version: int = 0,
        compile: bool = False,
    ) -> None:
        self.senior, self.junior, self.tokenizer = senior, junior, tokenizer
        self.max_rows, self.policy_version = max_rows, policy_version
        self.has_junior = junior is not None
        self.models = {1: senior} | ({0: junior} if junior is not None else {})
        self.heads = {who: model.get_output_embeddings() for who, model in self.models.items()}
        self.vocabulary = min(head.weight.shape[0] for head in self.heads.values())
        if self.vocabulary < len(tokenizer):
            raise EngineError(f"a model has {self.vocabulary} logits for the tokenizer's {len(tokenizer)} tokens")
        self.context = min(_context(model) for model in self.models.values())
        self.eos = eos_token_ids(senior.generation_config, tokenizer)
        step = _compiled_step if compile else _eager_step
        self.decode = {who: step(model) for who, model in self.models.items()}
        self._aborts = Aborts()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("torch", str(self.heads[1].weight.dtype).removeprefix("torch."))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        own = dict(self.senior.named_parameters())
        new = dict(weights)
        if own.keys() != new.keys():
            missing = sorted(own.keys() ^ new.keys())
            raise EngineError(
                f"weights do not match the engine's senior; {len(missing)} names differ, e.g. {missing[0]}"
            )
        for name, parameter in own.items():
            if parameter.shape != new[name].shape:
                raise EngineError(f"weight {name}: shape {tuple(new[name].shape)}, expected {tuple(parameter.shape)}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(new[name])
        self.policy_version = version

    def fingerprint(self, who: Who = "senior") -> int:
        model = self.models.get(1 if who == "senior" else 0)
        if model is None:
            raise EngineError("this engine has no junior")
        return fingerprint(model.named_parameters())

    def close(self) -> None:
        """Nothing to do: the models belong to whoever loaded them."""

    def abort(self, keys: Iterable[int] | None = None) -> None:
        self._aborts.add(keys)

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], *, progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        for i, request in enumerate(requests):
            check_request(i, request, vocabulary=self.vocabulary, context=self.context, has_junior=self.has_junior)
        self._aborts.clear()
        pairs = [(request, key) for request in requests for key in request.keys]
        rows = [_Row(request, key, number) for number, (request, key) in enumerate(pairs)]
        waiting = list(rows)
        batch = _Batch(self, requests, len(rows))
        while waiting or batch.rows:
            free = self.max_rows - len(batch.rows)
            if waiting and (not batch.rows or 8 * free >= self.max_rows):
                count = _whole_groups(waiting, free) or (0 if batch.rows else free)
                batch.admit(waiting[:count])
                del waiting[:count]
            written = batch.step()
            if written:
                stamp()
            if progress is not None:
                progress(written)
            if self._aborts:
                waiting = batch.end(self._aborts, waiting)
            batch.retire()
        completions = iter([batch.completion(row) for row in rows])
        return [[next(completions) for _ in request.keys] for request in requests]


def _whole_groups(waiting: Sequence["_Row"], free: int) -> int:
    """How many rows fit without tearing a request apart: its prompt is computed once."""
    if len(waiting) <= free:
        return len(waiting)
    return max((i for i in range(1, free + 1) if waiting[i].request is not waiting[i - 1].request), default=0)


def _context(model: PreTrainedModel) -> int:
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31 - 1)


@dataclass(slots=True, eq=False)
class _Row:
    """One completion on its way; ``number`` is its row of the output arrays."""

    request: Request
    key: int
    number: int
    written: int = 0
    stop_reason: StopReason | None = None


class _Batch:
    """The rows being decoded. ``rows[i]`` owns entry i of every tensor and row i of every KV cache."""

    def __init__(self, engine: TorchEngine, requests: Sequence[Request], total: int) -> None:
        self.engine = engine
        self.rows: list[_Row] = []
        writers = {who for request in requests for who in _WRITERS[request.strategy.writers]}
        self.caches = {who: _KVCache() for who in sorted(writers)}
        self.selection = LiveSelection()  # by number
        samplings = [r.sampling for r in requests]
        self.penalised = any(s.penalised for s in samplings)
        self.truncated = any(s.truncated for s in samplings)
        self.greedy = any(s.temperature == 0 for s in samplings)
        self.scaled = any(s.temperature not in (0, 1) for s in samplings)
        self.stop_strings = any(s.stop for s in samplings)
        self.stops = _StopTable(engine, requests)
        self.device = engine.heads[1].weight.device
        # What has been written, one row per completion of the call. The last column takes what finished rows sample.
        width = 1 + max((s.max_tokens for s in samplings), default=0)
        self.tokens = torch.empty(total, width, dtype=torch.int64)
        self.authors = torch.empty(total, width, dtype=torch.int8)
        self.logprobs = torch.empty(total, width, dtype=torch.float32)
        # Host side, one entry per row.
        self.number = torch.empty(0, dtype=torch.int64)
        self.limit = torch.empty(0, dtype=torch.int64)
        self.live = torch.empty(0, dtype=torch.bool)
        self.last = torch.empty(0, dtype=torch.int64)
        self.position = torch.empty(0, dtype=torch.int64)
        self.stream = torch.empty(0, dtype=torch.int64)
        self.written = torch.empty(0, dtype=torch.int64)
        self.author = torch.empty(0, dtype=torch.bool)
        self.stop_row = torch.empty(0, dtype=torch.int64)
        # Device side, one row each: temperature, top_k, top_p, min_p, penalties; token counts when penalised.
        self.parameters = torch.empty(0, 7, dtype=torch.float32, device=self.device)
        self.races: list[Tensor] = []  # of the coming steps, the next one last
        self.in_prompt = torch.empty(0, engine.vocabulary, dtype=torch.bool, device=self.device)
        self.counts = torch.empty(0, engine.vocabulary, dtype=torch.int64, device=self.device)

    def completion(self, row: _Row) -> Completion:
        assert row.stop_reason is not None
        tokens, authors, logprobs = (
            x[row.number, : row.written].numpy().copy() for x in (self.tokens, self.authors, self.logprobs)
        )
        return Completion(row.key, tokens, authors, logprobs, row.stop_reason, self.engine.policy_version)

    # ------------------------------------------------------------------------------------------------- coming and going

    def admit(self, new: list[_Row]) -> None:
        """Compute the prompts of new rows, each distinct request once, and append the rows to the batch."""
        if not new:
            return
        requests = list({id(row.request): row.request for row in new}.values())
        place = {id(request): i for i, request in enumerate(requests)}
        source = torch.tensor([place[id(row.request)] for row in new])
        prompts = [list(r.prompt) for r in requests]
        for who, cache in self.caches.items():
            cache.append(_prefill(self.engine.models[who], prompts), source, len(self.rows))

        keys = torch.tensor([row.key for row in new], dtype=torch.int64)
        number = torch.tensor([row.number for row in new])
        author = self.selection.admit(number, [row.request.strategy for row in new], keys)
        length = torch.tensor([len(p) for p in prompts])[source]
        self.last = torch.cat([self.last, torch.tensor([p[-1] for p in prompts])[source]])
        self.position = torch.cat([self.position, length - 1])
        self.stream = torch.cat([self.stream, stream(keys, SAMPLING)])
        self.written = torch.cat([self.written, torch.zeros_like(keys)])
        self.number = torch.cat([self.number, number])
        self.limit = torch.cat([self.limit, torch.tensor([row.request.sampling.max_tokens for row in new])])
        self.live = torch.cat([self.live, torch.ones_like(keys, dtype=torch.bool)])
        self.author = torch.cat([self.author, author])
        self.stop_row = torch.cat([self.stop_row, torch.tensor([self.stops.row(r) for r in requests])[source]])
        values = [
            (s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty, s.presence_penalty, s.frequency_penalty)
            for s in (r.sampling for r in requests)
        ]
        self.parameters = torch.cat(
            [self.parameters, torch.tensor(values, dtype=torch.float32)[source].to(self.device)]
        )
        if self.penalised:
            seen = torch.zeros(len(requests), self.engine.vocabulary, dtype=torch.bool)
            for i, prompt in enumerate(prompts):
                seen[i, prompt] = True
            self.in_prompt = torch.cat([self.in_prompt, seen[source].to(self.device)])
            self.counts = torch.cat([self.counts, torch.zeros_like(seen[source], dtype=torch.int64).to(self.device)])
        self.rows += new
        self.races = []

    def retire(self) -> None:
        """Drop finished rows once they make up an eighth of the batch, so that caches are copied rarely."""
        index = self.live.nonzero().squeeze(1)
        finished = len(self.rows) - len(index)
        if finished == 0 or (len(index) and 8 * finished < len(self.rows)):
            return
        self.rows = [self.rows[i] for i in index.tolist()]
        self.races = []
        for cache in self.caches.values():
            cache.keep(index, int(self.position[index].max()) + 1 if len(index) else 0)
        for name in ("last", "position", "stream", "written", "author", "stop_row", "number", "limit", "live"):
            setattr(self, name, getattr(self, name)[index])
        on_device = index.to(self.device)
        self.parameters = self.parameters[on_device]
        if self.penalised:
            self.in_prompt, self.counts = self.in_prompt[on_device], self.counts[on_device]

    def end(self, aborts: Aborts, waiting: list[_Row]) -> list[_Row]:
        """Mark the aborted rows finished; returns the rows that still wait."""
        for i, row in enumerate([*self.rows, *waiting]):
            if row.stop_reason is None and row.key in aborts:
                row.stop_reason = "abort"
                if i < len(self.rows):
                    row.written, self.live[i] = int(self.written[i]), False
        return [row for row in waiting if row.stop_reason is None]

    # -------------------------------------------------------------------------------------------------------- one token

    def step(self) -> int:
        """Every live row gets one token from its author; returns how many rows that were."""
        logits = self._author_logits()
        tokens, logprobs = self._sample(logits, self._race())
        if self.penalised:
            self.counts.scatter_add_(1, tokens[:, None], torch.ones_like(tokens[:, None]))
        tokens = tokens.cpu()
        self.tokens[self.number, self.written] = tokens
        self.authors[self.number, self.written] = self.author.to(torch.int8)
        self.logprobs[self.number, self.written] = logprobs.cpu()

        live = int(self.live.sum())
        # A finished row stands still until it is retired: it must not outgrow its model's context or its output row.
        self.position, self.written = self.position + self.live, self.written + self.live
        self._finish(tokens)
        self.author = self.selection.step(self.number, tokens)
        self.last = tokens
        return live

    def _finish(self, tokens: Int64[Tensor, " b"]) -> None:
        """End the rows whose last token is a stop or EOS token, completes a stop string, or is the last allowed."""
        stop = self.stops.stop[self.stop_row, tokens]
        ended = (stop | (self.written == self.limit)) & self.live
        if self.stop_strings:
            hits = [row.stop_reason is None and self._hits_stop_string(i) for i, row in enumerate(self.rows)]
            stop = stop | torch.tensor(hits)
            ended = ended | (stop & self.live)
        if not bool(ended.any()):
            return
        eos = self.stops.eos[self.stop_row, tokens]
        for i in ended.nonzero().squeeze(1).tolist():
            self.rows[i].stop_reason = "eos" if eos[i] else "stop" if stop[i] else "length"
            self.rows[i].written = int(self.written[i])
        self.live = self.live & ~ended

    def _author_logits(self) -> Float[Tensor, "b v"]:
        """Both models read the last token of every row; each row's logits are those of its author's model."""
        vocabulary, width = self.engine.vocabulary, int(self.position.max()) + 1
        logits = torch.empty(0)
        masks: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # the same for both models, as a rule
        for who, cache in self.caches.items():
            head = self.engine.heads[who]
            device = head.weight.device
            position = self.position.to(device)
            kind = (device, head.weight.dtype)
            if kind not in masks:
                masks[kind] = _column_mask(position, width, head.weight.dtype)
            cache.reserve(width)
            hidden = self.engine.decode[who](self.last.to(device), position, cache.layers, masks[kind])
            mine = self.author == bool(who)
            if bool(mine.all()):
                logits = head(hidden)[:, :vocabulary].float().to(self.device)
            elif len(self.caches) == 1:
                raise EngineError("a strategy let somebody write who it promised would not (Strategy.writers)")
            elif bool(mine.any()):
                if logits.shape[0] == 0:
                    logits = torch.empty(len(self.rows), vocabulary, device=self.device)
                index = mine.nonzero().squeeze(1)
                logits[index.to(self.device)] = head(hidden[index.to(device)])[:, :vocabulary].float().to(self.device)
        return logits

    def _race(self) -> Float64[Tensor, "b r"]:
        """The random numbers of this step's draws. They depend on no logit: those of many steps cost hardly more."""
        if not self.races:
            counters = self.written[:, None] + torch.arange(max(1, min(RACES_AHEAD, 512 // len(self.rows))))
            times = race_times(fold_in(self.stream[:, None], counters).to(self.device), self.engine.vocabulary)
            self.races = [*times.unbind(1)][::-1]
        return self.races.pop()

    def _sample(self, logits: Tensor, race: Tensor) -> tuple[Int64[Tensor, " b"], Float[Tensor, " b"]]:
        if not (self.penalised or self.scaled or self.greedy or self.truncated):
            return draw(logits, race)
        temperature, top_k, top_p, min_p, repetition, presence, frequency = self.parameters.split(1, dim=1)
        if self.penalised:
            logits = penalise(
                logits,
                seen_in_prompt=self.in_prompt,
                output_counts=self.counts,
                repetition=repetition,
                presence=presence,
                frequency=frequency,
            )
        raw = logits
        if self.scaled or self.greedy:
            logits = logits / torch.where(temperature > 0, temperature, 1.0)
        if self.truncated:
            logits = logits.masked_fill(~kept_tokens(logits, Truncation(top_k.long(), top_p, min_p)), -torch.inf)
        tokens, logprobs = draw(logits, race)
        if self.greedy:
            deterministic = (temperature == 0).squeeze(1)
            tokens = torch.where(deterministic, raw.argmax(-1), tokens)
            logprobs = torch.where(deterministic, 0.0, logprobs)
        return tokens, logprobs

    def _hits_stop_string(self, i: int) -> bool:
        stops = self.rows[i].request.sampling.stop
        if not stops:
            return False
        # A character is at most four byte tokens, and the last token completes the stop string.
        written = int(self.written[i])
        tail = self.tokens[self.number[i], max(0, written - 4 * max(map(len, stops)) - 4) : written]
        text = self.engine.tokenizer.decode(tail.tolist(), skip_special_tokens=False)
        return any(stop in text for stop in stops)


class _StopTable:
    """Which tokens end a row: one boolean row per distinct (ignore_eos, stop_token_ids)."""

    def __init__(self, engine: TorchEngine, requests: Sequence[Request]) -> None:
        kinds = dict.fromkeys((r.sampling.ignore_eos, r.sampling.stop_token_ids) for r in requests)
        self.index = {kind: i for i, kind in enumerate(kinds)}
        self.stop = torch.zeros(len(kinds), engine.vocabulary, dtype=torch.bool)
        self.eos = torch.zeros_like(self.stop)
        for (ignore_eos, ids), i in self.index.items():
            self.eos[i, list(() if ignore_eos else engine.eos)] = True
            self.stop[i, list(ids)] = True
        self.stop |= self.eos

    def row(self, request: Request) -> int:
        return self.index[(request.sampling.ignore_eos, request.sampling.stop_token_ids)]


# ------------------------------------------------------------------------------------------------------------ KV caches


_Layers = dict[int, tuple[Tensor, Tensor]]


class _KVCache:
    """Keys and values of one model: per layer two tensors [rows, kv heads, capacity, head dim]."""

    def __init__(self) -> None:
        self.layers: _Layers = {}

    def append(self, prompts: dict[int, tuple[Tensor, Tensor]], source: Int64[Tensor, " b"], rows: int) -> None:
        """Add one row per entry of ``source``, filled from the prefilled prompts."""
        for layer, pair in prompts.items():
            old = self.layers.get(layer)
            self.layers[layer] = tuple(  # type: ignore[assignment]
                self._join(
                    old[i] if old is not None else None, pair[i].index_select(0, source.to(pair[i].device)), rows
                )
                for i in (0, 1)
            )

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
        """Only some rows, and only the columns that they have reached, with room to grow."""
        for layer, (keys, values) in self.layers.items():
            on_device = index.to(keys.device)
            short = (x[:, :, : width + CACHE_STEP] for x in (keys, values))
            self.layers[layer] = tuple(x.index_select(0, on_device) for x in short)  # type: ignore[assignment]

    def reserve(self, width: int) -> None:
        """Room for so many columns."""
        for layer, (keys, values) in self.layers.items():
            if width > keys.shape[2]:
                extra = max(CACHE_STEP, keys.shape[2] // 4)
                self.layers[layer] = F.pad(keys, (0, 0, 0, extra)), F.pad(values, (0, 0, 0, extra))


def _column_mask(position: Int64[Tensor, " b"], width: int, dtype: torch.dtype) -> Float[Tensor, "b 1 1 w"]:
    """0 on the columns up to each row's position, -inf beyond."""
    seen = torch.arange(width, device=position.device) <= position[:, None]
    return torch.where(seen, torch.zeros((), dtype=dtype, device=position.device), -torch.inf)[:, None, None]


class _DecodeLayout:
    """One query per row against its row of a KV cache. Grouped queries share their key head's row of the kernel."""

    def __init__(self, layers: _Layers, position: Int64[Tensor, " b"], mask: Float[Tensor, "b 1 1 w"]) -> None:
        self.layers, self.position, self.mask = layers, position, mask
        self.max_length = mask.shape[-1]
        self.rows = torch.arange(len(position), device=position.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        b, h, _, d = query.shape
        keys, values = self.layers[layer]
        keys[self.rows, :, self.position] = key[:, :, 0]
        values[self.rows, :, self.position] = value[:, :, 0]
        keys, values = keys[:, :, : self.max_length], values[:, :, : self.max_length]
        grouped = query.reshape(b, keys.shape[1], -1, d)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scaling)
        return out.reshape(b, 1, h, out.shape[-1])


def _last_hidden(
    model: PreTrainedModel,
    last: Int64[Tensor, " b"],
    position: Int64[Tensor, " b"],
    layers: _Layers,
    mask: Float[Tensor, "b 1 1 w"],
) -> Float[Tensor, "b h"]:
    """Hidden states of every row's last token, whose keys and values join the cache."""
    return hidden_states(model, last[:, None], position[:, None], _DecodeLayout(layers, position, mask))[:, 0]


def _eager_step(model: PreTrainedModel) -> Callable[..., Tensor]:
    def step(last: Tensor, position: Tensor, layers: _Layers, mask: Tensor) -> Tensor:
        with eagerly(model):
            return _last_hidden(model, last, position, layers, mask)

    return step


def _compiled_step(model: PreTrainedModel) -> Callable[..., Tensor]:
    """As one graph for any width and any number of rows, but one: a size of 1 would be a graph of its own."""
    require_compiler(model, "rollout.compile")

    def step(last: Tensor, position: Tensor, layers: _Layers, mask: Tensor) -> Tensor:
        return _last_hidden(model, last, position, layers, mask)

    compiled, eager, dynamic = torch.compile(step), _eager_step(model), torch._dynamo.maybe_mark_dynamic

    def any_step(last: Tensor, position: Tensor, layers: _Layers, mask: Tensor) -> Tensor:
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


class _PrefillLayout:
    """Causal attention over right-padded prompts; collects every layer's keys and values."""

    def __init__(self, width: int) -> None:
        self.max_length = width
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.layers[layer] = key, value
        gqa = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
        return out.transpose(1, 2).contiguous()


def _prefill(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values of all prompt tokens but the last, which the first decoding step feeds."""
    device = model.get_output_embeddings().weight.device
    width = max(1, *(len(p) - 1 for p in prompts))
    parts: list[dict[int, tuple[Tensor, Tensor]]] = []
    size = max(1, PREFILL_TOKENS // width)
    for start in range(0, len(prompts), size):
        some = prompts[start : start + size]
        tokens = torch.zeros(len(some), width, dtype=torch.int64)
        for i, prompt in enumerate(some):
            tokens[i, : len(prompt) - 1] = torch.tensor(prompt[:-1], dtype=torch.int64)
        layout = _PrefillLayout(width)
        positions = torch.arange(width, device=device).expand(len(some), width)
        with eagerly(model):
            hidden_states(model, tokens.to(device), positions, layout)
        parts.append(layout.layers)
    return {
        layer: (torch.cat([p[layer][0] for p in parts]), torch.cat([p[layer][1] for p in parts])) for layer in parts[0]
    }
