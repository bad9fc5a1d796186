"""The reference engine: batched tandem decoding with two transformers models and their KV caches, on CPU or GPU."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.models.loading import context_of, eos_token_ids
from tandemrl.models.lora import adapted_layers, is_adapter
from tandemrl.models.sampling import race_times
from tandemrl.rollout.call import Call, CallEngine, Event, NewTokens
from tandemrl.rollout.decoding import DecodingBatch
from tandemrl.rollout.decoding_rows import Decoder, Row, Shaping, sample, sampling_parameters, shaped
from tandemrl.rollout.device_steps import CUDA_STEPS, DeviceSteps
from tandemrl.rollout.drafting import CPU, CUDA, DraftLength, Size
from tandemrl.rollout.endpoint_partner import EndpointJunior
from tandemrl.rollout.engine import EngineError, EngineInfo, Passes, Reply, Request, SentWeights
from tandemrl.rollout.kv_cache import KVCache, Layers, extend, prefill
from tandemrl.rollout.relay import (
    Job,
    LocalPartner,
    MakePartner,
    Relay,
    SpanRules,
    Writer,
    Written,
    check_partnered,
    draw_keys,
)
from tandemrl.rollout.sync import check_shapes, fingerprint
from tandemrl.selection import Who
from tandemrl.selection.whole_words import TextTables, text_tables
from tandemrl.selection.words import Vocabulary, vocabulary_of


class TorchEngine(CallEngine):
    """Tandem decoding with two models; see ``rollout.engine.Engine`` for the contract.

    Args:
        senior: a model from ``load_model`` or ``prepare``. The engine owns it, since ``load_weights`` changes it. A
            senior with adapters may share its other weights with the junior (``models.lora.adapted_alias``), since only
            the adapters are loaded then.
        junior: the frozen partner, of any size, family or device. None if only the senior ever writes.
        tokenizer: the tokenizer of both, used for stop strings only; or that of the senior.
        max_rows: how many completions are decoded at once. Further ones join when an eighth of the rows is free. As
            many again may wait between two turns, in the memory of the device.
        draft_tokens: see ``rollout.draft_tokens``; 0 without a junior.
        host_every: see ``rollout.host_every``.
        junior_tokenizer: that of a junior with a vocabulary of its own (``relay``).
        partner: the junior, if it is not in this process (``endpoint_partner``).
        ends: the ids that end a text. None stands for those of the models and the tokenizer.

    Raises:
        EngineError: the models cannot cover the tokenizer's vocabulary, or are to draft with two vocabularies.
    """

    def __init__(
        self,
        senior: PreTrainedModel,
        junior: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int = 256,
        draft_tokens: int | str = 0,
        host_every: int | str = "auto",
        junior_tokenizer: PreTrainedTokenizerBase | None = None,
        partner: EndpointJunior | None = None,
        ends: Sequence[int] | None = None,
    ) -> None:
        self.senior, self.junior, self.endpoint = senior, junior, partner
        self.models = {1: senior} | ({0: junior} if junior is not None else {})
        apart = junior is not None and junior_tokenizer is not None
        ours = _decoder({1: senior} if apart else self.models, tokenizer, ends)
        make_partner: MakePartner | None = partner
        if junior is not None and junior_tokenizer is not None:
            decoder = _decoder({1: junior}, junior_tokenizer, None)
            tables, own = text_tables(junior_tokenizer, decoder.vocabulary), vocabulary_of(junior_tokenizer)
            context = context_of(junior.config)

            def local(words: Vocabulary) -> LocalPartner:
                return LocalPartner(words, TorchWriter(decoder, tables), own, decoder.eos, context)

            make_partner = local
        if make_partner is not None and draft_tokens:
            raise EngineError(f"draft_tokens={draft_tokens}: a junior of another vocabulary cannot draft; use 0")
        super().__init__()
        self._decoder, self.vocabulary, self.max_rows = ours, ours.vocabulary, max_rows
        self.context = min(context_of(model.config) for model in ours.models.values())
        self.has_junior = junior is not None or partner is not None
        self.policy_version, self.passes, self._half_loaded = 0, Passes(), False
        self._make_partner = make_partner
        self._tables = None if make_partner is None else text_tables(tokenizer, self.vocabulary)
        self._spelling = None if make_partner is None else vocabulary_of(tokenizer)
        self._kept = dict[str | None, tuple[list[int], dict[int, Layers]]]()
        """By session, those used last at the end: a text, and the keys and values of all its tokens but the last."""
        self._adapted = frozenset(adapted_layers(senior))
        on_cuda = ours.device.type == "cuda"
        every = (CUDA_STEPS if on_cuda else 1) if host_every == "auto" else int(host_every)
        one_place = len({head.weight.device for head in ours.heads.values()}) == 1
        alone = every > 1 and one_place and make_partner is None
        self._alone = DeviceSteps(ours, every, max_rows, self.context) if alone else None
        self._draft_length: DraftLength | None = None
        if draft_tokens and junior is not None:
            tokens = None if draft_tokens == "auto" else int(draft_tokens)
            costs = CUDA if on_cuda else CPU
            self._draft_length = DraftLength(tokens, Size.of(senior), Size.of(junior), costs)

    @property
    def info(self) -> EngineInfo:
        dtype = str(self._decoder.heads[1].weight.dtype).removeprefix("torch.")
        return EngineInfo("torch", dtype, bool(self._adapted), drops=self._draft_length is None)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        own = {
            name: parameter
            for name, parameter in self.senior.named_parameters()
            if not self._adapted or is_adapter(name, self._adapted)
        }
        sent = SentWeights.of(weights)
        check_shapes(sent.shapes, {name: tuple(parameter.shape) for name, parameter in own.items()})
        with self.exclusive(), torch.no_grad():
            self._half_loaded = True
            self._kept.clear()  # other weights compute other keys and values
            left = dict(own)
            for name, tensor in sent:
                left.pop(name).copy_(tensor)
            if left:
                raise EngineError(f"{len(left)} weights did not come, e.g. {min(left)}; load all of them again")
            self._half_loaded, self.policy_version = False, version

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

    def keep(self, row: Row) -> None:
        """Keep what the next request of a row's session may go on with: the ``max_rows`` sessions used last."""
        self._kept.pop(row.request.session, None)
        self._kept[row.request.session] = row.text, row.kept
        if len(self._kept) > self.max_rows:
            del self._kept[next(iter(self._kept))]

    def take(self, request: Request) -> dict[int, Layers]:
        """What was kept of the session of a request, if its prompt goes on with that text. It is kept no longer."""
        text, layers = self._kept.pop(request.session, ([], {}))
        goes_on = len(request.prompt) > len(text) and [*request.prompt[: len(text)]] == text
        return layers if goes_on else {}

    def forget(self) -> None:
        self._kept.clear()

    def make_batch(self, requests: Sequence[Request], *, turns: bool, streams: bool) -> DecodingBatch:
        """The empty batch of a call that begins with these requests; see ``DecodingBatch`` and ``BatchCall``."""
        by_text = streams or any(request.strategy.removed is not None for request in requests)
        if self._make_partner is None or self._tables is None or self._spelling is None or not by_text:
            return DecodingBatch(self._decoder, turns=turns, alone=self._alone)
        partner = self._make_partner(self._spelling)
        return Relay(self._decoder, TorchWriter(self._decoder, self._tables), partner, self._spelling, turns=turns)

    @property
    def apart(self) -> bool:
        """Whether the junior has a vocabulary of its own."""
        return self._make_partner is not None

    def check(self, index: int, request: Request) -> None:
        super().check(index, request)
        check_partnered(index, request, apart=self.apart)

    def make_call(self, *, turns: bool, streams: bool) -> "BatchCall":
        if self._half_loaded:
            raise EngineError("a load of weights was cut off, so some are old and some new; load all of them again")
        return BatchCall(self, turns=turns, streams=streams)

    def draft_length_for(self, requests: Sequence[Request], rows: int) -> Callable[[int, Passes], int] | None:
        """The function (live rows, passes so far) -> length of the next draft, or None for a call without drafts."""
        writers = {request.strategy.writers for request in requests}
        if self._draft_length is None or writers <= {"junior"}:
            return None
        length = partial(self._draft_length, share=1.0 if writers == {"senior"} else 0.5)
        # Alone, the senior has no reader beside it unless that pays from the beginning.
        return None if writers == {"senior"} and not length(min(rows, self.max_rows), Passes()) else length


