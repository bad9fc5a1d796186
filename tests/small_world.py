"""Environments, tools and rewards for random models that write 72 letters. No torch: child processes import it."""

import time

from tandemrl.data.messages import Message, Transcript
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Score
from tandemrl.rollout.envs.environment import Answer, Environment, State


def add(a: int, b: int, row: Row, state: dict) -> str:
    """Adds two numbers.

    Args:
        a: a number
        b: another number
    """
    if a == 3:
        raise ValueError("no threes")
    state["sums"] = [*state.get("sums", ()), a + b]
    return f"{a + b} {row.ground_truth}"


CALLS = [
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 5, "b": 7}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 3}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": "one", "b": 3}}</tool_call>',
    '<tool_call>{"name": "sub", "arguments": {}}</tool_call>',
    "<tool_call>{",
]
"""Each is one token of ``helpers.agent_tokenizer``."""


def sums_for_letters(row: Row, text: str, transcript: Transcript) -> Score:
    """More for sums, less for letters: hardly two episodes have the same."""
    sums = len((transcript.state or {}).get("sums", ()))
    return Score(sums - len(text) / 100, {"acc": float(sums > 0), "f1": sums / 9}, None)


class Talk(Environment):
    """Answers every turn but the third with its length; tools make no difference. Remembers what it has seen."""

    index = ""

    def __init__(self) -> None:
        self.longest = 0

    def prepare(self) -> None:
        self.index = "loaded"

    def reply(self, row: Row, state: State, message: Message) -> Answer:
        self.longest = max(self.longest, len(message["content"]))
        heard = [*state.get("heard", ()), len(message["content"])]
        said = {"role": "user", "content": f"{heard[-1]} {row.ground_truth}"}
        return Answer([said], {"heard": heard}, over=len(heard) == 3, counts={"said": 1})

    def score(self, row: Row, transcript: Transcript) -> float:
        return sum(transcript.state["heard"]) % 5 / 5


class Deaf(Talk):
    """Never answers in time."""

    def reply(self, row: Row, state: State, message: Message) -> Answer:
        time.sleep(5)
        raise AssertionError("nobody waits for it")
