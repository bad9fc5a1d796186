"""One engine per process, used as if they were one: requests are dealt out, completions are gathered.

Every process calls with the same requests and gets all completions. A completion is a function of its key and the
weights, so it does not matter which process wrote it.
"""

from collections.abc import Callable, Sequence
from functools import partial

from tandemrl.processes.world import World
from tandemrl.rollout.engine import Completion, Engine, EngineAround, Passes, Request, Responder


class SpreadEngine(EngineAround):
    """An ``Engine`` over the engines of all processes, which must all make the same calls.

    ``generate`` may run in a thread beside the collectives of the trainer, since it uses a process group of its own.
    """

    def __init__(self, own: Engine, world: World) -> None:
        super().__init__(own)
        self.world, self._group = world, world.new_cpu_group()

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
