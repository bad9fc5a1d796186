"""The fleet of rank 0 as the engine of several trainer processes."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from torch import Tensor

from tandemrl.processes.world import World
from tandemrl.rollout.engine import Completion, EngineError, EngineInfo, Passes, Request, Responder
from tandemrl.rollout.fleet.engine import COUNTED, FleetEngine
from tandemrl.selection import Who

BEAT_S = 10.0
"""How often rank 0 says that it still waits for workers, at the least."""


class SharedFleet:
    """The fleet of rank 0. All processes make the same calls, and get the same completions.

    Weights are gathered by all of them, and sent by rank 0. While it waits for workers, it tells the others so: no
    collective takes longer than ``parallel.timeout_s`` because a rollout does.

    Args:
        own: the fleet of rank 0; None in the other processes.
    """

    def __init__(self, own: FleetEngine | None, world: World) -> None:
        self.own, self._world = own, world
        self._beat_s = min(BEAT_S, world.timeout_s / 4)
        self.passes = Passes()
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

        def generated(own: FleetEngine) -> tuple[list[list[Completion]], Passes]:
            return own.generate(requests, progress=progress, responder=responder), own.passes

        with ThreadPoolExecutor(1, thread_name_prefix="rollout") as thread:
            completions, self.passes = self.told(None if self.own is None else thread.submit(generated, self.own))
        return completions

    def told(self, running: Future[Any] | None) -> Any:
        """What comes of something that runs on rank 0, in all processes; the others have None.

        Raises:
            EngineError: it failed. On rank 0, whatever it failed with.
        """
        outcome = None
        while outcome is None:
            if running is not None and wait([running], self._beat_s).done:
                error = running.exception()
                outcome = (running.result(), "") if error is None else (None, f"rank 0: {error}")
            outcome = self._world.broadcast(outcome)
        if running is not None:
            return running.result()
        result, failed = outcome
        if failed:
            raise EngineError(failed)
        return result

    def abort(self, keys: Iterable[int] | None = None) -> None:
        if self.own is not None:
            self.own.abort(keys)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self.own is not None:
            self.own.load_weights(weights, version)
        else:
            for _ in weights:  # each of which all processes gather
                pass
        self.policy_version = version

    def fingerprint(self, who: Who = "senior") -> int:
        return int(self._world.broadcast(None if self.own is None else self.own.fingerprint(who)))

    def counts(self) -> dict[str, float]:
        """See ``FleetEngine``. Only rank 0 knows; in the others all are 0."""
        return dict.fromkeys(COUNTED, 0.0) if self.own is None else self.own.counts()

    def close(self) -> None:
        if self.own is not None:
            self.own.close()


Fleet = FleetEngine | SharedFleet
"""Engines whose rollouts of several steps may be in progress at once, each with its own weights."""
