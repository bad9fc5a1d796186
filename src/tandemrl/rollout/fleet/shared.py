"""The fleet of rank 0 as the engine of several trainer processes."""

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple, cast

from torch import Tensor

from tandemrl.distributed.watchdog import stamp
from tandemrl.distributed.world import World
from tandemrl.rollout.engine import Completion, EngineError, EngineInfo, Passes, Request, Responder
from tandemrl.rollout.fleet.engine import COUNTED, FleetEngine
from tandemrl.selection import Who

BEAT_S = 10.0
"""How often rank 0 says that it still waits for workers, at the least."""


class _Answer(NamedTuple):
    completions: list[list[Completion]]
    passes: Passes
    policy_version: int
    """Of the fleet at the end."""


class _Turns:
    """Lets the calls of several threads take their turns in the same order in every process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._places = self._turn = 0

    def place(self) -> int:
        """The place of a call in that order."""
        with self._changed:
            self._places += 1
            return self._places - 1

    def wait_for(self, place: int) -> None:
        with self._changed:
            while self._turn != place:
                self._changed.wait(BEAT_S)
                stamp()

    def over(self) -> None:
        """The next call takes its turn."""
        with self._changed:
            self._turn += 1
            self._changed.notify_all()


class SharedFleet:
    """The fleet of rank 0. All processes make the same calls, and get the same completions.

    Weights are gathered by all of them, and sent by rank 0. While it waits for workers, it tells the others so: no
    collective takes longer than ``parallel.timeout_s`` because a rollout does. ``generate`` may run in several threads
    beside the collectives of the trainer, since it uses a process group of its own; what threads have asked for comes
    in the order in which they, or ``at_step`` for them, did.

    Args:
        own: the fleet of rank 0; None in the other processes.
    """

    def __init__(self, own: FleetEngine | None, world: World) -> None:
        self._own, self._world = own, world
        self._group, self._turns = world.new_cpu_group(), _Turns()
        self._place: int | None = None
        self._beat_s = min(BEAT_S, world.timeout_s / 4)
        self.passes, self.begun = Passes(), threading.Event()
        told = None if own is None else (own.info, own.vocabulary, own.context, own.has_junior, own.policy_version)
        self.info: EngineInfo
        self.info, self.vocabulary, self.context, self.has_junior, self.policy_version = world.broadcast(told)

    def generate(
        self,
        requests: Sequence[Request],
        *,
        progress: Callable[[int], None] | None = None,
        responder: Responder | None = None,
    ) -> list[list[Completion]]:
        """As ``Engine.generate``. The ``responder`` of rank 0 hears what became of the turns in the workers."""
        place, self._place = self._turns.place() if self._place is None else self._place, None
        if self._own is None:
            answer = self._heard(place)
        else:
            answer = self._generated(self._own, place, requests, progress, responder)
        if isinstance(answer, Exception):
            raise answer
        self.passes, self.policy_version = answer.passes, answer.policy_version
        return answer.completions

    def _generated(
        self,
        own: FleetEngine,
        place: int,
        requests: Sequence[Request],
        progress: Callable[[int], None] | None,
        responder: Responder | None,
    ) -> _Answer | Exception:
        """What the workers have generated, or why they cannot, once all processes know it."""
        with ThreadPoolExecutor(1, thread_name_prefix="rollout") as thread:
            running = thread.submit(own.generate, requests, progress=progress, responder=responder)
            self._turns.wait_for(place)
            try:
                while not wait([running], self._beat_s).done:
                    self._told(None)
                error = running.exception()
                if error is None:
                    return cast(_Answer, self._told(_Answer(running.result(), own.passes, own.policy_version)))
                self._told(EngineError(f"rank 0: {error}"))
                return error if isinstance(error, Exception) else EngineError(str(error))
            finally:
                self._turns.over()

    def give_up(self, error: BaseException) -> None:
        """Release the place of a view (``at_step``) that has failed before ``generate``, here or in another process."""
        place, self._place = self._place, None
        if place is None:
            return  # it had its turn
        self.begun.set()
        if self._own is None:
            self._heard(place)
            return
        self._turns.wait_for(place)
        try:
            self._told(EngineError(f"rank 0: {error}"))
        finally:
            self._turns.over()

    def _heard(self, place: int) -> _Answer | Exception:
        """What rank 0 has to say to a call of another process, at the turn of this call."""
        self._turns.wait_for(place)
        try:
            while (answer := self._told(None)) is None:
                pass
            return answer
        finally:
            self._turns.over()

    def _told(self, answer: _Answer | Exception | None) -> _Answer | Exception | None:
        """What rank 0 says; None = it still waits."""
        return cast(_Answer | Exception | None, self._world.broadcast(answer, self._group))

    def abort(self, keys: Iterable[int] | None = None) -> None:
        if self._own is not None:
            self._own.abort(keys)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self._own is not None:
            self._own.load_weights(weights, version)
        else:
            for _ in weights:  # each of which all processes gather
                pass
        self.policy_version = version

    def fingerprint(self, who: Who = "senior") -> int:
        return int(self._world.broadcast(None if self._own is None else self._own.fingerprint(who)))

    def at_step(self, step: int) -> "SharedFleet":
        """See ``FleetEngine``. The view has a place among the calls: let it ``generate`` once, or ``give_up``."""
        view = copy.copy(self)  # all but these values is the fleet's
        view._place = self._turns.place()
        if self._own is None:
            view.begun = threading.Event()
            view.begun.set()  # rank 0 sends no newer weights before
        else:
            view._own = self._own.at_step(step)
            view.begun = view._own.begun
        return view

    def counts(self) -> dict[str, float]:
        """See ``FleetEngine``. Only rank 0 knows; in the others all are 0."""
        return dict.fromkeys(COUNTED, 0.0) if self._own is None else self._own.counts()

    def close(self) -> None:
        if self._own is not None:
            self._own.close()


Fleet = FleetEngine | SharedFleet
"""Engines whose rollouts of several steps may be in progress at once, each with its own weights."""
