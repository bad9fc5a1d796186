"""Two models with vocabularies of their own that write one text by turns, span by span.

A row's author is asked for as many words as the draws give it. What it proposes beyond them is dropped, and the other
one goes on: the senior's tokens are spelled, a ``Partner`` goes on with the text, and the senior's tokenizer reads what
that writes (``selection.words``). What a model wrote itself is never tokenised again. The junior's draws have streams
of their own (``selection.draws``).

Each turn of an episode is a text of its own. Its end and the observation come to each model in its own tokens.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional as F

from tandemrl.models.sampling import log_mass
from tandemrl.rollout.decoding import DecodingBatch
from tandemrl.rollout.decoding_rows import Block, Decoder, Row
from tandemrl.rollout.engine import LOST, EngineError, Passes, Request, StopReason
from tandemrl.selection import draws
from tandemrl.selection.draws import HANDOVER, fold_in, stream
from tandemrl.selection.whole_words import TextTables
from tandemrl.selection.words import Vocabulary, begin_words, read, spell, whole_characters, word_starts


@dataclass(slots=True)
class Span:
    """How a model goes on with a text.

    words: how many words it may begin; None: those up to the first one after a blank line. tail: the text's last three
    bytes as a number. counter: the number of its first draw. stream: of its draws. end: an id that ends a text.
    opening: the stream of its first draw after a handover; None where a turn begins. bare: whether it may draw any id.
    written: how many tokens it has. blank_line: whether its last word contains a blank line.
    """

    words: int | None
    tail: int
    counter: int
    stream: int
    end: int
    opening: int | None = None
    bare: bool = False
    written: int = 0
    blank_line: bool = False

    @property
    def opens(self) -> bool:
        """Whether its next token is the first after a handover."""
        return self.opening is not None and not self.written


def draw_keys(spans: Sequence[Span]) -> Int64[Tensor, " k"]:
    """The keys that the next tokens are drawn with."""
    streams = [span.opening if span.opens else span.stream for span in spans]
    return fold_in(torch.tensor(streams), torch.tensor([span.counter + span.written for span in spans]))


class SpanRules:
    """What the tables of a vocabulary mean for its spans."""

    def __init__(self, tables: TextTables) -> None:
        self._tables = tables

    def masked(self, logits: Float[Tensor, "k v"], spans: Sequence[Span]) -> Float[Tensor, "k v"]:
        """The logits without the ids that the spans cannot have next."""
        opens, bare = (torch.tensor(each)[:, None] for each in zip(*((s.opens, s.bare) for s in spans), strict=True))
        barred = torch.where(opens, ~self._tables.starts, self._tables.removed)
        barred = self._sized(barred, logits.shape[-1]) & ~bare
        return logits.masked_fill_(barred.to(logits.device), -torch.inf)

    def advance(self, spans: Sequence[Span], tokens: Int64[Tensor, " k"]) -> list[int]:
        """Tell the spans their next tokens. Returns those, by place, of which it begins a word too many."""
        tails = torch.tensor([span.tail for span in spans], dtype=torch.int64)
        begins, after = self._tables.begin(tails, tokens), self._tables.appended(tails, tokens).tolist()
        blank = torch.tensor([span.blank_line for span in spans])
        blank_after = self._tables.have_blank_line(blank, begins, tails, tokens).tolist()
        over = list[int]()
        for i, (span, begun) in enumerate(zip(spans, begins.tolist(), strict=True)):
            if span.words is None:
                is_over = span.blank_line and begun
            else:
                span.words -= begun or not span.written
                is_over = span.words < 0
            if is_over:
                over.append(i)
            span.tail, span.written, span.blank_line = after[i], span.written + 1, blank_after[i]
        return over

    def word_ends(self, logits: Float[Tensor, "k v"]) -> Float[Tensor, " k"]:
        """The log-prob that a word ends, by logits after truncation."""
        inside = self._sized(~self._tables.starts, logits.shape[-1])
        return log_mass(logits, inside.to(logits.device).expand(logits.shape))

    def _sized(self, barred: Bool[Tensor, "*k w"], size: int) -> Bool[Tensor, "*k v"]:
        return F.pad(barred[..., :size], (0, max(0, size - barred.shape[-1])), value=True)


class Job(NamedTuple):
    """A row to go on with. tokens: its prompt and all that follows, in the writer's vocabulary. room: how many more it
    may have. text: of the present turn; None if it is none."""

    row: Row
    tokens: Sequence[int]
    room: int
    span: Span
    text: bytes | None = b""


class Written(NamedTuple):
    """Tokens of a span with their log-probs. over: the log-prob that its last word ends, where the proposal of the next
    one was dropped. whole: whether it is done. end: why the turn ends with it, if that is not seen from the tokens; if
    there are none, why the completion ends. asks: how often an endpoint was asked for it."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    over: float | None = None
    whole: bool = True
    end: StopReason | None = None
    asks: int = 0


