"""One engine and one scorer per process, used as if they were one: work is dealt out, results are gathered.

Every process calls with the same requests and gets all of the answers. A completion is a function of its key and the
weights, so it does not matter who wrote it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from torch import Tensor

from tandemrl.config import RewardConfig
from tandemrl.data.rows import Row
from tandemrl.parallel import World, merge, share
from tandemrl.rollout.engine import Completion, Engine, EngineInfo, Request
from tandemrl.rollout.envs.protocol import Score
from tandemrl.rollout.envs.rubric import JudgePool
from tandemrl.rollout.envs.scoring import Scorer


class SpreadEngine:
    """An ``Engine`` over the engines of all processes; all of them must make the same calls. ``generate`` may run in a
    thread beside the collectives of the trainer: its own travel in a group of their own."""

    def __init__(self, own: Engine, world: World) -> None:
        self.own, self.world = own, world
        self.vocabulary, self.has_junior = own.vocabulary, own.has_junior
        self.policy_version = own.policy_version
        self._group = world.another_group()

    @property
    def info(self) -> EngineInfo:
        return self.own.info

    def generate(
        self, requests: Sequence[Request], *, progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        everybody = None if progress is None else lambda tokens: progress(tokens * self.world.size)  # about
        mine = share(requests, self.world)
        return merge(self.world.gather(self.own.generate(mine, progress=everybody) if mine else [], self._group))

    def abort(self, keys: Iterable[int] | None = None) -> None:
        self.own.abort(keys)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.own.load_weights(weights, version)
        self.policy_version = self.own.policy_version

    def fingerprint(self, who: Literal["senior", "junior"] = "senior") -> int:
        return self.own.fingerprint(who)


class SpreadScorer(Scorer):
    """A ``Scorer`` over the scorers of all processes; all of them must make the same calls. What the judges failed to
    score is counted over the whole batch."""

    def __init__(self, world: World, reward: RewardConfig, *, judge: JudgePool | None = None, **options: Any) -> None:
        super().__init__(reward, judge=None if judge is None else judge.score_part, **options)
        self._world, self._judges = world, judge

    def score(self, items: Sequence[tuple[Row, str]]) -> list[Score]:
        scores = merge(self._world.gather(super().score(share(items, self._world))))
        if self._judges is not None:
            self._judges.check(scores)
        return scores
