"""The reference engine: batched tandem decoding with two transformers models and their KV caches, on CPU or GPU.

The rows being decoded are a ``DecodingBatch`` (``decoding``). Between two steps, new rows and rows whose next turn
begins join it. A row that waits for the environment takes no place in the batch: its keys and values are kept apart.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.distributed.watchdog import stamp
from tandemrl.models.loading import context_of, eos_token_ids
from tandemrl.models.lora import adapted_layers, is_adapter
from tandemrl.rollout.control import Aborts
from tandemrl.rollout.decoding import DecodingBatch
from tandemrl.rollout.decoding_rows import Decoder, Row
from tandemrl.rollout.drafting import CPU, CUDA, DraftLength, Size
from tandemrl.rollout.endpoint_partner import EndpointJunior
from tandemrl.rollout.engine import (
    Completion,
    EngineError,
    EngineInfo,
    OnTokens,
    Passes,
    Reply,
    Request,
    Responder,
    Turn,
    check_request,
)
from tandemrl.rollout.kv_cache import compiled_step, eager_step
from tandemrl.rollout.local_partner import LocalPartner
from tandemrl.rollout.partner import MakePartner, check_partnered
from tandemrl.rollout.sync import fingerprint
from tandemrl.rollout.two_vocabularies import TwoVocabularies
from tandemrl.selection import Who
from tandemrl.selection.boundaries import token_bytes
from tandemrl.selection.whole_words import text_tables
from tandemrl.selection.words import vocabulary_of

POLL_EVERY = 4  # steps between two polls for observations: rows whose turns begin share a forward


class BatchEngine(ABC):
    """An engine that decodes a ``DecodingBatch`` step by step: the loop of a call.

    Args:
        decoder: what its batches decode with.
        context: how many tokens prompt and completion may have together.
        make_partner: makes the junior of a call, if it has a vocabulary of its own.
    """

    def __init__(
        self,
        decoder: Decoder,
        context: int,
        *,
        max_rows: int,
        has_junior: bool,
        policy_version: int = 0,
        make_partner: MakePartner | None = None,
    ) -> None:
        self._decoder, self.vocabulary, self.context = decoder, decoder.vocabulary, context
        self.max_rows, self.has_junior, self.policy_version = max_rows, has_junior, policy_version
        self.passes = Passes()
        self._make_partner = make_partner
        self._spelling = None if make_partner is None else vocabulary_of(decoder.tokenizer)
        self._aborts, self._busy = Aborts(), threading.RLock()
        self._draft_length: DraftLength | None = None

    @property
    @abstractmethod
    def info(self) -> EngineInfo: ...

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...

    @abstractmethod
    def fingerprint(self, who: Who = "senior") -> int: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _batch(self, requests: Sequence[Request], total: int, *, turns: bool, drafts: bool) -> DecodingBatch:
        """The empty batch of a call; see ``DecodingBatch``."""

    def abort(self, keys: Iterable[int] | None = None) -> None:
        self._aborts.add(keys)

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        *,
        progress: Callable[[int], None] | None = None,
        responder: Responder | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[list[Completion]]:
        for i, request in enumerate(requests):
            check_request(i, request, self)
            check_partnered(i, request, apart=self._make_partner is not None)
        with self._busy:
            return self._write(requests, progress, responder, on_tokens)

    def _write(
        self,
        requests: Sequence[Request],
        progress: Callable[[int], None] | None,
        responder: Responder | None,
        on_tokens: OnTokens | None,
    ) -> list[list[Completion]]:
        self._aborts.clear()
        pairs = [(request, key) for request in requests for key in request.keys]
        rows = [Row(request, key, number) for number, (request, key) in enumerate(pairs)]
        waiting, steps = list(rows), 0
        length = self._draft_length_for(requests, len(rows))
        batch = self._batch(requests, len(rows), turns=responder is not None, drafts=length is not None)
        apart, version = isinstance(batch, TwoVocabularies), self.policy_version
        between = _BetweenTurns(responder, self.vocabulary, apart=apart)
        while waiting or batch.rows or between:
            if self.policy_version != version:
                raise EngineError("weights were loaded during a call of generate; wait for its end")
            room = 2 * self.max_rows - len(batch.rows) - len(between)
            if between and (steps % POLL_EVERY == 0 or not batch.rows):
                between.listen(wait=not (batch.rows or between.ready or (waiting and room > 0)))
            if between.ready and (places := self.max_rows - int(batch.live.sum())):
                batch.resume(between.take(places))  # before new rows: what has begun comes to its end
            free = min(self.max_rows - len(batch.rows), room)
            if waiting and free > 0 and (not batch.rows or 8 * free >= self.max_rows):
                count = _whole_groups(waiting, free) or (0 if batch.rows else free)
                batch.admit(waiting[:count])
                del waiting[:count]
            if batch.rows:
                live = int(batch.live.sum())
                written, ended = batch.step(length(live, batch.passes) if length is not None and live else 0)
                steps += 1
                if written:
                    stamp()
                if progress is not None:
                    progress(written)
                if on_tokens is not None:
                    batch.tell(on_tokens)
                for row in ended:
                    between.submit(row, batch.own_tokens(row))
            if self._aborts:
                batch.abort(self._aborts)
                between.abort(self._aborts)
                for row in waiting:
                    if row.key in self._aborts:
                        row.stop_reason = "abort"
                waiting = [row for row in waiting if row.stop_reason is None]
            batch.retire()
        told = [None if responder is None else responder.transcript(row.number) for row in rows]
        self.passes = batch.passes
        completions = iter([batch.completion(row, version, its) for row, its in zip(rows, told, strict=True)])
        return [[next(completions) for _ in request.keys] for request in requests]

    def _draft_length_for(self, requests: Sequence[Request], rows: int) -> Callable[[int, Passes], int] | None:
        """The function (live rows, passes so far) -> length of the next draft, or None for a call without drafts."""
        writers = {request.strategy.writers for request in requests}
        if self._draft_length is None or writers <= {"junior"}:
            return None
        length = partial(self._draft_length, solo=writers == {"senior"})
        # Alone, the senior has no reader beside it unless that pays from the beginning.
        return None if writers == {"senior"} and not length(min(rows, self.max_rows), Passes()) else length


class TorchEngine(BatchEngine):
    """Tandem decoding with two models; see ``rollout.engine.Engine`` for the contract.

    Args:
        senior: a model from ``load_model`` or ``prepare``. The engine owns it, since ``load_weights`` changes it. A
            senior with adapters may share its other weights with the junior (``models.lora.adapted_alias``), since only
            the adapters are loaded then.
        junior: the frozen partner, of any size, family or device. None if only the senior ever writes.
        tokenizer: the tokenizer of both, used for stop strings only; or that of the senior.
        max_rows: how many completions are decoded at once. Further ones join when an eighth of the rows is free. As
            many again may wait between two turns, in the memory of the device.
        compile: compile each model's decoding step with ``torch.compile``, all layers in one graph. The first steps
            then take long. The pass in which the senior reads a draft is not compiled.
        draft_tokens: see ``rollout.draft_tokens``; 0 without a junior.
        junior_tokenizer: that of a junior with a vocabulary of its own (``two_vocabularies``).
        partner: the junior, if it is not in this process (``endpoint_partner``).
        ends: the ids that end a text. None stands for those of the models and the tokenizer.

    Raises:
        EngineError: the models cannot cover the tokenizer's vocabulary, or are to draft with two vocabularies.
        ModelError: ``compile`` is asked for on a CPU without a C++ compiler.
    """

    def __init__(
        self,
        senior: PreTrainedModel,
        junior: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int = 256,
        policy_version: int = 0,
        compile: bool = False,
        draft_tokens: int | str = 0,
        junior_tokenizer: PreTrainedTokenizerBase | None = None,
        partner: EndpointJunior | None = None,
        ends: Sequence[int] | None = None,
    ) -> None:
        self.senior, self.junior, self.endpoint = senior, junior, partner
        self.models = {1: senior} | ({0: junior} if junior is not None else {})
        apart = junior is not None and junior_tokenizer is not None
        ours = _decoder({1: senior} if apart else self.models, tokenizer, ends, compile=compile)
        make_partner: MakePartner | None = partner
        if junior is not None and junior_tokenizer is not None:
            decoder = _decoder({1: junior}, junior_tokenizer, None, compile=compile)
            tables, own = text_tables(junior_tokenizer, decoder.vocabulary), vocabulary_of(junior_tokenizer)
            make_partner = partial(
                LocalPartner, decoder, own, tables, token_bytes(tokenizer), context_of(junior.config)
            )
        if make_partner is not None:
            if draft_tokens:
                raise EngineError(f"draft_tokens={draft_tokens}: a junior of another vocabulary cannot draft; use 0")
            if compile:
                raise EngineError("compile: a junior of another vocabulary needs steps of any length; use false")
        super().__init__(
            ours,
            min(context_of(model.config) for model in ours.models.values()),
            max_rows=max_rows,
            has_junior=junior is not None or partner is not None,
            policy_version=policy_version,
            make_partner=make_partner,
        )
        self._adapted = frozenset(adapted_layers(senior))
        if draft_tokens and junior is not None:
            tokens = None if draft_tokens == "auto" else int(draft_tokens)
            costs = CPU if ours.heads[1].weight.device.type == "cpu" else CUDA
            self._draft_length = DraftLength(tokens, Size.of(senior), Size.of(junior), costs)

    @property
    def info(self) -> EngineInfo:
        dtype = str(self._decoder.heads[1].weight.dtype).removeprefix("torch.")
        return EngineInfo("torch", dtype, bool(self._adapted), streams=True, drops=self._draft_length is None)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        own = {
            name: parameter
            for name, parameter in self.senior.named_parameters()
            if not self._adapted or is_adapter(name, self._adapted)
        }
        new = dict(weights)
        if own.keys() != new.keys():
            missing = sorted(own.keys() ^ new.keys())
            raise EngineError(
                f"weights do not match the engine's senior; {len(missing)} names differ, e.g. {missing[0]}"
            )
        for name, parameter in own.items():
            if parameter.shape != new[name].shape:
                raise EngineError(f"weight {name}: shape {tuple(new[name].shape)}, expected {tuple(parameter.shape)}")
        with self._busy, torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(new[name])
            self.policy_version = version

    def fingerprint(self, who: Who = "senior") -> int:
        model = self.models.get(1 if who == "senior" else 0)
        if model is None and self.endpoint is not None:
            return self.endpoint.fingerprint
        if model is None:
            raise EngineError("this engine has no junior")
        return fingerprint(model.named_parameters())

    def close(self) -> None:
        """End the threads that ask an endpoint. The models belong to whoever loaded them."""
        if self.endpoint is not None:
            self.endpoint.close()

    def _batch(self, requests: Sequence[Request], total: int, *, turns: bool, drafts: bool) -> DecodingBatch:
        if self._make_partner is None or all(request.strategy.removed is None for request in requests):
            return DecodingBatch(self._decoder, requests, total, turns=turns, drafts=drafts)
        spelling, partner = self._spelling, self._make_partner
        assert spelling is not None
        return TwoVocabularies(self._decoder, requests, total, turns=turns, vocabulary=spelling, make_partner=partner)


class _BetweenTurns:
    """The rows of one call whose turn has ended: those that wait for an answer, and those that are ready with it."""

    def __init__(self, responder: Responder | None, vocabulary: int, *, apart: bool) -> None:
        self.responder, self.vocabulary, self.apart = responder, vocabulary, apart
        self.ready: list[tuple[Row, Sequence[int]]] = []
        """Rows that can go on, each with the tokens of its answer."""
        self._awaited: dict[int, Row] = {}
        self._aborted: set[int] = set()

    def __len__(self) -> int:
        return len(self._awaited) + len(self.ready)

    def submit(self, row: Row, tokens: Tensor) -> None:
        """Submit the ended turn of a row to the responder, if there is one."""
        if self.responder is None:
            return
        assert row.stop_reason is not None
        self._awaited[row.number] = row
        self.responder.submit(Turn(row.number, row.request.task, row.index, tokens.numpy().copy(), row.stop_reason))

    def listen(self, *, wait: bool) -> None:
        """Receive the answers that are ready, and end the rows that have no further turn.

        Raises:
            EngineError: an answer is to a turn that was not submitted, has a token outside the vocabulary, or none for
                a junior that has its own.
        """
        assert self.responder is not None
        replies = self.responder.replies(wait=wait)
        if replies:
            stamp()
        for reply in replies:
            if (row := self._awaited.pop(reply.number, None)) is not None:
                self._hear(row, reply)
            elif reply.number not in self._aborted:
                raise EngineError(f"a reply to completion {reply.number}, of which no turn waits for one")

    def _hear(self, row: Row, reply: Reply) -> None:
        context = reply.context
        if not context:
            row.end(reply.stop_reason or row.stop_reason)
        elif row.own_left == 0 or row.observed + len(context) > row.request.observation_tokens:
            row.end("length")
        elif min(context) < 0 or max(context) >= self.vocabulary:
            raise EngineError(
                f"completion {row.number}: a reply has a token outside the vocabulary of {self.vocabulary}"
            )
        elif self.apart and not reply.junior_context:
            raise EngineError(
                f"completion {row.number}: a reply has no context for the junior, which has another vocabulary; set "
                "junior_context"
            )
        else:
            row.junior_context = reply.junior_context
            self.ready.append((row, context))

    def take(self, count: int) -> list[tuple[Row, Sequence[int]]]:
        """Take out and return up to ``count`` of the rows that are ready."""
        taken, self.ready = self.ready[:count], self.ready[count:]
        return taken

    def abort(self, aborts: Aborts) -> None:
        """End the aborted rows. Answers that still come for them are ignored."""
        ended = [row for row in (*self._awaited.values(), *(row for row, _ in self.ready)) if row.key in aborts]
        for row in ended:
            row.end("abort")
            self._aborted.add(row.number)
            self._awaited.pop(row.number, None)
        self.ready = [(row, context) for row, context in self.ready if row.stop_reason != "abort"]


def _whole_groups(waiting: Sequence[Row], free: int) -> int:
    """How many of the waiting rows fit into ``free`` places if the rows of a request join together.

    They join together so that their prompt is computed once.
    """
    if len(waiting) <= free:
        return len(waiting)
    return max((i for i in range(1, free + 1) if waiting[i].request is not waiting[i - 1].request), default=0)


def _decoder(
    models: dict[int, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int] | None,
    *,
    compile: bool,
) -> Decoder:
    heads = {who: model.get_output_embeddings() for who, model in models.items()}
    vocabulary, step = min(head.weight.shape[0] for head in heads.values()), compiled_step if compile else eager_step
    if vocabulary < len(tokenizer):
        raise EngineError(f"a model has {vocabulary} logits for the tokenizer's {len(tokenizer)} tokens")
    steps = {who: step(model) for who, model in models.items()}
    if ends is None:
        ends = sorted({end for each in models.values() for end in eos_token_ids(each.generation_config, tokenizer)})
    drawn = tuple(end for end in ends if end < vocabulary)  # a generation config may be of a larger vocabulary
    return Decoder(models, heads, steps, vocabulary, drawn, tokenizer)
