"""What the engine of a worker generates of a unit, and the turns that its authors take with an environment."""

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tandemrl.rollout.engine import (
    Completion,
    Engine,
    EngineDeadError,
    EngineError,
    EngineInfo,
    Passes,
    Reply,
    Request,
    Responder,
    Turn,
)
from tandemrl.rollout.envs.episodes import EpisodeRunner
from tandemrl.types import Transcript

INITIAL = -1
"""The version of the weights that workers start with."""
TRIES = 4  # of a unit, before the fleet gives up


class Weights(NamedTuple):
    """Weights of the senior, which workers can load."""

    version: int
    stored: Any
    """What ``RayWorkers.put`` returned; None = those that workers start with."""
    checksum: int | None
    """None until a worker says it."""


class Described(NamedTuple):
    """What the engines of all workers have in common."""

    info: EngineInfo
    vocabulary: int
    context: int
    has_junior: bool
    policy_version: int
    """Of the weights that they start with."""
    senior: int
    """The fingerprint of these."""
    junior: int | None
    """That of the junior."""
    acts: bool
    """Whether the workers have an environment to take turns with."""


class Generated(NamedTuple):
    """What a worker has generated of a unit, or why it cannot, and what it cost."""

    version: int
    fingerprint: int
    """Of the weights that it has, read back."""
    described: Described
    process: str
    """Another one after each start of the worker."""
    load_s: float
    """What it took to load the weights; 0 if it had them."""
    unit_s: float
    completions: list[list[Completion]]
    passes: Passes
    tally: Mapping[str, int]
    """Of the turns that were taken with an environment."""
    failure: EngineError | None


class WorkerEngine:
    """The engine of a worker.

    Args:
        acting: what the authors take turns with; None = nothing.
    """

    def __init__(self, engine: Engine, acting: EpisodeRunner | None) -> None:
        self.engine, self.acting, self.process = engine, acting, uuid.uuid4().hex
        self._version, self._fingerprint = INITIAL, engine.fingerprint("senior")
        junior = engine.fingerprint("junior") if engine.has_junior else None
        told = (engine.info, engine.vocabulary, engine.context, engine.has_junior, engine.policy_version)
        self.described = Described(*told, self._fingerprint, junior, acts=acting is not None)

    def generate(
        self, version: int, weights: Iterable[tuple[str, Tensor]], requests: Sequence[Request], turns: bool
    ) -> Generated:
        """Generate a unit with the ``weights`` of this ``version``, which are loaded unless the engine has them.

        Args:
            turns: whether the authors take turns with the environment. Its episodes begin and end with the unit.

        Raises:
            EngineError: the weights do not fit, or the engine's process has ended.
        """
        begun = loaded = time.monotonic()
        if version != self._version:
            if version == INITIAL:
                raise EngineError("a worker does not go back to the weights that it started with")
            self.engine.load_weights(weights, version)
            self._version, self._fingerprint = version, self.engine.fingerprint("senior")
            loaded = time.monotonic()
        episodes = self.acting.episodes() if turns and self.acting is not None else None
        responder: dict[str, Any] = {} if episodes is None else {"responder": Rounds(episodes)}  # not all take turns
        completions, passes, failure = list[list[Completion]](), Passes(), None
        try:
            if requests:
                completions = self.engine.generate(requests, **responder)
                passes = self.engine.passes
        except EngineDeadError:
            raise  # so that the worker is lost, and another one generates the unit
        except EngineError as error:
            failure = error
        seconds, tally = (loaded - begun, time.monotonic() - loaded), {} if episodes is None else episodes.tally
        told = self._version, self._fingerprint, self.described, self.process, *seconds
        return Generated(*told, completions, passes, tally, failure)


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
