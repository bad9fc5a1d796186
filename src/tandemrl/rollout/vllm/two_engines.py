"""Tandem rollouts of whole words on vLLM: an engine for each model, which write one text span by span.

Each model is alone in a vLLM engine, with its own KV cache and scheduler. A batch asks the engine of a row's author to
go on with the row for as many words as the strategy gives the author (``spans``), and takes the span when it is whole.
What the other one wrote is part of the next request's prompt, of which the prefix cache holds all but the end. With one
vocabulary there is one batch (``WholeWords``), with two there is a half for each (``rollout.two_vocabularies``).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tandemrl.config import RolloutConfig
from tandemrl.models.loading import load_tokenizer, stored_eos_token_ids, vocabulary_check
from tandemrl.rollout.batch_engine import BatchEngine
from tandemrl.rollout.decoding import DecodingBatch
from tandemrl.rollout.decoding_rows import Block, Decoder, Row
from tandemrl.rollout.engine import Completion, EngineError, EngineInfo, Passes, Request
from tandemrl.rollout.local_partner import LocalPartner
from tandemrl.rollout.two_vocabularies import Half, TwoVocabularies, disagreement
from tandemrl.rollout.vllm.backend import platform_device
from tandemrl.rollout.vllm.call import death_reported, sampling_params
from tandemrl.rollout.vllm.engine import VllmEngine
from tandemrl.rollout.vllm.spans import HANDED_OVER, Span
from tandemrl.selection import Who, draws
from tandemrl.selection.boundaries import start_table, token_bytes
from tandemrl.selection.draws import stream
from tandemrl.selection.whole_words import TextTables, id_tables, text_tables
from tandemrl.selection.words import vocabulary_of

BLOCK_SIZE = 32
"""Tokens in a block of the KV cache on a CPU, where vLLM would take 128. A row that goes on reads the last one anew."""

AnyHalf = TypeVar("AnyHalf", bound="SpanHalf")


class Written(NamedTuple):
    """A span: its tokens with their log-probs, and the log-prob that its last word ends, if a word of the other author
    comes next."""

    tokens: list[int]
    logprobs: list[float]
    over: float | None


class SpanWriter:
    """The spans that an engine is writing, each for a row of a batch, by the row's number."""

    def __init__(self, engine: VllmEngine) -> None:
        self._llm = engine.backend.llm
        self._flying: dict[int, tuple[str, bool]] = {}  # vLLM's name of the request, and whether it is greedy

    def __len__(self) -> int:
        return len(self._flying)

    def keep(self, numbers: Collection[int]) -> list[int]:
        """Give up the spans of all other rows, and return which of these rows have none."""
        if gone := [number for number in self._flying if number not in numbers]:
            self._llm.abort_request([self._flying.pop(number)[0] for number in gone], internal=True)
        return [number for number in numbers if number not in self._flying]

    def begin(self, batch: DecodingBatch, rows: Mapping[int, tuple[int | None, bytes]], *, senior: bool) -> None:
        """Go on with some rows.

        Args:
            rows: by their places in the batch: the kind of stream that the first token is drawn with, after a handover
                (None where a turn begins), and the text before it, where words are a property of that.
            senior: whether it is the senior who goes on.

        Raises:
            EngineError: the draws give the author no word here, or vLLM cannot sample like this.
        """
        if not rows:
            return
        at, end = torch.tensor([*rows]), batch.decoder.eos[0]
        rooms = (batch.limit - batch.written)[at].tolist()
        runs = batch.selection.runs(batch.number[at], max(rooms), end, senior=senior)
        for (i, (opening, before)), room, words in zip(rows.items(), rooms, runs, strict=True):
            row, number, written = batch.rows[i], int(batch.number[i]), int(batch.written[i])
            if words == 0:
                raise _disagreement(row)
            first = None if opening is None else int(stream(torch.tensor([row.key]), opening))
            counter, tail = written + int(batch.shift[i]), int.from_bytes(before[-3:])
            span = Span(words, tail, counter, int(batch.stream[i]), end, first)
            sampling, arguments = row.request.sampling, {"tandem_key": row.key, **span.arguments()}
            params = sampling_params(f"completion {number}", sampling, batch.decoder.eos, room, arguments)
            prompt = {"prompt_token_ids": [*row.request.prompt, *batch.tokens[number, :written].tolist()]}
            name = self._llm.add_request(str(number), prompt, params, priority=number)
            self._flying[number] = name, sampling.temperature == 0

    def step(self) -> dict[int, Written]:
        """Let the engine make a step, and return the spans that are whole."""
        whole = {}
        for output in self._llm.step() if self._flying else ():
            number, span = int(output.request_id), output.outputs[0]
            _, greedy = self._flying.pop(number)
            tokens, logprobs, over = list(span.token_ids), list(span.logprobs.logprobs), None
            if span.stop_reason == HANDED_OVER:
                tokens.pop()
                over = logprobs.pop()
            if greedy:
                logprobs, over = [0.0] * len(tokens), None if over is None else 0.0
            whole[number] = Written(tokens, logprobs, over)
        return whole

    def close(self) -> None:
        """Give up what is still being written."""
        names = [name for name, _ in self._flying.values()]
        self._flying.clear()
        if names:
            self._llm.abort_request(names, internal=True)
            self._llm.reset_prefix_cache()


