"""One scorer per process, used as if they were one: responses are dealt out, scores are gathered."""

from collections.abc import Hashable, Sequence
from itertools import chain
from typing import Any

from tandemrl.config import RewardConfig
from tandemrl.processes.world import World
from tandemrl.rewards.protocol import Item, Judges, TrainerState
from tandemrl.rewards.scoring import Graded, Scorer


class SpreadScorer(Scorer):
    """A ``Scorer`` over the scorers of all processes, which must all make the same calls.

    Whether too many responses are unscored, or all were lost, is decided over the whole batch. Responses that a
    function gets together stay in one process.
    """

    def __init__(self, world: World, reward: RewardConfig, *, judge: Judges | None = None, **options: Any) -> None:
        super().__init__(reward, judge=None if judge is None else judge.score_part, **options)
        self._world, self._judges = world, judge

    def _graded(self, items: Sequence[Item], groups: Sequence[Hashable], state: TrainerState | None) -> list[Graded]:
        units: dict[Hashable, list[int]] = {}
        for i, (item, group) in enumerate(zip(items, groups, strict=True)):
            units.setdefault((True, group) if self.grouped(item.row) else (False, i), []).append(i)

        def compute(dealt: Sequence[list[int]]) -> list[list[Graded]]:
            places = [*chain(*dealt)]
            own = iter(self.score_part([items[i] for i in places], [groups[i] for i in places], state))
            return [[next(own) for _ in unit] for unit in dealt]

        scored = self._world.scatter_gather([*units.values()], compute)
        by_place = dict(zip(chain(*units.values()), chain(*scored), strict=True))
        graded = [by_place[i] for i in range(len(items))]
        if self._judges is not None:
            self._judges.check([each.score for each in graded])
        return graded
