"""Completions in the making, turn by turn. No vllm import."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tandemrl.rollout.engine import Completion, EngineError, Reply, Request, StopReason, Turn, replay_turns
from tandemrl.types import Transcript


@dataclass(slots=True, eq=False)
class Row:
    """One completion. number: among those of its call; id: among all that its engine ever wrote; index: its request's;
    strategy: what the workers call the request's."""

    number: int
    id: int
    index: int
    request: Request
    key: int
    strategy: str
    reason: StopReason = "abort"
    """Why its last turn ended, and, once it is over, why it is."""
    turns: list[np.ndarray] = field(default_factory=list)
    """Own tokens."""
    tokens: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        """Of the next turn."""
        return [*self.request.prompt, *self.tokens]

    @property
    def history(self) -> list[Sequence[int]]:
        return [*self.request.history, *(turn.tolist() for turn in self.turns)]

    @property
    def left(self) -> int:
        """Tokens that the next turn may have."""
        rest = self.request.sampling.max_tokens - sum(self.own)
        return rest if self.request.turn_tokens is None else min(rest, self.request.turn_tokens)

    @property
    def turn(self) -> Turn:
        """The last one."""
        return Turn(self.number, self.request.task, len(self.turns) - 1, self.turns[-1], self.reason)

    def end_turn(self, tokens: Sequence[int], logprobs: Sequence[float], reason: StopReason) -> None:
        """Raises:
        EngineError: there is not one log-prob per token.
        """
        if len(tokens) != len(logprobs):
            raise EngineError(f"row {self.number}: {len(tokens)} tokens were written, with {len(logprobs)} log-probs")
        self.reason = reason
        if len(tokens):
            self.turns.append(np.array(tokens, dtype=np.int64))
            self.tokens += tokens
            self.own += [True] * len(tokens)
            self.logprobs += logprobs

    def hear(self, reply: Reply) -> bool:
        """What the world answers; whether another turn follows, which takes tokens left for it and for the answer."""
        if not reply.context:
            self.reason = reply.stop_reason or self.reason
            return False
        said = len(self.own) - sum(self.own)
        if self.left < 1 or said + len(reply.context) > self.request.world_tokens:
            self.reason = "length"
            return False
        self.tokens += reply.context
        self.own += [False] * len(reply.context)
        self.logprobs += [0.0] * len(reply.context)
        return True

    def completion(self, authors: np.ndarray, version: int, transcript: Transcript | None) -> Completion:
        """What it has come to. An answer upon which nothing was written any more is left out.

        Args:
            authors: of its own tokens.
        """
        own = np.array(self.own, dtype=bool)
        end = int(own.nonzero()[0][-1]) + 1 if own.any() else 0
        author = np.full(end, -1, dtype=np.int8)
        author[own[:end]] = authors
        tokens = np.array(self.tokens[:end], dtype=np.int64)
        logprobs = np.array(self.logprobs[:end], dtype=np.float32)
        return Completion(self.key, tokens, author, logprobs, self.reason, version, transcript)


def authors_of(rows: Sequence[Row]) -> list[np.ndarray]:
    """The authors of each row's own tokens, recomputed from keys and tokens, all rows of a strategy at once."""
    authors: dict[int, np.ndarray] = {}
    for strategy in {id(row.request.strategy): row.request.strategy for row in rows}.values():
        mine = [row for row in rows if row.request.strategy is strategy]
        turns = [[*map(np.asarray, row.request.history), *row.turns] for row in mine]
        replayed = replay_turns(strategy, [row.key for row in mine], turns).author.numpy()
        for row, author in zip(mine, replayed, strict=True):
            before = sum(map(len, row.request.history))
            authors[row.number] = author[before : before + sum(row.own)]
    return [authors[row.number] for row in rows]
