"""Plans which model computes which tokens in one engine step of vLLM. This module does not import vllm.

vLLM's scheduler knows only one model. In each step it wants some requests brought from ``start`` to ``start + count``
computed tokens, in KV blocks that it allocates. Here two models share these block ids. Each has KV tensors of its own,
and each may lag behind. The planner keeps track of what each model has computed, and turns a step of the scheduler into
forward passes of each model. How it does that depends on the mode:

- ``lazy``: a decoding request is computed only by the author of its next token, from where that model stopped. The
  other model catches up in one chunk when its turn comes. Prompts are computed by both models, or by the only one that
  writes.
- ``lockstep``: both models compute every token.
- ``draft``: as lazy, but rows that decode are left to a ``drafting.Round``, in which the junior drafts.
- ``auto``: lazy or draft, whichever ``rollout.drafting`` expects to be cheaper, from step to step.

A prefix-cache hit is about block ids and does not say which model filled them. So the planner remembers for each block
which models have filled it. A model starts after the leading blocks of a request that it has filled itself.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from tandemrl.rollout.drafting import Choice, Drafts, Load
from tandemrl.rollout.engine import EngineError, Passes
from tandemrl.rollout.vllm.ledger import Ledger, Stats
from tandemrl.selection import Strategy
from tandemrl.selection.draws import SAMPLING, fold_in, stream
from tandemrl.selection.live import LiveSelection

SchedulingMode = Literal["lazy", "lockstep", "draft", "auto"]
DRAFTING: tuple[SchedulingMode, ...] = ("draft", "auto")
"""The modes in which the junior may draft."""
DRAWN_AHEAD = 64
"""How many keys of token draws are computed at once for a row."""
MEMORY = 4096
"""If more tokens than this have been drafted, or written where both may write, the counts of both are halved. A server
has one endless call, in which old counts would otherwise outweigh new ones."""
NO_DRAFTS = Drafts(0)
EVEN = 8
"""How many tokens of each author are added to those seen, so that the assumed shares of the authors begin equal."""
JUNIOR, SENIOR = 0, 1
_WRITERS = {"both": (True, True), "senior": (False, True), "junior": (True, False)}  # by author


def check_mode(mode: str) -> SchedulingMode:
    """Check that ``mode`` is a scheduling mode, and return it.

    Raises:
        EngineError: there is no such mode.
    """
    if mode not in get_args(SchedulingMode):
        raise EngineError(f"mode={mode}: must be one of {', '.join(get_args(SchedulingMode))}")
    return cast(SchedulingMode, mode)


class Admission(NamedTuple):
    """A request that the scheduler starts.

    prompt_length: how many tokens its prompt has. key: its request key. history: the own tokens of each earlier turn,
    all of which the prompt contains. row: a number that all turns of a completion share; None means that no turn
    follows this one. stops: token ids that end the request. drafts: whether its tokens may be drafted.
    """

    id: str
    prompt_length: int
    key: int
    strategy: Strategy
    history: Sequence[Sequence[int]] = ()
    row: int | None = None
    stops: Collection[int] = ()
    drafts: bool = True


@dataclass(slots=True)
class Pass:
    """One forward pass of one model. Row i computes ``count[i]`` tokens of ``ids[i]`` from position ``start[i]`` on."""

    ids: list[str]
    start: list[int]
    count: list[int]
    blocks: list[list[int] | None]
    """For each row, the block ids that its runner does not know: all those of a new or replaced row; None if none."""
    outputs: list[int]
    """For each row, how many tokens it has written in this turn."""
    new: list[int]
    """The rows that this model has never seen."""
    replaced: set[str]
    """The requests that came back from preemption. Their block ids are replaced, not extended."""
    ends: np.ndarray
    """For each row, whether this pass predicts its next token (bool)."""
    rows: np.ndarray
    """Each row's index in the step."""
    slots: np.ndarray
    """Each row's slot in the ledger."""


class Chosen(NamedTuple):
    """How far the junior drafts in the next step, with the load and the counts by which it was chosen."""

    choice: Choice
    load: Load
    passes: Passes


