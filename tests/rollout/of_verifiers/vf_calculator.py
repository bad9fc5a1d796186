"""A taskset on verifiers' own classes whose problems need a tool: a calculator behind MCP."""

import verifiers.v1 as vf

from tandemrl.tasks.generated import calculator


class Sum(vf.TaskData):
    answer: str = ""


class Calculator(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    async def calculator(self, expression: str) -> str:
        """Work out an expression of whole numbers."""
        return calculator.calculator(expression)


class SumTask(vf.Task[Sum, vf.State]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content.rpartition("\\boxed{")[2].startswith(f"{self.data.answer}}}"))

    @vf.reward(weight=0.1)
    async def asked(self, trace: vf.Trace) -> float:
        return float(sum(message.role == "tool" for message in trace.messages))


class Sums(vf.Taskset[SumTask]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.SharedToolsetConfig())]

    def load(self):
        rows = calculator.generate("calculator", "train", 64, 0)
        return [SumTask(Sum(prompt=row.messages[-1]["content"], answer=row.ground_truth)) for row in rows]


__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
