"""Plans which model computes which tokens in one engine step of vLLM. This module does not import vllm.

vLLM's scheduler knows only one model. In each step it wants some requests brought from ``start`` to ``start + count``
computed tokens, in KV blocks that it allocates. Here two models share these block ids, and each may lag behind. The
planner turns a step of the scheduler into forward passes of each model, by what each has computed (``KVState``) and by
the mode:

- ``lazy``: a decoding request is computed only by the author of its next token, from where that model stopped. The
  other model catches up in one chunk when its turn comes. Prompts are computed by both models, or by the only one that
  writes.
- ``lockstep``: both models compute every token. Nothing is as simple, so that the others are measured against it.
- ``draft``: as lazy, but rows that decode are left to a ``drafting.Round``, in which the junior drafts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from tandemrl.rollout.drafting import DraftLength
from tandemrl.rollout.engine import EngineError, Passes
from tandemrl.selection import Strategy
from tandemrl.selection.draws import SAMPLING, fold_in, stream
from tandemrl.selection.live import LiveSelection

JUNIOR, SENIOR = 0, 1
SchedulingMode = Literal["lazy", "lockstep", "draft"]
_WRITERS = {"both": (True, True), "senior": (False, True), "junior": (True, False)}  # by author


class Admission(NamedTuple):
    """A request that the scheduler starts.

    prompt_length: how many tokens its prompt has. key: its request key. history: the own tokens of each earlier turn,
    all of which the prompt contains. row: a number that all turns of a completion share; None means that no turn
    follows this one. stops: token ids that end the request.
    """

    id: str
    prompt_length: int
    key: int
    strategy: Strategy
    history: Sequence[Sequence[int]] = ()
    row: int | None = None
    stops: Collection[int] = ()


@dataclass(slots=True)
class ForwardPass:
    """One forward pass of one model. Row i computes ``count[i]`` tokens of ``ids[i]`` from position ``start[i]`` on."""

    ids: list[str]
    start: list[int]
    count: list[int]
    blocks: list[list[int] | None]
    """For each row, the block ids that its runner does not know: all those of a new or replaced row; None if none."""
    outputs: list[int]
    """For each row, how many tokens it has written in this turn."""
    ends: np.ndarray
    """For each row, whether this pass predicts its next token (bool)."""
    rows: np.ndarray
    """Each row's index in the step."""
    new: list[int] = field(default_factory=list)
    """The rows that this model has never seen."""
    replaced: set[str] = field(default_factory=set)
    """The requests that came back from preemption. Their block ids are replaced, not extended."""


@dataclass(slots=True)
class Stats:
    """Counts since the beginning of a call. The lists hold [junior, senior].

    passes: forward passes. rows: rows in these passes that decode. computed: tokens that the passes computed. drafts:
    how many tokens were drafted and accepted.
    """

    passes: list[int] = field(default_factory=lambda: [0, 0])
    rows: list[int] = field(default_factory=lambda: [0, 0])
    computed: list[int] = field(default_factory=lambda: [0, 0])
    drafts: Passes = field(default_factory=Passes)


