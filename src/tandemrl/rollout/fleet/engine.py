"""An ``Engine`` over the engines of several workers.

A call is split into *units*: fixed sets of keys that are always decoded together, so that a unit has the same bits
whichever worker generates it, however often. Each is asked for with a reference to its weights and their version, and
each answer says which version and checksum the worker has. Where the workers are, and who restarts them, is the
business of ``ray_workers``.
"""

import copy
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from tandemrl.processes.world import World
from tandemrl.rollout.engine import (
    Completion,
    EngineDeadError,
    EngineError,
    EngineInfo,
    OnProgress,
    Passes,
    Request,
    Responder,
    check_request,
)
from tandemrl.rollout.envs.episodes import Episodes
from tandemrl.rollout.fleet.ray_workers import INITIAL, TRIES, Described, Generated, RayWorkers, Weights
from tandemrl.rollout.spread import units_of
from tandemrl.rollout.sync import fingerprint
from tandemrl.selection import Who

COUNTED = ("restarts", "busy_s", "units", "unit_s", "loads", "load_s")
BEAT_S = 10.0
"""How often rank 0 says that it still waits for workers, at the least."""


class FleetEngine:
    """The workers of a fleet as one engine. Several threads may call ``generate``; their units are served in order.

    The weights are sent once, into ``RayWorkers.put``. ``fingerprint`` is of what was sent, and nothing is accepted
    from a worker unless what it has loaded, read back, has the same fingerprint.

    Of several processes, rank 0 has the workers. All make the same calls, and get the same completions. While rank 0
    waits for workers, it tells the others so: no collective takes longer than ``parallel.timeout_s`` because a rollout
    does.

    Args:
        workers: None in all processes but rank 0.
        size: how many workers.
        unit_groups: how many requests are a unit.

    Raises:
        EngineError: a worker does not start, or has another engine.
    """

    def __init__(self, workers: RayWorkers | None, *, size: int, unit_groups: int, world: World | None = None) -> None:
        self._workers, self._size, self._unit_groups = workers, size, unit_groups
        self._world = world = world or World()
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="fleet")
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._free: SimpleQueue[int] = SimpleQueue()
        self._busy, self._processes = dict[int, float](), dict[int, str]()
        self._counted, self._base = dict.fromkeys(COUNTED, 0.0), 0
        self.passes = Passes()
        described = None
        if workers is not None:
            try:
                started = workers.start()
                described = self._described = started[0][0]
                for number, (each, process) in enumerate(started):
                    self._check_described(each)
                    self._processes[number] = process
                    self._free.put(number)
            except EngineError:
                self.close()
                raise
        d: Described = world.broadcast(described)
        self._described, self._begun, self._weights = d, time.monotonic(), Weights(INITIAL, None, d.senior)
        self.info: EngineInfo = d.info
        self.vocabulary, self.context, self.has_junior = d.vocabulary, d.context, d.has_junior
        self.policy_version = d.policy_version

    def generate(
        self, requests: Sequence[Request], *, progress: OnProgress | None = None, responder: Responder | None = None
    ) -> list[list[Completion]]:
        """As ``Engine.generate``. The ``responder`` of rank 0 hears what became of the turns in the workers."""

        given = requests, progress, responder
        if self._world.size == 1:
            completions, self.passes = self._generated(*given)
            return completions
        with ThreadPoolExecutor(1, thread_name_prefix="rollout") as thread:
            completions, self.passes = self.told(thread.submit(self._generated, *given) if self._world.main else None)
        return completions

    def told(self, running: Future[Any] | None) -> Any:
        """What comes of something that runs on rank 0, in all processes; the others have None.

        Raises:
            EngineError: it failed. On rank 0, whatever it failed with.
        """
        outcome, world = None, self._world
        while outcome is None:
            if running is not None and wait([running], min(BEAT_S, world.timeout_s / 4)).done:
                error = running.exception()
                outcome = (running.result(), "") if error is None else (None, f"rank 0: {error}")
            outcome = world.broadcast(outcome)
        if running is not None:
            return running.result()
        result, failed = outcome
        if failed:
            raise EngineError(failed)
        return result

    def _generated(
        self, requests: Sequence[Request], progress: OnProgress | None, responder: Responder | None
    ) -> tuple[list[list[Completion]], Passes]:
        if responder is not None and not (self._described.acts and isinstance(responder, Episodes)):
            raise EngineError(
                "the workers have no environment to take turns with; make their engine with `acting` (as train and "
                "eval do), or set rollout.workers=0"
            )
        for i, request in enumerate(requests):
            check_request(i, request, self)
        with self._lock:  # so that calls do not mix their units
            units = units_of(requests, self._unit_groups)
            asked = [self._threads.submit(self._ask, unit, responder is not None) for unit in units]
        completions, passes = list[list[Completion]](), Passes()
        try:
            for future in asked:
                answer = future.result()
                if answer.failure is not None:
                    raise answer.failure
                completions += answer.completions
                passes += answer.passes
                if isinstance(responder, Episodes):
                    responder.tally.update(answer.tally)
                if progress is not None:
                    progress(sum(int((c.author >= 0).sum()) for group in answer.completions for c in group))
        finally:
            for future in asked:
                future.cancel()
        return completions, passes

    def _ask(self, requests: Sequence[Request], turns: bool = False) -> Generated:
        """What the next free worker says, once it has the right weights."""
        number, weights, why = self._free.get(), self._weights, ""
        self._busy[number] = time.monotonic()
        assert self._workers is not None
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

    def abort(self) -> None:
        """End the workers. What is being generated fails, and the fleet is of no further use."""
        self._closed.set()
        if self._workers is not None:
            self._workers.end()

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
            for name, tensor in weights:  # each of which all processes gather
                tensor = tensor.detach().to(dtype)
                if self._workers is not None:
                    sent ^= fingerprint([(name, tensor)])  # the whole one is the xor of its parts
                    yield name, tensor

        stored = [*counted()] if self._workers is None else self._workers.put(counted())
        first = self._weights.version == INITIAL
        self._weights = Weights(version, stored, None)
        if self.info.adapters and first and self._workers is not None:  # what they have beside them, they alone know
            self._base = self._ask([]).fingerprint ^ sent
        self._weights, self.policy_version = Weights(version, stored, sent ^ self._base), version

    def fingerprint(self, who: Who = "senior") -> int:
        checksum = self._world.broadcast(self._weights.checksum if who == "senior" else self._described.junior)
        if checksum is None:
            raise EngineError("this engine has no junior")
        return int(checksum)

    def snapshot(self) -> "FleetEngine | None":
        """This fleet with the weights of now, whatever weights come afterwards: on rank 0, for it alone."""
        if self._workers is None:
            return None
        own = copy.copy(self)  # the weights are a reference; all else is the fleet's
        own._world = World()
        return own

    def counts(self) -> dict[str, float]:
        """What the fleet did since its start: ``restarts`` of workers, ``idle_s`` of ``worker_s``, and how many
        ``units`` and ``loads`` workers have done, in ``unit_s`` and ``load_s`` seconds. Only rank 0 knows; in the
        others all are 0."""
        with self._lock:
            now, counted = time.monotonic(), dict(self._counted)
            busy = counted.pop("busy_s") + sum(now - since for since in self._busy.values())
        total = 0.0 if self._workers is None else self._size * (now - self._begun)
        return counted | {"idle_s": total - busy, "worker_s": total}

    def close(self) -> None:
        self.abort()
        self._threads.shutdown(cancel_futures=True)
        if self._workers is not None:
            self._workers.close()
