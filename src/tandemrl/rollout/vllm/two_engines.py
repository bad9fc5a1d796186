"""Tandem rollouts of whole words on vLLM: an engine for each model, which write one text span by span (``relay``).

Each model is alone in a vLLM engine, with its own KV cache and scheduler. A row's author is asked for a span with a
request; what the other one wrote is part of its prompt, of which the prefix cache holds all but the end.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tandemrl.config import RolloutConfig
from tandemrl.models.loading import load_tokenizer, stored_eos_token_ids, vocabulary_check
from tandemrl.rollout.batch_engine import BatchEngine
from tandemrl.rollout.decoding_rows import Decoder
from tandemrl.rollout.engine import Completion, EngineError, EngineInfo, Request
from tandemrl.rollout.partner import Job, LocalPartner, MakePartner, Writer, Written
from tandemrl.rollout.relay import Relay
from tandemrl.rollout.vllm.call import death_reported, sampling_params
from tandemrl.rollout.vllm.engine import VllmEngine, platform_device
from tandemrl.rollout.vllm.sampler import HANDED_OVER, arguments_of
from tandemrl.selection import Who
from tandemrl.selection.boundaries import start_table
from tandemrl.selection.whole_words import id_tables, text_tables
from tandemrl.selection.words import vocabulary_of

BLOCK_SIZE = 32
"""Tokens in a block of the KV cache on a CPU, where vLLM would take 128. A row that goes on reads the last one anew."""


class VllmWriter(Writer):
    """A `partner.Writer`, whose engine was told of the vocabulary (``tandem_spans``)."""

    def __init__(self, engine: VllmEngine) -> None:
        self._llm, self._eos = engine.llm, engine.eos
        self._flying: dict[int, tuple[str, bool]] = {}  # vLLM's name of the request, and whether it is greedy

    def __len__(self) -> int:
        return len(self._flying)

    def __contains__(self, number: object) -> bool:
        return number in self._flying

    def begin(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            row, sampling = job.row, job.row.request.sampling
            arguments = {"tandem_key": row.key, **arguments_of(job.span)}
            params = sampling_params(f"completion {row.number}", sampling, self._eos, job.room, arguments)
            prompt = {"prompt_token_ids": [*job.tokens]}
            name = self._llm.add_request(str(row.number), prompt, params, priority=row.number)
            self._flying[row.number] = name, sampling.temperature == 0

    def step(self, *, wait: bool) -> dict[int, Written]:
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

    def keep(self, live: Collection[int], waiting: Collection[int]) -> None:
        if gone := [self._flying.pop(number)[0] for number in [*self._flying] if number not in live]:
            self._llm.abort_request(gone, internal=True)
            if not live:  # the call is over: a step that failed was given blocks that no model has filled
                self._llm.reset_prefix_cache()


class VllmTwoEngines(BatchEngine):
    """Two engines of vLLM, one for each model, behind the interface of one; the loop is that of the reference engine.

    Strategies that drop proposals (``Strategy.starts``) can be had of it, and the senior alone.

    Args:
        senior, junior, tokenizer, config, dtype, engine_args, options: as of ``VllmEngine``. Each engine takes half of
            the share of the device's memory.
        junior_tokenizer: that of a junior with a vocabulary of its own, whose context is all that its model has.
        longest: of the senior's tokens.
        ends: of a text in them.

    Raises:
        EngineError: a setting needs both models in one engine, or is not supported.
        ModelError: the models do not share a vocabulary, and no tokenizer of the junior is given.
    """

    def __init__(
        self,
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
    ) -> None:
        config, apart = config or RolloutConfig(), junior_tokenizer is not None
        v = config.vllm
        if (config.tensor_parallel, config.draft_tokens, v.junior_device) != (1, 0, None):
            raise EngineError(
                "with a vLLM engine for each model, rollout.tensor_parallel must be 1, rollout.draft_tokens 0 and "
                "rollout.vllm.junior_device null"
            )
        if not apart:
            vocabulary_check(tokenizer, load_tokenizer(junior))
            ends = ends or stored_eos_token_ids(str(senior), tokenizer, str(junior))
        half = replace(config, vllm=replace(v, gpu_memory_utilization=v.gpu_memory_utilization / 2))
        given = ({"block_size": BLOCK_SIZE} if platform_device() == "cpu" else {}) | dict(engine_args or {})
        shared: dict[str, Any] = {} if apart else {"longest": longest, "ends": ends}
        shared |= {"dtype": v.junior_dtype or dtype, "engine_args": given | {"quantization": v.junior_quantization}}
        with ExitStack() as started:
            first = VllmEngine(
                senior, None, tokenizer, half, longest=longest, dtype=dtype, ends=ends, engine_args=given, **options
            )
            started.callback(first.close)
            second = VllmEngine(junior, None, junior_tokenizer or tokenizer, half, **shared, **options)
            started.callback(second.close)
            self.engines = {1: first, 0: second}
            self._writers = {who: VllmWriter(engine) for who, engine in self.engines.items()}
            vocabulary, context = first.vocabulary, first.context
            make_partner: MakePartner | None = None
            if apart:
                named = {"writer": self._writers.pop(0), "ends": second.eos, "context": second.context}
                make_partner = partial(LocalPartner, vocabulary=vocabulary_of(second.tokenizer), **named)
            else:
                vocabulary, context = min(vocabulary, second.vocabulary), min(context, second.context)
            decoder = Decoder({}, {}, vocabulary, first.eos, tokenizer)
            super().__init__(decoder, context, max_rows=config.max_rows, has_junior=True, make_partner=make_partner)
            self._starts = None if apart else start_table(tokenizer, vocabulary)[:vocabulary]
            for engine in (first, second):
                one = self._starts
                known: Any = text_tables(engine.tokenizer, engine.vocabulary) if one is None else id_tables(one)
                engine.call_workers("tandem_spans", known if engine.in_process else cloudpickle.dumps(known))
            started.pop_all()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo("vllm", self.engines[1].info.dtype, drops=True)

    def generate(self, requests: Sequence[Request], **named: Any) -> list[list[Completion]]:
        if all(r.strategy.starts is None and r.strategy.writers == "senior" for r in requests):
            alone = self.engines[1]
            written = alone.generate(requests, **named)
            self.passes = alone.passes
            return written
        with death_reported(), ExitStack() as awake:
            for engine in self.engines.values():
                awake.enter_context(engine.awake())
            return super().generate(requests, **named)

    def abort(self) -> None:
        self.engines[1].abort()  # if the senior writes alone
        super().abort()

    def check(self, index: int, request: Request) -> None:
        """Refuse also a request that asks for something that spans cannot give."""
        super().check(index, request)
        if request.strategy.starts is None and request.strategy.writers == "senior":
            return  # it has one span, of any ids
        if request.sampling.ignore_eos:
            raise EngineError(
                f"request {index}: where each model has a vLLM engine of its own, spans end by EOS; leave out "
                "ignore_eos, or use rollout.engine=torch"
            )
        starts, known = request.strategy.starts, self._starts
        same = starts is not None and (known is None or torch.equal(starts[: len(known)].nonzero(), known.nonzero()))
        if not same:
            raise EngineError(
                f"request {index}: its strategy drops no proposals, or not where words begin for this engine of vLLM; "
                "use strategies such as before_word in all steps, with the tokenizer's start_table, or "
                "rollout.engine=torch"
            )

    def make_batch(self, requests: Sequence[Request], *, turns: bool, streams: bool) -> Relay:
        return self.relay(self._writers, turns=turns)

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
