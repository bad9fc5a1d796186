"""Completions while they are being written, turn by turn. This module does not import vllm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from tandemrl.rollout.engine import Completion, EngineError, Reply, Request, StopReason, Turn, replay_turns
from tandemrl.types import Transcript


@dataclass(slots=True, eq=False)
class Row:
    """One completion while it is being written.

    number: its number among the completions of the call. id: its number among all completions that the engine ever
    wrote. index: the number of its request. key: its request key. strategy: the name by which the workers know the
    strategy of the request.

    tokens: everything after the prompt: its own tokens and, between turns, those of the environment. own: for each of
    these tokens, whether an author wrote it. logprobs: the log-prob of each of them, in nats; 0.0 for tokens of the
    environment.
    """

    number: int
    id: int
    index: int
    request: Request
    key: int
    strategy: str
    policy_version: int
    reason: StopReason = "abort"
    """Why its last turn ended. Once the completion is over, why it is over."""
    turns: list[np.ndarray] = field(default_factory=list)
    """The own tokens of each turn that has ended."""
    tokens: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        """The prompt of the next turn: that of the request, and all tokens since."""
        return [*self.request.prompt, *self.tokens]

    @property
    def history(self) -> list[Sequence[int]]:
        """The own tokens of each earlier turn, those before this call included."""
        return [*self.request.history, *(turn.tolist() for turn in self.turns)]

    @property
    def left(self) -> int:
        """How many tokens the next turn may have."""
        rest = self.request.sampling.max_tokens - sum(self.own)
        return rest if self.request.turn_tokens is None else min(rest, self.request.turn_tokens)

    @property
    def turn(self) -> Turn:
        """The last turn, as the ``Responder`` gets it."""
        return Turn(self.number, self.request.task, len(self.turns) - 1, self.turns[-1], self.reason)

    def end_turn(self, tokens: Sequence[int], logprobs: Sequence[float], reason: StopReason) -> None:
        """Append the own tokens of a turn that has ended.

        Args:
            tokens: the own tokens of the turn.
            logprobs: their log-probs, in nats.
            reason: why the turn ended.

        Raises:
            EngineError: the number of log-probs is not the number of tokens.
        """
        if len(tokens) != len(logprobs):
            raise EngineError(f"row {self.number}: {len(tokens)} tokens were written, with {len(logprobs)} log-probs")
        self.reason = reason
        if len(tokens):
            self.turns.append(np.array(tokens, dtype=np.int64))
            self.tokens += tokens
            self.own += [True] * len(tokens)
            self.logprobs += logprobs

    def add_observation(self, reply: Reply) -> bool:
        """Append the environment's answer to the last turn, and return whether another turn follows.

        Another turn follows an answer with context, if tokens are left for the turn and the context fits into
        ``observation_tokens``. Otherwise the completion is over, and ``reason`` says why.
        """
        if not reply.context:
            self.reason = reply.stop_reason or self.reason
            return False
        observed = len(self.own) - sum(self.own)
        if self.left < 1 or observed + len(reply.context) > self.request.observation_tokens:
            self.reason = "length"
            return False
        self.tokens += reply.context
        self.own += [False] * len(reply.context)
        self.logprobs += [0.0] * len(reply.context)
        return True

    def completion(self, authors: np.ndarray, transcript: Transcript | None) -> Completion:
        """The finished completion. An answer of the environment after which nothing was written is left out.

        Args:
            authors: the author of each own token, 0 for the junior and 1 for the senior.
            transcript: the messages of the episode, if there is one.
        """
        own = np.array(self.own, dtype=bool)
        end = int(own.nonzero()[0][-1]) + 1 if own.any() else 0
        author = np.full(end, -1, dtype=np.int8)
        author[own[:end]] = authors
        tokens = np.array(self.tokens[:end], dtype=np.int64)
        logprobs = np.array(self.logprobs[:end], dtype=np.float32)
        channels = tokens, author, logprobs
        return Completion(self.key, *channels, self.reason, self.policy_version, transcript)


def authors_of(rows: Sequence[Row]) -> list[np.ndarray]:
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
            authors[row.number] = author[before : before + sum(row.own)]
    return [authors[row.number] for row in rows]


def history_arguments(history: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """The own tokens of each earlier turn as ``SamplingParams.extra_args``. Over HTTP these hold flat lists only."""
    if not history:
        return {}
    return {"tandem_history": [token for turn in history for token in turn], "tandem_turns": [*map(len, history)]}


def history_of(extra: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """The own tokens of each earlier turn, from extra arguments that ``history_arguments`` made."""
    tokens = iter(extra.get("tandem_history", ()))
    return tuple(tuple(islice(tokens, length)) for length in extra.get("tandem_turns", ()))
