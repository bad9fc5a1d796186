"""Workers in this process, to test a ``FleetEngine`` without Ray, and with faults that come on cue; their engine, and
what it is asked."""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from threading import Event
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor

from helpers import flat, prepared, prompts, qwen3, requests, small_qwen3, strategies, tokenizer
from tandemrl.rollout.engine import EngineDeadError, EngineError, Request, Sampling
from tandemrl.rollout.envs.episodes import EpisodeRunner
from tandemrl.rollout.fleet.ray_workers import Described, Generated, RayWorkers, Weights, WorkerEngine
from tandemrl.rollout.torch_engine import TorchEngine


@cache
def models() -> tuple[Any, Any]:
    """Made once, since random models come from torch's one generator, and workers start in threads."""
    return prepared(qwen3()), prepared(small_qwen3())


def make() -> TorchEngine:
    return TorchEngine(*copy.deepcopy(models()), tokenizer())


@torch.no_grad()
def learnt(model: Any) -> Any:
    """The model with other weights."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(1.1)
    return other


def asked(count: int = 5, max_tokens: int = 12) -> list[Request]:
    """Requests of two keys: with units of two, the last of five has one."""
    return requests(prompts(count), Sampling(max_tokens=max_tokens), strategies()["word"], samples=2)


def bits(written: list[list[Any]]) -> list[Any]:
    fields = ("key", "stop_reason", "transcript", "policy_version")
    channels = ("tokens", "author", "behaviour_logprobs")
    return [
        [*(getattr(c, name).tolist() for name in channels), *(getattr(c, name) for name in fields)]
        for c in flat(written)
    ]


class LocalWorkers(RayWorkers):
    """``faults``: by the number of a worker, what happens: "does not start"; at its first unit "dies", "dies later"
    (when ``go_on`` is set) or "its engine dies"; or "is stale": it does not load the next weights, or "always stale".
    ``acting``: makes what the authors of a worker take turns with."""

    def __init__(
        self,
        make: Callable[[], TorchEngine],
        faults: dict[int, str] | None = None,
        acting: Callable[[], EpisodeRunner] | None = None,
        size: int = 1,
    ) -> None:
        self.make, self.faults, self.acting, self.size = make, faults or {}, acting, size
        self.workers: dict[int, WorkerEngine] = {}
        self.done: list[int] = []
        self.restarted: list[int] = []
        self.go_on = Event()

    def start(self) -> list[tuple[Described, str]]:
        if "does not start" in self.faults.values():
            raise EngineError("out of memory")
        for number in range(self.size):
            self.new(number)
        return [(worker.described, worker.process) for worker in self.workers.values()]

    def new(self, number: int) -> None:
        self.workers[number] = WorkerEngine(self.make(), None if self.acting is None else self.acting())

    def ask(self, number: int, weights: Weights, requests: Sequence[Request], turns: bool) -> Generated:
        worker, version, fault = self.workers[number], weights.version, self.faults.get(number, "")
        if "stale" not in fault:
            self.faults.pop(number, None)
        elif version >= 0:
            version = worker._version
            if fault == "is stale":
                del self.faults[number]
        if fault == "dies later":
            assert self.go_on.wait(60)
        if fault in ("dies", "dies later"):
            raise EngineDeadError("killed")
        if fault == "its engine dies":
            worker.engine.generate = Mock(side_effect=EngineDeadError("the vLLM engine died"))  # type: ignore[method-assign]
        told = worker.generate(version, weights.stored or (), requests, turns)
        self.done.append(number)
        return told

    def restart(self, number: int) -> None:
        self.restarted.append(number)
        self.new(number)

    def put(self, weights: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        return [(name, tensor.clone()) for name, tensor in weights]

    def end(self) -> None: ...

    def close(self) -> None: ...
