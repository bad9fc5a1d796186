"""The rows being decoded by the reference engine: who is in the batch, their next tokens, where they end.

A step feeds the last token of every row to both models, picks each row's logits from the model that writes its next
token, and draws that token by a counter-based key. Alternatively a step decodes several tokens of every row: the junior
drafts them, and the senior reads them at once. Bookkeeping happens on the host; the device holds one entry per row.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from tandemrl.models.sampling import log_mass, race_times
from tandemrl.rollout.control import Aborts
from tandemrl.rollout.decoding_rows import (
    Block,
    Decoder,
    Penalised,
    Row,
    Shaping,
    StartTable,
    StopTable,
    places_of,
    sample,
    sampling_parameters,
    seen_tokens,
    shaped,
)
from tandemrl.rollout.device_steps import DeviceSteps, Start
from tandemrl.rollout.engine import Completion, EngineError, Passes, Request
from tandemrl.rollout.kv_cache import KVCache, Layers, chunk_hidden, column_mask, extend, last_hidden, prefill
from tandemrl.selection.draws import HANDOVER, SAMPLING, fold_in, stream
from tandemrl.selection.live import LiveSelection, Mark

_WRITERS = {"both": (0, 1), "senior": (1,), "junior": (0,)}
RACES_AHEAD = 16  # steps whose random numbers are made at once, fewer where there are many rows


class DecodingBatch:
    """The rows being decoded. ``rows[i]`` owns entry i of every tensor and row i of every KV cache.

    A row that has ended stays in its place unchanged, until a row whose next turn begins takes the place or ``retire``
    drops it.

    Args:
        total: how many completions all requests ask for.
        turns: whether rows may come back for a further turn. The output arrays then have columns for what the
            environment says.
        drafts: whether both models keep a KV cache of all rows, whoever writes them, so that ``step`` can draft.
        alone: takes several steps at once where no request needs the host after each. None: the host sees each token.
    """

    def __init__(
        self,
        decoder: Decoder,
        requests: Sequence[Request],
        total: int,
        *,
        turns: bool,
        drafts: bool = False,
        alone: DeviceSteps | None = None,
    ) -> None:
        self.decoder, self.turns, self.alone = decoder, turns, alone
        self.rows: list[Row] = []
        self.passes = Passes()
        self.steps = 0
        """How many steps were taken so far, a draft being one."""
        self.caches: dict[int, KVCache] = {}
        self.selection = LiveSelection()  # by number
        self._released = set[int]()  # of rows that nobody asks for again
        self.penalised = self.stop_strings = False
        self.shaping = Shaping()
        self.stops = StopTable(decoder)
        self.starts = StartTable(decoder)
        self.device = decoder.device
        # What follows the prompts, one row per completion of the call.
        self.tokens = torch.empty(0, 0, dtype=torch.int64)
        self.authors = torch.empty(0, 0, dtype=torch.int8)
        self.logprobs = torch.empty(0, 0, dtype=torch.float32)
        self.handovers = torch.empty(0, 0, dtype=torch.float32)  # if any strategy drops proposals
        # Host side, one entry per row.
        self.number = torch.empty(0, dtype=torch.int64)
        self.limit = torch.empty(0, dtype=torch.int64)  # the column where the turn ends at the latest
        self.live = torch.empty(0, dtype=torch.bool)
        self.last = torch.empty(0, dtype=torch.int64)
        self.position = torch.empty(0, dtype=torch.int64)  # of the last token
        self.stream = torch.empty(0, dtype=torch.int64)
        self.written = torch.empty(0, dtype=torch.int64)
        self.shift = torch.empty(0, dtype=torch.int64)  # from the column to the counter of sampling draws
        self.author = torch.empty(0, dtype=torch.bool)
        self.stop_row = torch.empty(0, dtype=torch.int64)
        self.start_row = torch.empty(0, dtype=torch.int64)
        # Device side, one row each: temperature, top_k, top_p, min_p, penalties; token counts when penalised.
        self.parameters = torch.empty(0, 7, dtype=torch.float32, device=self.device)
        self.races: list[Tensor] = []  # of the coming steps, the next one last
        self.seen = torch.empty(0, decoder.vocabulary, dtype=torch.bool, device=self.device)  # before this turn
        self.counts = torch.empty(0, decoder.vocabulary, dtype=torch.int64, device=self.device)  # in this turn
        self.extend(requests, total, drafts=drafts)

    def extend(self, requests: Sequence[Request], total: int, *, drafts: bool = False) -> None:
        """Make ready for further requests.

        Args:
            total: above the numbers of all rows, from now on.
            drafts: whether steps may draft from now on.
        """
        samplings = [r.sampling for r in requests]
        self.shaping |= Shaping.of(requests)
        self.stop_strings |= any(s.stop for s in samplings)
        self.stops.extend(requests)
        self.starts.extend(requests, self.stops)
        if any(s.penalised for s in samplings) and not self.penalised:  # so far, penalties change nothing
            self.penalised = True
            rows, vocabulary = len(self.rows), self.decoder.vocabulary
            self.seen = torch.zeros(rows, vocabulary, dtype=torch.bool, device=self.device)
            self.counts = torch.zeros(rows, vocabulary, dtype=torch.int64, device=self.device)
        width = max((r.sampling.max_tokens + self.turns * r.observation_tokens for r in requests), default=0)
        self.widen(width, total)
        longest = max((len(r.prompt) for r in requests), default=0) + width
        writers = {0, 1} if drafts else {who for request in requests for who in _WRITERS[request.strategy.writers]}
        for who in sorted((writers & self.decoder.models.keys()) - self.caches.keys()):
            cache = self.caches[who] = KVCache() if self.alone is None else self.alone.cache(who, total, longest)
            if self.rows:
                each = zip(self.rows, self.written.tolist(), strict=True)
                texts = [[*row.request.prompt, *self.tokens[row.number, :written].tolist()] for row, written in each]
                cache.append(prefill(self.decoder.models[who], texts), torch.arange(len(texts)), 0)
        self.caches = dict(sorted(self.caches.items()))

    def widen(self, columns: int, rows: int = 0) -> None:
        """Make room in the output arrays. If they grow again and again, they do so by a quarter at the least."""
        (height, width), names = self.tokens.shape, ("tokens", "authors", "logprobs")
        more, down = max(0, columns - width), max(0, rows - height)
        if more:
            more = max(more, width // 4)
        if down:
            down = max(down, height // 4)
        for name in names if more or down else ():
            setattr(self, name, F.pad(getattr(self, name), (0, more, 0, down)))
        if self.starts and self.handovers.shape != self.tokens.shape:
            (old_rows, old_columns), (new_rows, new_columns) = self.handovers.shape, self.tokens.shape
            self.handovers = F.pad(self.handovers, (0, new_columns - old_columns, 0, new_rows - old_rows))

    def held(self) -> set[int]:
        """The numbers of all rows that are in a place, those that have ended included."""
        return {row.number for row in self.rows}

    def close(self) -> None:
        """Give back what the next call does not need."""
        if self.alone is not None:
            self.alone.close()

    def release(self, numbers: Sequence[int]) -> None:
        """Forget rows that have ended, once they have left their places: until then, steps ask for their state."""
        self._released.update(numbers)

    def text(self, row: Row) -> list[int]:
        """The prompt of a row, and what follows it up to its last turn."""
        return [*row.request.prompt, *self.tokens[row.number, : row.written].tolist()]

    def own_tokens(self, row: Row) -> Int64[Tensor, " n"]:
        """The tokens of the turn that a row has just ended."""
        return self.tokens[row.number, row.start : row.written]

    def news(self) -> Iterator[tuple[int, list[int], list[float]]]:
        """Yield the number of each row that has new tokens, these tokens, and their log-probs."""
        for row, written in zip(self.rows, self.written.tolist(), strict=True):
            if written > row.told:
                new = slice(row.told, written)
                yield row.number, self.tokens[row.number, new].tolist(), self.logprobs[row.number, new].tolist()
                row.told = written

    def completion(self, row: Row, version: int) -> Completion:
        assert row.stop_reason is not None
        channels = self.tokens, self.authors, self.logprobs
        tokens, authors, logprobs = (x[row.number, : row.written].numpy().copy() for x in channels)
        told = self.handovers[row.number, : row.written].numpy().copy() if self.starts.row(row.request) else None
        return Completion(row.key, tokens, authors, logprobs, row.stop_reason, version, None, told)

    # ------------------------------------------------------------------------------------------------- coming and going

    def admit(self, new: list[Row]) -> None:
        """Compute the prompts of new rows, each distinct request once, and append the rows to the batch. What their
        sessions have kept is not computed again."""
        if not new:
            return
        requests = list({id(row.request): row.request for row in new}.values())
        place = {id(request): i for i, request in enumerate(requests)}
        source = torch.tensor([place[id(row.request)] for row in new])
        for who, cache in self.caches.items():
            model, first = self.decoder.models[who], len(self.rows)
            begun = {first + i: row for i, row in enumerate(new) if who in row.kept}
            told = {id(row.request) for row in begun.values()}
            prefilled = prefill(model, [list(r.prompt[: 1 if id(r) in told else None]) for r in requests])
            cache.append(prefilled, source, first)
            for at, row in begun.items():
                cache.put(at, row.kept[who], first + len(new))
            if begun:
                starts = [next(iter(row.kept[who].values()))[0].shape[2] for row in begun.values()]
                further = [row.request.prompt[start:-1] for row, start in zip(begun.values(), starts, strict=True)]
                extend(model, cache, [*begun], starts, further)
        for row in new:
            row.kept = {}
        left = self._released - self.held()
        self._released -= left
        self.selection.release([*left])
        author = self.selection.admit(
            torch.tensor([row.number for row in new]),
            [row.request.strategy for row in new],
            torch.tensor([row.key for row in new], dtype=torch.int64),
            [row.request.history for row in new] if any(row.request.history for row in new) else None,
        )
        for name, entries in self._entries(new, author).items():
            setattr(self, name, torch.cat([getattr(self, name), entries]))
        self.rows += new
        self.races = []

    def resume(self, back: list[tuple[Row, Sequence[int]]]) -> None:
        """Begin the next turn of some rows, after the answer of the environment.

        Each row takes a free place (`places_of`), and its keys and values are put back into the KV caches.

        Args:
            back: pairs of a row and the tokens of the answer to its last turn.
        """
        self._make_places(len(back))
        places = places_of([row for row, _ in back], self.rows, (~self.live).nonzero().squeeze(1).tolist())
        self.rows += [row for row, _ in back][: len(self.live) - len(self.rows)]  # of new places; all are filled below
        for who, cache in self.caches.items():
            for place, (row, _) in zip(places.tolist(), back, strict=True):
                cache.put(place, row.kept[who] if who in row.kept else self._computed(who, row), len(self.live))
        self.begin(places, back)

    def _computed(self, who: int, row: Row) -> Layers:
        """The keys and values of a model that has joined the call since the row left."""
        return prefill(self.decoder.models[who], [self.text(row)])

    def _read(self, places: Tensor, back: Sequence[tuple[Row, Sequence[int]]]) -> None:
        """Compute the answers' tokens on top of the rows' keys and values, in one forward pass."""
        # The last own token is not computed yet, and that of the observation is fed by the next step.
        starts = [len(row.request.prompt) + row.written - 1 for row, _ in back]
        chunks = [[int(self.tokens[row.number, row.written - 1]), *context[:-1]] for row, context in back]
        for who, cache in self.caches.items():
            extend(self.decoder.models[who], cache, places.tolist(), starts, chunks)

    def begin(self, places: Int64[Tensor, " k"], back: Sequence[tuple[Row, Sequence[int]]]) -> None:
        """Begin the next turn of rows that are in their places; see ``resume``."""
        self._read(places, back)
        rows = [row for row, _ in back]
        for place, (row, context) in zip(places.tolist(), back, strict=True):
            observed = slice(row.written, row.written + len(context))
            self.tokens[row.number, observed] = torch.tensor(context, dtype=torch.int64)
            self.authors[row.number, observed], self.logprobs[row.number, observed] = -1, 0.0
            row.start = row.written = observed.stop
            row.index, row.stop_reason, row.kept = row.index + 1, None, {}
            self.rows[place] = row
        author = self.selection.turn(
            torch.tensor([row.number for row in rows]), torch.tensor([row.senior_next for row in rows])
        )
        for name, entries in self._entries(rows, author).items():
            whole = getattr(self, name)
            setattr(self, name, whole.index_copy(0, places.to(whole.device), entries))
        self.races = []

    def _entries(self, rows: Sequence[Row], author: Tensor) -> dict[str, Tensor]:
        """The entries, by name of the tensor, of rows whose turns begin."""
        texts = [self.text(row) for row in rows]
        columns = {
            "number": [row.number for row in rows],
            "last": [text[-1] for text in texts],
            "position": [len(text) - 1 for text in texts],
            "written": [row.written for row in rows],
            "shift": [sum(map(len, row.request.history)) - row.observed for row in rows],
            "limit": [row.written + min(row.request.turn_tokens or row.own_left, row.own_left) for row in rows],
            "stop_row": [self.stops.row(row.request) for row in rows],
            "start_row": [self.starts.row(row.request) for row in rows],
        }
        entries = {name: torch.tensor(values, dtype=torch.int64) for name, values in columns.items()}
        keys = torch.tensor([row.key for row in rows], dtype=torch.int64)
        entries |= {"stream": stream(keys, SAMPLING), "author": author, "live": torch.ones_like(author)}
        entries["parameters"] = sampling_parameters(rows).to(self.device)
        if self.penalised:
            entries["seen"] = seen_tokens(texts, self.decoder.vocabulary).to(self.device)
            entries["counts"] = torch.zeros_like(entries["seen"], dtype=torch.int64)
        return entries

    def _names(self) -> list[str]:
        """The names of the tensors that have an entry per row."""
        host = ["last", "position", "stream", "written", "shift", "author", "number", "limit", "live"]
        return [*host, "stop_row", "start_row", "parameters", *(["seen", "counts"] if self.penalised else [])]

    def _make_places(self, count: int) -> None:
        """Grow the batch until at least ``count`` of its places hold no live row."""
        missing = max(0, count - int((~self.live).sum()))
        for name in self._names():
            old = getattr(self, name)
            setattr(self, name, torch.cat([old, old.new_zeros(missing, *old.shape[1:])]))
        for cache in self.caches.values():
            cache.reserve(rows=len(self.live))

    def retire(self) -> None:
        """Drop ended rows once they make up an eighth of the batch, so that caches are copied rarely."""
        index = self.live.nonzero().squeeze(1)
        ended = len(self.rows) - len(index)
        if ended == 0 or (len(index) and 8 * ended < len(self.rows)):
            return
        self.rows = [self.rows[i] for i in index.tolist()]
        self.races = []
        for cache in self.caches.values():
            cache.keep(index, int(self.position[index].max()) + 1 if len(index) else 0)
        for name in self._names():
            whole = getattr(self, name)
            setattr(self, name, whole[index.to(whole.device)])

    def abort(self, aborts: Aborts) -> None:
        """End the live rows whose completions are aborted."""
        for i in self.live.nonzero().squeeze(1).tolist():
            row = self.rows[i]
            if row.key in aborts:
                row.stop_reason, row.written, self.live[i] = "abort", int(self.written[i]), False

    # ------------------------------------------------------------------------------------------------------ next tokens

    def step(self, ahead: int = 0) -> tuple[int, list[Row]]:
        """Write the next token of every live row, or up to ``ahead`` tokens by drafting.

        Returns:
            How many tokens were written in all rows, and the rows whose turn has ended.
        """
        block = self._drafted(ahead) if ahead else self._several() or self._one_token()
        self.steps += 1 if ahead else block.tokens.shape[1]
        live, rows = self.live, torch.arange(len(self.rows))
        count, stops = self._count(block)
        number = self.number
        self.passes += block.cost(count, int(live.sum()), self.caches)
        if self.penalised:
            inside = (torch.arange(block.tokens.shape[1]) < count[:, None]).to(self.device)
            self.counts.scatter_add_(1, block.tokens.to(self.device), inside.long())
        last = block.tokens[rows, (count - 1).clamp(min=0)]
        # A refused draft stays in the caches behind ``position``, where the mask hides it until it is overwritten. An
        # ended row stands still until it is retired: it must not outgrow its model's context or its output row.
        self.position, self.written = self.position + count, self.written + count
        ended = self._finish(last, stops)
        if block.marks:
            self.selection.rewind(number, block.marks, (count - 1).clamp(0, len(block.marks) - 1))
        self.author = self._after(last, live) if block.next is None else block.next
        self.last = last
        for i in ended:
            self._leave(i)
        return int(count.sum()), [self.rows[i] for i in ended]

    def _after(self, tokens: Int64[Tensor, " b"], live: Bool[Tensor, " b"]) -> Bool[Tensor, " b"]:
        """Whether the senior writes in each row after its next token, as the strategies say when they are told it."""
        # A row that may come back keeps its state and its columns. Of another, nobody asks what it goes on with.
        on = live.nonzero().squeeze(1) if self.turns and not bool(live.all()) else torch.arange(len(live))
        return self.author.index_copy(0, on, self.selection.step(self.number[on], tokens[on]))

    def _several(self) -> Block | None:
        """The next tokens of every row, up to the next look of the host; None if it has to look at each."""
        alone = self.alone
        if alone is None or self.penalised or self.starts or not bool(self.live.any()):
            return None
        mark = self.selection.mark(self.number)
        strategies = [self.selection.strategy(group) for group, _, _ in mark]
        if not all(alone.takes(s, state, len(mine)) for s, (_, mine, state) in zip(strategies, mark, strict=True)):
            return None
        left = (self.limit - self.written) * self.live  # a row that has ended stands still
        steps, end, counter = min(alone.every, int(left.max())), self.position + left, self.written + self.shift
        start = Start(self.last, self.author, self.position, end, counter, self.stream, self.parameters, mark)
        self.races = []
        block = alone.run(self.caches, strategies, start, self.shaping, steps=steps, every_mark=self.turns)
        if len(self.caches) == 1 and not bool((block.authors == bool(min(self.caches)))[self.live].all()):
            raise _broken_promise()
        return block._replace(most=self.live * steps)

    def _one_token(self) -> Block:
        """The next token of every row, without a draft."""
        logits, hidden = self._author_logits()
        tokens, logprobs = (x.cpu() for x in self._sample(logits, self._race()))
        after = self._after(tokens, self.live)
        block = Block(tokens[:, None], self.author[:, None], logprobs[:, None], self.live.long(), next=after)
        return self._handed_over(block, after, logits, hidden) if self.starts else block

    def _handed_over(
        self, block: Block, after: Bool[Tensor, " b"], logits: Float[Tensor, "b v"], hidden: Mapping[int, Tensor]
    ) -> Block:
        """The block of proposals, without those that the strategies drop (see ``Strategy``).

        Args:
            after: what the strategies say of the proposals. logits, hidden: see ``_author_logits``.
        """
        authors = torch.where(self.start_row > 0, after, self.author)
        tokens, logprobs, handovers = block.tokens.clone(), block.logprobs.clone(), torch.zeros_like(block.logprobs)
        for who in self.caches:
            rows = (self.live & (authors != self.author) & (after == bool(who))).nonzero().squeeze(1)
            if not len(rows):
                continue
            at, head = rows.to(self.device), self.decoder.heads[who]
            other = self.starts.table[self.start_row[rows]].logical_not().to(self.device)
            if not who:  # the senior ended its word, which is a choice of its own
                mass = log_mass(self._shaped(logits[at], at), other)
                handovers[rows, 0] = torch.where(self.parameters[at, 0] > 0, mass, 0.0).cpu()
            drawn = head(hidden[who][rows.to(head.weight.device)])[:, : self.decoder.vocabulary].float().to(self.device)
            keys = stream(torch.tensor([self.rows[i].key for i in rows.tolist()], dtype=torch.int64), HANDOVER)
            race = race_times(fold_in(keys, (self.written + self.shift)[rows]).to(self.device), self.decoder.vocabulary)
            drawn, each = self._sample(drawn.masked_fill(other, -torch.inf), race, at)
            tokens[rows, 0], logprobs[rows, 0] = drawn.cpu(), each.cpu()
        return block._replace(tokens=tokens, authors=authors[:, None], logprobs=logprobs, handovers=handovers)

    def _drafted(self, ahead: int) -> Block:
        """Up to ``ahead`` tokens of every row: the junior drafts them, whoever their author is, and the senior reads
        the draft at once and draws its own tokens again.

        Both models draw from the same random numbers, so the senior often draws the drafted token, too. What follows
        the first token that it draws otherwise is thrown away. So the tokens are those that single steps would give
        (drafter-invariant speculative decoding, Daliri, Musco and Suresh, arXiv 2408.07978, here across authors).
        """
        ahead = min(ahead, int((self.limit - self.written)[self.live].max()))
        counters = (self.written + self.shift)[:, None] + torch.arange(ahead)
        races = race_times(fold_in(self.stream[:, None], counters).to(self.device), self.decoder.vocabulary)
        self.races = []
        # What a row drafts beyond its limit is never kept; it shares one column of the cache.
        end = self.position + (self.limit - self.written)
        columns = (self.position[:, None] + torch.arange(ahead)).minimum(end[:, None])
        read, authors, guesses, logprobs = [self.last], [self.author], list[Tensor](), list[Tensor]()
        marks, counts = list[Mark](), self.counts.clone()
        for j, race in enumerate(races.unbind(1)):
            tokens, each = self._sample(self._logits_of(0, read[j], columns[:, j]), race, counts=counts)
            if self.penalised:
                counts.scatter_add_(1, tokens[:, None], torch.ones_like(tokens[:, None]))
            guesses.append(tokens.cpu())
            logprobs.append(each.cpu())
            marks.append(self.selection.mark(self.number))
            if j + 1 < ahead:
                authors.append(self.selection.step(self.number, guesses[j]))
                read.append(guesses[j])
        senior, guessed, drafted = (torch.stack(each, 1) for each in (authors, guesses, logprobs))
        # Now the senior reads the draft, and draws up to the first token that it draws otherwise, which is included.
        head, vocabulary = self.decoder.heads[1], self.decoder.vocabulary
        there, at_columns = (x.to(head.weight.device) for x in (torch.stack(read, 1), columns))
        hidden = chunk_hidden(self.decoder.models[1], there, at_columns, self.caches[1])
        drawn, count, right, counts = guessed.clone(), torch.zeros_like(self.written), self.live, self.counts.clone()
        for j, race in enumerate(races.unbind(1)):
            count = count + right
            mine = (right & senior[:, j]).nonzero().squeeze(1)
            if len(mine):
                at = mine.to(self.device)
                logits = head(hidden[mine.to(hidden.device), j])[:, :vocabulary].float().to(self.device)
                own, each = self._sample(logits, race[at], at, counts)
                drawn[mine, j], drafted[mine, j] = own.cpu(), each.cpu()
            right = right & (drawn[:, j] == guessed[:, j])
            if self.penalised:
                counts.scatter_add_(1, drawn[:, j : j + 1].to(self.device), torch.ones_like(counts[:, :1]))
        return Block(drawn, senior, drafted, count, marks, guessed)

    def _count(self, block: Block) -> tuple[Int64[Tensor, " b"], Bool[Tensor, " b"]]:
        """Write the tokens of a block that each row takes, up to its limit or a stop, into the output arrays.

        Returns:
            How many tokens each row takes, and whether it stops after them.
        """
        width, count = block.tokens.shape[1], block.most.minimum(self.limit - self.written)
        if width == 1:  # without a draft, every microsecond counts
            row = (count > 0).nonzero().squeeze(1)  # negative where a row waits beyond its limit
            at, stopped = torch.zeros_like(row), self.stops.stop[self.stop_row, block.tokens[:, 0]] & (count > 0)
        else:
            column = torch.arange(width)
            stop = self.stops.stop[self.stop_row[:, None], block.tokens]
            first = torch.where(stop, column + 1, width + 1).amin(1)
            count = count.minimum(first)
            row, at = (column < count[:, None]).nonzero(as_tuple=True)
            stopped = first == count
        number, place = self.number[row], self.written[row] + at
        self.tokens[number, place] = block.tokens[row, at]
        self.authors[number, place] = block.authors[row, at].to(torch.int8)
        self.logprobs[number, place] = block.logprobs[row, at]
        if block.handovers is not None:
            self.handovers[number, place] = block.handovers[row, at]
        stopped = stopped & self.live
        if self.stop_strings:
            for i in self.live.nonzero().squeeze(1).tolist():
                known, new = self.tokens[self.number[i], : int(self.written[i])], block.tokens[i, : int(count[i])]
                if hit := self.rows[i].first_stop(known, new, self.decoder.tokenizer.decode):
                    stopped[i], count[i] = True, hit
        return count, stopped

    def _finish(self, last: Int64[Tensor, " b"], stopped: Bool[Tensor, " b"]) -> list[int]:
        """End the rows that have stopped at their last token or have no token left, and return their indices."""
        ended = (stopped | (self.written == self.limit)) & self.live
        if not bool(ended.any()):
            return []
        eos = self.stops.eos[self.stop_row, last]
        indices = ended.nonzero().squeeze(1).tolist()
        for i in indices:
            self.rows[i].stop_reason = "eos" if eos[i] else "stop" if stopped[i] else "length"
            self.rows[i].written = int(self.written[i])
        self.live = self.live & ~ended
        return indices

    def _leave(self, i: int) -> None:
        """Keep what a further turn of an ended row would need, if it may have one, or the next request of its
        session."""
        row = self.rows[i]
        row.own += row.written - row.start
        row.senior_next = bool(self.author[i])
        if row.request.session is not None or (self.turns and row.stays):
            row.kept = {who: cache.take(i, int(self.position[i])) for who, cache in self.caches.items()}

    def _author_logits(self) -> tuple[Float[Tensor, "b v"], dict[int, Float[Tensor, "b _"]]]:
        """Let both models read the last token of every row. Returns each row's logits by its author, and the hidden
        states of both."""
        vocabulary, width = self.decoder.vocabulary, int(self.position.max()) + 1
        logits, states = torch.empty(0), dict[int, Tensor]()
        masks: dict[tuple[torch.device, torch.dtype], Tensor] = {}  # the same for both models, as a rule
        for who in self.caches:
            head = self.decoder.heads[who]
            device = head.weight.device
            kind = (device, head.weight.dtype)
            if kind not in masks:
                masks[kind] = column_mask(self.position.to(device), width, head.weight.dtype)[:, None, None]
            hidden = states[who] = self._last_hidden(who, self.last, self.position, masks[kind])
            mine = self.author == bool(who)
            if bool(mine.all()):
                logits = head(hidden)[:, :vocabulary].float().to(self.device)
            elif len(self.caches) == 1:
                raise _broken_promise()
            elif bool(mine.any()):
                if logits.shape[0] == 0:
                    logits = torch.empty(len(self.rows), vocabulary, device=self.device)
                index = mine.nonzero().squeeze(1)
                logits[index.to(self.device)] = head(hidden[index.to(device)])[:, :vocabulary].float().to(self.device)
        return logits, states

    def _last_hidden(self, who: int, last: Tensor, column: Tensor, mask: Tensor) -> Float[Tensor, "b h"]:
        """The hidden states of one model, which reads the token ``last`` of every row at its ``column``."""
        cache = self.caches[who]
        cache.reserve(mask.shape[-1])
        return last_hidden(self.decoder.models[who], last.to(mask.device), column.to(mask.device), cache.layers, mask)

    def _logits_of(self, who: int, last: Int64[Tensor, " b"], column: Int64[Tensor, " b"]) -> Float[Tensor, "b v"]:
        """The logits of one model for every row, after the token ``last`` at its ``column``."""
        head = self.decoder.heads[who]
        device, width = head.weight.device, int(column.max()) + 1
        mask = column_mask(column.to(device), width, head.weight.dtype)[:, None, None]
        hidden = self._last_hidden(who, last, column, mask)
        return head(hidden)[:, : self.decoder.vocabulary].float().to(self.device)

    def _race(self) -> Float64[Tensor, "b r"]:
        """The random numbers of this step's draws.

        They depend on no logit, so those of several steps are made at once, which costs hardly more.
        """
        if not self.races:
            ahead = torch.arange(max(1, min(RACES_AHEAD, 512 // len(self.rows))))
            counters = (self.written + self.shift)[:, None] + ahead
            times = race_times(fold_in(self.stream[:, None], counters).to(self.device), self.decoder.vocabulary)
            self.races = [*times.unbind(1)][::-1]
        return self.races.pop()

    def _sample(
        self,
        logits: Float[Tensor, "k v"],
        race: Float64[Tensor, "k r"],
        rows: Int64[Tensor, " k"] | None = None,
        counts: Int64[Tensor, "b v"] | None = None,
    ) -> tuple[Int64[Tensor, " k"], Float[Tensor, " k"]]:
        """Sample a token for each row and return the tokens with their log-probs.

        Args:
            logits: logits of the author's model.
            race: random numbers of the draws.
            rows: which rows of the batch these are. None means all of them.
            counts: how often each row of the batch has each token in its turn. None stands for ``self.counts``.
        """
        some = slice(None) if rows is None else rows
        return sample(logits, race, self.parameters[some], self._penalised(some, counts), self.shaping)

    def _shaped(self, logits: Float[Tensor, "k v"], rows: Int64[Tensor, " k"]) -> Float[Tensor, "k v"]:
        """The logits after penalties, temperature and truncation; -inf at what is cut off."""
        return shaped(logits, self.parameters[rows], self._penalised(rows), self.shaping)

    def _penalised(self, rows: Tensor | slice, counts: Tensor | None = None) -> Penalised | None:
        return (self.seen[rows], (self.counts if counts is None else counts)[rows]) if self.penalised else None


def _broken_promise() -> EngineError:
    return EngineError("a strategy let somebody write who it promised would not (Strategy.writers)")
