"""An ``Engine`` over the engines of several workers, and one that decodes in the same units without any.

``FleetEngine`` carries out what ``dispatcher`` decides, in a thread of its own. Where the workers are is the business
of the ``Workers`` that it gets, such as those on Ray (``ray_workers``).
"""

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from tandemrl.distributed.watchdog import stamp
from tandemrl.rollout.control import Aborts
from tandemrl.rollout.engine import (
    Completion,
    Engine,
    EngineError,
    EngineInfo,
    Passes,
    Request,
    Responder,
    check_request,
)
from tandemrl.rollout.envs.episodes import Episodes
from tandemrl.rollout.fleet.dispatcher import Dispatcher, DispatchError
from tandemrl.rollout.fleet.events import (
    INITIAL,
    Answered,
    Assign,
    Deliver,
    Event,
    Fail,
    Fence,
    Joined,
    Load,
    Published,
    Retire,
    Start,
    Submitted,
    Tick,
    Unit,
)
from tandemrl.rollout.fleet.units import UnitAnswer, turns_with
from tandemrl.rollout.sync import fingerprint
from tandemrl.selection import Who

TICK_S = 1.0
LOST_PER_WORKER = 4  # in a row, before the fleet gives up
COUNTED = ("redone", "restarts", "idle_s", "worker_s", "units", "unit_s", "loads", "load_s")
"""What ``FleetEngine.counts`` has."""


class Described(NamedTuple):
    """What the engines of all workers have in common."""

    info: EngineInfo
    vocabulary: int
    context: int
    has_junior: bool
    policy_version: int
    """Of the weights that they start with."""
    junior: int | None
    """The fingerprint of the junior."""
    acts: bool = False
    """Whether the workers have an environment to take turns with."""


