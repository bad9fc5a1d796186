"""Two models that are writers of their own and write one text by turns, span by span.

A row's author is asked for as many words as the draws give it. What it proposes beyond them is dropped, and the other
one goes on. With one vocabulary, tokens are handed over. With two, the senior's tokens are spelled, a ``Partner`` goes
on with the text, and the senior's tokenizer reads what that writes (``selection.words``). What a model wrote itself is
never tokenised again. The draws of a junior with a vocabulary of its own have streams of their own
(``selection.draws``).

Each turn of an episode is a text of its own. Its end and the observation come to each model in its own tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from tandemrl.rollout.decoding import DecodingBatch
from tandemrl.rollout.decoding_rows import Block, Decoder, Row
from tandemrl.rollout.engine import EngineError, Passes, Request
from tandemrl.rollout.partner import Job, Span, Writer, Written, refuse_penalties
from tandemrl.selection.draws import HANDOVER, stream
from tandemrl.selection.words import Vocabulary, spell


class Relay(DecodingBatch):
    """The rows in the senior's tokens.

    Args:
        decoder: of the senior. Its models, if it has any, are the writers'.
        writers: by author. The junior's is a `Partner` if there are two vocabularies.
        vocabulary: of the senior, where there are two.
    """

    def __init__(
        self, decoder: Decoder, writers: Mapping[int, Writer], vocabulary: Vocabulary | None, *, turns: bool
    ) -> None:
        self.writers, self._vocabulary = writers, vocabulary
        self._opening: dict[int, float] = {}
        """The rows whose next token is the first after a handover: the log-prob of a word that the senior ended."""
        ends, own = decoder.eos, decoder.tokenizer.eos_token_id
        self._end_of_text = own if own in ends else ends[0]
        super().__init__(replace(decoder, models={}, heads={}), turns=turns)

    def extend(self, requests: Sequence[Request], total: int, *, drafts: bool = False) -> None:
        for index, request in enumerate(requests):
            refuse_penalties(index, request)
        if self._vocabulary is not None and self.turns and any(request.sampling.stop for request in requests):
            raise EngineError(
                "stop strings in an environment with a junior of another vocabulary: there, a turn ends by EOS or a "
                "limit on tokens; leave them out"
            )
        for writer in self.writers.values():
            writer.extend(requests)
        super().extend(requests, total)

    # ------------------------------------------------------------------------------------------------- coming and going

    def admit(self, new: list[Row]) -> None:
        super().admit(new)
        for who, writer in self.writers.items():
            apart = not who and self._vocabulary is not None
            mine = [row for row in new if not apart or row.request.strategy.removed is not None]
            writer.admit({row: row.request.prompt for row in mine})

    def resume(self, back: list[tuple[Row, Sequence[int]]]) -> None:
        rows = [row for row, _ in back]
        lost = {number for writer in self.writers.values() for number in writer.resume(rows)}
        for row in rows:
            if row.number in lost:
                row.end("untranslatable")
        if back := [each for each in back if each[0].number not in lost]:
            super().resume(back)

    def retire(self) -> None:
        super().retire()
        live = {*self._places()}
        self._opening = {number: over for number, over in self._opening.items() if number in live}
        waiting = {row.number for row in self._slots if self.turns and row.stop_reason and row.stays} - live
        for writer in self.writers.values():
            writer.keep(live, waiting)

    def close(self) -> None:
        for writer in self.writers.values():
            writer.keep((), ())
        super().close()

    def _places(self) -> dict[int, int]:
        """The place of each live row, by number."""
        return {self.rows[i].number: i for i in self.live.nonzero().squeeze(1).tolist()}

    # ------------------------------------------------------------------------------------------------------ next tokens

    def _one_token(self) -> Block:
        """What is written after a step of each writer, and no token in the other rows."""
        places, spans = self._places(), dict[int, Written]()
        by_author = {who: [i for i in places.values() if bool(self.author[i]) == bool(who)] for who in (0, 1)}
        for who, writer in self.writers.items():
            new = [i for i in by_author[who] if self.rows[i].number not in writer]
            writer.begin([self._job(i, words) for i, words in zip(new, self._words(new, who), strict=True)])
            self.passes += Passes(**{("junior", "senior")[who]: len(writer)})
            for number, span in writer.step(wait=not by_author[1]).items():
                self.passes += Passes(spans=int(span.asks > 0), asks=span.asks)
                if span.end is not None and not span.tokens:  # nobody is asked for a further turn
                    self._stop(places[number], span.end)
                else:
                    spans[places[number]] = span
        return self._block(spans)

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
        row, written = self.rows[i], int(self.written[i])
        own = self.tokens[i, :written].tolist()
        text = b"" if self._vocabulary is None else spell(own, self._vocabulary)
        opening = int(stream(torch.tensor([row.key]), HANDOVER)) if row.number in self._opening else None
        counter, tail = written + int(self.shift[i]), int.from_bytes((text or b"")[-3:])
        bare = row.request.strategy.starts is None
        span = Span(words, tail, counter, int(self.stream[i]), self._end_of_text, opening, bare)
        return Job(row, [*row.text, *own], int(self.limit[i]) - written, span, text)

    def _block(self, spans: Mapping[int, Written]) -> Block:
        """What was written, by place, and no token in the other rows."""
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
        ends = {i: span.end for i, span in spans.items() if span.end is not None}
        authors = self.author[:, None].expand(shape)
        return Block(tokens, authors, logprobs, most, next=after, handovers=handovers, ends=ends)

    def _take(self, block: Block) -> tuple[Int64[Tensor, " b"], Bool[Tensor, " b"]]:
        """Take what was written, up to a stop, and tell the strategies of it."""
        count, stopped = super()._take(block)
        for k in range(int(count.max())):
            at = (count > k).nonzero().squeeze(1)
            wrong = self.selection.step(self.slot[at], block.tokens[at, k]) != self.author[at]
            if bool(wrong.any()):
                raise _disagreement(self.rows[int(at[wrong][0])])
        assert block.next is not None
        cut = (count < block.most) | stopped  # so that nobody was handed over to
        block.next[cut] = self.author[cut]
        assert block.ends is not None
        for i in [*block.ends]:
            if stopped[i]:
                del block.ends[i]
            stopped[i] = True
        return count, stopped


def _disagreement(row: Row) -> EngineError:
    """The error of a strategy that gives an author other words than it did before they were written."""
    if row.request.strategy.removed is not None:
        return EngineError("senior and junior count other words in the same text; please report this as a bug")
    return EngineError(
        f"completion {row.number}: its strategy decides by more than where words begin, and whoever writes is told "
        "beforehand how many words to write; use selection.strategy=before_word, or rollout.engine=torch"
    )
