"""Drafting through handovers: the junior writes ahead, through changes of the author; the senior reads once. No vllm
import.

A token is drawn by its author's logits and a key that follows from the request and the position. So the junior can go
on where the senior is the author: with the senior's key, its own token is a guess of what the senior will draw. One
forward of the senior over the draft draws at the senior's positions by the same keys. The first guess that it draws
otherwise is corrected, and what was built upon it is thrown away. The junior's own tokens are final as far as that. So
the tokens are those of ``lazy``, with fewer forwards of the senior (drafter-invariant speculative decoding, Daliri,
Musco and Suresh, arXiv 2408.07978, across authors).
"""

from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from tandemrl.rollout.vllm.planner import JUNIOR, SENIOR, Pass, Planner
from tandemrl.selection.draws import fold_in


class Round:
    """One engine step of the rows in ``Planner.drafting``. Arrays are by row of the round, or by (row, depth); depth 0
    is the next token.

    In order: for each ``depth`` of ``depths`` run ``draft_passes``, ``take`` what the junior drew and ``advance``;
    run ``catch_up_passes``, then ``verify_pass``, give its draws to ``correct``; ``settle``.

    Args:
        ahead: KV slots that each row has been given beyond those of its known tokens. A row writes at most one token
            more: the last one needs no slot.
    """

    def __init__(self, planner: Planner, ahead: np.ndarray) -> None:
        ids, slots = planner.step
        self.planner, self._all_slots = planner, slots
        self.rows = planner.drafting
        """Each row's index in the step."""
        self.ids = [ids[i] for i in self.rows.tolist()]
        self.index = {id: i for i, id in enumerate(self.ids)}
        self.slots, self.ahead = slots[self.rows], ahead
        self.depths = int(ahead.max()) + 1
        ledger = planner.ledger
        self._length = ledger.length[self.slots]
        self.outputs = planner.outputs[self.rows]
        """Tokens written before, in this turn."""
        self._computed = ledger.computed[:, self.slots]
        counters = planner.written(self.slots)[:, None] + np.arange(self.depths)
        self.keys: Int64[Tensor, "b d"] = fold_in(
            torch.from_numpy(ledger.stream[self.slots])[:, None], torch.from_numpy(counters)
        )
        """By which each token is drawn, whoever draws it."""
        shape = len(self.slots), self.depths
        self.tokens = np.zeros(shape, np.int64)
        self.authors = np.zeros(shape, np.int64)
        self.authors[:, 0] = ledger.author[self.slots]
        self._drafted = np.zeros(shape, bool)
        self._corrected = np.zeros(shape, bool)
        self._marks = [planner.selection.mark(torch.from_numpy(self.slots))]

    @property
    def positions(self) -> np.ndarray:
        """Of the token that the junior reads at each depth; from a row's last slot on, they stay there."""
        return self._length[:, None] - 1 + np.minimum(np.arange(self.depths), self.ahead[:, None])

    @property
    def senior(self) -> np.ndarray:
        """Which tokens the senior is the author of."""
        return np.logical_and(self.authors == SENIOR, np.arange(self.depths) <= self.ahead[:, None])

    @property
    def reads(self) -> np.ndarray:
        """In which rows that is any token."""
        return np.asarray(self.senior.any(1))

    @property
    def last(self) -> np.ndarray:
        """The depth of each row's last token of the senior's; 0 if it has none."""
        return np.where(self.senior, np.arange(self.depths), 0).max(1)

    def drafts(self) -> Iterator[tuple[str, list[int]]]:
        """What the senior reads: the tokens before its last one, of the rows that have one."""
        last = self.last
        for row in self.reads.nonzero()[0].tolist():
            yield self.ids[row], self.tokens[row, : last[row]].tolist()

    def draft_passes(self, depth: int) -> list[Pass]:
        """The junior's forwards for the tokens at ``depth``. None at the last depth if nobody needs them there."""
        # A pass reads the token in a slot and draws one that needs none. So at its last slot a row needs a token of the
        # junior's own, but no guess. It goes along where others do: its KV is needed in the next round, and a row that
        # leaves the batch is expensive to add again. Beyond it needs nothing.
        needed = (self.ahead > depth) | ((self.ahead == depth) & (self.authors[:, depth] == JUNIOR))
        if not needed.any():
            return []
        self._drafted[:, depth] = self.ahead >= depth
        outputs = self.outputs + depth
        return self._passes(JUNIOR, self._drafted[:, depth], self._length + depth, outputs, wanted=True)

    def take(self, depth: int, rows: np.ndarray, tokens: np.ndarray) -> None:
        """What the junior drew for some rows."""
        self.tokens[rows, depth] = tokens

    def advance(self, depth: int) -> None:
        """Every row's author at the next depth, if its token at ``depth`` stays."""
        if depth + 1 == self.depths:
            return
        planner, slots = self.planner, torch.from_numpy(self.slots)
        senior = planner.selection.step(slots, torch.from_numpy(self.tokens[:, depth].copy())).numpy()
        self._marks.append(planner.selection.mark(slots))
        self.authors[:, depth + 1] = senior
        going = np.flatnonzero(self.ahead > depth)
        planner.check_writers(self.slots[going], self.authors[going, depth + 1], [self.ids[i] for i in going.tolist()])

    def catch_up_passes(self) -> list[Pass]:
        """The senior's forwards over what it has not read, where that and the draft exceed the budget."""
        wanted = self.reads
        total = (self._length + self.last - self._computed[SENIOR])[wanted].sum()
        if total <= self.planner.budget:
            return []
        before = self._length - 1
        return self._passes(SENIOR, wanted & (self._computed[SENIOR] < before), before, self.outputs, wanted=False)

    def verify_pass(self) -> Pass | None:
        """The senior's forward up to its last token in each draft; None if it has none."""
        last = self.last
        passes = self._passes(SENIOR, self.reads, self._length + last, self.outputs + last, wanted=True)
        assert len(passes) <= 1, "the scheduler's budget is that of a forward"
        return passes[0] if passes else None

    def correct(self, rows: np.ndarray, depths: np.ndarray, tokens: np.ndarray) -> None:
        """What the senior drew at all places that ``senior`` names."""
        self._corrected[rows, depths] = self.tokens[rows, depths] != tokens
        self.tokens[rows, depths] = tokens

    def settle(self) -> np.ndarray:
        """Tokens that each row has written in the end. The ledger stands as if they had been written one by one.

        Raises:
            EngineError: a strategy lets somebody write next who it promised would not.
        """
        planner, ledger, slots = self.planner, self.planner.ledger, self.slots
        senior, depth = self.senior, np.arange(self.depths)
        first = np.where(self._corrected.any(1), self._corrected.argmax(1), self.depths)
        count = np.minimum(first, self.ahead) + 1
        for row, slot in enumerate(slots.tolist()):
            if stops := planner.stops[slot]:
                written = self.tokens[row, : count[row]].tolist()
                count[row] = next((d + 1 for d, token in enumerate(written) if token in stops), count[row])
        kept = depth < count[:, None]
        guesses = senior & self._drafted & kept
        planner.count_drafted(int(guesses.sum()), int((guesses & ~self._corrected).sum()))
        planner.count_written(slots[kept.nonzero()[0]], self.authors[kept])
        ledger.length[slots] = length = self._length + count
        for who in (JUNIOR, SENIOR):
            computed = ledger.computed[who, slots] = np.minimum(ledger.computed[who, slots], length - 1)
            planner.mark_filled(who, slots, self._computed[who], computed)
        at, last = torch.from_numpy(slots), count - 1
        planner.selection.rewind(at, self._marks, torch.from_numpy(last))
        tokens = torch.from_numpy(self.tokens[np.arange(len(slots)), last])
        ledger.author[slots] = planner.selection.step(at, tokens).numpy()
        planner.check_writers(slots, ledger.author[slots], self.ids)
        return count

    # ---------------------------------------------------------------------------------------------------------- details

    def _passes(self, who: int, run: np.ndarray, end: np.ndarray, outputs: np.ndarray, *, wanted: bool) -> list[Pass]:
        """Rows of the round brought to ``end``. ``outputs``: the tokens that the runner knows of as written."""
        size, planner = len(self._all_slots), self.planner
        runs, ends, wants = np.zeros(size, bool), np.zeros(size, np.int64), np.zeros(size, bool)
        runs[self.rows], ends[self.rows], wants[self.rows] = run, end, run & wanted
        passes = planner.prepare_passes(who, runs, self._all_slots, ends, wants, provisional=True)
        place = np.zeros(size, np.int64)
        place[self.rows] = np.arange(len(self.rows))
        for forward in passes:
            forward.outputs = outputs[place[forward.rows]].tolist()
            planner.stats.rows[who] += len(forward.rows)
        return passes
