"""Drafting across handovers: the junior drafts through changes of the author, and the senior reads the draft once.

This module does not import vllm.

A token is drawn from its author's logits with a key that depends on the request and the position alone. So the junior
can go on where the senior is the author: it draws with the same key, and its token is a guess of what the senior will
draw. One forward pass of the senior over the draft then draws at the senior's positions, with the same keys. The first
guess that the senior draws otherwise is corrected, and what follows it is discarded. The junior's own tokens before it
are final. So the tokens are those of ``lazy``, with fewer forward passes of the senior. This is drafter-invariant
speculative decoding (Daliri, Musco and Suresh, arXiv 2408.07978), applied across authors.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from tandemrl.rollout.drafting import count_accepted
from tandemrl.rollout.vllm.planner import JUNIOR, SENIOR, ForwardPass, Planner
from tandemrl.selection.draws import fold_in


class Draws(NamedTuple):
    """The tokens drawn at some places, with their log-probs.

    rows: the row of each place in the round. depths: the depth of each place.
    """

    rows: np.ndarray
    depths: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray


class Round:
    """One engine step of the rows in ``Planner.drafting``.

    Arrays are by row of the round, or by (row, depth). Depth 0 is the next token.

    Use it in this order. For each depth below ``depths``, run the ``draft_passes``, give the junior's draws to ``take``
    and call ``advance``. Then run the ``catch_up_passes`` and the ``verify_pass``, and give the senior's draws to
    ``correct``. Finally call ``settle``.

    Args:
        planner: the planner, which has just planned the step.
        ahead: how many KV slots each row has been given beyond those of its known tokens. A row writes at most one
            token more than that, since its last token needs no slot.
    """

    def __init__(self, planner: Planner, ahead: np.ndarray) -> None:
        ids, slots = planner.step
        self.planner = planner
        self.rows = planner.drafting
        """Each row's index in the step."""
        self.ids = [ids[i] for i in self.rows.tolist()]
        self.index = {id: i for i, id in enumerate(self.ids)}
        self.slots, self.ahead = slots[self.rows], ahead
        self.depths = int(ahead.max()) + 1
        state = planner.state
        self._length = state.length[self.slots]
        self.outputs = planner.outputs[self.rows]
        """How many tokens each row had written in this turn before the round."""
        self._computed = state.computed[:, self.slots]
        counters = state.written(self.slots)[:, None] + np.arange(self.depths)
        self.keys: Int64[Tensor, "b d"] = fold_in(
            torch.from_numpy(state.stream[self.slots])[:, None], torch.from_numpy(counters)
        )
        """The key that the token at each (row, depth) is drawn with, whichever model draws it."""
        shape = len(self.slots), self.depths
        self.tokens = np.zeros(shape, np.int64)
        self.authors = np.zeros(shape, np.int64)
        self.authors[:, 0] = state.author[self.slots]
        self._drafted = np.zeros(shape, bool)
        self._corrected = np.zeros(shape, bool)
        self._marks = [planner.selection.mark(torch.from_numpy(self.slots))]

    @property
    def positions(self) -> np.ndarray:
        """The position of the token that the junior reads at each (row, depth). It stops at the row's last slot."""
        return self._length[:, None] - 1 + np.minimum(np.arange(self.depths), self.ahead[:, None])

    @property
    def senior(self) -> np.ndarray:
        """Whether the senior is the author at each (row, depth)."""
        return np.logical_and(self.authors == SENIOR, np.arange(self.depths) <= self.ahead[:, None])

    @property
    def reads(self) -> np.ndarray:
        """For each row, whether the senior is the author of any of its tokens, so that it has to read the row."""
        return np.asarray(self.senior.any(1))

    @property
    def last(self) -> np.ndarray:
        """For each row, the depth of the last token whose author is the senior; 0 if there is none."""
        return np.where(self.senior, np.arange(self.depths), 0).max(1)

    def drafts(self) -> Iterator[tuple[str, list[int]]]:
        """What the senior reads: for each row in ``reads``, the request and its tokens before the senior's last one."""
        last = self.last
        for row in self.reads.nonzero()[0].tolist():
            yield self.ids[row], self.tokens[row, : last[row]].tolist()

    def draft_passes(self, depth: int) -> list[ForwardPass]:
        """The junior's forward passes for the tokens at ``depth``. The last depth may need none."""
        # A pass reads the token in a slot and draws the next one, which needs no slot. So at its last slot a row needs
        # a token only if the junior is the author, but no guess. It takes part anyway where other rows do, since its KV
        # is needed in the next round, and a row that leaves the batch is expensive to add again. Beyond its last slot a
        # row needs nothing.
        needed = (self.ahead > depth) | ((self.ahead == depth) & (self.authors[:, depth] == JUNIOR))
        if not needed.any():
            return []
        self._drafted[:, depth] = self.ahead >= depth
        outputs = self.outputs + depth
        return self._passes(JUNIOR, self._drafted[:, depth], self._length + depth, outputs, wanted=True)

    def take(self, depth: int, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Record the tokens that the junior drew at ``depth`` for some rows."""
        self.tokens[rows, depth] = tokens

    def advance(self, depth: int) -> None:
        """Draw the author of every row at the next depth, on the assumption that its token at ``depth`` is kept.

        Raises:
            EngineError: a strategy chose an author that its ``writers`` exclude.
        """
        if depth + 1 == self.depths:
            return
        self.authors[:, depth + 1] = self.planner.next_authors(self.slots, self.tokens[:, depth].copy())
        self._marks.append(self.planner.selection.mark(torch.from_numpy(self.slots)))

    def catch_up_passes(self) -> list[ForwardPass]:
        """The senior's forward passes over tokens before the drafts that it has not read.

        There are none if these tokens and the drafts fit into one pass together.
        """
        wanted = self.reads
        total = (self._length + self.last - self._computed[SENIOR])[wanted].sum()
        if total <= self.planner.budget:
            return []
        before = self._length - 1
        return self._passes(SENIOR, wanted & (self._computed[SENIOR] < before), before, self.outputs, wanted=False)

    def verify_pass(self) -> ForwardPass | None:
        """The senior's forward pass over each draft up to its own last token; None if it is the author of no token."""
        last = self.last
        passes = self._passes(SENIOR, self.reads, self._length + last, self.outputs + last, wanted=True)
        assert len(passes) <= 1, "the scheduler's budget is that of a forward"
        return passes[0] if passes else None

    def correct(self, rows: np.ndarray, depths: np.ndarray, tokens: np.ndarray) -> None:
        """Record the tokens that the senior drew.

        Over all calls, they must cover every place where ``senior`` is true.

        Args:
            rows: the row of each token.
            depths: the depth of each token.
            tokens: the tokens.
        """
        self._corrected[rows, depths] = self.tokens[rows, depths] != tokens
        self.tokens[rows, depths] = tokens

    def settle(self) -> np.ndarray:
        """Discard what follows corrections and stops, and return how many tokens each row has written in the round.

        The planner's state is then as if these tokens had been written one by one; ``KVState.keep_prefix`` says what
        that means for the KV caches.

        Raises:
            EngineError: a strategy chose an author that its ``writers`` exclude.
        """
        planner, state, slots = self.planner, self.planner.state, self.slots
        senior, depth = self.senior, np.arange(self.depths)
        first = np.where(self._corrected.any(1), self._corrected.argmax(1), self.depths)
        count = np.minimum(first, self.ahead) + 1
        for row, slot in enumerate(slots.tolist()):
            if stops := planner.stops[slot]:
                written = self.tokens[row, : count[row]].tolist()
                count[row] = next((d + 1 for d, token in enumerate(written) if token in stops), count[row])
        kept = depth < count[:, None]
        planner.stats.drafts += count_accepted(senior & self._drafted & kept, ~self._corrected)
        state.keep_prefix(slots, self._length + count, self._computed)
        last = count - 1
        planner.selection.rewind(torch.from_numpy(slots), self._marks, torch.from_numpy(last))
        state.author[slots] = planner.next_authors(slots, self.tokens[np.arange(len(slots)), last])
        return count

    # ---------------------------------------------------------------------------------------------------------- details

    def _passes(
        self, who: int, run: np.ndarray, end: np.ndarray, outputs: np.ndarray, *, wanted: bool
    ) -> list[ForwardPass]:
        """The passes in which one model computes rows of the round up to ``end``.

        Args:
            who: the model, ``JUNIOR`` or ``SENIOR``.
            run: for each row, whether the model computes it.
            end: for each row, up to how many computed tokens it is brought.
            outputs: for each row, how many tokens the runner takes to be written in this turn.
            wanted: whether the next token of each row is wanted.
        """
        planner, runs = self.planner, np.flatnonzero(run)
        wants = np.full(len(runs), wanted)
        passes = planner.prepare_passes(who, self.rows[runs], end[runs], wants, outputs[runs], provisional=True)
        planner.stats.rows[who] += sum(len(forward.rows) for forward in passes)
        return passes
