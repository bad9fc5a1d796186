"""Workers in threads of this process, to test a ``FleetEngine`` without Ray, and with faults that come on cue."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from unittest.mock import Mock

from torch import Tensor

from tandemrl.rollout.engine import EngineDeadError, EngineError, Request
from tandemrl.rollout.envs.episodes import EpisodeRunner
from tandemrl.rollout.fleet import events
from tandemrl.rollout.fleet.engine import Described
from tandemrl.rollout.fleet.events import INITIAL, Answered, Joined, Loaded, Lost, Unit
from tandemrl.rollout.fleet.units import WorkerEngine
from tandemrl.rollout.torch_engine import TorchEngine


class LocalWorkers:
    """``faults``: by the number of a worker, what happens: "does not start"; at its first unit "dies", "dies later"
    (when ``go_on`` is set), "its engine dies" or "keeps silent"; or "is stale": it never loads weights. ``acting``:
    makes what the authors of a worker take turns with."""

    def __init__(
        self,
        make: Callable[[], TorchEngine],
        faults: dict[int, str] | None = None,
        acting: Callable[[], EpisodeRunner] | None = None,
    ) -> None:
        self.make, self.faults, self.acting = make, faults or {}, acting
        self.runners: dict[int, EpisodeRunner] = {}
        self.engines: dict[int, TorchEngine] = {}
        self.workers: dict[int, WorkerEngine] = {}
        self.threads: dict[int, ThreadPoolExecutor] = {}
        self.kept: dict[int, list[tuple[str, Tensor]]] = {}
        self.done: list[tuple[int, Unit]] = []
        self.ended: list[int] = []
        self.go_on = Event()

    def begin(self, tell: Callable[[events.Event], None]) -> None:
        self.tell = tell

    def start(self, number: int) -> None:
        self.threads[number] = ThreadPoolExecutor(1)

        def start() -> None:
            if self.faults.get(number) == "does not start":
                self.tell(Lost(number, "out of memory"))
                return
            engine = self.engines[number] = self.make()
            if self.acting is not None:
                self.runners[number] = self.acting()
            self.workers[number] = WorkerEngine(engine, self.runners.get(number))
            told = (engine.info, engine.vocabulary, engine.context, engine.has_junior, engine.policy_version)
            junior, acts = engine.fingerprint("junior"), self.acting is not None
            self.tell(Joined(number, Described(*told, junior, acts)))

        self.threads[number].submit(start)

    def load(self, number: int, version: int) -> None:
        def load() -> None:
            if version != INITIAL and self.faults.get(number) == "is stale":
                self.tell(Loaded(number, version, self.engines[number].fingerprint()))
            else:
                self.tell(Loaded(number, version, self.workers[number].load(version, self.kept.get(version, ()))))

        self.threads[number].submit(load)

    def generate(self, number: int, unit: Unit, attempt: int, requests: Sequence[Request], turns: bool) -> None:
        def generate() -> None:
            fault = self.faults.pop(number, None)
            if fault == "dies later":
                assert self.go_on.wait(60)
            if fault in ("dies", "dies later"):
                self.tell(Lost(number, "killed"))
            elif fault != "keeps silent":
                if fault == "its engine dies":
                    self.engines[number].generate = Mock(side_effect=EngineDeadError("the vLLM engine died"))
                try:
                    version, checksum, answer = self.workers[number].generate(requests, turns)
                except EngineError as error:  # as it comes from a call of an actor
                    self.tell(Lost(number, str(error)))
                    return
                self.done.append((number, unit))
                self.tell(Answered(number, unit, attempt, version, checksum, answer))

        self.threads[number].submit(generate)

    def abort(self, number: int, keys: Iterable[int] | None) -> None:
        self.engines[number].abort(keys)

    def end(self, number: int) -> None:
        self.ended.append(number)

    def put(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.kept[version] = [(name, tensor.clone()) for name, tensor in weights]

    def drop(self, version: int) -> None:
        self.kept.pop(version, None)

    def close(self) -> None:
        for thread in self.threads.values():
            thread.shutdown()
