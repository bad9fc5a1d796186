"""Two models that are writers of their own and write one text by turns, span by span.

A row's author is asked for as many words as the draws give it. What it proposes beyond them is dropped, and the other
one goes on. With one vocabulary, tokens are handed over. With two, the senior's tokens are spelled, a ``Partner`` goes
on with the text, and the senior's tokenizer reads what that writes (``selection.words``). What a model wrote itself is
never tokenised again. The draws of a junior with a vocabulary of its own have streams of their own
(``selection.draws``).

Each turn of an episode is a text of its own. Its end and the observation come to each model in its own tokens.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from tandemrl.rollout.decoding import DecodingBatch
from tandemrl.rollout.decoding_rows import Block, Decoder, Row
from tandemrl.rollout.engine import LOST, EngineError, Passes, Request, StopReason
from tandemrl.rollout.partner import Ask, Ended, Job, MakePartner, Partner, Said, Writer, Written, refuse_penalties
from tandemrl.rollout.spans import Span
from tandemrl.selection.draws import HANDOVER, stream
from tandemrl.selection.words import Vocabulary, read, spell, whole_characters


class Relay(DecodingBatch):
    """The rows in the senior's tokens.

    Args:
        decoder: of the senior. Its models, if it has any, are the writers'.
        writers: by author: the senior's, and the junior's if they have one vocabulary.
        vocabulary: of the senior, where there are two.
        make_partner: makes the junior of this call, where there are two.
    """

    def __init__(
        self,
        decoder: Decoder,
        requests: Sequence[Request],
        total: int,
        writers: Mapping[int, Writer],
        vocabulary: Vocabulary | None,
        make_partner: MakePartner | None,
        *,
        turns: bool,
    ) -> None:
        self.writers, self._vocabulary = writers, vocabulary
        self.partner: Partner | None = None if make_partner is None else make_partner()
        self._known: dict[int, Row] = {}
        """By number: the rows that may be gone on with."""
        self._asked = set[int]()
        """The rows that the partner is writing."""
        self._opening: dict[int, float] = {}
        """The rows whose next token is the first after a handover: the log-prob of a word that the senior ended."""
        self._texts: dict[int, bytes] = {}
        """The text of the turn up to column ``_since``, where the senior's present words begin."""
        self._since: dict[int, int] = {}
        self._reasons: dict[int, StopReason] = {}
        """By place: why a row ends with what was just taken."""
        ends, own = decoder.eos, decoder.tokenizer.eos_token_id
        self._end_of_text = own if own in ends else ends[0]
        super().__init__(replace(decoder, models={}, heads={}), requests, total, turns=turns)

    def extend(self, requests: Sequence[Request], total: int, *, drafts: bool = False) -> None:
        for index, request in enumerate(requests):
            refuse_penalties(index, request)
        if self.partner is not None and self.turns and any(request.sampling.stop for request in requests):
            raise EngineError(
                "stop strings in an environment with a junior of another vocabulary: there, a turn ends by EOS or a "
                "limit on tokens; leave them out"
            )
        if self.partner is not None:
            self.partner.extend(requests)
        super().extend(requests, total)

    # ------------------------------------------------------------------------------------------------- coming and going

    def admit(self, new: list[Row]) -> None:
        super().admit(new)
        self._begin(new)
        for writer in self.writers.values():
            writer.admit({row.number: row.request.prompt for row in new})
        if self.partner is not None:
            self.partner.admit([row for row in new if row.request.strategy.removed is not None])

    def resume(self, back: list[tuple[Row, Sequence[int]]]) -> None:
        if self.partner is not None:
            turns = [turn for row, _ in back if (turn := self._ended(row)) is not None]
            lost = {row.number for row, _ in back} - {turn.number for turn in turns} | {*self.partner.resume(turns)}
            for row, _ in back:
                if row.number in lost:
                    row.end("untranslatable")
            back = [each for each in back if each[0].number not in lost]
        if back:
            super().resume(back)
            self._begin([row for row, _ in back])

    def _ended(self, row: Row) -> Ended | None:
        """The last turn of a row, if it is a text."""
        assert self._vocabulary is not None
        by_token = row.stop_reason == "eos"
        own = row.parts[-1].tokens.tolist()
        text = spell(own[:-1] if by_token else own, self._vocabulary)
        if text is not None and not by_token:
            text = whole_characters(text) or None
        return None if text is None else Ended(row.number, text, by_token, row.junior_context)

    def _begin(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._known[row.number], self._texts[row.number], self._since[row.number] = row, b"", 0
            self._opening.pop(row.number, None)

    def retire(self) -> None:
        super().retire()
        live = {*self._places()}
        waiting = {number for number, row in self._known.items() if self.turns and row.stop_reason and row.stays} - live
        self._known = {number: row for number, row in self._known.items() if number in live or number in waiting}
        self._asked &= live
        self._keep(live, waiting)

    def close(self) -> None:
        self._keep((), ())
        super().close()

    def _keep(self, live: Collection[int], waiting: Collection[int]) -> None:
        for writer in self.writers.values():
            writer.keep(live, waiting)
        if self.partner is not None:
            self.partner.keep(live, waiting)

    def _places(self) -> dict[int, int]:
        """The place of each live row, by number."""
        return {self.rows[i].number: i for i in self.live.nonzero().squeeze(1).tolist()}

    # ------------------------------------------------------------------------------------------------------ next tokens

    def _one_token(self) -> Block:
        """What is written after a step of each writer, and no token in the other rows."""
        self._reasons = {}
        places, spans = self._places(), dict[int, Written]()
        by_author = {who: [i for i in places.values() if bool(self.author[i]) == bool(who)] for who in (0, 1)}
        for who, writer in self.writers.items():
            new = [i for i in by_author[who] if self.rows[i].number not in writer]
            writer.begin([self._job(i, words) for i, words in zip(new, self._words(new, who), strict=True)])
            self.passes += Passes(**{("junior", "senior")[who]: len(writer)})
            spans |= {places[number]: span for number, span in writer.step().items()}
        if self.partner is not None:
            self._ask([i for i in by_author[0] if self.rows[i].number not in self._asked])
            for said in self.partner.spans(wait=not by_author[1]):
                self._asked.remove(said.number)
                if (taken := self._read_span(places[said.number], said)) is not None:
                    spans[places[said.number]] = taken
            its = self.partner.passes
            self.passes = self.passes._replace(junior=its.junior, spans=its.spans, asks=its.asks)
        return self._block({i: self._up_to_stop(i, span) for i, span in spans.items()})

    def _words(self, rows: Sequence[int], who: int) -> list[int | None]:
        """How many words the draws give an author in each row."""
        if not rows:
            return []
        at = torch.tensor(rows)
        room = int((self.limit - self.written)[at].max())
        runs = self.selection.runs(self.slot[at], room, self._end_of_text, senior=bool(who))
        for i, words in zip(rows, runs, strict=True):
            if words == 0:
                raise _disagreement(self.rows[i])
        return runs

    def _job(self, i: int, words: int | None) -> Job:
        row, number, written = self.rows[i], self.rows[i].number, int(self.written[i])
        opening = int(stream(torch.tensor([row.key]), HANDOVER)) if number in self._opening else None
        counter, tail = written + int(self.shift[i]), int.from_bytes(self._texts[number][-3:])
        bare = row.request.strategy.starts is None
        span = Span(words, tail, counter, int(self.stream[i]), self._end_of_text, opening, bare)
        return Job(row, self.text(i), int(self.limit[i]) - written, span)

    def _ask(self, rows: Sequence[int]) -> None:
        """Ask the partner to go on with some rows."""
        assert self.partner is not None
        assert self._vocabulary is not None
        readable = []
        for i in rows:
            number, written = self.rows[i].number, int(self.written[i])
            text = spell(self.tokens[i, self._since[number] : written].tolist(), self._vocabulary)
            if text is None:
                self._stop(i, "untranslatable")
            else:
                self._texts[number] += text
                self._since[number] = written
                readable.append(i)
        asks = list[Ask]()
        for i, words in zip(readable, self._words(readable, 0), strict=True):
            number = self.rows[i].number
            asks.append(Ask(number, self._texts[number], int(self.limit[i] - self.written[i]), words))
        self._asked |= {ask.number for ask in asks}
        self.partner.ask(asks)

    def _read_span(self, i: int, said: Said) -> Written | None:
        """What the partner wrote in the senior's vocabulary; None if it cannot be read or there is none, and the row
        has ended."""
        assert self._vocabulary is not None
        before, end = self._texts[said.number], said.end
        text = whole_characters(said.text) if end == "length" else said.text
        tokens = None if end in LOST else read(text, self._vocabulary, before)
        if tokens is None:
            self._stop(i, "failed" if end == "failed" else "untranslatable")
            return None
        if end == "eos":
            own = self.rows[i].request.end_of_turn
            tokens = (*tokens, self._end_of_text if own is None else own)
        room = int(self.limit[i] - self.written[i])
        if not tokens:  # it can read no more, so that there is no further turn either
            self._stop(i, "length")
            return None
        if len(tokens) <= room and (end == "eos" or end == "length"):
            self._reasons[i] = end
        self._texts[said.number] += text
        self._since[said.number] += len(tokens)
        taken = tokens[:room]
        return Written(taken, [0.0] * len(taken), 0.0 if end == "word" else None)

    def _up_to_stop(self, i: int, span: Written) -> Written:
        """What was written up to the stop string that one of its tokens completes."""
        if not self.stop_strings:
            return span
        known, new = self.tokens[i, : int(self.written[i])], torch.tensor(span.tokens, dtype=torch.int64)
        hit = self.rows[i].first_stop(known, new, self.decoder.tokenizer.decode)
        if hit and (hit < len(new) or self._reasons.get(i) != "eos"):
            self._reasons[i] = "stop"
            return Written(span.tokens[:hit], span.logprobs[:hit])
        return span

    def _block(self, spans: Mapping[int, Written]) -> Block:
        """What was written, by place, of which the strategies are told; and no token in the other rows."""
        shape = len(self.rows), max((len(span.tokens) for span in spans.values()), default=0) or 1
        tokens, logprobs, most = torch.zeros(shape).long(), torch.zeros(shape), torch.zeros_like(self.written)
        tokens[:, 0] = self.last  # of the other rows it stays as it is
        handovers, after = torch.zeros(shape), self.author.clone()
        for i, span in spans.items():
            most[i] = count = len(span.tokens)
            tokens[i, :count], logprobs[i, :count] = torch.tensor(span.tokens).long(), torch.tensor(span.logprobs)
            number = self.rows[i].number
            if count:
                handovers[i, 0] = self._opening.pop(number, 0.0)
            if span.over is not None:
                self._opening[number] = span.over if self.author[i] else 0.0
                after[i] = ~after[i]
        for k in range(int(most.max())):
            at = (most > k).nonzero().squeeze(1)
            wrong = self.selection.step(self.slot[at], tokens[at, k]) != self.author[at]
            if bool(wrong.any()):
                raise _disagreement(self.rows[int(at[wrong][0])])
        told = handovers if self.starts else None
        return Block(tokens, self.author[:, None].expand(shape), logprobs, most, next=after, handovers=told)

    def _finish(self, last: Int64[Tensor, " b"], stopped: Bool[Tensor, " b"]) -> list[int]:
        for i in self._reasons:
            stopped[i] = True
        ended = super()._finish(last, stopped)
        for i in ended:
            self.rows[i].stop_reason = self._reasons.get(i, self.rows[i].stop_reason)
        return ended


def _disagreement(row: Row) -> EngineError:
    """The error of a strategy that gives an author other words than it did before they were written."""
    if row.request.strategy.removed is not None:
        return EngineError("senior and junior count other words in the same text; please report this as a bug")
    return EngineError(
        f"completion {row.number}: its strategy decides by more than where words begin, and whoever writes is told "
        "beforehand how many words to write; use selection.strategy=before_word, or rollout.engine=torch"
    )
