"""Who wrote each token, recomputed from tokens and request keys alone, and how often authors were drawn."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int8, Int64
from torch import Tensor

from tandemrl.selection.strategies import Strategy


def map_state(function: Callable[..., Tensor], *states: Any) -> Any:
    """Apply ``function`` to corresponding tensors of (nested) NamedTuple states."""
    if isinstance(states[0], Tensor):
        return function(*states)
    mapped = [map_state(function, *parts) for parts in zip(*states, strict=True)]
    return type(states[0])(*mapped) if hasattr(states[0], "_fields") else tuple(mapped)


def draw_counts(state: Any) -> tuple[Int64[Tensor, " b"], Int64[Tensor, " b"]]:
    """For each row, how many authors were drawn so far and how many draws fell to the senior.

    Both are 0 for a state that does not count draws.
    """
    if hasattr(state, "draws"):
        return state.draws, state.senior_draws
    none = torch.zeros_like(state[0], dtype=torch.int64)
    return none, none


class Replay(NamedTuple):
    """The recomputed authors of a batch of completions, the longest of which has ``l`` tokens.

    author: 1 for the senior, 0 for the junior, -1 beyond the row's length. draws, senior_draws: the counts of
    ``draw_counts`` up to the draw for the last token; a draw for what would come after it is not counted.
    They are 0 for an empty row.
    """

    author: Int8[Tensor, "b l"]
    draws: Int64[Tensor, " b"]
    senior_draws: Int64[Tensor, " b"]


def replay(
    strategy: Strategy,
    keys: Int64[Tensor, " b"],
    tokens: Int64[Tensor, "b l"],
    lengths: Int64[Tensor, " b"],
    turn_starts: Bool[Tensor, "b l"] | None = None,
) -> Replay:
    """Recompute who wrote each token, from tokens and request keys alone. The result is what a live engine recorded.

    Args:
        strategy: the strategy that the completions were written under.
        keys: request key of each completion.
        tokens: own tokens of all turns of each completion, right-padded with anything.
        lengths: how many own tokens each completion has.
        turn_starts: True where a token begins a turn other than the first. None means that every completion has one
            turn.
    """
    real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    written = tokens.masked_fill(~real, 0).T.contiguous()  # by position: a step reads one row
    senior, state = strategy.init(keys)
    draws = senior_draws = torch.zeros_like(keys)
    authors = []
    for i in range(tokens.shape[1]):
        if i > 0 and strategy.starts is None:
            senior, state = strategy.step(state, written[i - 1])
        if turn_starts is not None and strategy.turn is not None and bool(turn_starts[:, i].any()):
            senior, state = _where(turn_starts[:, i], strategy.turn(state), (senior, state))
        if strategy.starts is not None:  # then a step names the author of the token that it is told
            senior, state = strategy.step(state, written[i])
        drawn, senior_drawn = draw_counts(state)
        draws = torch.where(real[:, i], drawn, draws)
        senior_draws = torch.where(real[:, i], senior_drawn, senior_draws)
        authors.append(senior)
    if not authors:
        return Replay(torch.empty_like(tokens, dtype=torch.int8), draws, senior_draws)
    author = torch.stack(authors, dim=1).to(torch.int8).masked_fill_(~real, -1)
    return Replay(author, draws, senior_draws)


def resumed(
    strategy: Strategy, keys: Int64[Tensor, " b"], histories: Sequence[Sequence[Sequence[int]]]
) -> tuple[Bool[Tensor, " b"], Any]:
    """The author of the next turn's first token and the strategy's state there, after the turns of ``histories``.

    For a row without history these are what ``init`` returns.

    Args:
        keys: request key of each row.
        histories: for each row, the own tokens of every earlier turn.

    Returns:
        Whether the senior writes first in each row, and the state.
    """
    return gone_on(strategy, *strategy.init(keys), histories)


def gone_on(
    strategy: Strategy, senior: Bool[Tensor, " b"], state: Any, turns: Sequence[Sequence[Sequence[int]]]
) -> tuple[Bool[Tensor, " b"], Any]:
    """As ``resumed``, from where a turn of each row may begin, after the further ``turns``."""
    nothing, end = -1, -2  # in place of a token id: beyond the row's turns, and where one of them ends
    after_turn = () if strategy.turn is None else (end,)
    told = [[token for written in row for token in (*written, *after_turn)] for row in turns]
    for column in senior.new_tensor([*zip_longest(*told, fillvalue=nothing)], dtype=torch.int64):
        after = strategy.step(state, column.clamp(min=0))
        if strategy.turn is not None and bool((column == end).any()):
            after = _where(column == end, strategy.turn(state), after)
        senior, state = _where(column != nothing, after, (senior, state))
    return senior, state


def _where(rows: Bool[Tensor, " b"], chosen: Any, other: Any) -> Any:
    """``torch.where`` by row on (nested) NamedTuples of tensors: ``chosen`` where ``rows`` is true, else ``other``."""
    return map_state(lambda a, b: torch.where(rows.view(-1, *[1] * (a.dim() - 1)), a, b), chosen, other)
