"""An open call of an engine: sequences join and leave it at any time. ``generate`` is a client of it, and so are the
server and ``tandemrl play``."""

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

from tandemrl.rollout.decoding_rows import Row
from tandemrl.rollout.engine import (
    Completion,
    Engine,
    EngineError,
    OnProgress,
    Reply,
    Request,
    Responder,
    StopReason,
    Turn,
    check_request,
)


class NewTokens(NamedTuple):
    """Further tokens of a sequence, with their log-probs."""

    number: int
    tokens: list[int]
    logprobs: list[float]


class Finished(NamedTuple):
    """A sequence has ended; ``Call.take`` returns its completion."""

    number: int


Event = Turn | NewTokens | Finished
"""What a step brought. A ``Turn`` is in calls with turns only, and its sequence waits for ``Call.answer``."""


class CallEngine(Engine):
    """An engine of which one call is open at a time. ``generate`` is such a call."""

    def __init__(self) -> None:
        self._busy, self._owner = threading.Lock(), 0
        self._call: Call | None = None

    @abstractmethod
    def make_call(self, *, turns: bool, streams: bool) -> "Call":
        """A call of an engine that no other call uses; see ``Call``."""

    def forget(self) -> None:
        """Keep nothing of sessions."""

    def check(self, index: int, request: Request) -> None:
        """Refuse a request that this engine cannot serve; see ``check_request``."""
        check_request(index, request, self)

    def open(self, *, turns: bool = False, streams: bool = True) -> "Call":
        """Open a call, which requests of any kind can join if it ``streams``. Close it after use: it is a context.

        A call of another thread is waited for, as ``load_weights`` waits for this one.

        Raises:
            EngineError: a call of this thread is open.
        """
        with ExitStack() as opened:
            opened.enter_context(self.exclusive())
            self._call = self.make_call(turns=turns, streams=streams)
            self._opened = opened.pop_all()
        return self._call

    def generate(
        self, requests: Sequence[Request], *, progress: OnProgress | None = None, responder: Responder | None = None
    ) -> list[list[Completion]]:
        with self.open(turns=responder is not None, streams=False) as call:
            return run(call, requests, progress=progress, responder=responder)

    def abort(self) -> None:
        if (call := self._call) is not None:
            call.abort()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """A context in which no call is open.

        Raises:
            EngineError: a call of this thread is open.
        """
        if self._owner == threading.get_ident():
            raise EngineError("a call of this engine is open in this thread; end it first")
        with self._busy:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner, self._call = 0, None

    def closed(self, call: "Call") -> None:
        """Hear that a call is over."""
        if self._call is call:
            self._opened.close()


