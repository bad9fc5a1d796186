"""Decides which rows come next, in shuffled epochs whose position can be saved and restored exactly."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tandemrl.data.rows import DataError


class Sampler:
    """Gives row numbers in shuffled epochs. Every row comes once per epoch, and a request may span epochs.

    The order of an epoch is a function of ``(seed, epoch)`` and the rows alone. So the state is three integers, and a
    resumed sampler gives the same numbers as one that never stopped.

    Args:
        levels: the level of each row. An epoch goes through the levels from the lowest to the highest, with the rows of
            a level in shuffled order.

    Raises:
        DataError: there are no rows.

    Examples:
        >>> sampler = Sampler(3, seed=0)
        >>> sorted(sampler.next(3)), len(sampler.next(5))
        ([0, 1, 2], 5)
    """

    def __init__(self, count: int, *, seed: int, levels: Sequence[int] | None = None) -> None:
        if count < 1:
            raise DataError("nothing to sample from: the data set has no rows")
        self._count, self._seed = count, seed
        self._levels = np.zeros(count, np.int64) if levels is None else np.asarray(levels)
        self._epoch, self._position = 0, 0

    @property
    def epoch(self) -> int:
        """How many epochs are finished."""
        return self._epoch

    def next(self, k: int) -> list[int]:
        """The next ``k`` row numbers."""
        chosen: list[int] = []
        while len(chosen) < k:
            order = np.random.default_rng([self._seed, self._epoch]).permutation(self._count)
            order = order[np.argsort(self._levels[order], kind="stable")]
            taken = order[self._position : self._position + k - len(chosen)]
            chosen += taken.tolist()
            self._position += len(taken)
            if self._position == self._count:
                self._epoch, self._position = self._epoch + 1, 0
        return chosen

    def state_dict(self) -> dict[str, int]:
        return {"count": self._count, "seed": self._seed, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            DataError: the state is of another number of rows or another seed.
        """
        for name, mine in (("count", self._count), ("seed", self._seed)):
            if state[name] != mine:
                raise DataError(
                    f"the saved sampler has {name} {state[name]}, this run has {mine}; resume with the data and seed "
                    "of the checkpoint, or start a new run"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
