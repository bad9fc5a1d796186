"""Environments with tools of every temper. No torch: processes import it."""

import json
import os
import time

from tandemrl.data.rows import Row
from tandemrl.rollout.envs.environment import Answer, Environment, Opening

DOCS = [
    {"id": "0", "title": "Ann", "body": "Ann was born in Paris.", "is_supporting": True},
    {"id": "1", "title": "Bob", "body": "Bob breeds running foxes.", "is_supporting": False},
    {"id": "2", "title": "Paris", "text": "The capital of France, on the Seine.", "is_supporting": True},
    {"id": "3", "title": "Lyon", "body": "The fox runs in Lyon: foxes, foxes.", "is_supporting": False},
]
"""Of a row that is searched."""


def row(name: str = "r", question: str = "?", **extra: object) -> Row:
    return Row(name, ({"role": "user", "content": question},), "qa", "", extra)


def call(name: str, **arguments: object) -> str:
    """A call as an author writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


# ---------------------------------------------------------------------------------------------------------------- tools


def add(a: int, b: int = 1) -> int:
    """Add numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def note(text: str, state: dict) -> str:
    """Remember something.

    Args:
        text: What to remember.
    """
    state.setdefault("notes", []).append(text)
    return f"noted: {state['notes']}"


def who(row: Row) -> str:
    """Say which row this is."""
    return row.example_id


def echo(text: str) -> str:
    """Say something.

    Args:
        text: What.
    """
    return text


def spoil(how: str, state: dict) -> str:
    """Do harm.

    Args:
        how: Which.
    """
    state["notes"] = ["spoilt"]
    if how == "hang":
        time.sleep(60)
    if how == "spin":
        while True:
            pass
    if how == "die":
        os._exit(3)
    if how == "exit":
        raise SystemExit("bye")
    if how == "unspeakable":
        return {1, 2}  # type: ignore[return-value]
    raise ValueError("no such harm")


def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return f"after {seconds}"


def complete(answer: str) -> None:
    """Give the answer.

    Args:
        answer: It.
    """
    raise AssertionError("it is not run")


class World(Environment):
    """All of the tools."""

    tools = (add, note, who, echo, spoil, wait, complete)
    ends = frozenset({"complete"})


class BadReply(Environment):
    def reply(self, row, state, message):
        raise KeyError("oops")


class NoAnswer(Environment):
    def reply(self, row, state, message):
        return "go on"


class BadState(Environment):
    def reply(self, row, state, message):
        return Answer([{"role": "user", "content": "on"}], {"seen": {1, 2}})


class Asking(Environment):
    """No tools: asks until it hears a number."""

    def start(self, row: Row) -> Opening:
        return Opening(row.messages, {"asked": 0})

    def reply(self, row, state, message) -> Answer:
        asked = state["asked"] + 1
        over = message["content"].strip().isdigit()
        return Answer([{"role": "user", "content": f"again ({asked})"}], {"asked": asked}, over, {"asked": 1})


class Halves(Environment):
    """Says and keeps halves of surrogate pairs."""

    def start(self, row: Row) -> Opening:
        return Opening(row.messages, {"first": "\ud800"})

    def reply(self, row, state, message) -> Answer:
        return Answer([{"role": "user", "content": "a \ud800"}], {**state, "\udfff": ["\udfff"]})


class Silent(Environment):
    def reply(self, row, state, message):
        return Answer([], {})


class Saying(Environment):
    def __init__(self, message, counts=()):
        self.message, self.counts = message, counts or {}

    def reply(self, row, state, message):
        return Answer([self.message], {}, counts=self.counts)
