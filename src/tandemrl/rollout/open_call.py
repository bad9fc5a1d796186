"""What the engines with open calls have in common: who may use the engine, and the sequences of a call."""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, TypeVar

from tandemrl.rollout.call import Call, run
from tandemrl.rollout.control import Aborts
from tandemrl.rollout.decoding_rows import Row
from tandemrl.rollout.engine import (
    Completion,
    Engine,
    EngineError,
    Reply,
    Request,
    Responder,
    StopReason,
    check_request,
)

AnyRow = TypeVar("AnyRow", bound=Row)


class CallEngine(Engine):
    """An engine of which one call is open at a time. ``generate`` is such a call."""

    def __init__(self) -> None:
        self._busy, self._owner = threading.Lock(), 0
        self._call: OpenCall[Any] | None = None

    @abstractmethod
    def make_call(self, *, turns: bool, streams: bool, anything: bool) -> "OpenCall[Any]":
        """A call of an engine that no other call uses; see ``OpenCall``.

        Args:
            anything: whether requests of any kind may join later; else those of the first ``submit`` decide.
        """

    def check(self, index: int, request: Request) -> None:
        """Refuse a request that this engine cannot serve; see ``check_request``."""
        check_request(index, request, self)

    def open(self, *, turns: bool = False) -> "OpenCall[Any]":
        """Open a call, which requests of any kind can join. Close it after use: it is a context.

        A call of another thread is waited for, as ``load_weights`` waits for this one.

        Raises:
            EngineError: a call of this thread is open.
        """
        return self._open(turns=turns, streams=True, anything=True)

    def _open(self, **how: bool) -> "OpenCall[Any]":
        self._acquire()
        try:
            self._call = self.make_call(**how)
        except BaseException:
            self._release()
            raise
        return self._call

    def generate(
        self,
        requests: Sequence[Request],
        *,
        progress: Callable[[int], None] | None = None,
        responder: Responder | None = None,
    ) -> list[list[Completion]]:
        with self._open(turns=responder is not None, streams=False, anything=False) as call:
            return run(call, requests, progress=progress, responder=responder)

    def abort(self, keys: Iterable[int] | None = None) -> None:
        if (call := self._call) is not None:
            call.abort(keys)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """A context in which no call is open.

        Raises:
            EngineError: a call of this thread is open.
        """
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def _acquire(self) -> None:
        if self._owner == threading.get_ident():
            raise EngineError("a call of this engine is open in this thread; end it first")
        self._busy.acquire()
        self._owner = threading.get_ident()

    def _release(self) -> None:
        self._owner, self._call = 0, None
        self._busy.release()

    def closed(self, call: "OpenCall[Any]") -> None:
        """Hear that a call is over."""
        if self._call is call:
            self._release()


class OpenCall(Call, Generic[AnyRow]):
    """A ``call.Call``.

    Args:
        engine: whose lock this call holds until ``close``.
        turns: whether rows may go on after their turn has ended.
        streams: whether steps tell of new tokens, too.
    """

    poll_every = 4  # rows whose turns begin share a forward pass

    def __init__(self, engine: CallEngine, *, turns: bool, streams: bool) -> None:
        self.engine, self._turns, self._streams = engine, turns, streams
        self._rows: dict[int, AnyRow] = {}
        """By number: those that were not taken."""
        self._awaited: dict[int, AnyRow] = {}
        """By number: those that wait for an answer."""
        self._over: list[AnyRow] = []
        """Rows that have ended since the last step."""
        self._aborts, self._aborted = Aborts(), set[int]()
        self.version, self.steps, self.written = engine.policy_version, 0, 0

    def __enter__(self) -> "OpenCall[AnyRow]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def awaits(self) -> bool:
        return bool(self._awaited)

    def answer(self, reply: Reply) -> None:
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

    @abstractmethod
    def _go_on(self, row: AnyRow, reply: Reply) -> None:
        """Let the next turn of a row begin, after the context of an answer."""

    def _end(self, row: AnyRow, reason: StopReason | None) -> None:
        row.end(reason)
        self._over.append(row)

    def abort(self, keys: Iterable[int] | None = None) -> None:
        self._aborts.add(keys)

    def _end_apart(self, keys: Aborts, apart: Iterable[AnyRow]) -> None:
        """End those of these rows, which are not being decoded, that were aborted. Answers that still come for them are
        ignored."""
        for row in [row for row in apart if row.key in keys]:
            self._end(row, "abort")
            self._aborted.add(row.number)
            self._awaited.pop(row.number, None)
