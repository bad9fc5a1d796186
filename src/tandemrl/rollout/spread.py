"""One engine per process, used as if they were one: requests are dealt out, completions are gathered.

Every process calls with the same requests and gets all completions. A completion is a function of its key and the
weights, so it does not matter which process wrote it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from tandemrl.processes.world import World
from tandemrl.rollout.engine import Completion, Engine, EngineInfo, OnProgress, Passes, Reply, Request, Responder, Turn
from tandemrl.selection import Who
from tandemrl.types import Transcript


def units_of(requests: Sequence[Request], size: int | None) -> list[list[Request]]:
    """The requests in units of ``size`` requests; the last one may have fewer."""
    size = size or max(1, len(requests))
    return [list(requests[i : i + size]) for i in range(0, len(requests), size)]


class SpreadEngine:
    """An ``Engine`` over the engines of all processes, which must all make the same calls.

    ``generate`` may run in a thread beside the collectives of the trainer, since it uses a process group of its own.

    Args:
        own: that of this process.
        unit_groups: how many requests are decoded together, as a fleet does it; None = all.
    """

    def __init__(self, own: Engine, world: World | None = None, unit_groups: int | None = None) -> None:
        self.own, self._world, self._unit_groups = own, world or World(), unit_groups
        self._group, self.passes = self._world.new_cpu_group(), Passes()
        self.context, self.vocabulary, self.has_junior = own.context, own.vocabulary, own.has_junior
        self.info: EngineInfo = own.info
        self.policy_version = own.policy_version

    def generate(
        self, requests: Sequence[Request], *, progress: OnProgress | None = None, responder: Responder | None = None
    ) -> list[list[Completion]]:
        """As ``Engine.generate``. Each process runs its own share of the episodes with its own ``responder``."""
        passes, size = Passes(), self._world.size
        about_all = None if progress is None else lambda tokens: progress(tokens * size)

        def counted(share: Sequence[Request]) -> list[list[Completion]]:
            nonlocal passes
            completions, begun = list[list[Completion]](), 0
            for unit in units_of(share, self._unit_groups):
                turns: dict[str, Any] = {} if responder is None else {"responder": responder}
                if responder is not None and self._unit_groups is not None:
                    turns["responder"] = Rounds(responder, begun)
                completions += self.own.generate(unit, progress=about_all, **turns)
                passes += self.own.passes
                begun += sum(len(request.keys) for request in unit)
            return completions

        completions = self._world.scatter_gather(requests, counted, self._group)
        self.passes = sum(self._world.gather(passes, self._group), Passes())
        return completions

    def abort(self) -> None:
        self.own.abort()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.own.load_weights(weights, version)
        self.policy_version = self.own.policy_version

    def fingerprint(self, who: Who = "senior") -> int:
        return self.own.fingerprint(who)

    def close(self) -> None:
        self.own.close()


class Rounds:
    """The ``Responder`` of a unit, whose answers come in rounds: when no row can go on without one, all come at once.

    What is decoded together then depends on the unit alone, and not on which tool was faster. So a unit has the same
    bits wherever and whenever it is decoded. The price is that rows wait for the slowest tool of a round.

    Args:
        responder: answers the turns.
        first: by how much its numbers of completions are greater than those of the unit.
    """

    def __init__(self, responder: Responder, first: int = 0) -> None:
        self._responder, self._first = responder, first
        self._awaited = set[int]()
        self._answered: dict[int, Reply] = {}

    def submit(self, turn: Turn) -> None:
        """See `Responder`."""
        self._awaited.add(turn.number)
        self._responder.submit(turn._replace(number=turn.number + self._first))

    def replies(self, *, wait: bool) -> list[Reply]:
        """See `Responder`. Without ``wait`` there are none, but time-outs of tools are noticed."""
        self._take(wait=False)
        if not wait:
            return []
        while self._awaited:
            self._take(wait=True)
        ready, self._answered = [self._answered[number] for number in sorted(self._answered)], {}
        return ready

    def transcript(self, number: int) -> Transcript:
        """See `Responder`."""
        return self._responder.transcript(number + self._first)

    def _take(self, *, wait: bool) -> None:
        for reply in self._responder.replies(wait=wait):
            number = reply.number - self._first
            if number in self._awaited:  # else it is to a row of an earlier unit that was aborted
                self._awaited.remove(number)
                self._answered[number] = reply._replace(number=number)
