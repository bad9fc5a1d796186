"""Tandem rollouts on vLLM with two vocabularies: an engine for each model, which write one text span by span.

Each model is alone in a vLLM engine, with its own tokens, KV cache and scheduler. A half of the batch
(``rollout.two_vocabularies``) asks its engine to go on with a row for as many words as the draws give the model
(``spans``), and takes the span when it is whole. What the other one wrote is part of the next request's prompt, of
which the prefix cache holds all but the end.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tandemrl.config import RolloutConfig
from tandemrl.rollout.control import Turnstile
from tandemrl.rollout.decoding import DecodingBatch
from tandemrl.rollout.decoding_rows import Block, Decoder, Row
from tandemrl.rollout.engine import Completion, EngineError, EngineInfo, Passes, Request, Sampling
from tandemrl.rollout.local_partner import LocalPartner
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.rollout.two_vocabularies import Half, TwoVocabularies, disagreement
from tandemrl.rollout.vllm.backend import Backend, platform_device
from tandemrl.rollout.vllm.engine import VllmEngine
from tandemrl.rollout.vllm.spans import HANDOVER, Span
from tandemrl.selection import Who
from tandemrl.selection.draws import stream
from tandemrl.selection.whole_words import text_tables
from tandemrl.selection.words import vocabulary_of

BLOCK_SIZE = 32
"""Tokens in a block of the KV cache on a CPU, where vLLM would take 128. A row that goes on reads the last one anew."""

AnyHalf = TypeVar("AnyHalf", bound="SpanHalf")


class SpanHalf(Half):
    """A half whose tokens an engine of vLLM writes, span by span.

    backend: of the engine, whose workers were told of the vocabulary (``tandem_spans``). Set it before the first step.
    """

    backend: Backend

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._flying: dict[int, str] = {}  # by number: vLLM's name of the request

    def step(self, ahead: int = 0) -> tuple[int, list[Row]]:
        self.handed = []
        return DecodingBatch.step(self)

    def close(self) -> None:
        """Give up what is still being written."""
        if self._flying:
            self.backend.llm.abort_request(list(self._flying.values()), internal=True)
            self.backend.llm.reset_prefix_cache()

    def _one_token(self) -> Block:
        """The spans that are whole after a step of the engine, and no token in the other rows."""
        llm, writing, places = self.backend.llm, self.live & ~self.paused, self.places()
        live = {number for number, i in places.items() if writing[i]}
        if gone := [number for number in self._flying if number not in live]:
            llm.abort_request([self._flying.pop(number) for number in gone], internal=True)
        for number in live - self._flying.keys():
            self._begin(places[number])
        self.passes += Passes(senior=len(self._flying))
        spans = {}
        for output in llm.step():
            number, one = int(output.request_id), output.outputs[0]
            del self._flying[number]
            spans[places[number]] = one
        return self._block(spans)

    def _begin(self, i: int) -> None:
        """Ask the engine to go on with a row.

        Raises:
            EngineError: vLLM cannot sample like this.
        """
        row, number, written = self.rows[i], int(self.number[i]), int(self.written[i])
        room = int(self.limit[i]) - written
        words = self.runs(torch.tensor([number]), room, self.decoder.eos[0], senior=self.senior)[0]
        if not words:
            raise disagreement()
        text, opening = self.texts[number], bool(self.opening[i])
        span = Span(
            words,
            int.from_bytes(text[-3:]),
            int(self.written[i] + self.shift[i]),
            int(self.stream[i]),
            self.decoder.eos[0],
            int(stream(torch.tensor([row.key]), self.handover_stream)) if opening else None,
        )
        prompt = [*row.request.prompt, *self.tokens[number, :written].tolist()]
        params = _params(row.request.sampling, span, room, row.key, self.decoder.eos)
        self._flying[number] = self.backend.llm.add_request(
            str(number), {"prompt_token_ids": prompt}, params, priority=number
        )
        self.unread[number] = []

    def _block(self, spans: Mapping[int, Any]) -> Block:
        """The tokens of some spans.

        Args:
            spans: vLLM's ``CompletionOutput`` by row.
        """
        width = max((len(span.token_ids) for span in spans.values()), default=1)
        shape = len(self.rows), width
        tokens, logprobs, handovers = torch.zeros(shape).long(), torch.zeros(shape), torch.zeros(shape)
        most, over = torch.zeros_like(self.written), list[int]()
        for i, span in spans.items():
            own, told, greedy = list(span.token_ids), span.logprobs.logprobs, self.parameters[i, 0] == 0
            if told[-1] > HANDOVER / 2:
                own.pop()
                over.append(i)
                self.mass[i] = 0.0 if greedy else HANDOVER - told[-1]
            if greedy:
                told = [0.0] * len(own)
            most[i] = len(own)
            tokens[i, : len(own)], logprobs[i, : len(own)] = torch.tensor(own), torch.tensor(told[: len(own)])
            self.opening[i] = False
        for k in range(int(most.max())):
            at = (most > k).nonzero().squeeze(1)
            if bool((self.selection.step(self.number[at], tokens[at, k]) != self.senior).any()):
                raise disagreement()
        self.handed = over
        self.paused[over] = True
        authors = torch.full(shape, self.senior)
        after = torch.ones(len(self.rows), dtype=torch.bool)
        return Block(tokens, authors, logprobs, most, next=after, handovers=handovers if self.starts else None)


class SeniorSpans(TwoVocabularies, SpanHalf):
    """The senior's half, which asks the junior's for its spans."""


def _params(sampling: Sampling, span: Span, room: int, key: int, stops: Sequence[int]) -> SamplingParams:
    s = sampling
    return SamplingParams(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        max_tokens=room,
        stop_token_ids=list(stops),
        ignore_eos=True,
        detokenize=False,
        skip_special_tokens=False,
        logprobs=0,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"tandem_key": key, **span.arguments()},
    )


class VllmTwoVocabularies(TorchEngine):
    """Two engines of vLLM, one for each model, behind the interface of one; the batch is that of ``TorchEngine``.

    Args:
        senior, junior: the engines, each without a junior.
        max_rows: how many completions are written at once.
    """

    def __init__(self, senior: VllmEngine, junior: VllmEngine, *, max_rows: int = 256) -> None:
        self.engines = {1: senior, 0: junior}
        self.max_rows, self.policy_version, self.has_junior = max_rows, 0, True
        self.endpoint = self._draft_length = None
        self.passes = Passes()
        decoders = {who: _decoder(engine) for who, engine in self.engines.items()}
        self._decoder, self.vocabulary, self.context = decoders[1], senior.vocabulary, senior.context
        self._aborts, self._turnstile = senior._aborts, Turnstile()
        tables = {who: text_tables(each.tokenizer, each.vocabulary) for who, each in self.engines.items()}
        for who, engine in self.engines.items():
            backend = engine.backend
            backend.call("tandem_spans", tables[who] if backend.in_process else cloudpickle.dumps(tables[who]))
        self._spelling = vocabulary_of(senior.tokenizer)
        own = vocabulary_of(junior.tokenizer)
        self._halves = list[SpanHalf]()

        def half(*args: Any, **named: Any) -> SpanHalf:
            return self._keep(SpanHalf(*args, **named), junior)

        def make_partner(requests: Sequence[Request], total: int) -> LocalPartner:
            return LocalPartner(decoders[0], own, tables[0], junior.context, requests, total, half=half)

        self._make_partner = make_partner

    @classmethod
    def start(
        cls,
        senior: str | Path,
        junior: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        junior_tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig | None = None,
        *,
        longest: int | None = None,
        dtype: str = "float32",
        engine_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> "VllmTwoVocabularies":
        """Start both engines; the arguments are those of ``VllmEngine.start``. Each takes half of the share of the
        device's memory.

        Args:
            longest: of the senior's tokens. The junior's context is all that its model has.
        """
        config = config or RolloutConfig()
        v = config.vllm
        own = replace(config, vllm=replace(v, gpu_memory_utilization=v.gpu_memory_utilization / 2))
        args = {"block_size": BLOCK_SIZE} if platform_device() == "cpu" else {}
        given = {**args, **(engine_args or {})}
        first = VllmEngine.start(
            senior, None, tokenizer, own, longest=longest, dtype=dtype, engine_args=given, **options
        )
        second = VllmEngine.start(
            junior,
            None,
            junior_tokenizer,
            own,
            dtype=v.junior_dtype or dtype,
            engine_args=given | {"quantization": v.junior_quantization},
            **options,
        )
        return cls(first, second, max_rows=config.max_rows)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("vllm", self.engines[1].backend.dtype, drops=True)

    def generate(self, requests: Sequence[Request], **named: Any) -> list[list[Completion]]:
        if all(r.strategy.removed is None and r.strategy.writers == "senior" for r in requests):
            alone = self.engines[1]
            written = alone.generate(requests, **named)
            self.passes = alone.passes
            return written
        for i, request in enumerate(requests):
            if request.sampling.penalised:
                raise EngineError(
                    f"request {i}: with two vocabularies vLLM counts the tokens of each span alone; leave out "
                    "repetition_penalty, presence_penalty and frequency_penalty, or use rollout.engine=torch"
                )
            if request.sampling.stop:
                raise EngineError(
                    f"request {i}: with two vocabularies vLLM looks for no stop strings; leave them out, or use "
                    "rollout.engine=torch"
                )
            if request.strategy.removed is None:
                raise EngineError(
                    f"request {i}: the senior writes alone, but not in other requests of the call; generate them in a "
                    "call of their own"
                )
        with ExitStack() as awake, self._closing():
            for engine in self.engines.values():
                awake.enter_context(engine.backend.awake())
            return super().generate(requests, **named)

    def _batch(self, requests: Sequence[Request], total: int, *, turns: bool, drafts: bool) -> DecodingBatch:
        assert self._make_partner is not None
        return self._keep(
            SeniorSpans(
                self._decoder,
                requests,
                total,
                turns=turns,
                vocabulary=self._spelling,
                make_partner=self._make_partner,
            ),
            self.engines[1],
        )

    def _keep(self, half: AnyHalf, engine: VllmEngine) -> AnyHalf:
        half.backend = engine.backend
        self._halves.append(half)
        return half

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """A context after which no engine still writes."""
        try:
            yield
        finally:
            for half in self._halves:
                half.close()
            self._halves.clear()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.engines[1].load_weights(weights, version)
        self.policy_version = version

    def fingerprint(self, who: Who = "senior") -> int:
        return self.engines[1 if who == "senior" else 0].fingerprint()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


def _decoder(engine: VllmEngine) -> Decoder:
    """What a half has to know of a model that is elsewhere."""
    return Decoder({}, {1: nn.Linear(1, 1)}, {}, engine.vocabulary, engine.eos, engine.tokenizer)
