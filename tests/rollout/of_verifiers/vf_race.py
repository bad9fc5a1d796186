"""A taskset whose environment compares the answers to a task: the shortest wins."""

import verifiers.v1 as vf
from vf_sums import Sum, SumTask
from vf_sums import Sums as OfSums


class RaceTask(SumTask):
    """Without rewards of its own."""

    def hooks(self, attr: str) -> list:
        return [] if attr == "reward" else super().hooks(attr)


class Race(vf.Taskset[RaceTask]):
    def load(self):
        return [RaceTask(Sum(**task.data.model_dump())) for task in OfSums.load(self)]


class Shortest(vf.SingleAgentEnv):
    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        assert len(episode.traces) > 1, "a list of one"
        lengths = [len(trace.last_reply) for trace in episode.traces]
        for trace, length in zip(episode.traces, lengths, strict=True):
            trace.record_reward("shortest", float(length == min(lengths)))


__all__ = ["Race", "Shortest"]