def _up_to_stops(batch: DecodingBatch, spans: dict[int, Written]) -> dict[int, Written]:
    """Whole spans, by the place of the row, up to the stop string that one of their tokens completes."""
    if not batch.stop_strings:
        return spans
    found = {}
    for i, span in spans.items():
        known = batch.tokens[batch.number[i], : int(batch.written[i])]
        stop = batch.rows[i].first_stop(known, torch.tensor(span.tokens), batch.decoder.tokenizer.decode)
        found[i] = Written(span.tokens[:stop], span.logprobs[:stop], None) if stop else span
    return found


def _block(batch: DecodingBatch, spans: Mapping[int, Written], authors: Bool[Tensor, " b"]) -> Block:
    """The tokens of whole spans, of which the strategies are told, and none in the other rows.

    Args:
        spans: by the place of the row.
        authors: of each row, whether the senior writes it.
    """
    shape = len(batch.rows), max((len(span.tokens) for span in spans.values()), default=1)
    tokens, logprobs, most = torch.zeros(shape).long(), torch.zeros(shape), torch.zeros_like(batch.written)
    tokens[:, 0] = batch.last  # of the other rows it stays as it is
    for i, span in spans.items():
        most[i] = count = len(span.tokens)
        tokens[i, :count], logprobs[i, :count] = torch.tensor(span.tokens), torch.tensor(span.logprobs)
    for k in range(int(most.max())):
        at = (most > k).nonzero().squeeze(1)
        wrong = batch.selection.step(batch.number[at], tokens[at, k]) != authors[at]
        if bool(wrong.any()):
            raise _disagreement(batch.rows[int(at[wrong][0])])
    handovers = torch.zeros(shape) if batch.starts else None
    return Block(tokens, authors[:, None].expand(shape), logprobs, most, next=authors, handovers=handovers)


def _disagreement(row: Row) -> EngineError:
    """The error of a strategy that gives an author other words than it did before they were written."""
    if row.request.strategy.removed is not None:
        return disagreement()
    return EngineError(
        f"completion {row.number}: its strategy decides by more than where words begin, and vLLM is told beforehand "
        "how many words an author writes; use selection.strategy=before_word, or rollout.engine=torch"
    )


class WholeWords(DecodingBatch):
    """The rows of two models with one vocabulary. Each is written by the engine of its author, span by span.

    writers: of the junior and the senior. Set them before the first step.
    """

    writers: Mapping[int, SpanWriter]

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._opening: dict[int, float] = {}
        """Of the rows whose next token is the first after a handover, by number: the log-prob of a word that the senior
        ended there."""

    def _one_token(self) -> Block:
        """The spans that are whole after a step of each engine, and no token in the other rows."""
        places = {self.rows[i].number: i for i in self.live.nonzero().squeeze(1).tolist()}
        spans = dict[int, Written]()
        for who, writer in self.writers.items():
            new = writer.keep([number for number, i in places.items() if bool(self.author[i]) == bool(who)])
            opened = {places[number]: (draws.HANDOVER if number in self._opening else None, b"") for number in new}
            writer.begin(self, opened, senior=bool(who))
            self.passes += Passes(**{("junior", "senior")[who]: len(writer)})
            spans |= {places[number]: span for number, span in writer.step().items()}
        spans = _up_to_stops(self, spans)
        block, after = _block(self, spans, self.author), self.author.clone()
        assert block.handovers is not None
        for i, span in spans.items():
            number = self.rows[i].number
            block.handovers[i, 0] = self._opening.pop(number, 0.0)
            if span.over is not None:
                self._opening[number] = span.over if after[i] else 0.0
                after[i] = ~after[i]
        return block._replace(next=after)


