"""A taskset on verifiers' own classes: the problems of the tiny pair, without tools."""

import verifiers.v1 as vf

from tandemrl.data.rows import Row
from tandemrl.tasks.generated.synthetic import generate


class Sum(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[Sum, vf.State]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content.rpartition("\\boxed{")[2].startswith(f"{self.data.answer}}}"))

    @vf.reward(weight=0.1)
    async def short(self, trace: vf.Trace) -> float:
        return 1 / (1 + len(trace.assistant_messages[-1].content))


class Sums(vf.Taskset[SumTask]):
    def load(self):
        rows: list[Row] = generate("plain", "train", 64, 0)
        return [SumTask(Sum(prompt=row.messages[-1]["content"], answer=row.ground_truth)) for row in rows]


__all__ = ["Sums"]