class BatchCall(Call):
    """A `call.Call`. Between two steps, new rows and rows whose next turn begins join the batch. A row that waits for
    an answer takes no place in it: its keys and values are kept apart.
    """

    engine: TorchEngine

    def __init__(self, engine: TorchEngine, *, turns: bool, streams: bool) -> None:
        super().__init__(engine, turns=turns, streams=streams)
        self._batch: DecodingBatch | None = None
        self._waiting: list[Row] = []
        self._ready: list[tuple[Row, Sequence[int]]] = []
        """Rows that can go on, each with the tokens of its answer."""
        self._length: Callable[[int, Passes], int] | None = None

    @torch.inference_mode()
    def close(self) -> None:
        if self._batch is not None:
            self.engine.passes = self._batch.passes
            self._batch.close()
        self.engine.closed(self)

    @torch.inference_mode()
    def _begin(self, requests: Sequence[Request], rows: Sequence[Row]) -> None:
        engine = self.engine
        kept = {id(request): engine.take(request) for request in requests}
        for row in rows:
            row.kept = kept[id(row.request)]
        going = [*(row for row in self._rows.values() if not row.over), *rows]
        length = engine.draft_length_for([row.request for row in going], len(going))
        if self._batch is None:
            self._batch = engine.make_batch(requests, turns=self._turns, streams=self._streams)
        self._batch.extend(requests, len(going), drafts=length is not None)
        self._length = length
        self._waiting += rows

    @torch.inference_mode()
    def _step(self) -> list[Event]:
        batch = self._batch
        if batch is None:
            return []
        if self._aborts:
            self._end_aborted(batch)
            self._drop_ended(batch)
        self._join(batch)
        events: list[Event] = []
        if batch.rows:
            live, before = 0 if self._length is None else int(batch.live.sum()), batch.steps
            written, ended = batch.step(self._length(live, batch.passes) if self._length is not None and live else 0)
            self.steps, self.written = self.steps + max(1, batch.steps - before), self.written + written
            if self._streams:
                events += [NewTokens(*each) for each in batch.news()]
            if self._turns:
                self._awaited |= {row.number: row for row in ended}
                events += [row.turn for row in ended]
            if batch.ended:
                self._drop_ended(batch)
        return events

    def _drop_ended(self, batch: DecodingBatch) -> None:
        """Note which rows of the batch are over: those that have ended, but for those that wait for an answer now."""
        ended, batch.ended = batch.ended, []
        for row in ended:
            if row.number not in self._awaited:
                if row.kept and row.request.session is not None and not self.engine.apart:
                    self.engine.keep(row)
                row.over, row.kept = True, {}
                self._over.append(row)
        batch.retire()

    def _join(self, batch: DecodingBatch) -> None:
        """Let rows into the batch: those with an answer before new ones, so that what has begun comes to its end."""
        most = self.engine.max_rows
        if self._ready and (places := most - int(batch.live.sum())):
            back, self._ready = self._ready[:places], self._ready[places:]
            batch.resume(back)
            self._over += [row for row, _ in back if row.over]  # those cannot go on
        free = min(most - len(batch.rows), self._room)
        if self._waiting and free > 0 and (not batch.rows or 8 * free >= most):
            count = whole_groups(self._waiting, free) or (0 if batch.rows else free)
            new, self._waiting = self._waiting[:count], self._waiting[count:]
            batch.admit(new)

    @property
    def _room(self) -> int:
        """How many more rows may be decoded or wait between two turns."""
        rows = 0 if self._batch is None else len(self._batch.rows)
        return 2 * self.engine.max_rows - rows - len(self._awaited) - len(self._ready)

    def _go_on(self, row: Row, reply: Reply) -> None:
        if self.engine.apart and isinstance(self._batch, Relay) and not reply.junior_context:
            raise EngineError(
                f"completion {row.number}: a reply has no context for the junior, which has another vocabulary; set "
                "junior_context"
            )
        row.junior_context = reply.junior_context
        self._ready.append((row, reply.context))

    def _end_aborted(self, batch: DecodingBatch) -> None:
        numbers = self._take_aborts()
        batch.abort(numbers)
        self._end_apart(numbers, [*self._awaited.values(), *(row for row, _ in self._ready), *self._waiting])
        self._ready = [(row, context) for row, context in self._ready if not row.over]
        self._waiting = [row for row in self._waiting if not row.over]

    @property
    def idle(self) -> bool:
        return self._batch is None or not self._batch.rows

    @property
    def blocked(self) -> bool:
        return self.idle and not (self._ready or self._over or self._aborts or (self._waiting and self._room > 0))