class KVState:
    """The state of each request, and above all which of its tokens and KV blocks each of the two models has computed.

    vLLM's scheduler hands out blocks for one model. Both models share its block ids, but each has KV tensors of its
    own, and each may lag behind. A prefix-cache hit is about block ids and does not say which model filled them. So the
    state remembers for each block which models have filled it. A model starts after the leading blocks of a request
    that it has filled itself. What happens to the KV of a refused draft is in ``keep_prefix``.

    Arrays are by slot, or by (author, slot) where each model has its own.

    Args:
        capacity: for how many requests there is room at first.
        block_size: tokens in a block of the KV cache.
        num_blocks: blocks in the KV cache.
    """

    def __init__(self, capacity: int, *, block_size: int, num_blocks: int) -> None:
        one, two = (capacity,), (2, capacity)
        self.prompt = np.zeros(one, np.int64)
        """How many tokens the prompt has."""
        self.before = np.zeros(one, np.int64)
        """How many own tokens earlier turns have. The prompt contains them."""
        self.length = np.zeros(one, np.int64)
        """How many tokens are known: those of the prompt, and those that were written in this turn."""
        self.author = np.zeros(one, np.int64)
        """The author of the next token."""
        self.stream = np.zeros(one, np.int64)
        """The key of the token draws."""
        self.computed = np.zeros(two, np.int64)
        """By author: for how many tokens this model holds the KV."""
        self.sent = np.zeros(two, np.int64)
        """By author: how many block ids of the request its runner knows."""
        self.known = np.zeros(two, bool)
        """By author: whether its runner knows the request."""
        self.replace = np.zeros(two, bool)
        """By author: whether its runner has block ids from before a preemption, which must be replaced."""
        self.changed = np.zeros(two, bool)
        """By author: whether its runner has yet to be told of the request, or of changes of its block ids."""
        self.writers = np.zeros(two, bool)
        """By author: whether it may write in the request."""
        self.reads = np.zeros(two, bool)
        """By author: whether it computes the prompt, to write or to draft."""
        self._by_slot = list(vars(self))
        self.blocks: list[list[int]] = [[] for _ in range(capacity)]
        """The block ids of each slot."""
        self.filled = np.zeros((2, num_blocks), dtype=bool)
        """By author and block id: whether this model has filled the block."""
        self.block_size = block_size

    def grow(self) -> None:
        """Double the number of slots."""
        for name in self._by_slot:
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)], axis=-1))
        self.blocks += [[] for _ in self.blocks]

    def written(self, slots: np.ndarray) -> np.ndarray:
        """How many own tokens each slot has, over all turns."""
        return self.before[slots] + self.length[slots] - self.prompt[slots]

    def reset(self, slots: np.ndarray) -> None:
        """Begin with new requests, of which no model knows anything."""
        for array in (self.computed, self.sent, self.known, self.replace):
            array[:, slots] = 0
        self.changed[:, slots] = True
        for slot in slots.tolist():
            self.blocks[slot] = []

    def allocate(
        self,
        slots: np.ndarray,
        start: Sequence[int],
        count: Sequence[int],
        blocks: Sequence[list[int] | None],
        whole: np.ndarray,
    ) -> None:
        """Take up the blocks that the scheduler has allocated in a step.

        Args:
            slots: the slot of each row.
            start: for each row, how many of its tokens are computed according to the scheduler.
            count: for each row, how many further tokens are scheduled.
            blocks: for each row, its newly allocated block ids, or None.
            whole: for each row, whether it has all its blocks there, since no model knows it, or it comes back from
                preemption.
        """
        allocated = [(i, int(slots[i]), new) for i, new in enumerate(blocks) if new]
        size = self.block_size
        # Before any hit is looked at: a request can hit a block that another one was given in this very step.
        self.filled[:, [b for i, _, new in allocated for b in (new[start[i] // size :] if whole[i] else new)]] = False
        for i, slot, new in allocated:
            self.changed[:, slot] = True
            if whole[i]:
                self._reallocate(slot, new, start[i] // size)
            else:
                self.blocks[slot] += new
            if count[i] > 1 or not self.known[:, slot].any():
                # What this step computes counts for the rows behind it: they come later in a pass, or in a later one.
                full = self.blocks[slot][: (start[i] + count[i]) // size]
                for who in (JUNIOR, SENIOR):
                    if self.reads[who, slot]:
                        self.filled[who, full] = True

    def _reallocate(self, slot: int, blocks: Sequence[int], hits: int) -> None:
        """Replace all blocks of a request; the first ``hits`` of the new ones come from the prefix cache."""
        self.blocks[slot] = list(blocks)
        for who in (JUNIOR, SENIOR):
            filled = self.filled[who, blocks[:hits]]
            run = hits if filled.all() else int(filled.argmin())
            self.computed[who, slot] = run * self.block_size
        self.sent[:, slot] = 0
        self.replace[:, slot] = self.known[:, slot]

    def fill(self, who: int, slots: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
        """Remember which blocks a model has filled by computing the tokens from ``start`` to ``end`` of each slot."""
        old, new = start // self.block_size, end // self.block_size
        crossed = (new > old).nonzero()[0]
        for slot, a, b in zip(slots[crossed].tolist(), old[crossed].tolist(), new[crossed].tolist(), strict=True):
            self.filled[who, self.blocks[slot][a:b]] = True

    def keep_prefix(self, slots: np.ndarray, length: np.ndarray, before: np.ndarray) -> None:
        """Keep the first ``length`` tokens of each slot after a round of drafts. What follows them is refused.

        Nothing in the KV cache is erased. Each model counts as having computed no more than the kept tokens but the
        last, which nobody has read. So the next pass of each model overwrites the entries of refused tokens before
        anything reads them. Only blocks that are full of kept tokens count as filled, so that no prefix-cache hit finds
        a refused token. vLLM's scheduler rolls its own count back as for its own speculative decoding, since it gave
        the slots as slots for drafts (``worker.TandemScheduler``).

        Args:
            slots: the slots of the round.
            length: how many tokens each slot keeps, its prompt included.
            before: by author, how many tokens of each slot the model had computed before the round.
        """
        self.length[slots] = length
        for who in (JUNIOR, SENIOR):
            computed = self.computed[who, slots] = np.minimum(self.computed[who, slots], length - 1)
            self.fill(who, slots, before[who], computed)

    def take_update(self, who: int, slot: int) -> tuple[bool, bool, list[int] | None]:
        """What a model's runner has to be told of a request. From then on it knows.

        Returns:
            Whether the request is new to the runner, whether its block ids are replaced instead of extended, and the
            block ids that the runner lacks, or None if there are none.
        """
        owned = self.blocks[slot]
        told = not self.known[who, slot], bool(self.replace[who, slot]), owned[self.sent[who, slot] :] or None
        self.sent[who, slot], self.known[who, slot] = len(owned), True
        self.replace[who, slot] = self.changed[who, slot] = False
        return told


class Planner:
    """Keeps track of what each model has computed, and plans the forward passes of each engine step.

    In each engine step call ``finish``, ``admit`` and ``schedule``, run the passes, then call ``postprocess`` and
    ``choose``.

    Args:
        budget: how many tokens one forward pass can take. A longer catch-up is split.
        block_size: tokens in a block of the KV cache.
        num_blocks: blocks in the KV cache.
        draft_length: chooses how far the junior drafts in the mode ``draft``; None without that mode.
        capacity: for how many requests there is room at first. The room grows as needed.
    """

    def __init__(
        self,
        *,
        budget: int,
        block_size: int,
        num_blocks: int,
        draft_length: DraftLength | None = None,
        capacity: int = 256,
    ) -> None:
        self.budget, self.draft_length = budget, draft_length
        self.mode: SchedulingMode = "lazy" if draft_length is None else "draft"
        self.drafting = np.empty(0, np.int64)
        """The rows of the planned step whose tokens are to be drafted. No pass of ``schedule`` contains them."""
        self.state = KVState(capacity, block_size=block_size, num_blocks=num_blocks)
        self.slots: dict[str, int] = {}
        self.stats = Stats()
        self._free = list(range(capacity))[::-1]
        self.selection = LiveSelection()
        self.stops: dict[int, Collection[int]] = {}  # by slot
        self._row_of: dict[int, int] = {}  # by slot, of requests that another turn may follow
        self._between_turns: dict[int, int] = {}  # row -> the slot that still has its strategy's state
        self.step: tuple[list[str], np.ndarray] = ([], np.empty(0, np.int64))
        """The requests of the planned step, and their slots."""

    # ------------------------------------------------------------------------------------------------- coming and going

    def finish(self, ids: Collection[str]) -> None:
        """Forget requests. If another turn may follow, the state of the strategy is kept. Unknown ids are ignored."""
        slots = [self.slots.pop(id) for id in ids if id in self.slots]
        if slots:
            rows = [self._row_of.pop(slot, None) for slot in slots]
            self._between_turns |= {row: slot for row, slot in zip(rows, slots, strict=True) if row is not None}
            self._release([slot for row, slot in zip(rows, slots, strict=True) if row is None])

    def begin_call(self) -> None:
        """Forget all counts, so that a call depends on its own requests only, and the states kept for further turns."""
        self.stats = Stats()
        self._release([*self._between_turns.values()])
        self._between_turns = {}

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Take up new requests and draw the authors of their first tokens.

        Raises:
            EngineError: a strategy chose an author that its ``writers`` exclude.
        """
        if not admissions:
            return
        self._grow(len(admissions))
        state = self.state
        kept = [None if a.row is None else self._between_turns.pop(a.row, None) for a in admissions]
        slots = [self._free.pop() if slot is None else slot for slot in kept]
        at, keys = np.array(slots), torch.tensor([a.key for a in admissions])
        before = np.array([sum(map(len, a.history)) for a in admissions])
        # Workers may have written on before a stop string was found in what they wrote: then they begin anew, too.
        goes_on = np.array([slot is not None for slot in kept]) & (before > 0) & (before == state.written(at))
        senior, places = np.empty(len(at), dtype=bool), torch.from_numpy(at)
        if goes_on.any():
            going = places[goes_on]
            senior[goes_on] = self.selection.turn(going, torch.from_numpy(state.author[at[goes_on]] == SENIOR)).numpy()
        if len(new := (~goes_on).nonzero()[0]):
            some = [admissions[i] for i in new.tolist()]
            known = [a.strategy for a in some], keys[new], [a.history for a in some]
            senior[new] = self.selection.admit(places[new], *known).numpy()
        state.author[at] = senior
        self.slots.update((a.id, slot) for a, slot in zip(admissions, slots, strict=True))
        self._row_of.update((slot, a.row) for a, slot in zip(admissions, slots, strict=True) if a.row is not None)
        state.prompt[at] = state.length[at] = [a.prompt_length for a in admissions]
        state.before[at] = before
        state.stream[at] = stream(keys, SAMPLING).numpy()
        state.writers[:, at] = state.reads[:, at] = np.array([_WRITERS[a.strategy.writers] for a in admissions]).T
        if self._draft_length(len(self.slots), at, np.ones(1), Passes()):
            state.reads[JUNIOR, at] = True  # so that it can draft where the senior writes alone, too
        self.stops.update((slot, a.stops) for a, slot in zip(admissions, slots, strict=True))
        state.reset(at)
        self._check_writers(at, state.author[at])

    def token_keys(self, ids: Sequence[str]) -> Int64[Tensor, " b"]:
        """The keys that the next tokens of some requests are drawn with. They are the same whichever model draws."""
        slots = self._slots_of(ids)
        return fold_in(torch.from_numpy(self.state.stream[slots]), torch.from_numpy(self.state.written(slots)))

    @property
    def authors(self) -> np.ndarray:
        """The author of the next token of each request of the planned step, ``JUNIOR`` or ``SENIOR``."""
        return self.state.author[self.step[1]]

    @property
    def outputs(self) -> np.ndarray:
        """How many tokens each request of the planned step has written in this turn."""
        slots = self.step[1]
        return self.state.length[slots] - self.state.prompt[slots]

    # --------------------------------------------------------------------------------------------------------- one step

    def schedule(
        self,
        ids: list[str],
        start: Sequence[int],
        count: Sequence[int],
        blocks: Sequence[list[int] | None],
        resumed: Collection[str] = (),
        *,
        room: bool = True,
    ) -> tuple[list[ForwardPass], list[ForwardPass]]:
        """The forward passes of the junior and of the senior for one scheduler step.

        Args:
            ids: the scheduled requests.
            start: for each request, how many of its tokens are computed according to the scheduler.
            count: for each request, how many further tokens are scheduled, slots for drafts excluded.
            blocks: for each request, its newly allocated block ids, or None. New requests and those in ``resumed``
                have all their block ids here.
            resumed: the requests that come back from preemption.
            room: whether the scheduler has given slots for drafts to some of the requests.
        """
        state, slots = self.state, self._slots_of(ids)
        counts = np.array(count, dtype=np.int64)
        end = np.array(start, dtype=np.int64) + counts
        first = ~(state.known[JUNIOR, slots] | state.known[SENIOR, slots])
        whole = first | np.array([id in resumed for id in ids])
        state.allocate(slots, start, count, blocks, whole)
        run = state.reads[:, slots]
        ends = end == state.length[slots]
        decoding = ends & (counts == 1) & ~first
        if self.mode != "lockstep":
            other = 1 - state.author[slots]
            run[other[decoding], decoding.nonzero()[0]] = False
        drafted = decoding & state.known[JUNIOR, slots] & (room and self.mode == "draft")
        self.drafting = drafted.nonzero()[0]
        run[:, self.drafting] = False
        for who in (JUNIOR, SENIOR):
            self.stats.rows[who] += int(np.count_nonzero(run[who] & decoding))
        self.step = ids, slots
        outputs, both = self.outputs, (run[who].nonzero()[0] for who in (JUNIOR, SENIOR))
        junior, senior = (
            self.prepare_passes(who, rows, end[rows], ends[rows], outputs[rows]) for who, rows in enumerate(both)
        )
        return junior, senior

    def postprocess(self, tokens: np.ndarray) -> None:
        """Record what the authors wrote in the planned step, and draw the next authors.

        Args:
            tokens: the token of each request, in the order of ``schedule``; -1 for a request that has written nothing
                yet, or that was part of a round of drafts, which keeps its own record.

        Raises:
            EngineError: a strategy chose an author that its ``writers`` exclude.
        """
        slots = self.step[1]
        self.step = ([], slots[:0])
        sampled = tokens >= 0
        if sampled.any():
            slots = slots[sampled]
            self.state.length[slots] += 1
            self.state.author[slots] = self.next_authors(slots, tokens[sampled])

    def next_authors(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Draw the next authors of some slots, after a token of each.

        Raises:
            EngineError: a strategy chose an author that its ``writers`` exclude.
        """
        authors = self.selection.step(torch.from_numpy(slots), torch.from_numpy(tokens)).numpy().astype(np.int64)
        self._check_writers(slots, authors)
        return authors

    def ahead(self, ids: Sequence[str]) -> int:
        """How far the junior drafts in the next step, provided that the step continues these requests.

        The drafts are then as long as the slots that the scheduler gives them, on all ranks.
        """
        slots = self._slots_of(ids)
        slots = slots[self.state.known[JUNIOR, slots]]
        writers = self.state.writers[:, slots]
        return self._draft_length(len(slots), slots, writers[SENIOR] / writers.sum(0), self.stats.drafts)

    def _draft_length(self, rows: int, slots: np.ndarray, shares: np.ndarray, passes: Passes) -> int:
        """The length of drafts for so many rows such as these slots, of whose tokens the senior writes these shares."""
        if self.mode != "draft" or self.draft_length is None or not len(slots):
            return 0
        context = float(self.state.length[slots].mean())
        return self.draft_length(rows, passes, share=float(shares.mean()), context=context)

    # ---------------------------------------------------------------------------------------------------------- details

    def _slots_of(self, ids: Sequence[str]) -> np.ndarray:
        return np.fromiter(map(self.slots.__getitem__, ids), np.int64, len(ids))

    def _grow(self, needed: int) -> None:
        """Make room until at least ``needed`` slots are free."""
        while len(self._free) < needed:
            capacity = len(self.state.blocks)
            self.state.grow()
            self._free = [*range(capacity, 2 * capacity)][::-1] + self._free

    def _release(self, slots: list[int]) -> None:
        if slots:
            self.selection.release(slots)
            self._free += slots

    def _check_writers(self, slots: np.ndarray, authors: np.ndarray) -> None:
        if not self.state.writers[authors, slots].all():
            raise EngineError("a strategy lets somebody write who it promised would not (Strategy.writers)")

    def prepare_passes(
        self,
        who: int,
        rows: np.ndarray,
        end: np.ndarray,
        ends: np.ndarray,
        outputs: np.ndarray,
        *,
        provisional: bool = False,
    ) -> list[ForwardPass]:
        """The passes in which one model computes some rows of the step, as few as the budget allows.

        Args:
            who: the model, ``JUNIOR`` or ``SENIOR``.
            rows: each row's index in the step.
            end: for each row, up to how many computed tokens it is brought.
            ends: for each row, whether its next token is wanted.
            outputs: for each row, how many tokens the runner takes to be written in this turn.
            provisional: whether the tokens may still change, so that the blocks do not count as filled.
        """
        state, passes, slots, left = self.state, list[ForwardPass](), self.step[1][rows], np.arange(len(rows))
        while len(left):
            start = state.computed[who][slots[left]]
            wanted = end[left] - start
            count = (self.budget - wanted.cumsum() + wanted).clip(0, wanted)
            fit, after = count > 0, left[count < wanted]
            now, start, count, last = left[fit], start[fit], count[fit], (count == wanted)[fit]
            at, ids = slots[now], [self.step[0][i] for i in rows[now].tolist()]
            self.stats.passes[who] += 1
            self.stats.computed[who] += int(count.sum())
            state.computed[who][at] = start + count
            begin, amount, blocks = start.tolist(), count.tolist(), list[list[int] | None]([None] * len(ids))
            forward = ForwardPass(ids, begin, amount, blocks, outputs[now].tolist(), ends[now] & last, rows[now])
            for i in state.changed[who][at].nonzero()[0].tolist():
                new, replaced, blocks[i] = state.take_update(who, int(at[i]))
                forward.new += [i] * new
                forward.replaced |= {ids[i]} if replaced else set()
            passes.append(forward)
            if not provisional:
                state.fill(who, at, start, start + count)
            left = after
        return passes
