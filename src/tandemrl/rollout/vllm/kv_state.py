"""The state of each request, and above all which of its tokens and KV blocks each of the two models has computed.

vLLM's scheduler hands out blocks for one model. Both models share its block ids, but each has KV tensors of its own,
and each may lag behind. A prefix-cache hit is about block ids and does not say which model filled them. So the state
remembers for each block which models have filled it. A model starts after the leading blocks of a request that it has
filled itself. What happens to the KV of a refused draft is in ``KVState.keep_prefix``.

This module does not import vllm.
"""

from collections.abc import Sequence

import numpy as np

JUNIOR, SENIOR = 0, 1


class KVState:
    """The state of each request, in arrays by slot, or by (author, slot) where each model has its own.

    An author is 0 for the junior and 1 for the senior.

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