class Writer(ABC):
    """One who writes spans. Its length is how many rows a forward pass of its model now has."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, number: object) -> bool:
        """Whether it is writing in the row of this number."""

    @abstractmethod
    def admit(self, prompts: Mapping[Row, Sequence[int]]) -> None:
        """Hear of rows that begin, with their prompts."""

    @abstractmethod
    def begin(self, jobs: Sequence[Job]) -> None:
        """Begin to write, and return without waiting."""

    @abstractmethod
    def step(self, *, wait: bool) -> dict[int, Written]:
        """Make a step in all spans, and return by number what is known of them now.

        Args:
            wait: nobody else is writing; if anything was begun, return something.
        """

    @abstractmethod
    def keep(self, live: Collection[int], waiting: Collection[int]) -> None:
        """Drop all rows but these. Those that wait are not being written."""


SpanEnd = Literal["word", "eos", "length", "untranslatable", "failed"]
"""How a text ended: right before a word of the senior, with its end, at a limit of tokens; or it does not count, since
what the senior has written before cannot be read, or what the junior wrote is no text, or it wrote nothing usable."""


class Said(NamedTuple):
    """What a junior wrote. The end of the turn itself is no part of ``text``."""

    number: int
    text: bytes
    end: SpanEnd
    asks: int = 0


class Partner(Writer):
    """A junior with a vocabulary of its own: text in, text out, which is read here in the senior's tokens.

    Args:
        senior: the senior's vocabulary.
    """

    def __init__(self, senior: Vocabulary) -> None:
        self._senior = senior
        self._jobs: dict[int, Job] = {}
        """By number: what it is writing."""

    def extend(self, requests: Sequence[Request]) -> None:
        """Hear of further requests of the call.

        Raises:
            EngineError: a request asks for what it cannot do.
        """

    @abstractmethod
    def ask(self, jobs: Sequence[Job]) -> None:
        """Begin to write after ``Job.text``: so many words as the span has, or up to the end of a step."""

    @abstractmethod
    def spans(self, *, wait: bool) -> list[Said]:
        """What is ready; see ``step``. Each is returned once."""

    @abstractmethod
    def read_turn(self, row: Row, text: bytes) -> bool:
        """Begin the next turn of a row, whose last one has this text. Returns whether it can read it."""

    def __contains__(self, number: object) -> bool:
        return number in self._jobs

    def begin(self, jobs: Sequence[Job]) -> None:
        self._jobs |= {job.row.number: job for job in jobs}
        self.ask([job for job in jobs if job.text is not None])

    def step(self, *, wait: bool) -> dict[int, Written]:
        lost = [Said(number, b"", "untranslatable") for number, job in self._jobs.items() if job.text is None]
        return {said.number: self._read(said) for said in [*lost, *self.spans(wait=wait and not lost)]}

    def _read(self, said: Said) -> Written:
        """What it wrote in the senior's vocabulary."""
        job, end = self._jobs.pop(said.number), said.end
        text = whole_characters(said.text) if end == "length" else said.text
        tokens = None if end in LOST else read(text, self._senior, job.text or b"")
        if tokens is None:
            return Written((), (), end="failed" if end == "failed" else "untranslatable", asks=said.asks)
        if end == "eos":
            own = job.row.request.end_of_turn
            tokens = (*tokens, job.span.end if own is None else own)
        taken, fits = tokens[: job.room], len(tokens) <= job.room
        over = 0.0 if end == "word" else None
        why: StopReason | None = end if fits and end != "word" else None
        return Written(taken, [0.0] * len(taken), over, end=why if taken else "length", asks=said.asks)

    def resume(self, rows: Sequence[Row]) -> set[int]:
        """Hear of rows whose next turn begins, after ``Reply.junior_context``. Returns the numbers of those whose last
        turn it cannot read."""
        lost = set[int]()
        for row in rows:
            own, by_token = row.parts[-1].tokens.tolist(), row.stop_reason == "eos"
            text = spell(own[:-1] if by_token else own, self._senior)
            if text is not None and not by_token:
                text = whole_characters(text) or None
            if text is None or not self.read_turn(row, text):
                lost.add(row.number)
        return lost

    def keep(self, live: Collection[int], waiting: Collection[int]) -> None:
        self._jobs = {number: job for number, job in self._jobs.items() if number in live}