class Call(AbstractContextManager["Call"]):
    """Sequences that an engine is decoding. Nothing but ``abort`` may be called from two threads at once.

    Args:
        engine: whose lock this call holds until ``close``.
        turns: whether rows may go on after their turn has ended.
        streams: whether steps tell of new tokens, too, and requests of any kind may join later; else those of the first
            ``submit`` decide what the call can do.
    """

    poll_every = 4
    """Steps between two polls for answers: rows whose turns begin share a forward pass."""

    def __init__(self, engine: CallEngine, *, turns: bool, streams: bool) -> None:
        self.engine, self._turns, self._streams = engine, turns, streams
        self._rows: dict[int, Row] = {}
        """By number: those that were not taken."""
        self._awaited: dict[int, Row] = {}
        """By number: those that wait for an answer."""
        self._over: list[Row] = []
        """Rows that have ended since the last step."""
        self._aborts = deque[frozenset[int] | None]()
        """The numbers that other threads have asked to end since the last step; None: all."""
        self._aborted = set[int]()
        self.version, self.steps, self.written = engine.policy_version, 0, 0
        """How many steps have decoded anything so far, and how many tokens were written in all sequences."""
        self._next = 0
        """The number of the next row."""

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, requests: Sequence[Request]) -> list[int]:
        """Let sequences join, one for each key of each request. Returns their numbers, in this order.

        Raises:
            EngineError: a request asks for something this engine lacks; none of them joins.
        """
        for i, request in enumerate(requests):
            self.engine.check(i, request)
        pairs = [(request, key) for request in requests for key in request.keys]
        rows = [Row(*pair, number) for number, pair in enumerate(pairs, self._next)]
        self._begin(requests, rows)
        self._next += len(rows)
        self._rows |= {row.number: row for row in rows}
        return [row.number for row in rows]

    @abstractmethod
    def _begin(self, requests: Sequence[Request], rows: Sequence[Row]) -> None:
        """Let the rows of some requests join."""

    def step(self) -> list[Event]:
        """Write the next tokens of all sequences that do not wait for an answer."""
        events = self._step()
        over, self._over = self._over, []
        return [*events, *(Finished(row.number) for row in over)]

    @abstractmethod
    def _step(self) -> list[Event]:
        """The same, without the sequences that are over, which are in ``_over``."""

    def take(self, numbers: Sequence[int]) -> list[Completion]:
        """The completions of sequences that have ended."""
        return [self._rows.pop(number).completion(self.version) for number in numbers]

    @abstractmethod
    def close(self) -> None:
        """Give up what is left, and let others use the engine."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether no sequence is being decoded, though some may be about to join."""

    @property
    @abstractmethod
    def blocked(self) -> bool:
        """Whether a step could do nothing before an answer or another request comes."""

    @abstractmethod
    def _go_on(self, row: Row, reply: Reply) -> None:
        """Let the next turn of a row begin, after the context of an answer."""

    @property
    def awaits(self) -> bool:
        """Whether a sequence waits for an answer."""
        return bool(self._awaited)

    def answer(self, reply: Reply) -> None:
        """Answer the last turn of a sequence, which goes on with the next step.

        Raises:
            EngineError: it waits for no answer, or cannot read this one.
        """
        if (row := self._awaited.pop(reply.number, None)) is None:
            if reply.number in self._aborted:
                return  # it comes too late
            raise EngineError(f"a reply to completion {reply.number}, of which no turn waits for one")
        context, vocabulary = reply.context, self.engine.vocabulary
        if not context:
            self._end(row, reply.stop_reason or row.stop_reason)
        elif row.own_left == 0 or row.observed + len(context) > row.request.observation_tokens:
            self._end(row, "length")
        elif min(context) < 0 or max(context) >= vocabulary:
            raise EngineError(f"completion {row.number}: a reply has a token outside the vocabulary of {vocabulary}")
        else:
            self._go_on(row, reply)

    def _end(self, row: Row, reason: StopReason | None) -> None:
        row.end(reason)
        self._over.append(row)

    def abort(self, numbers: Iterable[int] | None = None) -> None:
        """End sequences with the next step: all of them, or these. Thread-safe."""
        self._aborts.append(None if numbers is None else frozenset(numbers))

    def _take_aborts(self) -> set[int]:
        """The numbers of the rows that are to end."""
        asked = [self._aborts.popleft() for _ in range(len(self._aborts))]
        return {*self._rows} if None in asked else {number for numbers in asked for number in numbers or ()}

    def _end_apart(self, numbers: Container[int], apart: Iterable[Row]) -> None:
        """End those of these rows, which are not being decoded, that were aborted. Answers that still come for them are
        ignored."""
        for row in [row for row in apart if row.number in numbers]:
            self._end(row, "abort")
            self._aborted.add(row.number)
            self._awaited.pop(row.number, None)


def run(
    call: Call, requests: Sequence[Request], *, progress: OnProgress | None = None, responder: Responder | None = None
) -> list[list[Completion]]:
    """Write all completions of some requests; see ``Engine.generate``."""
    numbers = call.submit(requests)
    left, before = set(numbers), -1
    while left:
        steps, written = call.steps, call.written
        due = steps // call.poll_every > before // call.poll_every
        if responder is not None and call.awaits and (due or call.idle):
            for reply in responder.replies(wait=call.blocked):
                call.answer(reply)
        for event in call.step():
            if isinstance(event, Finished):
                left.remove(event.number)
            elif isinstance(event, Turn) and responder is not None:
                responder.submit(event)
        before = steps if call.steps > steps else before
        if progress is not None and call.steps > steps:
            progress(call.written - written)
    done = call.take(numbers)
    if responder is not None:
        done = [replace(c, transcript=responder.transcript(n)) for n, c in zip(numbers, done, strict=True)]
    completions = iter(done)
    return [[next(completions) for _ in request.keys] for request in requests]