class SpanHalf(Half):
    """A half whose tokens an engine of vLLM writes, span by span.

    writer: of the engine, whose workers were told of the vocabulary (``tandem_spans``). Set it before the first step.
    """

    writer: SpanWriter

    def step(self, ahead: int = 0) -> tuple[int, list[Row]]:
        self.handed = []
        return DecodingBatch.step(self)

    def _one_token(self) -> Block:
        """The spans that are whole after a step of the engine, and no token in the other rows."""
        writing, places = self.live & ~self.paused, self.places()
        new = self.writer.keep([number for number, i in places.items() if writing[i]])
        kinds = {number: self.handover_stream if self.opening[places[number]] else None for number in new}
        opened = {places[number]: (kind, self.texts[number]) for number, kind in kinds.items()}
        self.writer.begin(self, opened, senior=self.senior)
        self.unread |= {number: [] for number in new}
        self.passes += Passes(senior=len(self.writer))
        spans = _up_to_stops(self, {places[number]: span for number, span in self.writer.step().items()})
        block = _block(self, spans, torch.full_like(self.live, self.senior))
        for i, span in spans.items():
            self.opening[i] = False
            if span.over is not None:
                self.mass[i] = span.over
        self.handed = [i for i, span in spans.items() if span.over is not None]
        self.paused[self.handed] = True
        return block._replace(next=torch.ones_like(self.live))


class SeniorSpans(TwoVocabularies, SpanHalf):
    """The senior's half, which asks the junior's for its spans."""


