"""The rows being decoded by the reference engine: who is in the batch, their next tokens, where they end.

A step feeds the last token of every row to both models, picks each row's logits from the model that writes its next
token, and draws that token by a counter-based key. Alternatively a step decodes several tokens of every row: the junior
drafts them, and the senior reads them at once. Bookkeeping happens on the host; the device holds one entry per row.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain, count
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int8, Int64
from torch import Tensor

from tandemrl.models.sampling import log_mass, race_times
from tandemrl.rollout.decoding_rows import (
    Block,
    Decoder,
    Part,
    Penalised,
    Row,
    Shaping,
    TokenSets,
    sample,
    sampling_parameters,
    shaped,
)
from tandemrl.rollout.device_steps import DeviceSteps, Start
from tandemrl.rollout.engine import EngineError, Passes, Request, StopReason
from tandemrl.rollout.kv_cache import KVCache, column_mask, extend, next_hidden, prefill
from tandemrl.selection.draws import HANDOVER, SAMPLING, fold_in, stream
from tandemrl.selection.live import LiveSelection, Mark

RACES_AHEAD = 16  # steps whose random numbers are made at once
_WRITERS = {"both": (0, 1), "senior": (1,), "junior": (0,)}
_OUTPUTS = {"tokens": torch.int64, "authors": torch.int8, "logprobs": torch.float32, "handovers": torch.float32}


class DecodingBatch:
    """The rows being decoded. ``rows[i]`` owns entry i of every tensor and row i of every KV cache.

    A row that has ended stays in its place unchanged, until another row takes the place or ``retire`` drops it. Its
    text is in ``Row.parts`` then.

    Args:
        turns: whether rows may come back for a further turn.
        alone: takes several steps at once where no request needs the host after each. None: the host sees each token.
    """

    # Entries of the rows (``_entries``), on the host but for the last.
    slot: Int64[Tensor, " b"]
    limit: Int64[Tensor, " b"]  # how many tokens the turn may have
    live: Bool[Tensor, " b"]
    last: Int64[Tensor, " b"]
    position: Int64[Tensor, " b"]  # of the last token
    stream: Int64[Tensor, " b"]
    written: Int64[Tensor, " b"]
    shift: Int64[Tensor, " b"]  # from ``written`` to the number of the next sampling draw
    author: Bool[Tensor, " b"]
    stop_row: Int64[Tensor, " b"]
    start_row: Int64[Tensor, " b"]
    parameters: Float[Tensor, "b 7"]
    # What each row has written in its turn: as many columns as ``written`` says.
    tokens: Int64[Tensor, "b w"]
    authors: Int8[Tensor, "b w"]
    logprobs: Float[Tensor, "b w"]
    handovers: Float[Tensor, "b w"]

    def __init__(self, decoder: Decoder, *, turns: bool, alone: DeviceSteps | None = None) -> None:
        self.decoder, self.turns, self.alone = decoder, turns, alone
        self.rows: list[Row] = []
        self.ended: list[Row] = []
        """Rows whose turn has ended since the caller last looked."""
        self.passes = Passes()
        self.steps = 0
        """How many steps were taken so far, a draft being one."""
        self.caches: dict[int, KVCache] = {}
        self.selection = LiveSelection()
        self._slots: list[Row] = []
        """By slot of ``selection``: whose state it is."""
        self.penalised = self.stop_strings = False
        self.shaping = Shaping()
        self.stops, self.starts = (TokenSets(decoder.vocabulary) for _ in range(2))
        self.starts.row(None, ())  # of strategies that have none
        self.device = decoder.device
        self._width = 0
        self._ahead: tuple[Tensor, list[Tensor]] = torch.empty(2, 0), []
        """The next step's draws (streams, counters), and random numbers for them and for steps after it, last first."""
        # On the device, one entry per row if any has penalties: which tokens it has before its turn, how often in it.
        self.seen = torch.empty(0, decoder.vocabulary, dtype=torch.bool, device=self.device)
        self.counts = torch.empty(0, decoder.vocabulary, dtype=torch.int64, device=self.device)
        for name, entries in self._entries([], torch.empty(0, dtype=torch.bool)).items():
            setattr(self, name, entries)

    def extend(self, requests: Sequence[Request], total: int, *, drafts: bool = False) -> None:
        """Make ready for further requests.

        Args:
            total: how many rows are not finished.
            drafts: whether steps may draft from now on, for which both models keep a KV cache of all rows, whoever
                writes them.

        Raises:
            EngineError: a strategy drops proposals, and does not know that a word ends before what ends a turn.
        """
        samplings = [r.sampling for r in requests]
        self.shaping |= Shaping.of(requests)
        self.stop_strings |= any(s.stop for s in samplings)
        for number, request in enumerate(requests):
            stop_row, start_row = self._token_rows(request)
            ends_inside = self.stops.table[stop_row] & ~self.starts.table[start_row]
            if start_row and (missing := ends_inside.nonzero().flatten().tolist()):
                raise EngineError(
                    f"request {number}: the tokens {missing} end a turn, but its strategy (before_word) does not "
                    "know that a word ends before them; make them special tokens of the tokenizer, end turns by "
                    "stop strings, or use selection.strategy=word"
                )
        if any(s.penalised for s in samplings) and not self.penalised:  # so far, penalties change nothing
            self.penalised = True
            rows, vocabulary = len(self.rows), self.decoder.vocabulary
            self.seen = torch.zeros(rows, vocabulary, dtype=torch.bool, device=self.device)
            self.counts = torch.zeros(rows, vocabulary, dtype=torch.int64, device=self.device)
        more = max((s.max_tokens - self._width for s in samplings), default=0)
        if more > 0:
            self._width += more
            for name in _OUTPUTS:
                setattr(self, name, F.pad(getattr(self, name), (0, more)))
        whole = (len(r.prompt) + r.sampling.max_tokens + self.turns * r.observation_tokens for r in requests)
        longest = max(whole, default=0)
        writers = {0, 1} if drafts else {who for request in requests for who in _WRITERS[request.strategy.writers]}
        for who in sorted((writers & self.decoder.models.keys()) - self.caches.keys()):
            cache = self.caches[who] = KVCache() if self.alone is None else self.alone.cache(who, total, longest)
            if self.rows:
                texts = [self.text(i) for i in range(len(self.rows))]
                cache.put(range(len(texts)), prefill(self.decoder.models[who], texts))
        self.caches = dict(sorted(self.caches.items()))

    def _token_rows(self, request: Request) -> tuple[int, int]:
        """The rows, in ``stops`` and ``starts``, of the tokens that end a turn and of those that may follow a
        handover."""
        s, starts = request.sampling, request.strategy.starts
        ends = *s.stop_token_ids, *(() if s.ignore_eos else self.decoder.eos)
        return self.stops.row(ends, ends), self.starts.row(starts, () if starts is None else starts)

    def close(self) -> None:
        """Give back what the next call does not need."""
        if self.alone is not None:
            self.alone.close()

    def text(self, i: int) -> list[int]:
        """The text in a place: the prompt and all that follows."""
        row = self.rows[i]
        return row.text if row.stop_reason else [*row.text, *self.tokens[i, : int(self.written[i])].tolist()]

    def news(self) -> Iterator[tuple[int, list[int], list[float]]]:
        """Yield the number of each row that has new tokens, these tokens, and their log-probs."""
        for i, (row, written) in enumerate(zip(self.rows, self.written.tolist(), strict=True)):
            if written > row.told:
                new = slice(row.told, written)
                yield row.number, self.tokens[i, new].tolist(), self.logprobs[i, new].tolist()
                row.told = written

    # ------------------------------------------------------------------------------------------------- coming and going

    def admit(self, new: list[Row]) -> None:
        """Let new rows join."""
        if not new:
            return
        inside = set(map(id, self.rows))  # until they leave their places, steps ask for their state
        free = [slot for slot, row in enumerate(self._slots) if row.over and id(row) not in inside]
        self.selection.release(free)
        for row in new:
            row.slot = free.pop() if free else len(self._slots)
            self._slots[row.slot : row.slot + 1] = [row]
        author = self.selection.admit(
            torch.tensor([row.slot for row in new]),
            [row.request.strategy for row in new],
            torch.tensor([row.key for row in new], dtype=torch.int64),
            [row.request.history for row in new],
        )
        self._join(new, author)

    def resume(self, back: list[tuple[Row, Sequence[int]]]) -> None:
        """Begin the next turn of some rows.

        Args:
            back: pairs of a row and the tokens of the answer to its last turn.
        """
        for row, context in back:
            row.observe(context)
        rows = [row for row, _ in back]
        senior = torch.tensor([row.senior_next for row in rows])
        self._join(rows, self.selection.turn(torch.tensor([row.slot for row in rows]), senior))

    def _join(self, rows: Sequence[Row], author: Bool[Tensor, " k"]) -> None:
        """Give each row a place: the one that it left, if no other row has taken that, so that no row is in the batch
        twice; then those of rows that have ended, then new ones."""
        ended = (~self.live).nonzero().squeeze(1).tolist()
        left = {id(self.rows[place]): place for place in ended}
        own = [left.get(id(row)) for row in rows]
        free = chain((place for place in ended if place not in own), count(len(self.rows)))
        places = [next(free) if place is None else place for place in own]
        self.rows += rows[: max(0, max(places) + 1 - len(self.rows))]  # all new places are filled here
        for place, row in zip(places, rows, strict=True):
            self.rows[place] = row
        for who in self.caches:
            self._compute(who, dict(zip(places, rows, strict=True)))
        for row in rows:
            row.kept = {}
        for name, entries in self._entries(rows, author).items():
            whole = getattr(self, name)
            whole = torch.cat([whole, whole.new_zeros(len(self.rows) - len(whole), *whole.shape[1:])])
            setattr(self, name, whole.index_copy(0, torch.tensor(places, device=whole.device), entries))

    def _compute(self, who: int, rows: Mapping[int, Row]) -> None:
        """Let one model compute the keys and values of some rows, by place, but for the last token: each distinct
        prompt once, and nothing that was kept."""
        model, cache = self.decoder.models[who], self.caches[who]
        fresh = {place: row for place, row in rows.items() if who not in row.kept}
        texts = {id(row if row.parts else row.request): row.text for row in fresh.values()}
        if fresh:
            index = {text: i for i, text in enumerate(texts)}
            source = [index[id(row if row.parts else row.request)] for row in fresh.values()]
            cache.put([*fresh], prefill(model, [*texts.values()]), source)
        begun = {place: row for place, row in rows.items() if who in row.kept}
        for place, row in begun.items():
            cache.put([place], row.kept[who])
        if begun:
            starts = [next(iter(row.kept[who].values()))[0].shape[2] for row in begun.values()]
            further = [row.text[start:-1] for row, start in zip(begun.values(), starts, strict=True)]
            extend(model, cache, [*begun], starts, further)

    def _entries(self, rows: Sequence[Row], author: Bool[Tensor, " k"]) -> dict[str, Tensor]:
        """The entries, by name of the tensor, of rows whose turns begin."""
        texts = [row.text for row in rows]
        tables = [self._token_rows(row.request) for row in rows]
        columns = {
            "slot": [row.slot for row in rows],
            "last": [text[-1] for text in texts],
            "position": [len(text) - 1 for text in texts],
            "written": [0] * len(rows),
            "shift": [sum(map(len, row.request.history)) + row.own for row in rows],
            "limit": [row.turn_left for row in rows],
            "stop_row": [stop_row for stop_row, _ in tables],
            "start_row": [start_row for _, start_row in tables],
        }
        entries = {name: torch.tensor(values, dtype=torch.int64) for name, values in columns.items()}
        keys = torch.tensor([row.key for row in rows], dtype=torch.int64)
        entries |= {"stream": stream(keys, SAMPLING), "author": author, "live": torch.ones_like(author)}
        entries["parameters"] = sampling_parameters(rows).to(self.device)
        entries |= {name: torch.zeros(len(rows), self._width, dtype=dtype) for name, dtype in _OUTPUTS.items()}
        if self.penalised:
            seen = torch.zeros(len(rows), self.decoder.vocabulary, dtype=torch.bool)
            for i, text in enumerate(texts):
                seen[i, text] = True
            entries["seen"] = seen.to(self.device)
            entries["counts"] = torch.zeros_like(entries["seen"], dtype=torch.int64)
        return entries

    def retire(self) -> None:
        """Drop ended rows once they make up an eighth of the batch, so that caches are copied rarely. The last live
        rows take their places."""
        on = self.live.nonzero().squeeze(1)
        ended = len(self.rows) - len(on)
        if ended == 0 or (len(on) and 8 * ended < len(self.rows)):
            return
        index = torch.arange(len(on))
        index[~self.live[: len(on)]] = on[on >= len(on)]
        self.rows = [self.rows[i] for i in index.tolist()]
        for cache in self.caches.values():
            cache.keep(index, int(self.position[index].max()) + 1 if len(index) else 0)
        for name in self._entries([], self.author[:0]):
            whole = getattr(self, name)
            setattr(self, name, whole[index.to(whole.device)])

    def abort(self, numbers: Container[int]) -> None:
        """End the live rows of these numbers."""
        for i in self.live.nonzero().squeeze(1).tolist():
            if self.rows[i].number in numbers:
                self._stop(i, "abort")

    def _stop(self, i: int, reason: StopReason) -> None:
        """End the turn of a row."""
        written, channels = int(self.written[i]), (self.tokens, self.authors, self.logprobs, self.handovers)
        self.rows[i].end_turn(Part(*(x[i, :written].numpy().copy() for x in channels)), reason)
        self.live[i] = False
        self.ended.append(self.rows[i])

    # ------------------------------------------------------------------------------------------------------ next tokens

    def step(self, ahead: int = 0) -> tuple[int, list[Row]]:
        """Write the next token of every live row, or up to ``ahead`` tokens by drafting.

        Returns:
            How many tokens were written in all rows, and the rows whose turn has ended.
        """
        block = self._drafted(ahead) if ahead else self._several() or self._one_token()
        self.steps += 1 if ahead else block.tokens.shape[1]
        live = self.live.clone()
        count, stopped = self._take(block)
        total = int(count.sum())
        self.passes += block.cost(count, total, int(live.sum()), self.caches)
        if self.penalised:
            inside = (torch.arange(block.tokens.shape[1]) < count[:, None]).to(self.device)
            self.counts.scatter_add_(1, block.tokens.to(self.device), inside.long())
        several = block.tokens.shape[1] > 1
        last = block.tokens.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0] if several else block.tokens[:, 0]
        # A refused draft stays in the caches behind ``position``, where the mask hides it until it is overwritten. An
        # ended row stands still until it is retired: it must not outgrow its model's context or its output row.
        self.position, self.written = self.position + count, self.written + count
        ended = self._finish(last, stopped, block.ends or {})
        if block.marks:
            self.selection.rewind(self.slot, block.marks, (count - 1).clamp(0, len(block.marks) - 1))
        self.author = self._after(last, live) if block.next is None else block.next
        self.last = last
        for i in ended:
            self._leave(i)
        return total, [self.rows[i] for i in ended]

    def _after(self, tokens: Int64[Tensor, " b"], live: Bool[Tensor, " b"]) -> Bool[Tensor, " b"]:
        """Whether the senior writes in each row after its next token, as the strategies say when they are told it."""
        # Strategies hear of a token here, and of drafts in ``_drafted``; with vLLM in ``Planner.next_authors``.
        # A row that may come back keeps its state and its columns. Of another, nobody asks what it goes on with.
        if not self.turns or bool(live.all()):
            return self.selection.step(self.slot, tokens)
        on = live.nonzero().squeeze(1)
        return self.author.index_copy(0, on, self.selection.step(self.slot[on], tokens[on]))

    def _several(self) -> Block | None:
        """The next tokens of every row, up to the next look of the host; None if it has to look at each."""
        alone = self.alone
        if alone is None or self.penalised or len(self.starts.table) > 1 or not bool(self.live.any()):
            return None
        mark = self.selection.mark(self.slot)
        strategies = [self.selection.strategy(group) for group, _, _ in mark]
        if not all(alone.takes(s, state, len(mine)) for s, (_, mine, state) in zip(strategies, mark, strict=True)):
            return None
        left = (self.limit - self.written) * self.live  # a row that has ended stands still
        steps, end = min(alone.every, int(left.max())), self.position + left
        start = Start(
            self.last, self.author, self.position, end, self.written + self.shift, self.stream, self.parameters, mark
        )
        block = alone.run(self.caches, strategies, start, self.shaping, steps=steps, every_mark=self.turns)
        if len(self.caches) == 1 and not bool((block.authors == bool(min(self.caches)))[self.live].all()):
            raise _broken_promise()
        return block._replace(most=self.live * steps)

    def _one_token(self) -> Block:
        """The next token of every row, without a draft."""
        last, columns, masks = self.last[:, None], self.position[:, None], dict[Any, Any]()
        hidden = {who: self._read(who, last, columns, masks)[:, 0] for who in self.caches}
        logits = self._author_logits(hidden)
        tokens, logprobs = (x.cpu() for x in self._sample(logits, self._race()))
        after = self._after(tokens, self.live)
        block = Block(tokens[:, None], self.author[:, None], logprobs[:, None], self.live.long(), next=after)
        return self._handed_over(block, after, logits, hidden) if len(self.starts.table) > 1 else block

    def _handed_over(
        self, block: Block, after: Bool[Tensor, " b"], logits: Float[Tensor, "b v"], hidden: Mapping[int, Tensor]
    ) -> Block:
        """The block of proposals, without those that the strategies drop (see ``Strategy``).

        Args:
            after: what the strategies say of the proposals.
            logits: those that the proposals were drawn from.
            hidden: the states of each model after the last tokens.
        """
        authors = torch.where(self.start_row > 0, after, self.author)
        tokens, logprobs, handovers = block.tokens.clone(), block.logprobs.clone(), torch.zeros_like(block.logprobs)
        for who in self.caches:
            rows = (self.live & (authors != self.author) & (after == bool(who))).nonzero().squeeze(1)
            if not len(rows):
                continue
            at, inside = rows.to(self.device), ~self.starts.table[self.start_row[rows]].to(self.device)
            if not who:  # the senior ended its word, which is a choice of its own
                mass = log_mass(shaped(logits[at], self.parameters[at], self._penalised(at), self.shaping), inside)
                handovers[rows, 0] = torch.where(self.parameters[at, 0] > 0, mass, 0.0).cpu()
            keys = stream(torch.tensor([self.rows[i].key for i in rows.tolist()], dtype=torch.int64), HANDOVER)
            others = self._logits(who, hidden[who], rows).masked_fill(inside, -torch.inf)
            drawn = self._sample(others, self._races(keys, (self.written + self.shift)[rows]), at)
            tokens[rows, 0], logprobs[rows, 0] = (x.cpu() for x in drawn)
        return block._replace(tokens=tokens, authors=authors[:, None], logprobs=logprobs, handovers=handovers)

    def _drafted(self, ahead: int) -> Block:
        """Up to ``ahead`` tokens of every row: the junior drafts them, whoever their author is, and the senior reads
        the draft at once and draws its own tokens again.

        Both models draw from the same random numbers, so the senior often draws the drafted token, too. What follows
        the first token that it draws otherwise is thrown away. So the tokens are those that single steps would give
        (drafter-invariant speculative decoding, Daliri, Musco and Suresh, arXiv 2408.07978, here across authors).
        """
        ahead = min(ahead, int((self.limit - self.written)[self.live].max()))
        races = self._races(self.stream[:, None], (self.written + self.shift)[:, None] + torch.arange(ahead)).unbind(1)
        # What a row drafts beyond its limit is never kept; it shares one column of the cache.
        end = self.position + (self.limit - self.written)
        columns = (self.position[:, None] + torch.arange(ahead)).minimum(end[:, None])
        read, authors, guesses, logprobs = [self.last], [self.author], list[Tensor](), list[Tensor]()
        marks, counts = list[Mark](), self.counts.clone()
        for j, race in enumerate(races):
            logits = self._logits(0, self._read(0, read[j][:, None], columns[:, j : j + 1], {})[:, 0])
            tokens, each = self._sample(logits, race, counts=counts)
            if self.penalised:
                counts.scatter_add_(1, tokens[:, None], torch.ones_like(tokens[:, None]))
            guesses.append(tokens.cpu())
            logprobs.append(each.cpu())
            marks.append(self.selection.mark(self.slot))
            if j + 1 < ahead:
                authors.append(self.selection.step(self.slot, guesses[j]))
                read.append(guesses[j])
        senior, guessed, drafted = (torch.stack(each, 1) for each in (authors, guesses, logprobs))
        # Now the senior reads the draft, and draws up to the first token that it draws otherwise, which is included.
        hidden = self._read(1, torch.stack(read, 1), columns, {})
        drawn, count, right, counts = guessed.clone(), torch.zeros_like(self.written), self.live, self.counts.clone()
        for j, race in enumerate(races):
            count = count + right
            mine = (right & senior[:, j]).nonzero().squeeze(1)
            if len(mine):
                at = mine.to(self.device)
                own, each = self._sample(self._logits(1, hidden[:, j], mine), race[at], at, counts)
                drawn[mine, j], drafted[mine, j] = own.cpu(), each.cpu()
            right = right & (drawn[:, j] == guessed[:, j])
            if self.penalised:
                counts.scatter_add_(1, drawn[:, j : j + 1].to(self.device), torch.ones_like(counts[:, :1]))
        return Block(drawn, senior, drafted, count, marks, guessed)

    def _take(self, block: Block) -> tuple[Int64[Tensor, " b"], Bool[Tensor, " b"]]:
        """Write the tokens of a block that each row takes, up to its limit or a stop, into the output arrays.

        Returns:
            How many tokens each row takes, and whether it stops after them.
        """
        width, count = block.tokens.shape[1], block.most.minimum(self.limit - self.written)
        if width == 1:  # without a draft, every microsecond counts
            taking = count > 0  # negative where a row waits beyond its limit
            row = taking.nonzero().squeeze(1)
            at, stopped = torch.zeros_like(row), self.stops.table[self.stop_row, block.tokens[:, 0]] & taking
        else:
            column = torch.arange(width)
            stop = self.stops.table[self.stop_row[:, None], block.tokens]
            first = torch.where(stop, column + 1, width + 1).amin(1)
            count = count.minimum(first)
            row, at = (column < count[:, None]).nonzero(as_tuple=True)
            stopped = (first == count) & self.live
        place = self.written[row] + at
        self.tokens[row, place] = block.tokens[row, at]
        self.authors[row, place] = block.authors[row, at].to(torch.int8)
        self.logprobs[row, place] = block.logprobs[row, at]
        if block.handovers is not None:
            self.handovers[row, place] = block.handovers[row, at]
        for i in self.live.nonzero().squeeze(1).tolist() if self.stop_strings else ():
            known, new = self.tokens[i, : int(self.written[i])], block.tokens[i, : int(count[i])]
            if hit := self.rows[i].first_stop(known, new, self.decoder.tokenizer.decode):
                stopped[i], count[i] = True, hit
        return count, stopped

    def _finish(
        self, last: Int64[Tensor, " b"], stopped: Bool[Tensor, " b"], ends: Mapping[int, StopReason]
    ) -> list[int]:
        """End the rows that have stopped at their last token or have no token left, and return their places."""
        ended = ((stopped | (self.written == self.limit)) & self.live).nonzero().squeeze(1).tolist()
        for i in ended:
            eos = int(last[i]) in self.decoder.eos and not self.rows[i].request.sampling.ignore_eos
            self._stop(i, ends.get(i) or ("eos" if eos else "stop" if stopped[i] else "length"))
        return ended

    def _leave(self, i: int) -> None:
        """Keep what a further turn of an ended row would need, if it may have one, or the next request of its
        session."""
        row = self.rows[i]
        row.senior_next = bool(self.author[i])
        if row.request.session is not None or (self.turns and row.stays):
            row.kept = {who: cache.take(i, int(self.position[i])) for who, cache in self.caches.items()}

    # ---------------------------------------------------------------------------------------------- one model, one draw

    def _read(
        self, who: int, tokens: Int64[Tensor, "b c"], columns: Int64[Tensor, "b c"], masks: dict[Any, Any]
    ) -> Float[Tensor, "b c h"]:
        """The hidden states of one model, which reads the next tokens of every row at their columns.

        Args:
            masks: of these columns, which models share where they are in one place and dtype.
        """
        head, cache = self.decoder.heads[who].weight, self.caches[who]
        if (place := (head.device, head.dtype)) not in masks:
            there = columns.to(head.device)
            masks[place] = there, column_mask(there, int(columns.max()) + 1, head.dtype)[:, None]
        there, mask = masks[place]
        cache.reserve(mask.shape[-1])
        return next_hidden(self.decoder.models[who], tokens.to(head.device), there, cache.layers, mask)

    def _logits(
        self, who: int, hidden: Float[Tensor, "b h"], rows: Int64[Tensor, " k"] | None = None
    ) -> Float[Tensor, "k v"]:
        """The logits of one model by its hidden states, for some rows or all."""
        some = hidden if rows is None else hidden[rows.to(hidden.device)]
        return self.decoder.heads[who](some)[:, : self.decoder.vocabulary].float().to(self.device)

    def _author_logits(self, hidden: Mapping[int, Float[Tensor, "b _"]]) -> Float[Tensor, "b v"]:
        """Each row's logits by its author."""
        logits = torch.empty(0)
        for who, states in hidden.items():
            mine = (self.author if who else ~self.author).nonzero().squeeze(1)
            if len(mine) == len(self.author):
                return self._logits(who, states)
            if len(hidden) == 1:
                raise _broken_promise()
            if len(mine):
                if logits.shape[0] == 0:
                    logits = torch.empty(len(self.author), self.decoder.vocabulary, device=self.device)
                logits[mine.to(self.device)] = self._logits(who, states, mine)
        return logits

    def _race(self) -> Float64[Tensor, "b r"]:
        """The random numbers of this step's draws. Those of several steps are made at once, which costs hardly more."""
        draws = torch.stack([self.stream, self.written + self.shift])
        ready, races = self._ahead
        if not races or ready.shape != draws.shape or not bool(((ready == draws) | ~self.live).all()):
            steps = torch.arange(max(1, min(RACES_AHEAD, 512 // len(self.rows))))
            races = [*self._races(self.stream[:, None], draws[1][:, None] + steps).unbind(1)][::-1]
        draws[1].add_(1)
        self._ahead = draws, races[:-1]
        return races[-1]

    def _races(self, streams: Int64[Tensor, "*#b"], counters: Int64[Tensor, "*#b"]) -> Float64[Tensor, "*b r"]:
        """The random numbers of some draws."""
        return race_times(fold_in(streams, counters).to(self.device), self.decoder.vocabulary)

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

    def _penalised(self, rows: Tensor | slice, counts: Tensor | None = None) -> Penalised | None:
        return (self.seen[rows], (self.counts if counts is None else counts)[rows]) if self.penalised else None


def _broken_promise() -> EngineError:
    return EngineError("a strategy let somebody write who it promised would not (Strategy.writers)")