MakePartner = Callable[[Vocabulary], Partner]
"""Makes the partner of a call, for a senior's vocabulary."""


# --------------------------------------------------------------------------------------------- a model of this process


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


class LocalPartner(Partner):
    """A `Partner` that a writer writes for.

    Args:
        senior: the senior's vocabulary.
        writer: with the junior's model.
        vocabulary, ends, context: of the junior: the ids that end a text, and how many tokens it can read.
    """

    def __init__(
        self, senior: Vocabulary, writer: Writer, vocabulary: Vocabulary, ends: Sequence[int], context: int
    ) -> None:
        super().__init__(senior)
        self._writer, self._vocabulary, self._ends, self._context = writer, vocabulary, ends, context
        self.readers: dict[int, Reader] = {}
        """By number of the row."""
        self._ready: list[Said] = []

    def __len__(self) -> int:
        return len(self._writer)

    def admit(self, prompts: Mapping[Row, Sequence[int]]) -> None:
        self.readers |= {r.number: Reader(r, [*read], self._earlier(r), len(read)) for r, read in prompts.items()}
        self._writer.admit(prompts)

    def _earlier(self, row: Row) -> int:
        """How many draws earlier requests took at most: its tokens were others, each of at least a byte."""
        pieces = self._senior.pieces
        texts = (b"".join(pieces.get(t, b"") for t in turn) for turn in row.request.history)
        ends = sum(turn[-1] not in pieces for turn in row.request.history)
        return ends + sum(len(whole_characters(text)) for text in texts)

    def ask(self, jobs: Sequence[Job]) -> None:
        begun = []
        for row, _, room, asked, text in jobs:
            number, reader = row.number, self.readers[row.number]
            assert text is not None
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
            reader.since, key = len(reader.tokens), torch.tensor([row.key])
            own, first = (int(stream(key, kind)) for kind in (draws.JUNIOR_SAMPLING, draws.JUNIOR_HANDOVER))
            tail, opening = int.from_bytes(text[-3:]), first if text else None
            span = Span(asked.words, tail, reader.counter, own, self._ends[0], opening)
            begun.append(Job(row, reader.tokens, room, span))
        self._writer.begin(begun)

    def spans(self, *, wait: bool) -> list[Said]:
        for number, written in self._writer.step(wait=wait).items():
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

    def read_turn(self, row: Row, text: bytes) -> bool:
        if (reader := self.readers.get(row.number)) is None:
            return True  # the senior writes alone
        # Also the number of a dropped token is not used again.
        counter, by_token = reader.counter + 1 + self._earlier(row), row.stop_reason == "eos"
        if len(text) < len(reader.text) or (reader.ended and not by_token):
            readable = self.cut(reader, text)
        else:
            tokens = read(text[len(reader.text) :], self._vocabulary, reader.text)
            readable = tokens is not None
            reader.tokens += tokens or ()
        if not readable:
            return False
        again = by_token and reader.ended and reader.tokens[-1] == row.junior_context[0]  # the end, which it repeats
        reader.tokens += row.junior_context[again:]
        self.readers[row.number] = Reader(row, reader.tokens, counter, len(reader.tokens))
        return True

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
        super().keep(live, waiting)
        self._ready = [said for said in self._ready if said.number in live]
        self.readers = {n: reader for n, reader in self.readers.items() if n in live or n in waiting}
        self._writer.keep(live, waiting)


# -------------------------------------------------------------------------------------------------- what is refused


def check_untranslatable(reasons: Collection[str], share: float, error: type[Exception]) -> int:
    """How many texts ended as ``untranslatable``: no more than ``share``, but for chance (6σ).

    Args:
        reasons: the stop reason of every text.
        error: what is raised if there are more.
    """
    total, lost = len(reasons), sum(reason == "untranslatable" for reason in reasons)
    if lost > total * share + 6 * math.sqrt(total * share * (1 - share)):
        raise error(
            f"{lost} of {total} texts are untranslatable, more than selection.max_untranslatable={share:g}: one model "
            "writes what the other's tokenizer reads as another text or other words (cut characters, special tokens, "
            "accents). Choose a junior whose tokenizer suits the senior's (tandemrl check --senior S --junior J), "
            "lower rollout.temperature, or raise the limit: what is left out biases the gradient, and counts as wrong "
            "in evaluations"
        )
    return lost