def _decoder(
    models: dict[int, PreTrainedModel], tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] | None
) -> Decoder:
    heads = {who: model.get_output_embeddings() for who, model in models.items()}
    vocabulary = min(head.weight.shape[0] for head in heads.values())
    if vocabulary < len(tokenizer):
        raise EngineError(f"a model has {vocabulary} logits for the tokenizer's {len(tokenizer)} tokens")
    if ends is None:
        own = (eos_token_ids(each.generation_config, each.config, tokenizer) for each in models.values())
        ends = sorted({*chain.from_iterable(own)})
    drawn = tuple(end for end in ends if end < vocabulary)  # a generation config may be of a larger vocabulary
    return Decoder(models, heads, vocabulary, drawn, tokenizer)


def whole_groups(waiting: Sequence[Row], free: int) -> int:
    """How many of the waiting rows fit into ``free`` places if the rows of a request join together.

    They join together so that their prompt is computed once.
    """
    if len(waiting) <= free:
        return len(waiting)
    return max((i for i in range(1, free + 1) if waiting[i].request is not waiting[i - 1].request), default=0)


class TorchWriter(Writer):
    """A `relay.Writer`. The keys and values of a row stay until it is dropped; what another author has written is
    read when the row is gone on with.

    Args:
        decoder: with the model as model 1.
        tables: of its vocabulary.
    """

    def __init__(self, decoder: Decoder, tables: TextTables) -> None:
        self._decoder, self._rules, self._cache = decoder, SpanRules(tables), KVCache()
        self._place: dict[int, int] = {}
        """By number: the row of the cache."""
        self._size = 0
        self._read: dict[int, list[int]] = {}
        """By number: the tokens that the cache holds."""
        self._unread: dict[int, list[int]] = {}
        self._jobs: dict[int, Job] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, number: object) -> bool:
        return number in self._jobs

    def admit(self, prompts: Mapping[Row, Sequence[int]]) -> None:
        distinct = {id(prompt): [*prompt] for prompt in prompts.values()}
        if not distinct:
            return
        of = {name: i for i, name in enumerate(distinct)}
        places = range(self._size, self._size + len(prompts))
        prefilled = prefill(self._decoder.models[1], [*distinct.values()])
        self._cache.put(places, prefilled, [of[id(prompt)] for prompt in prompts.values()])
        for place, (row, prompt) in zip(places, prompts.items(), strict=True):
            self._place[row.number], self._read[row.number] = place, list(prompt[:-1])
        self._size += len(prompts)

    def begin(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            number, tokens, read = job.row.number, list(job.tokens), self._read[job.row.number]
            if tokens[: len(read)] != read or len(read) == len(tokens):  # the end of it was cut
                same = (a == b for a, b in zip(read, tokens[:-1], strict=False))
                del read[next((k for k, equal in enumerate(same) if not equal), len(tokens) - 1) :]
            self._unread[number], self._jobs[number] = tokens[len(read) :], job

    def step(self, *, wait: bool) -> dict[int, Written]:
        if not self._jobs:
            return {}
        jobs = [*self._jobs.items()]
        rows, spans = [job.row for _, job in jobs], [job.span for _, job in jobs]
        logits = self._rules.masked(self._logits([*self._jobs]), spans)
        parameters, shaping = sampling_parameters(rows).to(logits.device), Shaping.of(row.request for row in rows)
        race = race_times(draw_keys(spans).to(logits.device), self._decoder.vocabulary)
        tokens, logprobs = (x.cpu() for x in sample(logits, race, parameters, None, shaping))
        over = self._rules.advance(spans, tokens)
        ends = dict[int, float]()
        if over:
            mass = self._rules.word_ends(shaped(logits[over], parameters[over], None, shaping))
            ends = dict(zip(over, torch.where(parameters[over, 0] > 0, mass, 0.0).tolist(), strict=True))
        found = {}
        for i, ((number, job), token, logprob) in enumerate(zip(jobs, tokens.tolist(), logprobs.tolist(), strict=True)):
            if i in ends:
                found[number] = Written([], [], ends[i])
            else:
                whole = token in self._decoder.eos or job.span.written == job.room
                found[number], self._unread[number] = Written([token], [logprob], None, whole), [token]
            if found[number].whole:
                del self._jobs[number]
        return found

    def _logits(self, numbers: Sequence[int]) -> Float[Tensor, "k v"]:
        """The logits of some rows, after the model has read all that it had not yet."""
        chunks, starts = [self._unread[n] for n in numbers], [len(self._read[n]) for n in numbers]
        places = [self._place[n] for n in numbers]
        hidden = extend(self._decoder.models[1], self._cache, places, starts, chunks)
        for number, chunk in zip(numbers, chunks, strict=True):
            self._read[number] += chunk
        return self._decoder.heads[1](hidden)[:, : self._decoder.vocabulary].float()

    def keep(self, live: Collection[int], waiting: Collection[int]) -> None:
        self._jobs = {number: job for number, job in self._jobs.items() if number in live}
        self._place = {n: place for n, place in self._place.items() if n in live or n in waiting}
        self._read = {number: self._read[number] for number in self._place}
        if 8 * (self._size - len(self._place)) >= max(1, self._size):  # rarely, since all is copied
            width = max(map(len, self._read.values()), default=0)
            self._cache.keep(torch.tensor([*self._place.values()], dtype=torch.int64), width)
            self._place, self._size = {n: i for i, n in enumerate(self._place)}, len(self._place)
