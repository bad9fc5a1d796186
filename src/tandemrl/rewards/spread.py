"""One scorer per process, used as if they were one: responses are dealt out, scores are gathered."""

from collections.abc import Sequence
from typing import Any

from tandemrl.config import RewardConfig
from tandemrl.data.messages import Transcript
from tandemrl.data.rows import Row
from tandemrl.distributed.world import World
from tandemrl.rewards.judge.rubric import JudgePool
from tandemrl.rewards.protocol import Score
from tandemrl.rewards.scoring import Scorer


class SpreadScorer(Scorer):
    """A ``Scorer`` over the scorers of all processes, which must all make the same calls.

    Whether too many responses are unscored, or all were lost, is decided over the whole batch.
    """

    def __init__(self, world: World, reward: RewardConfig, *, judge: JudgePool | None = None, **options: Any) -> None:
        super().__init__(reward, judge=None if judge is None else judge.score_part, **options)
        self._world, self._judges = world, judge

    def score(
        self, items: Sequence[tuple[Row, str]], transcripts: Sequence[Transcript | None] | None = None
    ) -> list[Score]:
        episodes = [None] * len(items) if transcripts is None else transcripts

        def share(dealt: Sequence[tuple[tuple[Row, str], Transcript | None]]) -> list[tuple[Score, bool]]:
            return self.score_part([item for item, _ in dealt], [transcript for _, transcript in dealt])

        scored = self._world.scatter_gather(list(zip(items, episodes, strict=True)), share)
        self.check_lost(sum(lost for _, lost in scored), len(scored))
        scores = [score for score, _ in scored]
        if self._judges is not None:
            self._judges.check(scores)
        return scores
