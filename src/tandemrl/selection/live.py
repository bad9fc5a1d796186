"""The authors of the rows that an engine is decoding.

Each strategy has one state for all of its rows. Rows are addressed by slot, so that any subset of them can advance.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from tandemrl.selection.authors import gone_on, map_state, resumed
from tandemrl.selection.strategies import Strategy

Mark = list[tuple[int, Tensor, Any]]
"""The states of some slots: for each strategy its number, the positions of its slots among them, and their states."""

KEPT = 512
"""Of how many texts it is remembered where their last turn began."""


class LiveSelection:
    """Who writes next in each slot, where different slots may follow different strategies.

    A slot is a small integer that the engine chooses for a row. Releasing a slot, or admitting it again, forgets its
    state.
    """

    def __init__(self) -> None:
        self._strategies: list[Strategy] = []
        self._states: list[Any] = []
        self._strategy_of = torch.empty(0, dtype=torch.int64)  # by slot; -1: free
        # Decoding mostly advances the same rows again: their states stay gathered until others are asked for.
        self._gathered: tuple[int, Tensor, Any] | None = None  # strategy, slots, states
        # By key, of texts that are asked for turn by turn: strategy, earlier turns, and how the last one began. So what
        # a turn costs does not grow with the text.
        self._past: dict[int, tuple[Strategy, list[tuple[int, ...]], Tensor, Any]] = {}

    def admit(
        self,
        slots: Int64[Tensor, " b"],
        strategies: Sequence[Strategy],
        keys: Int64[Tensor, " b"],
        histories: Sequence[Sequence[Sequence[int]]] | None = None,
    ) -> Bool[Tensor, " b"]:
        """Start a completion in each slot, and return whether the senior writes its first token.

        Args:
            slots: the slots, in the order of the other arguments.
            strategies: the strategy of each slot.
            keys: the request key of each slot.
            histories: for each slot, the own tokens of every earlier turn (see ``authors.resumed``).
        """
        self._scatter()
        senior = torch.empty(len(slots), dtype=torch.bool)
        for strategy in {id(s): s for s in strategies}.values():
            mine = [i for i, s in enumerate(strategies) if s is strategy]
            past = {i: [] if histories is None else [*map(tuple, histories[i])] for i in mine}
            known = {i: self._known(strategy, int(keys[i]), past[i]) for i in mine}
            new = [i for i in mine if known[i] is None]
            begun = [(new, resumed(strategy, keys[new], [past[i] for i in new]))] if new else []
            begun += [([i], gone_on(strategy, *found)) for i, found in known.items() if found is not None]
            for which, (first, started) in begun:
                senior[which], group = first, self._group(strategy, started)
                needed = int(slots[which].max()) + 1
                self._states[group] = map_state(lambda x, size=needed: _grown(x, size), self._states[group])
                self._put(group, slots[which], started)
                self._strategy_of = _grown(self._strategy_of, needed, fill=-1)
                self._strategy_of[slots[which]] = group
            for i in filter(past.__getitem__, mine):
                stood = strategy, past[i], senior[i : i + 1], self._get(group, slots[i : i + 1])
                self._past.pop(int(keys[i]), None)
                self._past[int(keys[i])] = stood
        for key in [*self._past][:-KEPT]:
            del self._past[key]
        return senior

    def _known(self, strategy: Strategy, key: int, past: list[tuple[int, ...]]) -> tuple[Any, Any, Any] | None:
        """Where the text of a key stood at its last turn, and the turns since; None: nowhere in this ``past``."""
        of, earlier, senior, state = self._past.get(key, (None, past, None, None))
        same = of is strategy and past[: len(earlier)] == earlier
        return (senior, state, [past[len(earlier) :]]) if same else None

    def release(self, slots: Sequence[int]) -> None:
        self._strategy_of[[slot for slot in slots if slot < len(self._strategy_of)]] = -1

    def step(self, slots: Int64[Tensor, " b"], tokens: Int64[Tensor, " b"]) -> Bool[Tensor, " b"]:
        """Tell each slot the token that was just written in it, and return whether the senior writes the next one."""
        if len(self._strategies) == 1:
            return self._advance(0, slots, tokens)
        senior = torch.empty(len(slots), dtype=torch.bool)
        for group, mine in self._groups(slots):
            senior[mine] = self._advance(group, slots[mine], tokens[mine])
        return senior

    def turn(self, slots: Int64[Tensor, " b"], senior: Bool[Tensor, " b"]) -> Bool[Tensor, " b"]:
        """Begin a further turn in each slot, and return whether the senior writes its first token.

        Args:
            slots: the slots in which a turn begins.
            senior: what ``step`` returned after the last token of the turn before. It stands for strategies without a
                ``turn`` function.
        """
        self._scatter()
        senior = senior.clone()
        for group, mine in self._groups(slots):
            if (turn := self._strategies[group].turn) is not None:
                senior[mine], state = turn(self._get(group, slots[mine]))
                self._put(group, slots[mine], state)
        return senior

    def mark(self, slots: Int64[Tensor, " b"]) -> Mark:
        """The present states of some slots, to which ``rewind`` can return."""
        kept = self._gathered
        if kept is not None and torch.equal(kept[1], slots):
            return [(kept[0], torch.arange(len(slots)), kept[2])]
        self._scatter()
        return [(group, mine, self._get(group, slots[mine])) for group, mine in self._groups(slots)]

    def rewind(self, slots: Int64[Tensor, " b"], marks: Sequence[Mark], which: Int64[Tensor, " b"]) -> None:
        """Put slot ``slots[i]`` back into its state at the mark ``marks[which[i]]``. All marks are of these slots."""
        self._scatter()
        for parts in zip(*marks, strict=True):
            group, mine, _ = parts[0]

            def chosen(*states: Tensor, at: Tensor = which[mine]) -> Tensor:
                return torch.stack(states)[at, torch.arange(len(at))]

            self._put(group, slots[mine], map_state(chosen, *(part[2] for part in parts)))

    def strategy(self, number: int) -> Strategy:
        """The strategy with this number of a mark."""
        return self._strategies[number]

    def runs(self, slots: Int64[Tensor, " k"], room: int, begin: int, *, senior: bool) -> list[int | None]:
        """How many words the draws give an author from here on in each slot, at most ``room``; None: those up to the
        end of a step (``Strategy.by_steps``). No state changes.

        Args:
            slots: the slots, whose strategies have ``starts``.
            begin: a token that begins a word.
            senior: whose words are counted.
        """
        before, count = self.mark(slots), torch.zeros_like(slots)
        by_steps = torch.tensor([self._strategies[group].by_steps for group in self._strategy_of[slots].tolist()])
        runs, begins = ~by_steps, torch.full_like(slots, begin)
        for _ in range(room):
            runs = runs & (self.step(slots, begins) == senior)  # as if every token began a word
            count += runs
            if not bool(runs.any()):
                break
        self.rewind(slots, [before], torch.zeros_like(slots))
        return [None if steps else words for steps, words in zip(by_steps.tolist(), count.tolist(), strict=True)]

    def _advance(self, group: int, slots: Tensor, tokens: Tensor) -> Tensor:
        kept = self._gathered
        if kept is not None and kept[0] == group and torch.equal(kept[1], slots):
            state = kept[2]
        else:
            self._scatter()
            state = self._get(group, slots)
        senior, state = self._strategies[group].step(state, tokens)
        self._gathered = group, slots, state
        return senior.bool()  # a strategy of the user's may say 0 and 1

    def _scatter(self) -> None:
        if self._gathered is not None:
            self._put(*self._gathered)
            self._gathered = None

    def _groups(self, slots: Tensor) -> list[tuple[int, Tensor]]:
        """The number of each strategy that some slots follow, with the positions of these among them."""
        group_of = self._strategy_of[slots]
        return [(group, (group_of == group).nonzero().squeeze(1)) for group in group_of.unique().tolist()]

    def _get(self, group: int, slots: Tensor) -> Any:
        return map_state(lambda x: x.index_select(0, slots), self._states[group])

    def _put(self, group: int, slots: Tensor, state: Any) -> None:
        map_state(lambda x, new: x.index_copy_(0, slots, new), self._states[group], state)

    def _group(self, strategy: Strategy, like: Any) -> int:
        for group, known in enumerate(self._strategies):
            if known is strategy:
                return group
        empty = map_state(lambda x: x.new_zeros(0, *x.shape[1:]), like)
        in_use = set(self._strategy_of.tolist())
        for group in range(len(self._strategies)):
            if group not in in_use:
                self._strategies[group], self._states[group] = strategy, empty
                return group
        self._strategies.append(strategy)
        self._states.append(empty)
        return len(self._strategies) - 1


def _grown(tensor: Tensor, size: int, fill: int = 0) -> Tensor:
    """The tensor with at least ``size`` rows, the new ones filled with ``fill``. When it grows, it at least doubles."""
    if size <= len(tensor):
        return tensor
    extra = tensor.new_full((max(size, 2 * len(tensor)) - len(tensor), *tensor.shape[1:]), fill)
    return torch.cat([tensor, extra])
