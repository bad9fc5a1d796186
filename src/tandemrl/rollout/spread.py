"""One engine per process, used as if they were one: requests are dealt out, completions are gathered.

Every process calls with the same requests and gets all completions. A completion is a function of its key and the
weights, so it does not matter which process wrote it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

from torch import Tensor

from tandemrl.distributed.world import World
from tandemrl.rollout.engine import Completion, Engine, EngineInfo, Passes, Request, Responder


class SpreadEngine:
    """An ``Engine`` over the engines of all processes, which must all make the same calls.

    ``generate`` may run in a thread beside the collectives of the trainer, since it uses a process group of its own.
    """

    def __init__(self, own: Engine, world: World) -> None:
        self.own, self.world = own, world
        self.vocabulary, self.has_junior = own.vocabulary, own.has_junior
        self.policy_version = own.policy_version
        self.passes = Passes()
        self._group = world.new_cpu_group()

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
        """As ``Engine.generate``. Each process runs its own share of the episodes with its own ``responder``."""
        about_all = None if progress is None else lambda tokens: progress(tokens * self.world.size)
        generate = partial(self.own.generate, progress=about_all)
        if responder is not None:
            generate = partial(generate, responder=responder)
        passes = Passes()  # where there are fewer requests than processes, the engine is not asked

        def counted(share: Sequence[Request]) -> list[list[Completion]]:
            nonlocal passes
            completions = generate(share)
            passes = self.own.passes
            return completions

        completions = self.world.scatter_gather(requests, counted, self._group)
        self.passes = sum(self.world.gather(passes, self._group), Passes())
        return completions

    def abort(self, keys: Iterable[int] | None = None) -> None:
        self.own.abort(keys)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.own.load_weights(weights, version)
        self.policy_version = self.own.policy_version

    def close(self) -> None:
        self.own.close()

    def fingerprint(self, who: Literal["senior", "junior"] = "senior") -> int:
        return self.own.fingerprint(who)
