"""A junior with a vocabulary of its own that this process decodes with, in a half of its own (``two_vocabularies``)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from tandemrl.rollout.decoding_rows import Decoder, Row
from tandemrl.rollout.engine import Passes, Request
from tandemrl.rollout.partner import Ask, Ended, Span, SpanEnd
from tandemrl.rollout.two_vocabularies import Half, Received
from tandemrl.selection import Strategy
from tandemrl.selection.whole_words import TextTables
from tandemrl.selection.words import Vocabulary, whole_characters, word_starts

_NONE = torch.iinfo(torch.int64).max  # the limit of a row that waits


class LocalPartner:
    """A `Partner` that this process decodes with, in a half of its own.

    Args:
        decoder: with the junior as model 1.
        vocabulary, tables: of the junior.
        pieces: the bytes of each id of the senior's that is text.
        context: how many tokens it can read.
        requests: those of the senior.
        half: makes its half.
    """

    counts = False

    def __init__(
        self,
        decoder: Decoder,
        vocabulary: Vocabulary,
        tables: TextTables,
        pieces: Mapping[int, bytes],
        context: int,
        requests: Sequence[Request],
        total: int,
        half: Callable[..., Half] = Half,
    ) -> None:
        self._tables, self._pieces, self._context = tables, pieces, context
        self._vocabulary, self._end = vocabulary, decoder.eos[0]
        self._strategies: dict[int, tuple[Strategy, Strategy]] = {}
        """By the id of the senior's: this one, and the junior's."""
        self._requests: dict[int, tuple[Request, list[Request]]] = {}
        """By the id of the senior's: this one, and the junior's once for each completion that is to be admitted."""
        self._half = half(decoder, self._read(requests), total, senior=False, vocabulary=vocabulary)
        self._ready: list[Span] = []

    def extend(self, requests: Sequence[Request], total: int) -> None:
        self._half.extend(self._read(requests), total)

    def _read(self, requests: Sequence[Request]) -> list[Request]:
        """Requests as the junior gets them, without those that the senior writes alone."""
        new = []
        for request in requests:
            if (over := request.strategy.over) is None:
                continue
            strategies = self._strategies.setdefault(id(request.strategy), (request.strategy, over(self._tables)))
            own = replace(
                request,
                prompt=request.junior_prompt,
                strategy=strategies[1],
                sampling=replace(request.sampling, stop=()),  # the senior's half looks for stop strings
                history=tuple(_turn_read(turn, self._pieces, self._vocabulary, self._end) for turn in request.history),
            )
            self._requests[id(request)] = request, [own] * len(request.keys)
            new.append(own)
        return new

    def held(self) -> set[int]:
        return self._half.held()

    def release(self, numbers: Iterable[int]) -> None:
        self._half.release([*numbers])

    @property
    def passes(self) -> Passes:
        return Passes(junior=self._half.passes.senior)

    def admit(self, rows: Sequence[Row]) -> None:
        first, new = len(self._half.rows), list[Row]()
        for row in rows:
            if (known := self._requests.get(id(row.request))) is not None:
                new.append(Row(known[1].pop(), row.key, row.number))
                if not known[1]:
                    del self._requests[id(row.request)]
        self._half.admit(new)
        self._half.paused[first:] = True  # until they are asked for

    def ask(self, asks: Sequence[Ask]) -> None:
        half, places = self._half, self._half.places()
        received = []
        for number, text, room, _ in asks:
            i = places[number]
            new = text[len(half.texts[number]) :]
            tokens = half.reading(i, new)
            if tokens is None:
                self._close(i, Span(number, b"", "untranslatable"))
                continue
            written = int(half.written[i]) + len(tokens)
            half.limit[i] = min(written + room, self._context - len(half.rows[i].request.prompt))
            if half.limit[i] <= written:
                self._close(i, Span(number, b"", "length"))
                continue
            half.widen(int(half.limit[i]))
            received.append(Received(i, new, tokens))
        half.receive(received)

    def resume(self, turns: Sequence[Ended]) -> list[int]:
        half, places = self._half, self._half.places()
        lost, tails, back = list[int](), list[Received](), list[tuple[int, Ended]]()
        for turn in turns:
            if (i := places.get(turn.number)) is None:
                continue  # the senior writes alone
            row, known = half.rows[i], half.texts[turn.number]
            row.own = int(half.written[i] + half.shift[i]) + 1  # also the number of a dropped token is not used again
            own_end, new = row.stop_reason == "eos", turn.text[len(known) :]
            if len(turn.text) < len(known) or (own_end and not turn.by_token):
                tokens: tuple[int, ...] | None = () if half.cut(i, turn.text) else None
            else:
                tokens = half.reading(i, new)
            if tokens is None:
                lost.append(turn.number)
                continue
            end = turn.context[:1] if turn.by_token and not own_end else ()
            tails.append(Received(i, new, (*tokens, *end)))
            back.append((i, turn))
        half.receive(tails)
        begun = []
        for i, turn in back:
            row, last = half.rows[i], int(half.last[i])
            row.written = int(half.written[i])
            has_end = turn.by_token and last == turn.context[0]
            begun.append((row, turn.context[has_end:]))
            half.widen(row.written + len(turn.context))
        if begun:
            at = torch.tensor([i for i, _ in back])
            half.begin(at, begun)
            half.paused[at], half.limit[at] = True, _NONE
        return lost

    def spans(self, *, wait: bool) -> list[Span]:
        half = self._half
        if half.writes:
            _, ended = half.step()
            for i in half.handed:
                self._hand(i, "word")
            half.live |= torch.isin(half.number, torch.tensor([row.number for row in ended]))
            places = half.places()
            for row in ended:  # it stays, since another turn may follow
                i = places[row.number]
                half.paused[i], half.limit[i] = True, _NONE
                self._hand(i, "eos" if row.stop_reason == "eos" else "length")
        half.retire()
        ready, self._ready = self._ready, []
        return ready

    def forget(self, numbers: Iterable[int]) -> None:
        ended = set(numbers)
        for i, row in enumerate(self._half.rows):
            if row.number in ended:
                self._half.live[i] = False
        self._ready = [span for span in self._ready if span.number not in ended]

    def _hand(self, i: int, end: SpanEnd) -> None:
        text = self._half.handed_text(i, ended=end == "eos")
        span = Span(self._half.rows[i].number, text or b"", "untranslatable" if text is None else end)
        self._ready.append(span)

    def _close(self, i: int, span: Span) -> None:
        self._half.live[i] = False
        self._ready.append(span)


def _turn_read(turn: Sequence[int], pieces: Mapping[int, bytes], junior: Vocabulary, end: int) -> tuple[int, ...]:
    """An earlier turn in the junior's tokens, word by word, with the token ``end`` if one of the senior's ends it.

    Only the strategy reads them, which draws by words; what the model reads of the turn is in its prompt.
    """
    text = whole_characters(b"".join(pieces.get(token, b"") for token in turn))
    words = (text[start:stop].decode(errors="replace") for start, stop in pairwise([*word_starts(text), len(text)]))
    tokens = tuple(token for word in words for token in junior.encode(word))
    return (*tokens, end) if turn[-1] not in pieces or not tokens else tokens
