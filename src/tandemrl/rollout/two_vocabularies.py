"""Decoding where senior and junior have vocabularies of their own: two batches that write one text.

Each model has a batch with its own ids, KV cache, and state of the strategy, which draws by words of the text and so
says the same to both. The one whose word it is writes until it proposes a token that begins a word of the other. That
token is dropped. What was written since the last handover is spelled, the other tokenizer reads it
(``selection.words``), its model computes these tokens in one pass, and draws the first token of the next word from
those that begin one. What a model wrote itself is never tokenised again.

Each turn of an episode is a text of its own. Its end and the observation come to each model in its own tokens.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from tandemrl.models.sampling import log_mass, race_times
from tandemrl.rollout.control import Aborts
from tandemrl.rollout.decoding import DecodingBatch
from tandemrl.rollout.decoding_rows import Block, Decoder, Row
from tandemrl.rollout.engine import LOST, EngineError, Passes, Request, StopReason
from tandemrl.rollout.kv_cache import extend
from tandemrl.rollout.partner import Ask, Ended, MakePartner, Partner, Span
from tandemrl.selection import Strategy, draws
from tandemrl.selection.draws import fold_in, stream
from tandemrl.selection.words import Vocabulary, begin_words, last_word, read, spell, whole_characters, word_starts
from tandemrl.types import own_turns


class Received(NamedTuple):
    """What the other model wrote in a row, and why the row ends with it, if it does."""

    row: int
    text: bytes
    tokens: tuple[int, ...]
    reason: StopReason | None = None


class Half(DecodingBatch):
    """The rows as one of the models sees them: its own tokens, and its readings of what the other wrote.

    A row that the other model writes is paused: it stays in its place, and nothing is written into it.

    Args:
        senior: whose half it is. In both, model 1 of the decoder is the half's own.
        vocabulary: of that model.
    """

    def __init__(
        self,
        decoder: Decoder,
        requests: Sequence[Request],
        total: int,
        *,
        senior: bool,
        vocabulary: Vocabulary,
        turns: bool = False,
    ) -> None:
        self._barred_for: dict[int, Strategy] = {}
        """The strategies by the ids of their tables, in the order of ``starts``."""
        super().__init__(decoder, requests, total, turns=turns)
        self.senior, self.spelling = senior, vocabulary
        self.sampling_stream = draws.SAMPLING if senior else draws.JUNIOR_SAMPLING
        self.handover_stream = draws.HANDOVER if senior else draws.JUNIOR_HANDOVER
        self.texts: dict[int, bytes] = {}
        """By number: the text of the turn up to the last handover."""
        self.unread: dict[int, list[int]] = {}
        """By number: the last tokens, which the model has not read yet."""
        self.handed: list[int] = []
        """The rows that were handed over in the last step."""
        self.paused = torch.empty(0, dtype=torch.bool)
        self.opening = torch.empty(0, dtype=torch.bool)  # whether the next token is the first after a handover
        self.since = torch.empty(0, dtype=torch.int64)  # the column after the last handover
        self.mass = torch.empty(0, dtype=torch.float32)  # log-prob of the proposal that was dropped

    def extend(self, requests: Sequence[Request], total: int, *, drafts: bool = False) -> None:
        super().extend(requests, total, drafts=drafts)
        for request in requests:
            if (starts := request.strategy.starts) is not None:
                self._barred_for.setdefault(id(starts), request.strategy)
        barred = [torch.zeros(2, self.decoder.vocabulary, dtype=torch.bool)]
        for strategy in self._barred_for.values():
            starts, removed = strategy.starts, strategy.removed
            assert starts is not None
            assert removed is not None
            barred.append(torch.stack([removed, ~starts])[:, : self.decoder.vocabulary])
        self.barred = torch.cat(barred).to(self.device)  # by start_row, for any token and for an opening one

    def release(self, numbers: Sequence[int]) -> None:
        super().release(numbers)
        for number in numbers:
            self.texts.pop(number, None)
            self.unread.pop(number, None)

    def _entries(self, rows: Sequence[Row], author: Tensor) -> dict[str, Tensor]:
        entries = super()._entries(rows, torch.ones_like(author))  # whoever writes here is model 1
        own = author == self.senior
        self.texts |= dict.fromkeys((row.number for row in rows), b"")
        for row in rows:
            self.unread.setdefault(row.number, [row.request.prompt[-1]])
        if not self.senior:  # its tokens of earlier requests were others than are read, each of at least a byte
            sizes = (
                [len(self.spelling.pieces.get(t, b"x")) for turn in row.request.history for t in turn] for row in rows
            )
            entries["shift"] += torch.tensor([sum(each) - len(each) for each in sizes])
        opening, since = torch.zeros_like(author), entries["written"].clone()
        return entries | {"paused": ~own, "opening": opening, "since": since, "mass": torch.zeros(len(rows))}

    def _names(self) -> list[str]:
        return [*super()._names(), "paused", "opening", "since", "mass"]

    def _read(self, places: Tensor, back: Sequence[tuple[Row, Sequence[int]]]) -> None:
        """An answer of the environment is read where the model goes on."""
        for row, context in back:
            self.unread[row.number] += context

    def _leave(self, i: int) -> None:
        number = self.rows[i].number
        self.unread[number] = self.unread[number] or [int(self.last[i])]  # whose keys and values are not kept
        super()._leave(i)

    @property
    def writes(self) -> bool:
        """Whether there is a row that this model writes now."""
        return bool((self.live & ~self.paused).any())

    def step(self, ahead: int = 0) -> tuple[int, list[Row]]:
        self.handed = []
        idle = int((self.live & self.paused).sum())
        written, ended = super().step()
        self.passes += Passes(senior=-idle)  # they stand still
        return written, ended

    def _races_of(self, rows: Int64[Tensor, " k"]) -> Float64[Tensor, "k r"]:
        keys, opening = self.stream[rows], self.opening[rows]
        if bool(opening.any()):
            of_requests = torch.tensor([self.rows[i].key for i in rows.tolist()], dtype=torch.int64)
            keys = torch.where(opening, stream(of_requests, self.handover_stream), keys)
        counters = (self.written + self.shift)[rows]
        return race_times(fold_in(keys, counters).to(self.device), self.decoder.vocabulary)

    def _logits_after_reading(self, rows: Int64[Tensor, " k"]) -> Float[Tensor, "k v"]:
        """The logits of some rows, after the model has read all that it had not yet."""
        head, numbers, last = self.decoder.heads[1], self.number[rows].tolist(), self.last[rows].tolist()
        chunks = [self.unread[number] or [token] for number, token in zip(numbers, last, strict=True)]
        starts = [end + 1 - len(chunk) for end, chunk in zip(self.position[rows].tolist(), chunks, strict=True)]
        hidden = extend(self.decoder.models[1], self.caches[1], rows.tolist(), starts, chunks)
        self.unread |= {number: [] for number in numbers}
        return head(hidden)[:, : self.decoder.vocabulary].float().to(self.device)

    def _one_token(self) -> Block:
        """The next token of every row that this model writes, or its end: then the row is paused."""
        writing = self.live & ~self.paused
        at = writing.nonzero().squeeze(1)
        on_device, slots = at.to(self.device), self.number[at]
        barred = self.barred[(2 * self.start_row + self.opening)[at].to(self.device)]
        logits = self._logits_after_reading(at).masked_fill(barred, -torch.inf)
        tokens, logprobs = (x.cpu() for x in self._sample(logits, self._races_of(at), on_device))
        before = self.selection.mark(slots)
        lost = self.selection.step(slots, tokens) != self.senior
        if bool(lost.any()):
            self.selection.rewind(slots, [before, self.selection.mark(slots)], (~lost).long())
        if bool((lost & self.opening[at]).any()):
            raise disagreement()
        over = at[lost]
        self.handed = over.tolist()
        if self.handed and self.senior:  # it ended its word, which is a choice of its own
            dropped = lost.to(self.device)
            rows, other = on_device[dropped], ~self.starts.table[self.start_row[over]].to(self.device)
            mass = log_mass(self._shaped(logits[dropped], rows), other)
            self.mass[over] = torch.where(self.parameters[rows, 0] > 0, mass, 0.0).cpu()
        self.paused[over], self.opening[at] = True, False
        kept = at[~lost]
        self.unread |= {n: [token] for n, token in zip(slots[~lost].tolist(), tokens[~lost].tolist(), strict=True)}
        none = torch.zeros(len(writing), 1)
        return Block(
            self.last.index_copy(0, kept, tokens[~lost])[:, None],
            torch.full((len(writing), 1), self.senior),
            none.index_copy(0, kept, logprobs[~lost, None]),
            torch.zeros_like(self.last).index_fill(0, kept, 1),
            next=torch.ones_like(writing),
            handovers=none if self.starts else None,
        )

    def handed_text(self, i: int, *, ended: bool = False) -> bytes | None:
        """What this model wrote in a row since the last handover, which becomes part of its text; None if it is none.

        Args:
            ended: whether its last token is the end of the text.
        """
        number, last = int(self.number[i]), int(self.written[i]) - ended
        text = spell(self.tokens[number, int(self.since[i]) : last].tolist(), self.spelling)
        if text is not None:
            self.texts[number] += text
        return text

    def reading(self, i: int, text: bytes) -> tuple[int, ...] | None:
        """What the other model wrote in a row, in this vocabulary; None if it cannot be read."""
        before = self.texts[int(self.number[i])]
        if not text:
            return ()
        found = read(text, self.spelling, last_word(before), words=len(word_starts(text, before)))
        return None if found.refusal is not None else found.tokens

    def receive(self, spans: Sequence[Received]) -> None:
        """Append what the other model wrote to its rows, which this one goes on with, or which end."""
        if not spans:
            return
        rows, counts = torch.tensor([span.row for span in spans]), torch.tensor([len(span.tokens) for span in spans])
        tokens = torch.tensor([token for span in spans for token in span.tokens], dtype=torch.int64)
        of, ends = torch.repeat_interleave(torch.arange(len(rows)), counts), counts.cumsum(0)
        place = torch.arange(len(tokens)) - (ends - counts)[of]  # of each token in its span
        self.widen(int((self.written[rows] + counts).max()))
        numbers, columns = self.number[rows][of], self.written[rows][of] + place
        self.tokens[numbers, columns] = tokens
        self.authors[numbers, columns], self.logprobs[numbers, columns] = int(not self.senior), 0.0
        self.handovers[numbers, columns] = torch.where(place == 0, self.mass[rows][of], 0.0)
        if self.penalised:
            at = rows[of].to(self.device), tokens.to(self.device)
            self.counts.index_put_(at, torch.ones_like(at[1]), accumulate=True)
        for span in spans:
            self.texts[self.rows[span.row].number] += span.text
        for k in range(int(counts.max())):
            at_k = place == k
            if bool((self.selection.step(numbers[at_k], tokens[at_k]) == self.senior).any()):
                raise disagreement()
        for span in spans:
            self.unread[self.rows[span.row].number] += span.tokens
        some = counts > 0
        self.last[rows[some]] = tokens[ends[some] - 1]
        self.position[rows] += counts
        self.written[rows] += counts
        self.since[rows] = self.written[rows]
        self.opening[rows] = self.written[rows] > torch.tensor([self.rows[span.row].start for span in spans])
        self.paused[rows] = False
        for span in spans:
            if span.reason is not None:
                self.stop(span.row, span.reason)
                self._leave(span.row)

    def stop(self, i: int, reason: StopReason) -> None:
        """End a row."""
        self.rows[i].stop_reason, self.rows[i].written, self.live[i] = reason, int(self.written[i]), False

    def cut(self, i: int, text: bytes) -> bool:
        """Take back what this model wrote beyond ``text``, to which the other one's limit has cut the turn.

        The cut may be inside a token. What is left of it is read, as new tokens.

        Returns:
            whether it could be read.
        """
        row, pieces = self.rows[i], self.spelling.pieces
        number, start, seen = row.number, row.start, int(self.position[i]) + 1 - len(self.unread[row.number])
        tokens = self.tokens[number, start : int(self.written[i])].tolist()
        if row.stop_reason == "eos":
            tokens.pop()
        ends = [*accumulate((len(pieces[token]) for token in tokens), initial=0)]
        kept = max(k for k, end in enumerate(ends) if text[:end] == whole_characters(text[:end]) and end <= len(text))
        before, left = text[: ends[kept]], text[ends[kept] :]
        more = self.spelling.encode(left.decode())
        begun = begin_words([pieces.get(token, b"") for token in more], before)
        if spell(more, self.spelling) != left or sum(begun) != len(word_starts(left, before)):
            return False
        tokens = [*tokens[:kept], *more]
        written = start + len(tokens)
        self.widen(written)
        self.tokens[number, start:written] = torch.tensor(tokens, dtype=torch.int64)
        self.authors[number, start + kept : written] = int(not self.senior)
        self.position[i] += written - self.written[i]
        self.written[i] = written
        whole = [*row.request.prompt, *self.tokens[number, :written].tolist()]
        self.last[i], self.unread[number] = whole[-1], whole[min(seen, len(row.request.prompt) + start + kept) :]
        self.texts[number] = text
        slot, earlier = torch.tensor([number]), slice(0, start)
        turns = own_turns(self.tokens[number, earlier].numpy(), self.authors[number, earlier].numpy())
        history = [turn.tolist() for turn in turns]
        self.selection.admit(slot, [row.request.strategy], torch.tensor([row.key]), [history])
        for token in tokens:
            self.selection.step(slot, torch.tensor([token]))
        return True

    def places(self) -> dict[int, int]:
        """The live row of each number."""
        return {self.rows[i].number: i for i in self.live.nonzero().squeeze(1).tolist()}


class TwoVocabularies(Half):
    """The senior's half, which asks a partner for the junior's spans; what the engine sees of both.

    Args:
        make_partner: makes the partner of this call.
    """

    def __init__(
        self,
        decoder: Decoder,
        requests: Sequence[Request],
        total: int,
        *,
        turns: bool,
        vocabulary: Vocabulary,
        make_partner: MakePartner,
    ) -> None:
        self._make_partner = make_partner
        self._partner: Partner | None = None
        super().__init__(decoder, requests, total, senior=True, vocabulary=vocabulary, turns=turns)
        self.away: dict[int, Row] = {}
        """By number: the rows that may have a further turn."""
        ends, own = decoder.eos, decoder.tokenizer.eos_token_id
        self.end_of_text = own if own in ends else ends[0]

    def extend(self, requests: Sequence[Request], total: int, *, drafts: bool = False) -> None:
        super().extend(requests, total, drafts=drafts)
        if self.turns and self.stop_strings:
            raise EngineError(
                "stop strings in an environment with a junior of another vocabulary: there, a turn ends by EOS or a "
                "limit on tokens; leave them out"
            )
        if self._partner is None:
            self._partner = self._make_partner(requests, total)
        else:
            self._partner.extend(requests, total)

    @property
    def partner(self) -> Partner:
        assert self._partner is not None
        return self._partner

    def held(self) -> set[int]:
        return super().held() | self.partner.held()

    def release(self, numbers: Sequence[int]) -> None:
        super().release(numbers)
        self.partner.release(numbers)

    def admit(self, new: list[Row]) -> None:
        first = len(self.rows)
        super().admit(new)
        self.partner.admit(new)
        self._ask([i for i in range(first, len(self.rows)) if self.paused[i]])

    def resume(self, back: list[tuple[Row, Sequence[int]]]) -> None:
        turns, lost = [], set[int]()
        for row, _ in back:
            by_token = row.stop_reason == "eos"
            text = spell(self.tokens[row.number, row.start : row.written - by_token].tolist(), self.spelling)
            if text is not None and not by_token:
                text = whole_characters(text) or None
            if text is None:
                lost.add(row.number)
            else:
                turns.append(Ended(row.number, text, by_token, row.junior_context))
        lost.update(self.partner.resume(turns))
        for row, _ in back:
            if row.number in lost:
                row.end("untranslatable")
            else:
                del self.away[row.number]
        if going_on := [each for each in back if each[0].number not in lost]:
            super().resume(going_on)
            places = self.places()
            self._ask([i for row, _ in going_on if self.paused[i := places[row.number]]])

    def step(self, ahead: int = 0) -> tuple[int, list[Row]]:
        """As that of a batch. A turn that the junior ends has ended, too, but not one that is lost."""
        written, ended = super().step() if self.writes else (0, [])
        self._ask(self.handed)
        self.handed = []
        spans, places = self.partner.spans(wait=not self.writes), self.places()
        taken = [each for span in spans if (each := self._taken(places[span.number], span)) is not None]
        self.receive(taken)
        ended += [self.rows[each.row] for each in taken if each.reason is not None]
        self.away |= {row.number: row for row in ended}
        self._forget_over()
        new, its = sum(len(each.tokens) for each in taken), self.partner.passes
        self.passes = self.passes._replace(
            tokens=self.passes.tokens + new, junior=its.junior, spans=its.spans, asks=its.asks
        )
        return written + new, ended

    def abort(self, aborts: Aborts) -> None:
        super().abort(aborts)
        self._forget(row for row in self.rows if row.stop_reason == "abort")

    def _forget_over(self) -> None:
        """Tell the partner of the rows that have no further turn."""
        over = [row for row in self.away.values() if not (self.turns and row.stays)]
        self._forget(over)
        for row in over:
            del self.away[row.number]

    def _forget(self, rows: Iterable[Row]) -> None:
        self.partner.forget([row.number for row in rows])

    def _ask(self, rows: Sequence[int]) -> None:
        asks = []
        for i in rows:
            if self.handed_text(i) is None:
                self.stop(i, "untranslatable")
                self._forget([self.rows[i]])
            else:
                number = self.rows[i].number
                asks.append(Ask(number, self.texts[number], int(self.limit[i] - self.written[i])))
        if asks and self.partner.counts:
            slots, room = torch.tensor([each.number for each in asks]), max(each.room for each in asks)
            runs = self.selection.runs(slots, room, self.end_of_text, senior=False)
            asks = [each._replace(words=words) for each, words in zip(asks, runs, strict=True)]
        self.partner.ask(asks)

    def _taken(self, i: int, span: Span) -> Received | None:
        """A span in the senior's vocabulary; None if it cannot be read or there is none, and the row has ended."""
        text = whole_characters(span.text) if span.end == "length" else span.text
        tokens = None if span.end in LOST else self.reading(i, text)
        if tokens is None:
            self.stop(i, "failed" if span.end == "failed" else "untranslatable")
            self._forget([self.rows[i]])
            return None
        room, reason = int(self.limit[i] - self.written[i]), _REASONS.get(span.end)
        if span.end == "eos":
            end = self.rows[i].request.end_of_turn
            tokens = (*tokens, self.end_of_text if end is None else end)
        if len(tokens) > room or (len(tokens) == room and reason is None):
            tokens, reason = tokens[:room], "length"
        hit = self._first_stop(i, tokens)
        if hit and (hit < len(tokens) or reason != "eos"):
            tokens, reason = tokens[:hit], "stop"
        if not tokens:  # it can read no more, so that there is no further turn either
            self.stop(i, "length")
            self._forget([self.rows[i]])
            return None
        return Received(i, text, tokens, reason)

    def _first_stop(self, i: int, tokens: Sequence[int]) -> int:
        """The number, from 1, of the first of the ``tokens`` that completes a stop string in a row; 0 if none does."""
        if not self.stop_strings:
            return 0
        known = self.tokens[self.number[i], : int(self.written[i])]
        new = torch.tensor(tokens, dtype=torch.int64)
        return self.rows[i].first_stop(known, new, self.decoder.tokenizer.decode)


_REASONS: dict[str, StopReason] = {"eos": "eos", "length": "length"}


def disagreement() -> EngineError:
    """The error of two models that do not count the same words."""
    return EngineError("senior and junior count other words in the same text; please report this as a bug")
