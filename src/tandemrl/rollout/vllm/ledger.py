"""What the planner keeps track of: the state of each request in each model, and counts of the work done.

This module does not import vllm.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Ledger:
    """The state of each request, in arrays by slot, or by (author, slot) where each model has its own.

    An author is 0 for the junior and 1 for the senior.
    """

    prompt: np.ndarray
    """How many tokens the prompt has."""
    before: np.ndarray
    """How many own tokens earlier turns have. The prompt contains them."""
    length: np.ndarray
    """How many tokens are known: those of the prompt, and those that were written in this turn."""
    author: np.ndarray
    """The author of the next token."""
    stream: np.ndarray
    """The key of the token draws."""
    drawn: np.ndarray
    """The number of the token that the first cached token key is for, counted over all turns; -1 if none is cached."""
    computed: np.ndarray
    """By author: for how many tokens this model holds the KV."""
    sent: np.ndarray
    """By author: how many block ids of the request its runner knows."""
    known: np.ndarray
    """By author: whether its runner knows the request."""
    replace: np.ndarray
    """By author: whether its runner has block ids from before a preemption, which must be replaced."""
    changed: np.ndarray
    """By author: whether its runner has yet to be told of the request, or of changes of its block ids."""
    writers: np.ndarray
    """By author: whether it may write in the request."""
    reads: np.ndarray
    """By author: whether it computes the prompt, to write or to draft."""
    drafts: np.ndarray
    """Whether the tokens of the request may be drafted."""

    @classmethod
    def empty(cls, capacity: int) -> "Ledger":
        """A ledger with ``capacity`` slots, all zero."""
        one, two = (capacity,), (2, capacity)
        integers = [np.zeros(one, np.int64) for _ in range(6)] + [np.zeros(two, np.int64) for _ in range(2)]
        flags = [np.zeros(two, bool) for _ in range(5)] + [np.zeros(one, bool)]
        return cls(*integers, *flags)

    def grown(self) -> "Ledger":
        """A ledger with twice as many slots. The first half are those of this one, the others are zero."""
        grow = lambda x: np.concatenate([x, np.zeros_like(x)], axis=-1)  # noqa: E731
        return Ledger(*(grow(getattr(self, name)) for name in self.__slots__))


@dataclass(slots=True)
class Stats:
    """Counts since the start of the engine. The lists hold [junior, senior].

    steps: engine steps. passes: forward passes. rows: rows in these passes that decode. computed: tokens that the
    passes computed. written: tokens by author. drafted: tokens that the junior drafted where the senior is the author,
    up to and with the first one in each draft that the senior draws otherwise. accepted: how many of the drafted tokens
    the senior draws, too.
    """

    steps: int = 0
    passes: list[int] = field(default_factory=lambda: [0, 0])
    rows: list[int] = field(default_factory=lambda: [0, 0])
    computed: list[int] = field(default_factory=lambda: [0, 0])
    written: list[int] = field(default_factory=lambda: [0, 0])
    drafted: int = 0
    accepted: int = 0
