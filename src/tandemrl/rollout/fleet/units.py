"""What the engine of a worker generates of a unit, and the turns that its authors take with an environment."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tandemrl.rollout.engine import (
    Completion,
    Engine,
    EngineDeadError,
    EngineError,
    Passes,
    Reply,
    Request,
    Responder,
    Turn,
)
from tandemrl.rollout.envs.episodes import EpisodeRunner, Episodes, Tally
from tandemrl.rollout.fleet.events import INITIAL
from tandemrl.types import Transcript


class UnitAnswer(NamedTuple):
    """What an engine has generated of a unit, and what it cost."""

    completions: list[list[Completion]]
    passes: Passes
    tally: Tally = Tally()
    """Of the turns that were taken with an environment."""


class Generated(NamedTuple):
    """What a worker has generated of a unit, or why it cannot."""

    version: int
    fingerprint: int
    """Of the weights that it has."""
    answer: UnitAnswer | EngineError


class WorkerEngine:
    """The engine of a worker.

    Args:
        acting: what the authors take turns with; None = nothing.
    """

    def __init__(self, engine: Engine, acting: EpisodeRunner | None) -> None:
        self.engine, self.acting = engine, acting
        self._version, self._fingerprint = INITIAL, 0

    def load(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> int:
        """Load weights; ``INITIAL`` are those it has. Returns the fingerprint of the engine's, read back.

        Raises:
            EngineError: the weights do not fit, or are those that the engine no longer has.
        """
        if version != INITIAL:
            self.engine.load_weights(weights, version)
        elif self._version != INITIAL:
            raise EngineError("a worker does not go back to the weights that it started with")
        self._version, self._fingerprint = version, self.engine.fingerprint("senior")
        return self._fingerprint

    def generate(self, requests: Sequence[Request], turns: bool) -> Generated:
        """Generate a unit, taking ``turns`` or not. The episodes begin and end with the unit.

        Raises:
            EngineError: the engine's process has ended.
        """
        answer = self._answer(requests, self.acting.episodes() if turns and self.acting is not None else None)
        return Generated(self._version, self._fingerprint, answer)

    def _answer(self, requests: Sequence[Request], episodes: Episodes | None) -> UnitAnswer | EngineError:
        try:
            completions = self.engine.generate(requests, **turns_with(episodes))
        except EngineDeadError:
            raise  # so that the worker is lost, and another one generates the unit
        except EngineError as error:
            return error
        return UnitAnswer(completions, self.engine.passes, Tally() if episodes is None else episodes.tally)


def turns_with(responder: Responder | None, first: int = 0) -> dict[str, Any]:
    """The ``responder`` of a unit, as an argument of ``generate``: not every engine takes turns.

    Args:
        first: see ``Rounds``.
    """
    return {} if responder is None else {"responder": Rounds(responder, first)}


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
