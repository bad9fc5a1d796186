"""Engines that decode a ``DecodingBatch`` step by step, and their open calls."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from tandemrl.rollout.call import Call, CallEngine, Event, NewTokens
from tandemrl.rollout.decoding import DecodingBatch
from tandemrl.rollout.decoding_rows import Decoder, Row
from tandemrl.rollout.drafting import DraftLength
from tandemrl.rollout.engine import EngineError, Passes, Reply, Request
from tandemrl.rollout.kv_cache import Layers
from tandemrl.rollout.relay import MakePartner, Relay, Writer, check_partnered
from tandemrl.selection.words import vocabulary_of


class BatchEngine(CallEngine):
    """An engine that decodes a ``DecodingBatch``.

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
        make_partner: MakePartner | None = None,
    ) -> None:
        super().__init__()
        self._decoder, self.vocabulary, self.context = decoder, decoder.vocabulary, context
        self.max_rows, self.has_junior, self.policy_version = max_rows, has_junior, 0
        self.passes = Passes()
        self._make_partner = make_partner
        self._spelling = None if make_partner is None else vocabulary_of(decoder.tokenizer)
        self._kept = dict[str | None, tuple[list[int], dict[int, Layers]]]()
        """By session, those used last at the end: a text, and the keys and values of all its tokens but the last."""
        self._draft_length: DraftLength | None = None
        self._half_loaded = False

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

    @abstractmethod
    def make_batch(self, requests: Sequence[Request], *, turns: bool, streams: bool) -> DecodingBatch:
        """The empty batch of a call that begins with these requests; see ``DecodingBatch`` and ``BatchCall``."""

    def relay(self, writers: Mapping[int, Writer], *, turns: bool) -> Relay:
        """The batch of a call in which two models write by spans."""
        if self._make_partner is not None and self._spelling is not None:
            writers = {**writers, 0: self._make_partner(self._spelling)}
        return Relay(self._decoder, writers, self._spelling, turns=turns)

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

    engine: BatchEngine

    def __init__(self, engine: BatchEngine, *, turns: bool, streams: bool) -> None:
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


def whole_groups(waiting: Sequence[Row], free: int) -> int:
    """How many of the waiting rows fit into ``free`` places if the rows of a request join together.

    They join together so that their prompt is computed once.
    """
    if len(waiting) <= free:
        return len(waiting)
    return max((i for i in range(1, free + 1) if waiting[i].request is not waiting[i - 1].request), default=0)