def refuse_penalties(index: int, request: Request) -> None:
    """Refuse penalties where two models write by spans.

    Raises:
        EngineError: the message names the request and what works instead.
    """
    if request.sampling.penalised:
        raise EngineError(
            f"request {index}: sampling with penalties: two models that write by spans each count the tokens of each "
            "span alone; leave out repetition_penalty, presence_penalty and frequency_penalty"
        )


def check_partnered(index: int, request: Request, *, apart: bool) -> None:
    """Refuse a request that does not suit an engine whose junior has a vocabulary of its own, or has none.

    Args:
        apart: whether it has one.

    Raises:
        EngineError: the message names the request and what works instead.
    """
    strategy, s = request.strategy, request.sampling
    by_text = strategy.removed is not None
    if not apart or (strategy.writers == "senior" and not by_text):
        if by_text:
            raise EngineError(
                f"request {index}: its strategy is for two vocabularies, and this engine has one; use before_word"
            )
        return
    if not by_text:
        raise EngineError(
            f"request {index}: junior and senior have two vocabularies, and its strategy looks at tokens of both; use "
            "selection.strategy=before_word, or a junior of the senior's tokenizer family"
        )
    if not request.junior_prompt:
        raise EngineError(f"request {index}: no prompt for the junior, which has another vocabulary; set junior_prompt")
    refuse_penalties(index, request)
    if s.stop_token_ids or s.ignore_eos:
        raise EngineError(
            f"request {index}: with a junior of another vocabulary a turn ends by EOS, a stop string or a limit on "
            "tokens; leave out stop ids and ignore_eos"
        )


# ------------------------------------------------------------------------------------------------------------ the batch


_DISAGREE = "senior and junior count other words in the same text; please report this as a bug"


class Relay(DecodingBatch):
    """The rows in the senior's tokens.

    Args:
        decoder: of the senior. Its models are the writer's.
        senior, junior: who write.
        vocabulary: of the senior.
    """

    def __init__(
        self, decoder: Decoder, senior: Writer, junior: Partner, vocabulary: Vocabulary, *, turns: bool
    ) -> None:
        self._junior, self._vocabulary = junior, vocabulary
        self._writers: dict[int, Writer] = {1: senior, 0: junior}
        self._opening: dict[int, float] = {}
        """The rows whose next token is the first after a handover: the log-prob of a word that the senior ended."""
        ends, own = decoder.eos, decoder.tokenizer.eos_token_id
        self._end_of_text = own if own in ends else ends[0]
        super().__init__(replace(decoder, models={}, heads={}), turns=turns)

    def extend(self, requests: Sequence[Request], total: int, *, drafts: bool = False) -> None:
        for index, request in enumerate(requests):
            refuse_penalties(index, request)
        if self.turns and any(request.sampling.stop for request in requests):
            raise EngineError(
                "stop strings in an environment with a junior of another vocabulary: there, a turn ends by EOS or a "
                "limit on tokens; leave them out"
            )
        self._junior.extend(requests)
        super().extend(requests, total)

    # ------------------------------------------------------------------------------------------------- coming and going

    def admit(self, new: list[Row]) -> None:
        super().admit(new)
        self._writers[1].admit({row: row.request.prompt for row in new})
        self._junior.admit({row: row.request.junior_prompt for row in new if row.request.strategy.removed is not None})

    def resume(self, back: list[tuple[Row, Sequence[int]]]) -> None:
        rows = [row for row, _ in back]
        lost = self._junior.resume(rows)
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
        for writer in self._writers.values():
            writer.keep(live, waiting)

    def close(self) -> None:
        for writer in self._writers.values():
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
        for who, writer in self._writers.items():
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
        if 0 in runs:
            raise EngineError(_DISAGREE)
        return runs

    def _job(self, i: int, words: int | None) -> Job:
        row, written = self.rows[i], int(self.written[i])
        own = self.tokens[i, :written].tolist()
        text = spell(own, self._vocabulary)
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
            if bool((self.selection.step(self.slot[at], block.tokens[at, k]) != self.author[at]).any()):
                raise EngineError(_DISAGREE)
        assert block.next is not None
        cut = (count < block.most) | stopped  # so that nobody was handed over to
        block.next[cut] = self.author[cut]
        assert block.ends is not None
        for i in [*block.ends]:
            if stopped[i]:
                del block.ends[i]
            stopped[i] = True
        return count, stopped
