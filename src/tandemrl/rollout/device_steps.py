"""Decoding steps that need no host: each reads and writes tensors that stay on the device.

Draws, authors and places are functions of counters, so the host need not see a token before the next one is drawn. It
looks after every ``rollout.host_every`` steps: then it cuts each row at its end, as after a draft, and lets rows come
and go. So the tokens are the same for every number of steps. On CUDA a step is captured as a graph, once for each size
of batch, and replayed, which spares the launches of its thousands of small kernels.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tandemrl.models.sampling import race_times
from tandemrl.rollout.decoding_rows import Block, Decoder, Shaping, sample
from tandemrl.rollout.kv_cache import KVCache, Layers, column_mask, next_hidden, roomy
from tandemrl.selection.authors import map_state
from tandemrl.selection.draws import fold_in
from tandemrl.selection.live import Mark
from tandemrl.selection.strategies import Strategy

CUDA_STEPS = 16  # between two looks, if rollout.host_every is auto; 1 on a CPU
GRAPHS = 32  # kept at once; those used longest ago are dropped
FEWEST_ROWS = 8  # of a graph: fewer are hardly faster
COLUMNS = 128  # by which the widths of graphs differ at least


class Start(NamedTuple):
    """Where the rows of a batch stand before some steps.

    last: the last token. author: whether the senior writes next. position: of the last token. end: the position that no
    row goes beyond; what is fed there is never kept. counter: of the next sampling draw of each ``stream``. parameters:
    see ``decoding_rows.sampling_parameters``. mark: the states of the strategies.
    """

    last: Int64[Tensor, " b"]
    author: Bool[Tensor, " b"]
    position: Int64[Tensor, " b"]
    end: Int64[Tensor, " b"]
    counter: Int64[Tensor, " b"]
    stream: Int64[Tensor, " b"]
    parameters: Float[Tensor, "b 7"]
    mark: Mark


class Step:
    """A decoding step as a function without arguments of tensors that stay in their places.

    Everything that changes from step to step has one entry per step, at the index that the tensor ``number`` holds.

    Args:
        layers: keys and values of each model, for at least ``rows`` rows and ``width`` columns.
        mark: states of the strategies, for their shapes.
        steps: how many steps follow each other at most.
        side: a CUDA stream, on which the junior computes beside the senior.
    """

    def __init__(
        self,
        decoder: Decoder,
        layers: Mapping[int, Layers],
        shaping: Shaping,
        strategies: Sequence[Strategy],
        mark: Mark,
        *,
        rows: int,
        width: int,
        steps: int,
        side: torch.cuda.Stream | None = None,
    ) -> None:
        self.decoder, self.layers, self.shaping, self.strategies = decoder, layers, shaping, strategies
        self.width = width
        zeros = partial(torch.zeros, dtype=torch.int64, device=decoder.device)
        self.number = zeros(1)
        self.tokens, self.authors = zeros(steps + 1, rows), zeros(steps + 1, rows, dtype=torch.bool)
        self.logprobs = zeros(steps, rows, dtype=torch.float32)
        self.position, self.end, self.counter, self.stream = (zeros(rows) for _ in range(4))
        self.parameters = zeros(rows, 7, dtype=torch.float32)
        self.members = [zeros(rows, dtype=torch.bool) for _ in mark]
        self.states = [
            map_state(lambda x: zeros(steps + 1, rows, *x.shape[1:], dtype=x.dtype), state) for _, _, state in mark
        ]
        self.side = side if len(layers) > 1 else None

    def load(self, start: Start) -> None:
        """Put the rows into their places. Places of no row compute something, too, which nobody reads."""
        count, device = len(start.last), self.number.device
        self.number.zero_()
        for places, values in zip(
            (self.tokens[0], self.authors[0], self.position, self.end, self.counter, self.stream, self.parameters),
            start[:-1],
            strict=True,
        ):
            places[count:].zero_()
            places[:count].copy_(values)
        for member, states, (_, mine, state) in zip(self.members, self.states, start.mark, strict=True):
            at = mine.to(device)
            member.zero_()
            member[at] = True
            map_state(lambda places, new, at=at: places[0].index_copy_(0, at, new.to(device)), states, state)

    def __call__(self) -> None:
        last, author = (x.index_select(0, self.number)[0] for x in (self.tokens, self.authors))
        column = (self.position + self.number).minimum(self.end)
        logits = self._logits(last, column, author)
        race = race_times(fold_in(self.stream, self.counter + self.number), self.decoder.vocabulary)
        tokens, logprobs = sample(logits, race, self.parameters, None, self.shaping)
        self.logprobs.index_copy_(0, self.number, logprobs[None])
        after, following = author, self.number + 1
        for strategy, member, states in zip(self.strategies, self.members, self.states, strict=True):
            now = map_state(lambda x: x.index_select(0, self.number)[0], states)
            senior, new = strategy.step(now, tokens)
            after = senior if len(self.members) == 1 else torch.where(member, senior, after)
            map_state(lambda x, each: x.index_copy_(0, following, each[None]), states, new)
        self.tokens.index_copy_(0, following, tokens[None])
        self.authors.index_copy_(0, following, after[None])
        self.number.copy_(following)

    def _logits(self, last: Tensor, column: Tensor, author: Tensor) -> Float[Tensor, "b v"]:
        """The logits of each row's author. Two models compute side by side, since neither fills a GPU by itself."""
        masks = {
            head.weight.dtype: column_mask(column, self.width, head.weight.dtype)[:, None, None]
            for head in self.decoder.heads.values()
        }
        found, side = dict[int, Tensor](), self.side
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        for who, layers in self.layers.items():
            with torch.cuda.stream(side) if side is not None and who == 0 else nullcontext():
                head = self.decoder.heads[who]
                mask = masks[head.weight.dtype]
                hidden = next_hidden(self.decoder.models[who], last[:, None], column[:, None], layers, mask)
                found[who] = head(hidden[:, 0])[:, : self.decoder.vocabulary]
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        if len(found) == 1:
            return found.popitem()[1].float()
        if found[0].dtype != found[1].dtype:
            found = {who: logits.float() for who, logits in found.items()}
        return torch.where(author[:, None], found[1], found[0]).float()

    def written(self, count: int, mark: Mark, *, steps: int, every_mark: bool) -> Block:
        """What ``steps`` steps have written for ``count`` rows. Of the states only the last ones, if not
        ``every_mark``."""
        tokens, authors, logprobs = (
            x[:, :count].cpu().T for x in (self.tokens[1 : steps + 1], self.authors[:steps], self.logprobs[:steps])
        )
        first = 0 if every_mark else steps - 1
        states = [map_state(lambda x: x[first:steps, :count].cpu(), each) for each in self.states]
        marks = [
            [
                (group, mine, map_state(lambda x, mine=mine, j=j: x[j].index_select(0, mine), state))
                for (group, mine, _), state in zip(mark, states, strict=True)
            ]
            for j in range(steps - first)
        ]
        return Block(tokens, authors, logprobs, torch.full((count,), steps), marks)