class Planner:
    """Keeps track of what each model has computed, and plans the forward passes of each engine step.

    In each engine step call ``finish``, ``admit`` and ``schedule``, run the passes, then call ``postprocess`` and
    ``choose``.

    Args:
        budget: how many tokens one forward pass can take. A longer catch-up is split.
        block_size: tokens in a block of the KV cache.
        num_blocks: blocks in the KV cache.
        prefix_caching: whether vLLM caches prefixes. If not, the planner need not remember which blocks are filled.
        mode: which model computes which tokens (see the module).
        drafts: chooses how far the junior drafts, in the modes in which it drafts.
        record: whether to record the authors of every request by its key (``recorded``), for tests.
        capacity: for how many requests there is room at first. The room grows as needed.
    """

    def __init__(
        self,
        *,
        budget: int,
        block_size: int,
        num_blocks: int,
        prefix_caching: bool = True,
        mode: SchedulingMode = "lazy",
        drafts: Drafts = NO_DRAFTS,
        record: bool = False,
        capacity: int = 256,
    ) -> None:
        self.budget, self.block_size, self.prefix_caching, self.mode = budget, block_size, prefix_caching, mode
        self.drafts = drafts
        self.drafting = np.empty(0, np.int64)
        """The rows of the planned step whose tokens are to be drafted. No pass of ``schedule`` contains them."""
        self.filled = np.zeros((2, num_blocks), dtype=bool)
        self.slots: dict[str, int] = {}
        self.stats = Stats()
        self.recorded: dict[int, list[int]] | None = {} if record else None
        self.authors_of: dict[int, list[int]] = {}
        self._free = list(range(capacity))[::-1]
        self.ledger = Ledger.empty(capacity)
        self._blocks: list[list[int]] = [[] for _ in range(capacity)]
        self.selection = LiveSelection()
        self.stops: dict[int, Collection[int]] = {}  # by slot
        self._row_of: dict[int, int] = {}  # by slot, of requests that another turn may follow
        self._between_turns: dict[int, int] = {}  # row -> the slot that still has its strategy's state
        self._step: tuple[list[str], np.ndarray] = ([], np.empty(0, np.int64))
        self._same = self._step  # the last rows planned, and their slots
        self._token_keys = np.empty((capacity, DRAWN_AHEAD), np.int64)  # by slot
        self.begin_call()

    # ------------------------------------------------------------------------------------------------- coming and going

    def finish(self, ids: Collection[str]) -> None:
        """Forget requests. If another turn may follow, the state of the strategy is kept. Unknown ids are ignored."""
        slots = [self.slots.pop(id) for id in ids if id in self.slots]
        if slots:
            self._same = [], self._same[1][:0]
            rows = [self._row_of.pop(slot, None) for slot in slots]
            self._between_turns |= {row: slot for row, slot in zip(rows, slots, strict=True) if row is not None}
            self._release([slot for row, slot in zip(rows, slots, strict=True) if row is None])

    def forget_rows(self) -> None:
        """Forget the strategies' states that were kept for further turns."""
        self._release([*self._between_turns.values()])
        self._between_turns = {}

    def begin_call(self) -> None:
        """Forget the counts by which drafts are chosen, so that a call depends on its own requests only."""
        self._choice = Choice()
        self._seen = np.zeros(4, np.int64)  # drafted, accepted; written by the junior and the senior where both may

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Take up new requests and draw the authors of their first tokens.

        Raises:
            EngineError: a strategy chose an author that its ``writers`` exclude.
        """
        if not admissions:
            return
        ledger = self._grow(len(admissions))
        kept = [None if a.row is None else self._between_turns.pop(a.row, None) for a in admissions]
        slots = [self._free.pop() if slot is None else slot for slot in kept]
        at, keys = np.array(slots), torch.tensor([a.key for a in admissions])
        before = np.array([sum(map(len, a.history)) for a in admissions])
        # Workers may have written on before a stop string was found in what they wrote: then they begin anew, too.
        goes_on = np.array([slot is not None for slot in kept]) & (before > 0) & (before == self.written(at))
        ledger.author[at] = self._first_authors(admissions, at, keys, goes_on)
        self.slots.update((a.id, slot) for a, slot in zip(admissions, slots, strict=True))
        self._row_of.update((slot, a.row) for a, slot in zip(admissions, slots, strict=True) if a.row is not None)
        ledger.prompt[at] = ledger.length[at] = [a.prompt_length for a in admissions]
        ledger.before[at] = before
        ledger.stream[at] = stream(keys, SAMPLING).numpy()
        ledger.writers[:, at] = ledger.reads[:, at] = np.array([_WRITERS[a.strategy.writers] for a in admissions]).T
        ledger.drafts[at] = [a.drafts for a in admissions]
        if self._drafts_alone(at):
            ledger.reads[JUNIOR, at] |= ledger.drafts[at]
        self.stops.update((slot, a.stops) for a, slot in zip(admissions, slots, strict=True))
        for array in (ledger.computed, ledger.sent, ledger.known, ledger.replace):
            array[:, at] = 0
        ledger.changed[:, at] = True
        ledger.drawn[at] = -1
        for slot in slots:
            self._blocks[slot] = []
        self.check_writers(at, ledger.author[at], [a.id for a in admissions])
        if self.recorded is not None:
            for admission, slot in zip(admissions, slots, strict=True):
                self.authors_of[slot] = self.recorded.setdefault(admission.key, [])

    def token_keys(self, ids: Sequence[str], forward: Pass | None = None) -> Int64[Tensor, " b"]:
        """The keys that the next tokens of some requests are drawn with. They are the same whichever model draws.

        Args:
            ids: requests of the planned step.
            forward: the pass that draws them, which spares a look-up if its rows are ``ids``.
        """
        same = forward is not None and ids == forward.ids  # mostly: then no looking up
        slots = forward.slots if same and forward is not None else self._slots_of(ids)
        ledger = self.ledger
        written = self.written(slots)
        column = written % DRAWN_AHEAD
        empty = slots[ledger.drawn[slots] != written - column]
        if len(empty):
            self._refill_token_keys(empty)
        return torch.from_numpy(self._token_keys[slots, column])

    @property
    def authors(self) -> np.ndarray:
        """The author of the next token of each request of the planned step, ``JUNIOR`` or ``SENIOR``."""
        return self.ledger.author[self._step[1]]

    @property
    def step(self) -> tuple[list[str], np.ndarray]:
        """The requests of the planned step, and their slots."""
        return self._step

    @property
    def outputs(self) -> np.ndarray:
        """How many tokens each request of the planned step has written in this turn."""
        slots = self._step[1]
        return self.ledger.length[slots] - self.ledger.prompt[slots]

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
    ) -> tuple[list[Pass], list[Pass]]:
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
        ledger, size = self.ledger, self.block_size
        if ids != self._same[0]:  # decoding mostly goes on with the same rows
            self._same = list(ids), self._slots_of(ids)
        slots = self._same[1]
        begin, counts = np.array(start, dtype=np.int64), np.array(count, dtype=np.int64)
        end = begin + counts
        first = ~(ledger.known[JUNIOR, slots] | ledger.known[SENIOR, slots])
        allocated = [(i, new) for i, new in enumerate(blocks) if new]
        if allocated:
            ledger.changed[:, slots[[i for i, _ in allocated]]] = True
        replaced = {i for i, _ in allocated if first[i] or ids[i] in resumed}
        if allocated and self.prefix_caching:
            # Before any hit is looked at: a request can hit a block that another one was given in this very step.
            fresh = [b for i, new in allocated for b in (new[start[i] // size :] if i in replaced else new)]
            self.filled[:, fresh] = False
        for i, new in allocated:
            slot = int(slots[i])
            if i in replaced:
                self._blocks[slot] = list(new)
                self._reallocate(slot, start[i] // size)
            else:
                self._blocks[slot] += new
            if self.prefix_caching and (first[i] or count[i] > 1):
                # What this step computes counts for the rows behind it: they come later in a pass, or in a later one.
                full = self._blocks[slot][: int(end[i]) // size]
                for who in (JUNIOR, SENIOR):
                    if ledger.reads[who, slot]:
                        self.filled[who, full] = True
        run = ledger.reads[:, slots]
        ends = end == ledger.length[slots]
        decoding = ends & (counts == 1) & ~first
        if self.mode != "lockstep":
            other = 1 - ledger.author[slots]
            run[other[decoding], decoding.nonzero()[0]] = False
        drafted = decoding & ledger.drafts[slots] & ledger.known[JUNIOR, slots] & (room and self.mode in DRAFTING)
        self.drafting = drafted.nonzero()[0]
        run[:, self.drafting] = False
        for who in (JUNIOR, SENIOR):
            self.stats.rows[who] += int(np.count_nonzero(run[who] & decoding))
        self._step = ids, slots
        self.stats.steps += 1
        junior, senior = (self.prepare_passes(who, run[who], slots, end, ends) for who in (JUNIOR, SENIOR))
        return junior, senior

    def postprocess(self, tokens: np.ndarray) -> None:
        """Record what the authors wrote in the planned step, and draw the next authors.

        Args:
            tokens: the token of each request, in the order of ``schedule``; -1 for a request that has written nothing
                yet, or that was part of a round of drafts, which keeps its own record.

        Raises:
            EngineError: a strategy chose an author that its ``writers`` exclude.
        """
        ids, slots = self._step
        self._step = ([], slots[:0])
        sampled = tokens >= 0
        written = int(np.count_nonzero(sampled))
        if not written:
            return
        ledger = self.ledger
        if written < len(ids):
            ids, slots, tokens = [ids[i] for i in sampled.nonzero()[0]], slots[sampled], tokens[sampled]
        self.count_written(slots, ledger.author[slots])
        ledger.length[slots] += 1
        ledger.author[slots] = self.selection.step(torch.from_numpy(slots), torch.from_numpy(tokens)).numpy()
        self.check_writers(slots, ledger.author[slots], ids)

    def choose(self, ids: Sequence[str]) -> Chosen:
        """Choose how far the junior drafts in the next step, provided that the step continues these requests.

        The drafts are then as long as the slots that the scheduler gives them, on all ranks.
        """
        if self.mode not in DRAFTING:
            return Chosen(Choice(), Load(0), Passes())
        slots, ledger = self._slots_of(ids), self.ledger
        drafted, accepted, junior, senior = self._seen.tolist()
        passes = Passes(drafted=drafted, accepted=accepted)
        slots = slots[ledger.drafts[slots] & ledger.known[JUNIOR, slots]]
        load = Load(len(slots))
        if len(slots):
            share = (senior + EVEN) / (junior + senior + 2 * EVEN)
            may_write = ledger.writers[:, slots]
            shares = np.where(may_write.all(0), share, may_write[SENIOR])
            load = Load(len(slots), float(ledger.length[slots].mean()), float(shares.mean()))
            self._choice = self.drafts.choose(self._choice, load, passes, always=self.mode == "draft")
        return Chosen(self._choice, load, passes)

    # ---------------------------------------------------------------------------------------------------------- details

    def _slots_of(self, ids: Sequence[str]) -> np.ndarray:
        return np.fromiter(map(self.slots.__getitem__, ids), np.int64, len(ids))

    def _drafts_alone(self, admitted: np.ndarray) -> bool:
        """Whether the junior also reads prompts of rows that the senior writes alone, so that it can draft for them.

        Args:
            admitted: the slots of the rows.
        """
        if self.mode != "auto":
            return self.mode == "draft"
        load = Load(len(self.slots), float(self.ledger.length[admitted].mean()), 1.0)
        return self.drafts.choose(Choice(), load, Passes()).ahead > 0

    def count_drafted(self, drafted: int, accepted: int) -> None:
        """Count the drafts of a round, of the tokens that its rows keep.

        Args:
            drafted: how many tokens were guesses of what the senior draws, corrected ones included.
            accepted: how many of them the senior drew, too.
        """
        self.stats.drafted += drafted
        self.stats.accepted += accepted
        self._seen[:2] += drafted, accepted
        self._forget()

    def count_written(self, slots: np.ndarray, authors: np.ndarray) -> None:
        """Count written tokens by their authors. Tokens of the same slot must be in order."""
        if self.mode in DRAFTING:
            both = self.ledger.writers[:, slots].all(0)
            self._seen[2:] += np.bincount(authors[both], minlength=2)
            self._forget()
        by_senior = int(np.count_nonzero(authors))
        self.stats.written[SENIOR] += by_senior
        self.stats.written[JUNIOR] += len(authors) - by_senior
        if self.recorded is not None:
            for slot, author in zip(slots.tolist(), authors.tolist(), strict=True):
                self.authors_of[slot].append(author)

    def _forget(self) -> None:
        """Halve the counts once they are large, so that old ones weigh less, also if nothing is drafted any more."""
        if max(self._seen[0], self._seen[2:].sum()) > MEMORY:
            self._seen //= 2

    def written(self, slots: np.ndarray) -> np.ndarray:
        """How many own tokens each slot has, over all turns."""
        ledger = self.ledger
        return ledger.before[slots] + ledger.length[slots] - ledger.prompt[slots]

    def _first_authors(
        self, admissions: Sequence[Admission], slots: np.ndarray, keys: Tensor, goes_on: np.ndarray
    ) -> np.ndarray:
        """Draw whether the senior writes the first token of each request.

        Args:
            admissions: the requests.
            slots: the slot of each request.
            keys: the key of each request.
            goes_on: for each request, whether its slot still has the strategy's state from the turn before.
        """
        senior = np.empty(len(slots), dtype=bool)
        if goes_on.any():
            at = slots[goes_on]
            last = torch.from_numpy(self.ledger.author[at] == SENIOR)
            senior[goes_on] = self.selection.turn(torch.from_numpy(at), last).numpy()
        new = (~goes_on).nonzero()[0]
        if len(new):
            some = [admissions[i] for i in new.tolist()]
            histories = [a.history for a in some] if any(a.history for a in some) else None
            at, strategies = torch.from_numpy(slots[new]), [a.strategy for a in some]
            senior[new] = self.selection.admit(at, strategies, keys[torch.from_numpy(new)], histories).numpy()
        return senior

    def _grow(self, needed: int) -> Ledger:
        """Grow the ledger until at least ``needed`` slots are free, and return it."""
        while len(self._free) < needed:
            capacity = len(self._blocks)
            self.ledger = self.ledger.grown()
            self._blocks += [[] for _ in range(capacity)]
            self._token_keys = np.concatenate([self._token_keys, np.empty_like(self._token_keys)])
            self._free = [*range(capacity, 2 * capacity)][::-1] + self._free
        return self.ledger

    def _release(self, slots: list[int]) -> None:
        if slots:
            self.selection.release(slots)
            self._free += slots

    def check_writers(self, slots: np.ndarray, authors: np.ndarray, ids: Sequence[str]) -> None:
        """Check the authors of some slots against what their strategies promise.

        Raises:
            EngineError: a strategy chose an author that its ``writers`` exclude.
        """
        kept = self.ledger.writers[authors, slots]
        if not kept.all():
            raise EngineError(
                f"request {ids[int(kept.argmin())]}: its strategy lets somebody write who it promised would not "
                "(Strategy.writers)"
            )

    def _refill_token_keys(self, slots: np.ndarray) -> None:
        """Compute the next ``DRAWN_AHEAD`` token keys of some slots."""
        ledger = self.ledger
        written = self.written(slots)
        ledger.drawn[slots] = first = written - written % DRAWN_AHEAD
        counters = first[:, None] + np.arange(DRAWN_AHEAD)
        keys = ledger.stream[slots].repeat(DRAWN_AHEAD)
        page = fold_in(torch.from_numpy(keys), torch.from_numpy(counters.reshape(-1)))
        self._token_keys[slots] = page.numpy().reshape(counters.shape)

    def _reallocate(self, slot: int, hits: int) -> None:
        """Account for a request whose blocks are all newly given, the first ``hits`` of them from the prefix cache."""
        ledger = self.ledger
        for who in (JUNIOR, SENIOR):
            filled = self.filled[who, self._blocks[slot][:hits]]
            run = hits if filled.all() else int(filled.argmin())
            ledger.computed[who, slot] = run * self.block_size
        ledger.sent[:, slot] = 0
        ledger.replace[:, slot] = ledger.known[:, slot]

    def prepare_passes(
        self,
        who: int,
        run: np.ndarray,
        slots: np.ndarray,
        end: np.ndarray,
        ends: np.ndarray,
        *,
        provisional: bool = False,
    ) -> list[Pass]:
        """The passes in which one model computes rows up to ``end``, as few as the budget allows.

        Args:
            who: the model, ``JUNIOR`` or ``SENIOR``.
            run: for each row of the step, whether the model computes it.
            slots: for each row, its slot.
            end: for each row, up to how many computed tokens it is brought.
            ends: for each row, whether its next token is wanted.
            provisional: whether the tokens may still change, so that the blocks do not count as filled.
        """
        passes, rows = [], run.nonzero()[0]
        while len(rows):
            at = slots[rows]
            start = self.ledger.computed[who][at]
            count = end[rows] - start
            total = int(count.sum())
            left = rows[:0]
            if total > self.budget:
                before = np.concatenate([[0], count.cumsum()[:-1]])
                possible = np.minimum(count, np.maximum(self.budget - before, 0))
                left, fit = rows[possible < count], possible > 0
                rows, at, start, count = rows[fit], at[fit], start[fit], possible[fit]
                total = self.budget
            self.stats.passes[who] += 1
            self.stats.computed[who] += total
            passes.append(self._prepare_pass(who, rows, at, start, count, ends[rows] & (start + count == end[rows])))
            if not provisional:
                self.mark_filled(who, at, start, start + count)
            rows = left
        return passes

    def _prepare_pass(
        self, who: int, rows: np.ndarray, slots: np.ndarray, start: np.ndarray, count: np.ndarray, ends: np.ndarray
    ) -> Pass:
        ledger, ids = self.ledger, self._step[0]
        ledger.computed[who][slots] = start + count
        forward = Pass(
            ids=ids if len(rows) == len(ids) else [ids[i] for i in rows.tolist()],
            start=start.tolist(),
            count=count.tolist(),
            blocks=[None] * len(rows),
            outputs=(ledger.length[slots] - ledger.prompt[slots]).tolist(),
            new=[],
            replaced=set(),
            ends=ends,
            rows=rows,
            slots=slots,
        )
        changed = ledger.changed[who][slots].nonzero()[0]
        if len(changed):
            self._prepare_updates(who, changed, forward)
        return forward

    def mark_filled(self, who: int, slots: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
        """Remember which blocks a model has filled by computing the tokens from ``start`` to ``end`` of each slot."""
        if not self.prefix_caching:
            return
        full: list[int] = []
        old, new = start // self.block_size, end // self.block_size
        crossed = (new > old).nonzero()[0]
        for slot, a, b in zip(slots[crossed].tolist(), old[crossed].tolist(), new[crossed].tolist(), strict=True):
            full += self._blocks[slot][a:b]
        if full:
            self.filled[who, full] = True

    def _prepare_updates(self, who: int, rows: np.ndarray, forward: Pass) -> None:
        """Add to a pass what its runner has to be told of requests that are new, got blocks or were preempted.

        Args:
            who: the model.
            rows: the rows of the pass that have changed since the model last computed them.
            forward: the pass.
        """
        ledger, slots = self.ledger, forward.slots[rows]
        forward.new += rows[~ledger.known[who][slots]].tolist()
        forward.replaced |= {forward.ids[i] for i in rows[ledger.replace[who][slots]].tolist()}
        owned = [self._blocks[slot] for slot in slots.tolist()]
        for row, blocks, sent in zip(rows.tolist(), owned, ledger.sent[who][slots].tolist(), strict=True):
            forward.blocks[row] = blocks[sent:] or None
        ledger.sent[who][slots] = [len(blocks) for blocks in owned]
        ledger.known[who][slots] = True
        ledger.replace[who][slots] = ledger.changed[who][slots] = False
