"""An ``Engine`` over the engines of several workers, and one that decodes in the same units without any.

A call is split into *units*: fixed sets of keys that are always decoded together, so that a unit has the same bits
whichever worker generates it, however often. Each is asked for with a reference to its weights and their version, and
each answer says which version and checksum the worker has. Where the workers are, and who restarts them, is the
business of the ``Workers`` (``ray_workers``).
"""

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from tandemrl.processes.watchdog import stamp
from tandemrl.rollout.control import Aborts
from tandemrl.rollout.engine import (
    Completion,
    Engine,
    EngineAround,
    EngineDeadError,
    EngineError,
    EngineInfo,
    Passes,
    Request,
    Responder,
    check_request,
)
from tandemrl.rollout.envs.episodes import Episodes
from tandemrl.rollout.fleet.units import INITIAL, Described, Generated, UnitAnswer, turns_with
from tandemrl.rollout.sync import fingerprint
from tandemrl.selection import Who

TRIES = 4  # of a unit, before the fleet gives up
COUNTED = ("restarts", "idle_s", "worker_s", "units", "unit_s", "loads", "load_s")
"""What ``FleetEngine.counts`` has."""


class Weights(NamedTuple):
    """Weights of the senior, which workers can load."""

    version: int
    stored: Any
    """What ``Workers.put`` returned; None = those that workers start with."""
    checksum: int | None
    """None until a worker says it."""