class DeviceSteps:
    """Takes the steps between two looks of the host, and keeps what it captured from call to call.

    Args:
        every: how many steps at most.
        max_rows: of a batch.
        context: how many columns a row may have.
        static: whether sizes are rounded up and kept from call to call, which graphs need. None: on CUDA.
    """

    def __init__(
        self, decoder: Decoder, every: int, max_rows: int, context: int, *, static: bool | None = None
    ) -> None:
        self._decoder, self.every, self._max_rows, self._context = decoder, every, max_rows, context
        self._device = decoder.device
        on_cuda = self._device.type == "cuda"
        self._static = on_cuda if static is None else static
        self._caches: dict[int, KVCache] = {}
        self._graphs: dict[tuple[Any, ...], tuple[Step, Any]] = {}
        self._taken: dict[int, tuple[Strategy, bool]] = {}
        self._pool: Any = None
        self._stream, self._side = (torch.cuda.Stream(self._device) if on_cuda else None for _ in range(2))
        self._norms = plain_norms(decoder.models.values()) if self._static else []

    def cache(self, who: int, rows: int, width: int) -> KVCache:
        """The empty KV cache of a model for a call of so many rows and columns."""
        if not self._static:
            return KVCache()
        cache = self._caches.setdefault(who, KVCache(self._rows, self._columns))
        cache.clear(min(rows, self._max_rows), width)
        return cache

    def close(self) -> None:
        """Give back what is too large to be kept until the next call."""
        self._taken = {}
        if not self._static or any(cache.large for cache in self._caches.values()):
            self._caches, self._graphs, self._pool = {}, {}, None

    def _rows(self, rows: int) -> int:
        power = max(FEWEST_ROWS, 1 << (rows - 1).bit_length())
        return max(rows, min(power, self._max_rows))

    def _columns(self, width: int) -> int:
        """The width of the graph for at least ``width`` columns, which is at most a quarter more where it is large."""
        return max(width, min(roomy(width, COLUMNS), self._context))

    def takes(self, strategy: Strategy, state: Any, rows: int) -> bool:
        """Whether a strategy, with a state of it for some rows, can be asked on this device."""
        if id(strategy) not in self._taken:
            here = map_state(lambda x: x.to(self._device), state)
            able = True
            try:
                strategy.step(here, torch.zeros(rows, dtype=torch.int64, device=self._device))
            except (RuntimeError, TypeError, ValueError, AttributeError) as error:
                cause = f"a strategy is asked on the CPU, as it cannot be asked elsewhere: {_cause(error)}"
                warnings.warn(cause, stacklevel=2)
                able = False
            self._taken[id(strategy)] = strategy, able
        return self._taken[id(strategy)][1]

    def run(
        self,
        caches: Mapping[int, KVCache],
        strategies: Sequence[Strategy],
        start: Start,
        shaping: Shaping,
        *,
        steps: int,
        every_mark: bool,
    ) -> Block:
        """Take some steps."""
        count = len(start.last)
        width = int((start.position + steps - 1).minimum(start.end).max()) + 1
        for cache in caches.values():
            cache.reserve(width)
        rows, columns = (self._rows(count), self._columns(width)) if self._static else (count, roomy(width))
        layers = {who: cache.room(rows, columns) for who, cache in caches.items()}
        key = (rows, columns, shaping, *map(id, strategies), *((who, cache.moves) for who, cache in caches.items()))
        step, graph = self._graphs.pop(key, (None, None))
        left = steps
        if step is None:  # it is captured after its first run, since what that sets up must not be
            sizes = {"rows": rows, "width": columns, "steps": self.every}
            step = Step(self._decoder, layers, shaping, strategies, start.mark, side=self._side, **sizes)
            step.load(start)
            with self._aside(), self._kernels():
                step()
            graph, left = self._captured(step), steps - 1
        else:
            step.load(start)
        while len(self._graphs) >= GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))
        self._graphs[key] = step, graph
        for _ in range(left):
            if graph is None:
                with self._kernels():
                    step()
            else:
                graph.replay()
        return step.written(count, start.mark, steps=steps, every_mark=every_mark)

    def _kernels(self) -> AbstractContextManager[None]:
        return fewer_kernels(self._norms) if self._static else nullcontext()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A context in which work is queued on a stream of its own, as during a capture."""
        if self._stream is None:
            yield
            return
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            yield
        main.wait_stream(self._stream)

    def _captured(self, step: Step) -> Any:
        """The graph of a step; None off CUDA and, with a warning, if it cannot be captured."""
        if self._stream is None:
            return None
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with (
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
                self._kernels(),
            ):
                step()
        except (RuntimeError, TypeError, ValueError) as error:  # of CUDA, or of a model that asks for values
            torch.cuda.synchronize()
            self._pool = None  # a capture that was cut off may hold on to it
            warnings.warn(f"decoding runs without a CUDA graph, since capture failed: {_cause(error)}", stacklevel=2)
            return None
        return graph


def _cause(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# ----------------------------------------------------------------------------------------------------- fewer kernels


def plain_norms(models: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that compute RMSNorm as ``F.rms_norm`` does, up to rounding."""
    norms = [
        module
        for model in dict.fromkeys(models)  # a pair may be one model twice
        for module in model.modules()
        if hasattr(module, "variance_epsilon") and hasattr(module, "weight") and "forward" not in module.__dict__
    ]
    plain = dict[type[nn.Module], bool]()
    for module in norms:
        if type(module) not in plain:
            like = module.weight
            assert isinstance(like, Tensor)
            probe = torch.stack([torch.linspace(-2, 3, len(like)), torch.linspace(1, 0, len(like))]).to(like)
            with torch.inference_mode():
                close = torch.allclose(module(probe), _fused_norm(module, probe), rtol=0.02, atol=1e-3)
            plain[type(module)] = close
    return [module for module in norms if plain[type(module)]]


def _fused_norm(module: nn.Module, hidden: Tensor) -> Tensor:
    weight, epsilon = module.weight, module.variance_epsilon
    assert isinstance(weight, Tensor)
    assert isinstance(epsilon, float)
    return F.rms_norm(hidden, weight.shape, weight, epsilon)


@contextmanager
def fewer_kernels(norms: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which these modules run as one kernel, and attention by kernels that a graph can hold."""
    for module in norms:
        module.forward = partial(_fused_norm, module)
    try:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        for module in norms:
            del module.forward
