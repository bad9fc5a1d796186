"""A junior with a vocabulary of its own that this process, or an engine of it, decodes with (``relay``)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tandemrl.rollout.decoding_rows import Row
from tandemrl.rollout.engine import Passes, Request
from tandemrl.rollout.partner import Ask, Ended, Job, Said, SpanEnd, Writer
from tandemrl.rollout.spans import Span
from tandemrl.selection import draws
from tandemrl.selection.draws import stream
from tandemrl.selection.words import Vocabulary, begin_words, read, spell, whole_characters, word_starts


@dataclass(slots=True)
class Reader:
    """A row as the junior has it.

    tokens: its prompt and all that follows. counter: the number of its next draw. start: where the present turn begins.
    since: where what it writes now begins. text: of the turn, up to there. ended: whether the junior ended the turn.
    """

    row: Row
    tokens: list[int]
    counter: int
    start: int
    since: int = 0
    text: bytes = b""
    ended: bool = False

    def read(self, tokens: Sequence[int], text: bytes) -> None:
        self.tokens += tokens
        self.text += text
        self.counter += len(tokens)


class LocalPartner:
    """A `Partner` that a writer writes for.

    Args:
        writer: with the junior's model.
        vocabulary, ends, context: of the junior: the ids that end a text, and how many tokens it can read.
        pieces: the bytes of each id of the senior's that is text.
    """

    def __init__(
        self, writer: Writer, vocabulary: Vocabulary, ends: Sequence[int], context: int, pieces: Mapping[int, bytes]
    ) -> None:
        self._writer, self._vocabulary, self._ends = writer, vocabulary, ends
        self._context, self._pieces = context, pieces
        self.readers: dict[int, Reader] = {}
        """By number of the row."""
        self._ready: list[Said] = []
        self.passes = Passes()

    def extend(self, requests: Sequence[Request]) -> None:
        """It can do what the senior can."""

    def admit(self, rows: Sequence[Row]) -> None:
        for row in rows:
            prompt = list(row.request.junior_prompt)
            self.readers[row.number] = Reader(row, prompt, self._earlier(row), len(prompt))
        self._writer.admit({row.number: row.request.junior_prompt for row in rows})

    def _earlier(self, row: Row) -> int:
        """How many draws earlier requests took at most: its tokens were others, each of at least a byte."""
        texts = (b"".join(self._pieces.get(t, b"") for t in turn) for turn in row.request.history)
        ends = sum(turn[-1] not in self._pieces for turn in row.request.history)
        return ends + sum(len(whole_characters(text)) for text in texts)

    def ask(self, asks: Sequence[Ask]) -> None:
        jobs = []
        for number, text, room, words in asks:
            reader = self.readers[number]
            new = text[len(reader.text) :]
            tokens = read(new, self._vocabulary, reader.text)
            if tokens is None:
                self._ready.append(Said(number, b"", "untranslatable"))
                continue
            reader.read(tokens, new)
            room = min(room, self._context - len(reader.tokens))
            if room <= 0:
                self._ready.append(Said(number, b"", "length"))
                continue
            reader.since, key = len(reader.tokens), torch.tensor([reader.row.key])
            own, first = (int(stream(key, kind)) for kind in (draws.JUNIOR_SAMPLING, draws.JUNIOR_HANDOVER))
            tail, opening = int.from_bytes(text[-3:]), first if text else None
            span = Span(words, tail, reader.counter, own, self._ends[0], opening)
            jobs.append(Job(reader.row, reader.tokens, room, span))
        self._writer.begin(jobs)

    def spans(self, *, wait: bool) -> list[Said]:
        self.passes += Passes(junior=len(self._writer))
        for number, written in self._writer.step().items():
            reader = self.readers[number]
            reader.read(written.tokens, b"")
            if not written.whole:
                continue
            own = reader.tokens[reader.since :]
            reader.ended = written.over is None and own[-1] in self._ends
            text = spell(own[:-1] if reader.ended else own, self._vocabulary)
            end: SpanEnd = "word" if written.over is not None else "eos" if reader.ended else "length"
            reader.text += text or b""
            self._ready.append(Said(number, text or b"", "untranslatable" if text is None else end))
        ready, self._ready = self._ready, []
        return ready

    def resume(self, turns: Sequence[Ended]) -> list[int]:
        lost = []
        for number, text, by_token, context in turns:
            if (reader := self.readers.get(number)) is None:
                continue  # the senior writes alone
            # Also the number of a dropped token is not used again.
            counter = reader.counter + 1 + self._earlier(reader.row)
            if len(text) < len(reader.text) or (reader.ended and not by_token):
                readable = self.cut(reader, text)
            else:
                tokens = read(text[len(reader.text) :], self._vocabulary, reader.text)
                readable = tokens is not None
                reader.tokens += tokens or ()
            if not readable:
                lost.append(number)
                continue
            said = by_token and reader.ended and reader.tokens[-1] == context[0]  # the end, which the context repeats
            reader.tokens += context[said:]
            start = len(reader.tokens)
            self.readers[number] = Reader(reader.row, reader.tokens, counter, start)
        return lost

    def cut(self, reader: Reader, text: bytes) -> bool:
        """Take back what was written beyond ``text``, to which the senior's limit has cut the turn.

        The cut may be inside a token. What is left of it is read, as new tokens. Returns whether it could be read.
        """
        pieces = self._vocabulary.pieces
        tokens = reader.tokens[reader.start : len(reader.tokens) - reader.ended]
        ends = [*accumulate((len(pieces[token]) for token in tokens), initial=0)]
        kept = max(k for k, end in enumerate(ends) if text[:end] == whole_characters(text[:end]) and end <= len(text))
        before, left = text[: ends[kept]], text[ends[kept] :]
        more = self._vocabulary.encode(left.decode())
        begun = begin_words([pieces.get(token, b"") for token in more], before)
        if spell(more, self._vocabulary) != left or sum(begun) != len(word_starts(left, before)):
            return False
        reader.tokens[reader.start :] = [*tokens[:kept], *more]
        return True

    def keep(self, live: Collection[int], waiting: Collection[int]) -> None:
        self._ready = [said for said in self._ready if said.number in live]
        self.readers = {n: reader for n, reader in self.readers.items() if n in live or n in waiting}
        self._writer.keep(live, waiting)
