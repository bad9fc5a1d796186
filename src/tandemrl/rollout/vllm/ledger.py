"""The account that the planner keeps: of each request, of each model, and of what it has all cost. No vllm import."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class Ledger:
    """What is known of each request: arrays by slot, or by (author, slot) where it is known of each model."""

    prompt: np.ndarray
    before: np.ndarray
    """Own tokens of earlier turns, which the prompt contains."""
    length: np.ndarray
    author: np.ndarray
    stream: np.ndarray
    """The key of the token draws."""
    waited: np.ndarray
    """Steps since the row was last run."""
    drawn: np.ndarray
    """The token that the first of the row's token keys is for."""
    computed: np.ndarray
    """By author: tokens whose KV this model holds."""
    sent: np.ndarray
    """By author: block ids that its runner knows."""
    known: np.ndarray
    """By author: its runner knows the request."""
    replace: np.ndarray
    """By author: its runner has block ids from before a preemption."""
    changed: np.ndarray
    """By author: its runner lacks news of the request itself, or of its block ids."""
    writers: np.ndarray
    """By author: may write."""
    reads: np.ndarray
    """By author: computes the prompt, to write or to draft."""
    drafts: np.ndarray
    """Its tokens may be drafted."""

    @classmethod
    def empty(cls, capacity: int) -> "Ledger":
        one, two = (capacity,), (2, capacity)
        integers = [np.zeros(one, np.int64) for _ in range(7)] + [np.zeros(two, np.int64) for _ in range(2)]
        flags = [np.zeros(two, bool) for _ in range(5)] + [np.zeros(one, bool)]
        return cls(*integers, *flags)

    def grown(self) -> "Ledger":
        grow = lambda x: np.concatenate([x, np.zeros_like(x)], axis=-1)  # noqa: E731
        return Ledger(*(grow(getattr(self, name)) for name in self.__slots__))


@dataclass(slots=True)
class Stats:
    """Since the start: engine steps; forward passes, the rows in them that decode, and computed tokens of (junior,
    senior); tokens written by each; tokens drafted in the senior's place, and those of them that it drew, too."""

    steps: int = 0
    passes: list[int] = field(default_factory=lambda: [0, 0])
    rows: list[int] = field(default_factory=lambda: [0, 0])
    computed: list[int] = field(default_factory=lambda: [0, 0])
    written: list[int] = field(default_factory=lambda: [0, 0])
    drafted: int = 0
    accepted: int = 0