@runtime_checkable
class Workers(Protocol):
    """Processes that each hold an engine, by number. Every method returns at once; what comes of it is told."""

    def begin(self, tell: Callable[[Event], None]) -> None:
        """Tell events to this function, which any thread may call."""
        ...

    def start(self, number: int) -> None: ...

    def load(self, number: int, version: int) -> None:
        """Let a worker load the weights that were ``put`` under this version; ``INITIAL`` are those it starts with."""
        ...

    def generate(self, number: int, unit: Unit, attempt: int, requests: Sequence[Request], turns: bool) -> None:
        """Let a worker generate, taking turns with its environment or not. What is told is what
        ``units.WorkerEngine.generate`` returns; an error has no other remedy than another request."""
        ...

    def abort(self, number: int, keys: Iterable[int] | None) -> None: ...

    def end(self, number: int) -> None: ...

    def put(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Keep weights for all workers."""
        ...

    def drop(self, version: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class _Call:
    """A running call of ``generate``."""

    units: list[list[Request]]
    turns: bool = False
    """Whether the authors take turns with an environment."""
    arrived: SimpleQueue[UnitAnswer | Exception] = field(default_factory=SimpleQueue)


class _Abort(NamedTuple):
    keys: frozenset[int] | None


def units_of(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """The requests in units of ``size`` requests; the last one may have fewer."""
    return [list(requests[i : i + size]) for i in range(0, len(requests), size)]


class UnitEngine:
    """An engine that decodes each unit by itself: what a fleet generates, in this process."""

    def __init__(self, own: Engine, size: int) -> None:
        self.own, self.size = own, size
        self.vocabulary, self.has_junior, self.policy_version = own.vocabulary, own.has_junior, own.policy_version
        self.passes, self._aborts = Passes(), Aborts()

    @property
    def context(self) -> int:
        return self.own.context

    @property
    def info(self) -> EngineInfo:
        return self.own.info

    def generate(
        self,
        requests: Sequence[Request],
        *,
        progress: Callable[[int], None] | None = None,
        responder: Responder | None = None,
    ) -> list[list[Completion]]:
        self._aborts.clear()
        completions: list[list[Completion]] = []
        self.passes, begun = Passes(), 0
        for unit in units_of(requests, self.size):
            kept, turns = _without(unit, self._aborts), turns_with(responder, begun)
            written = self.own.generate(kept, progress=progress, **turns) if kept else []
            completions += _with_aborted(unit, written, responder)
            self.passes += self.own.passes if kept else Passes()
            begun += sum(len(request.keys) for request in unit)
        return completions

    def abort(self, keys: Iterable[int] | None = None) -> None:
        keys = None if keys is None else frozenset(keys)
        self._aborts.add(keys)
        self.own.abort(keys)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.own.load_weights(weights, version)
        self.policy_version = self.own.policy_version

    def fingerprint(self, who: Who = "senior") -> int:
        return self.own.fingerprint(who)

    def close(self) -> None:
        self.own.close()


class FleetEngine:
    """The workers of a fleet as one engine. Several threads may call ``generate``; their calls are served in order.

    The weights are sent once, into ``Workers.put``. ``fingerprint`` is of what was sent, and no worker generates
    anything unless what it has loaded, read back, has the same fingerprint.

    Args:
        size: how many workers.
        unit_groups: how many requests are a unit.
        max_staleness: see ``Dispatcher``.
        timeout_s: a worker that does not start, load or answer in this time is replaced.

    Raises:
        EngineError: no worker starts.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        size: int,
        unit_groups: int,
        max_staleness: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        self._workers, self._unit_groups = workers, unit_groups
        self._dispatcher = Dispatcher(
            size,
            max_staleness=max_staleness,
            timeout_s=timeout_s,
            patience=LOST_PER_WORKER * size,
            numbers=count(),
        )
        self._events: SimpleQueue[Event | _Abort | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._calls: dict[int, _Call] = {}
        self._numbers, self._aborts = count(), Aborts()
        self._failures: list[str] = []
        self._described: Described | None = None
        self._step: int | None = None
        self.begun = threading.Event()
        """Set when a call of ``generate`` has its place and its weights."""
        self._version, self._base = INITIAL, 0
        self._checksums: dict[int, int | None] = {INITIAL: None}
        """Of the newest version; a worker's, where only that can be known."""
        self.passes = Passes()
        workers.begin(self._events.put)
        self._events.put(Published(INITIAL, None))
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._thread.start()
        try:
            self._wait_for(lambda: self._described is not None)
        except EngineError:
            self.close()
            raise
        assert self._described is not None
        described = self._described
        self.info: EngineInfo = described.info
        self.vocabulary: int = described.vocabulary
        self.context: int = described.context
        self.has_junior: bool = described.has_junior
        self.policy_version: int = described.policy_version

    # ------------------------------------------------------------------------------------------------------ the engine

    def generate(
        self,
        requests: Sequence[Request],
        *,
        progress: Callable[[int], None] | None = None,
        responder: Responder | None = None,
    ) -> list[list[Completion]]:
        assert self._described is not None
        if responder is not None and not (self._described.acts and isinstance(responder, Episodes)):
            raise EngineError(
                "the workers have no environment to take turns with; make their engine with `acting` (as train and "
                "eval do), or set rollout.workers=0"
            )
        for i, request in enumerate(requests):
            check_request(i, request, self)
        if not requests:
            return []
        call = _Call(units_of(requests, self._unit_groups), turns=responder is not None)
        with self._changed:
            if not self._calls:
                self._aborts.clear()
            number = next(self._numbers)
            self._calls[number] = call
            step = self._version + 1 if self._step is None else self._step
            self._events.put(Submitted(number, len(call.units), self._version, step))
        self.begun.set()
        completions, passes = [], Passes()
        try:
            for unit in call.units:
                answer = self._next(call)
                completions += _with_aborted(unit, answer.completions, responder)
                passes += answer.passes
                if isinstance(responder, Episodes):
                    responder.count(answer.tally)
                stamp()
                if progress is not None:
                    progress(sum(int((c.author >= 0).sum()) for group in answer.completions for c in group))
        finally:
            del self._calls[number]
        self.passes = passes
        return completions

    def _next(self, call: _Call) -> UnitAnswer:
        while True:
            if self._failures:
                raise EngineError(self._failures[0])
            try:
                answer = call.arrived.get(timeout=TICK_S)
            except Empty:
                continue
            if isinstance(answer, Exception):
                raise answer
            return answer

    def abort(self, keys: Iterable[int] | None = None) -> None:
        keys = None if keys is None else frozenset(keys)
        self._aborts.add(keys)
        self._events.put(_Abort(keys))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send weights. Workers that are generating load them before their next unit.

        Raises:
            EngineError: the version is not newer than the one before; or no worker can load adapters.
        """
        if version <= self._version:
            raise EngineError(f"the fleet has weights {self._version}; newer ones need a greater number, not {version}")
        sent, dtype = 0, getattr(torch, self.info.dtype)

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal sent
            for name, tensor in weights:
                tensor = tensor.detach().to(dtype)
                sent ^= fingerprint([(name, tensor)])  # the whole one is the xor of its parts
                yield name, tensor

        self._workers.put(version, counted())
        unknown = self.info.adapters and self._version == INITIAL  # what the workers have beside the adapters
        with self._changed:
            self._checksums = {version: None if unknown else sent ^ self._base}
            self._version = self.policy_version = version
            self._events.put(Published(version, self._checksums[version]))
        if unknown:
            self._base = self.fingerprint() ^ sent

    def fingerprint(self, who: Who = "senior") -> int:
        assert self._described is not None
        if who == "junior":
            if self._described.junior is None:
                raise EngineError("this engine has no junior")
            return self._described.junior
        self._wait_for(lambda: self._checksums[self._version] is not None)
        checksum = self._checksums[self._version]
        assert checksum is not None
        return checksum

    def at_step(self, step: int) -> "FleetEngine":
        """This fleet with the weights of now, for the rollouts of a step, whatever weights come afterwards.

        Once its ``generate`` has ``begun``, the workers can get those weights until it has all that it asks for.
        """
        view = copy.copy(self)  # all but these values is the fleet's
        view._step, view.begun = step, threading.Event()
        return view

    def counts(self) -> dict[str, float]:
        """What the fleet did since its start: ``redone`` units, ``restarts`` of workers, ``idle_s`` of ``worker_s``,
        and how many ``units`` and ``loads`` workers have done, in ``unit_s`` and ``load_s`` seconds."""
        d = self._dispatcher
        counted = {"redone": d.redone, "restarts": d.restarts, "idle_s": d.idle_s, "worker_s": d.worker_s}
        for name, state in (("unit", "generating"), ("load", "loading")):
            counted |= {f"{name}s": d.done.get(state, 0), f"{name}_s": d.done_s.get(state, 0.0)}
        return {name: float(value) for name, value in counted.items()}

    def close(self) -> None:
        self._events.put(None)
        self._thread.join()
        self._workers.close()

    def _wait_for(self, holds: Callable[[], bool]) -> None:
        """Wait until the thread of the fleet has made something true.

        Raises:
            EngineError: the fleet has failed.
        """
        with self._changed:
            while not holds():
                if self._failures:
                    raise EngineError(self._failures[0])
                self._changed.wait(TICK_S)
                stamp()

    # ------------------------------------------------------------------------------------------ the thread of the fleet

    def _run(self) -> None:
        try:
            while (event := self._event()) is not None:
                self._take(event)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
            raise

    def _event(self) -> Event | _Abort | None:
        try:
            return self._events.get(timeout=TICK_S)
        except Empty:
            return Tick()

    def _take(self, event: Event | _Abort) -> None:
        if isinstance(event, _Abort):
            for number, worker in self._dispatcher.workers.items():
                if worker.state == "generating":
                    self._workers.abort(number, event.keys)
            return
        if isinstance(event, Joined):
            self._joined(event)
        try:
            actions = self._dispatcher.handle(event, time.monotonic())
        except DispatchError as error:
            assert isinstance(event, Submitted)
            self._calls[event.batch].arrived.put(EngineError(str(error)))
            return
        for action in actions:
            self._carry_out(action)
        with self._changed:
            if self._checksums.get(self._version, 0) is None:
                self._checksums[self._version] = self._dispatcher.checksums.get(self._version)
            self._changed.notify_all()

    def _joined(self, event: Joined) -> None:
        if self._described is None:
            self._described = event.described
        if event.described != self._described:
            self._fail(f"the engine of a worker is another one: {event.described}, not {self._described}")

    def _carry_out(self, action: Any) -> None:
        match action:
            case Start(number):
                self._workers.start(number)
            case Load(number, version):
                self._workers.load(number, version)
            case Assign(number, unit, attempt):
                self._assign(number, unit, attempt)
            case Fence(number):
                self._workers.end(number)
            case Deliver(unit, answer) if unit.batch in self._calls:
                self._calls[unit.batch].arrived.put(answer)
            case Retire(version):
                self._workers.drop(version)
            case Fail(why):
                self._fail(f"the rollout workers do not last: {why}")

    def _assign(self, number: int, unit: Unit, attempt: int) -> None:
        call = self._calls.get(unit.batch)
        requests = [] if call is None else _without(call.units[unit.index], self._aborts)
        if call is not None and requests:
            self._workers.generate(number, unit, attempt, requests, call.turns)
        else:  # nobody waits for it any more
            version = self._dispatcher.workers[number].version
            assert version is not None
            checksum, nothing = self._dispatcher.checksums[version], UnitAnswer([], Passes())
            self._events.put(Answered(number, unit, attempt, version, checksum or 0, nothing))

    def _fail(self, why: str) -> None:
        with self._changed:
            self._failures.append(why)
            self._changed.notify_all()


def _without(requests: Sequence[Request], aborts: Aborts) -> list[Request]:
    """The requests without the keys that were aborted before they were begun."""
    if not aborts:
        return list(requests)
    kept = [replace(request, keys=tuple(key for key in request.keys if key not in aborts)) for request in requests]
    return [request for request in kept if request.keys]


def _with_aborted(
    requests: Sequence[Request], completions: Sequence[Sequence[Completion]], responder: Responder | None
) -> list[list[Completion]]:
    """The completions of a unit, with empty ones for the keys that ``_without`` left out."""
    if [len(group) for group in completions] == [len(request.keys) for request in requests]:
        return list(map(list, completions))
    by_key = {completion.key: completion for group in completions for completion in group}
    said = None if responder is None else responder.transcript(-1)  # of an episode that never began
    nothing = Completion(0, np.zeros(0, np.int64), np.zeros(0, np.int8), np.zeros(0, np.float32), "abort", 0, said)
    return [[by_key.get(key) or replace(nothing, key=key) for key in request.keys] for request in requests]