class VllmTwoEngines(BatchEngine):
    """Two engines of vLLM, one for each model, behind the interface of one; the loop is that of the reference engine.

    Strategies that drop proposals (``Strategy.starts``) can be had of it, and the senior alone.

    Args:
        senior, junior: the engines, each without a junior.
        apart: whether the junior has a vocabulary of its own.
        max_rows: how many completions are written at once.
    """

    def __init__(self, senior: VllmEngine, junior: VllmEngine, *, apart: bool, max_rows: int = 256) -> None:
        self.engines = {1: senior, 0: junior}
        self._writers = {who: SpanWriter(engine) for who, engine in self.engines.items()}
        decoder, context = _decoder(senior), senior.context
        if apart:
            theirs, own, context_of_junior = _decoder(junior), vocabulary_of(junior.tokenizer), junior.context
            tables, pieces = text_tables(junior.tokenizer, junior.vocabulary), token_bytes(senior.tokenizer)

            def half(*args: Any, **named: Any) -> SpanHalf:
                return self._with_writer(SpanHalf(*args, **named), 0)

            def make_partner(requests: Sequence[Request], total: int) -> LocalPartner:
                return LocalPartner(theirs, own, tables, pieces, context_of_junior, requests, total, half=half)

        else:
            decoder = replace(decoder, vocabulary=min(senior.vocabulary, junior.vocabulary))
            context = min(context, junior.context)
        super().__init__(
            decoder, context, max_rows=max_rows, has_junior=True, make_partner=make_partner if apart else None
        )
        self._starts: Tensor | None = None
        if apart:
            self._tell(1, text_tables(senior.tokenizer, senior.vocabulary))
            self._tell(0, tables)
        else:
            self._tell_starts(start_table(senior.tokenizer, self.vocabulary))

    @classmethod
    def start(
        cls,
        senior: str | Path,
        junior: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        junior_tokenizer: PreTrainedTokenizerBase | None,
        config: RolloutConfig | None = None,
        *,
        longest: int | None = None,
        dtype: str = "float32",
        ends: Sequence[int] | None = None,
        engine_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> "VllmTwoEngines":
        """Start both engines; the arguments are those of ``VllmEngine.start``. Each takes half of the share of the
        device's memory.

        Args:
            junior_tokenizer: that of a junior with a vocabulary of its own, whose context is all that its model has.
            longest: of the senior's tokens.
            ends: of a text in them.

        Raises:
            EngineError: a setting needs both models in one engine, or is not supported.
            ModelError: the models do not share a vocabulary, and no tokenizer of the junior is given.
        """
        config = config or RolloutConfig()
        v = config.vllm
        for key, value, needed in (
            ("rollout.tensor_parallel", config.tensor_parallel, 1),
            ("rollout.draft_tokens", config.draft_tokens, 0),
            ("rollout.vllm.junior_device", v.junior_device, None),
        ):
            if value != needed:
                raise EngineError(
                    f"{key}={value}: must be {needed or 'null'} where each model has a vLLM engine of its own"
                )
        if junior_tokenizer is None:
            vocabulary_check(tokenizer, load_tokenizer(junior))
            ends = ends or stored_eos_token_ids(str(senior), tokenizer, str(junior))
        own = replace(config, vllm=replace(v, gpu_memory_utilization=v.gpu_memory_utilization / 2))
        args = {"block_size": BLOCK_SIZE} if platform_device() == "cpu" else {}
        given = {**args, **(engine_args or {})}
        with ExitStack() as started:
            first = VllmEngine.start(
                senior, None, tokenizer, own, longest=longest, dtype=dtype, ends=ends, engine_args=given, **options
            )
            started.callback(first.close)
            second = VllmEngine.start(
                junior,
                None,
                junior_tokenizer or tokenizer,
                own,
                longest=longest if junior_tokenizer is None else None,
                dtype=v.junior_dtype or dtype,
                ends=ends if junior_tokenizer is None else None,
                engine_args=given | {"quantization": v.junior_quantization},
                **options,
            )
            started.callback(second.close)
            both = cls(first, second, apart=junior_tokenizer is not None, max_rows=config.max_rows)
            started.pop_all()
            return both

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("vllm", self.engines[1].backend.dtype, drops=True)

    def generate(self, requests: Sequence[Request], **named: Any) -> list[list[Completion]]:
        if all(r.strategy.starts is None and r.strategy.writers == "senior" for r in requests):
            alone = self.engines[1]
            written = alone.generate(requests, **named)
            self.passes = alone.passes
            return written
        for i, request in enumerate(requests):
            self._check(i, request)
        if self._make_partner is None:
            first, *more = {id(r.strategy.starts): r.strategy.starts for r in requests}.values()
            assert first is not None
            if not all(each is not None and torch.equal(first, each) for each in more):
                raise EngineError(
                    "the strategies of a call differ in where words begin; generate each in a call of its own"
                )
            self._tell_starts(first)
        with death_reported(), ExitStack() as awake, self._closing():
            for engine in self.engines.values():
                awake.enter_context(engine.backend.awake())
            return super().generate(requests, **named)

    def abort(self, keys: Iterable[int] | None = None) -> None:
        keys = None if keys is None else [*keys]
        self.engines[1].abort(keys)  # if the senior writes alone
        super().abort(keys)

    def _check(self, i: int, request: Request) -> None:
        """Refuse a request that asks for something that spans cannot give.

        Raises:
            EngineError: the message names the request and what works instead.
        """
        if request.sampling.penalised:
            raise EngineError(
                f"request {i}: where each model has a vLLM engine of its own, it counts the tokens of each span alone; "
                "leave out repetition_penalty, presence_penalty and frequency_penalty, or use rollout.engine=torch"
            )
        if request.sampling.ignore_eos:
            raise EngineError(
                f"request {i}: where each model has a vLLM engine of its own, spans end by EOS; leave out ignore_eos, "
                "or use rollout.engine=torch"
            )
        if request.strategy.starts is None and request.strategy.writers == "senior":
            raise EngineError(
                f"request {i}: the senior writes alone, but not in other requests of the call; generate them in a call "
                "of their own"
            )
        if request.strategy.starts is None and self._make_partner is None:
            raise EngineError(
                f"request {i}: its strategy does not drop proposals, for which this engine of vLLM was started; use "
                "strategies such as before_word in all steps, or rollout.engine=torch"
            )

    def make_batch(
        self, requests: Sequence[Request], total: int, *, turns: bool, drafts: bool, anything: bool
    ) -> DecodingBatch:
        if self._make_partner is None:
            batch = WholeWords(self._decoder, requests, total, turns=turns)
            batch.writers = self._writers
            return batch
        spelling, partner = self._spelling, self._make_partner
        assert spelling is not None
        half = SeniorSpans(self._decoder, requests, total, turns=turns, vocabulary=spelling, make_partner=partner)
        return self._with_writer(half, 1)

    def _with_writer(self, half: AnyHalf, who: int) -> AnyHalf:
        half.writer = self._writers[who]
        return half

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """A context after which no engine still writes."""
        try:
            yield
        finally:
            for writer in self._writers.values():
                writer.close()

    def _tell_starts(self, starts: Tensor) -> None:
        """Tell both engines which ids begin a word, if it is news."""
        if self._starts is None or not torch.equal(self._starts, starts):
            known = torch.zeros(self.vocabulary, dtype=torch.bool)
            known[: len(starts)] = starts[: self.vocabulary]
            self._starts = starts
            for who in self.engines:
                self._tell(who, id_tables(known))

    def _tell(self, who: int, tables: TextTables) -> None:
        backend = self.engines[who].backend
        backend.call("tandem_spans", tables if backend.in_process else cloudpickle.dumps(tables))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self.exclusive():
            self.engines[1].load_weights(weights, version)
            self.policy_version = version

    def fingerprint(self, who: Who = "senior") -> int:
        return self.engines[1 if who == "senior" else 0].fingerprint()

    def close(self) -> None:
        with ExitStack() as closing:
            for engine in self.engines.values():
                closing.callback(engine.close)


def _decoder(engine: VllmEngine) -> Decoder:
    """What a half has to know of a model that is elsewhere."""
    return Decoder({}, {}, engine.vocabulary, engine.eos, engine.tokenizer)