@runtime_checkable
class Workers(Protocol):
    """Processes that each hold an engine, by number."""

    def start(self) -> list[tuple[Described, str]]:
        """Start all of them. Returns ``described`` and ``process`` of their ``units.WorkerEngine``.

        Raises:
            EngineError: one does not start.
        """
        ...

    def ask(self, number: int, weights: Weights, requests: Sequence[Request], turns: bool) -> Generated:
        """What ``units.WorkerEngine.generate`` of a worker returns.

        Raises:
            EngineDeadError: the worker fails; after a restart it may be asked again.
            EngineError: it is silent, however often it is restarted.
        """
        ...

    def restart(self, number: int) -> None: ...

    def abort(self, keys: Iterable[int] | None) -> None: ...

    def put(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        """Keep weights for all workers, as long as there is a reference to what this returns."""
        ...

    def end(self) -> None:
        """End all workers. What is still asked for fails."""
        ...

    def close(self) -> None: ...


def units_of(requests: Sequence[Request], size: int) -> list[list[Request]]:
    """The requests in units of ``size`` requests; the last one may have fewer."""
    return [list(requests[i : i + size]) for i in range(0, len(requests), size)]


class UnitEngine(EngineAround):
    """An engine that decodes each unit by itself: what a fleet generates, in this process."""

    def __init__(self, own: Engine, size: int) -> None:
        super().__init__(own)
        self.size, self._aborts = size, Aborts()

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
        super().abort(keys)


class FleetEngine:
    """The workers of a fleet as one engine. Several threads may call ``generate``; their units are served in order.

    The weights are sent once, into ``Workers.put``. ``fingerprint`` is of what was sent, and nothing is accepted from a
    worker unless what it has loaded, read back, has the same fingerprint.

    Args:
        size: how many workers.
        unit_groups: how many requests are a unit.

    Raises:
        EngineError: a worker does not start, or has another engine.
    """

    def __init__(self, workers: Workers, *, size: int, unit_groups: int) -> None:
        self._workers, self._size, self._unit_groups = workers, size, unit_groups
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="fleet")
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._calls, self._aborts, self._base = set[object](), Aborts(), 0
        self._free: SimpleQueue[int] = SimpleQueue()
        self._busy, self._processes = dict[int, float](), dict[int, str]()
        self._counted = dict.fromkeys((*COUNTED, "busy_s"), 0.0)
        self.passes = Passes()
        try:
            started = workers.start()
            self._described = started[0][0]
            for number, (described, process) in enumerate(started):
                self._check_described(described)
                self._processes[number] = process
                self._free.put(number)
        except EngineError:
            self.close()
            raise
        self._begun = time.monotonic()
        d = self._described
        self.info: EngineInfo = d.info
        self.vocabulary: int = d.vocabulary
        self.context: int = d.context
        self.has_junior: bool = d.has_junior
        self.policy_version: int = d.policy_version
        self._weights = Weights(INITIAL, None, d.senior)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        progress: Callable[[int], None] | None = None,
        responder: Responder | None = None,
    ) -> list[list[Completion]]:
        if responder is not None and not (self._described.acts and isinstance(responder, Episodes)):
            raise EngineError(
                "the workers have no environment to take turns with; make their engine with `acting` (as train and "
                "eval do), or set rollout.workers=0"
            )
        for i, request in enumerate(requests):
            check_request(i, request, self)
        units, call = units_of(requests, self._unit_groups), object()
        with self._lock:  # so that calls do not mix their units
            if not self._calls:
                self._aborts.clear()
            self._calls.add(call)
            asked = [self._threads.submit(self._unit, unit, responder is not None) for unit in units]
        completions, passes = list[list[Completion]](), Passes()
        try:
            for unit, future in zip(units, asked, strict=True):
                answer = future.result()
                completions += _with_aborted(unit, answer.completions, responder)
                passes += answer.passes
                if isinstance(responder, Episodes):
                    responder.count(answer.tally)
                stamp()
                if progress is not None:
                    progress(sum(int((c.author >= 0).sum()) for group in answer.completions for c in group))
        finally:
            for future in asked:
                future.cancel()
            self._calls.discard(call)
        self.passes = passes
        return completions

    def _unit(self, requests: Sequence[Request], turns: bool) -> UnitAnswer:
        """What a worker generates of a unit."""
        kept = _without(requests, self._aborts)
        answer = self._ask(kept, turns).answer if kept else UnitAnswer([], Passes())
        if isinstance(answer, EngineError):
            raise answer
        return answer

    def _ask(self, requests: Sequence[Request], turns: bool = False) -> Generated:
        """What the next free worker says, once it has the right weights."""
        number, weights, why = self._free.get(), self._weights, ""
        self._busy[number] = time.monotonic()
        try:
            for _ in range(TRIES):
                if self._closed.is_set():
                    raise EngineError("the fleet was closed")
                try:
                    told = self._workers.ask(number, weights, requests, turns)
                except EngineDeadError as error:
                    why = str(error)
                else:
                    self._check_described(told.described)
                    self._count(number, told)
                    if told.version == weights.version and weights.checksum in (None, told.fingerprint):
                        return told
                    why = f"weights {weights.version} did not reach it: it has {told.fingerprint:#x}"
                self._workers.restart(number)
            raise EngineError(f"the rollout workers do not last: {TRIES} tries of a unit failed; the last: {why}")
        finally:
            with self._lock:
                self._counted["busy_s"] += time.monotonic() - self._busy.pop(number)
            self._free.put(number)

    def _check_described(self, described: Described) -> None:
        if described != self._described:
            raise EngineError(f"the engine of a worker is another one: {described}, not {self._described}")

    def _count(self, number: int, told: Generated) -> None:
        with self._lock:
            restarts, self._processes[number] = told.process != self._processes[number], told.process
            new = {"restarts": restarts, "units": 1, "unit_s": told.unit_s}
            for name, value in (new | {"loads": told.load_s > 0, "load_s": told.load_s}).items():
                self._counted[name] += value

    def abort(self, keys: Iterable[int] | None = None) -> None:
        keys = None if keys is None else frozenset(keys)
        self._aborts.add(keys)
        self._workers.abort(keys)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send weights. Workers load them before their next unit.

        Raises:
            EngineError: the version is not newer than the one before.
        """
        if version <= self._weights.version:
            raise EngineError(
                f"the fleet has weights {self._weights.version}; newer ones need a greater number, not {version}"
            )
        sent, dtype = 0, getattr(torch, self.info.dtype)

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal sent
            for name, tensor in weights:
                tensor = tensor.detach().to(dtype)
                sent ^= fingerprint([(name, tensor)])  # the whole one is the xor of its parts
                yield name, tensor

        stored = self._workers.put(counted())
        first = self._weights.version == INITIAL
        self._weights = Weights(version, stored, None)
        if self.info.adapters and first:  # what the workers have beside them is known to them alone
            self._base = self._ask([]).fingerprint ^ sent
        self._weights = self._weights._replace(checksum=sent ^ self._base)
        self.policy_version = version

    def fingerprint(self, who: Who = "senior") -> int:
        checksum = self._weights.checksum if who == "senior" else self._described.junior
        if checksum is None:
            raise EngineError("this engine has no junior")
        return checksum

    def snapshot(self) -> "FleetEngine":
        """This fleet with the weights of now, whatever weights come afterwards."""
        return copy.copy(self)  # the weights are a reference; all else is the fleet's

    def counts(self) -> dict[str, float]:
        """What the fleet did since its start: ``restarts`` of workers, ``idle_s`` of ``worker_s``, and how many
        ``units`` and ``loads`` workers have done, in ``unit_s`` and ``load_s`` seconds."""
        with self._lock:
            now, counted = time.monotonic(), dict(self._counted)
            busy = counted.pop("busy_s") + sum(now - since for since in self._busy.values())
        total = self._size * (now - self._begun)
        return counted | {"idle_s": total - busy, "worker_s": total}

    def close(self) -> None:
        self._closed.set()
        self._workers.end()
        self._threads.shutdown(cancel_futures=True)
        self._workers.close()


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
