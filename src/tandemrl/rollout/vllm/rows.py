"""Completions while vLLM is writing them, turn by turn. This module does not import vllm."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tandemrl.rollout.decoding_rows import Row
from tandemrl.rollout.engine import Completion, StopReason, Turn, replay_turns


@dataclass(slots=True, eq=False)
class VllmRow(Row):
    """A row whose tokens are kept here.

    tokens: everything after the prompt: its own tokens and, between turns, those of the
    environment. logprobs: the log-prob of each of these tokens, in nats; 0.0 for tokens of the environment. turns: the
    own tokens of each turn that has ended. mine: whether each of ``tokens`` is an own one.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[np.ndarray] = field(default_factory=list)
    mine: list[bool] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        """The prompt of the next turn: that of the request, and all tokens since."""
        return [*self.request.prompt, *self.tokens]

    @property
    def history(self) -> list[list[int]]:
        """The own tokens of each earlier turn, those before this call included."""
        return [*map(list, self.request.history), *(turn.tolist() for turn in self.turns)]

    @property
    def turn(self) -> Turn:
        """The last turn, as the ``Responder`` gets it."""
        assert self.stop_reason is not None
        return Turn(self.number, self.request.task, len(self.turns) - 1, self.turns[-1], self.stop_reason)

    def end_turn(self, tokens: Sequence[int], logprobs: Sequence[float], reason: StopReason) -> None:
        """Append the own tokens of a turn that has ended.

        Args:
            tokens: the own tokens of the turn.
            logprobs: their log-probs, in nats.
            reason: why the turn ended.
        """
        self.stop_reason = reason
        if len(tokens):
            self.turns.append(np.array(tokens, dtype=np.int64))
            self.tokens += tokens
            self.mine += [True] * len(tokens)
            self.logprobs += logprobs
            self.own += len(tokens)
            self.written = len(self.tokens)

    def observe(self, context: Sequence[int]) -> None:
        """Append what the environment says before the next turn."""
        self.tokens += context
        self.logprobs += [0.0] * len(context)
        self.mine += [False] * len(context)
        self.written = self.told = len(self.tokens)
        self.stop_reason = None

    def completion(self, authors: np.ndarray, version: int) -> Completion:
        """The finished completion. An answer of the environment after which nothing was written is left out.

        Args:
            authors: the author of each own token, 0 for the junior and 1 for the senior.
            version: of the weights.
        """
        mine = np.array(self.mine, dtype=bool)
        end = mine.nonzero()[0].max(initial=-1) + 1
        author = np.full(end, -1, dtype=np.int8)
        author[mine[:end]] = authors
        tokens = np.array(self.tokens[:end], dtype=np.int64)
        logprobs = np.array(self.logprobs[:end], dtype=np.float32)
        return Completion(self.key, tokens, author, logprobs, self.stop_reason or "abort", version)


def authors_of(rows: Sequence[VllmRow]) -> list[np.ndarray]:
    """The author of each own token of each row, replayed from keys and tokens for all rows of a strategy at once.

    Tokens that were written before this call are left out.
    """
    authors: dict[int, np.ndarray] = {}
    for strategy in {id(row.request.strategy): row.request.strategy for row in rows}.values():
        mine = [row for row in rows if row.request.strategy is strategy]
        turns = [[*map(np.asarray, row.request.history), *row.turns] for row in mine]
        replayed = replay_turns(strategy, [row.key for row in mine], turns).author.numpy()
        for row, author in zip(mine, replayed, strict=True):
            before = sum(map(len, row.request.history))
            authors[row.number] = author[before : before + row.own]
    return [authors[row.number] for row in rows]
