"""A world whose answers depend on a turn's tokens alone, and what an engine must write with it, token by token."""

import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from helpers import VOCABULARY, raced_token, reference_distribution, reference_logits, sampling_key
from tandemrl.rollout.engine import Completion, Reply, Request, Turn
from tandemrl.types import Transcript


def answer(tokens: Sequence[int], index: int) -> tuple[int, ...]:
    """What is said after turn ``index``: one to nine ids, no EOS, as the turn's tokens have it."""
    generator = np.random.default_rng([index, *map(int, tokens)])
    return tuple(generator.integers(2, VOCABULARY, generator.integers(1, 10)).tolist())


def repeating(count: int) -> Callable[[Sequence[int], int], tuple[int, ...]]:
    """Says one id so many times."""
    return lambda tokens, index: answer(tokens, index)[:1] * count


@dataclass
class ScriptedWorld:
    """A ``Responder``: ``turns`` turns of every completion, answered by ``say``.

    delay_s: each answer takes a random time up to that, in a thread of its own; None: it is ready at once. ``told``:
    every turn that was submitted, in that order.
    """

    turns: int = 3
    say: Callable[[Sequence[int], int], tuple[int, ...]] = answer
    delay_s: float | None = None
    told: list[Turn] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ready: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._random = random.Random(0)

    def submit(self, turn: Turn) -> None:
        self.told.append(turn)
        if turn.index + 1 < self.turns:
            reply = Reply(turn.number, self.say(turn.tokens.tolist(), turn.index))
        else:
            reply = Reply(turn.number, stop_reason="turns")
        if self.delay_s is None:
            self._ready.put(reply)
        else:
            threading.Timer(self._random.uniform(0, self.delay_s), self._ready.put, (reply,)).start()

    def replies(self, *, wait: bool) -> list[Reply]:
        found = [self._ready.get(timeout=60)] if wait else []
        while not self._ready.empty():
            found.append(self._ready.get())
        self._random.shuffle(found)
        return found

    def transcript(self, number: int) -> Transcript:
        mine = [turn for turn in self.told if turn.number == number]
        return Transcript(tuple({"role": "assistant", "content": t.tokens.tolist()} for t in mine))


def played(
    request: Request,
    key: int,
    senior: PreTrainedModel,
    junior: PreTrainedModel,
    *,
    turns: int = 3,
    say: Callable[[Sequence[int], int], tuple[int, ...]] = answer,
) -> Completion:
    """What an engine must write: a full forward of untouched models for every token, one row, one loop.

    Turns end by a limit on tokens or by a stop id; both models have the vocabulary of the helpers.
    """
    sampling, models = request.sampling, {1: senior, 0: junior}
    tokens: list[int] = []
    authors: list[int] = []
    logprobs: list[float] = []
    turn: list[int] = []
    own, reason = 0, "turns"
    writes, state = request.strategy.init(torch.tensor([key]))
    for index in range(turns):
        if index:
            said = say(turn, index - 1)
            if own == sampling.max_tokens or authors.count(-1) + len(said) > request.observation_tokens:
                reason = "length"
                break
            tokens += said
            authors += [-1] * len(said)
            logprobs += [0.0] * len(said)
            if request.strategy.turn is not None:
                writes, state = request.strategy.turn(state)
        before, turn = [*request.prompt, *tokens], []
        while len(turn) < (request.turn_tokens or sampling.max_tokens) and own < sampling.max_tokens:
            who = int(writes)
            logits = reference_logits(models[who], request.prompt, [*tokens, 0])[-1]
            p = reference_distribution(logits, sampling, before, turn)
            token = raced_token(p, sampling_key(key, own))
            tokens.append(token)
            authors.append(who)
            logprobs.append(float(np.log(p[token])))
            turn.append(token)
            own += 1
            writes, state = request.strategy.step(state, torch.tensor([token]))
            if token in sampling.stop_token_ids:
                break
    return Completion(
        key, np.array(tokens, np.int64), np.array(authors, np.int8), np.array(logprobs, np.float32), reason
    )
