"""Tries a strategy on a few made-up rows, before a run relies on it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tandemrl.selection.strategies import Strategy

ROWS, LENGTH = 4, 6
KEPT = (2, 0)
"""The rows that are also tried alone, in this order."""


@torch.no_grad()
def try_strategy(strategy: Strategy, vocabulary: int) -> None:
    """Call the functions of a strategy on a few made-up rows, and check what an engine and ``replay`` rely on.

    Authors and states must have the right shapes and types, inputs must stay as they are, and the authors of a row must
    be a function of its key and tokens alone.

    Args:
        vocabulary: how many token ids the models can write. The first and the last of them are among the made-up ones.

    Raises:
        ValueError: the message says which function is at fault, and what it has to do.
    """
    keys = torch.arange(1, ROWS + 1) * 0x9E3779B97F4A7C1
    tokens = torch.linspace(0, vocabulary - 1, ROWS * LENGTH).long().view(LENGTH, ROWS)
    authors, state = _written(strategy, keys, tokens)
    if not torch.equal(authors, _written(strategy, keys, tokens)[0]):
        raise ValueError(
            "the same keys and tokens gave other authors the second time; take random numbers from "
            "tandemrl.selection.draws, which depend on a row's key and a counter only"
        )
    at = torch.tensor(KEPT)
    if not torch.equal(_written(strategy, keys[at], tokens[:, at])[0], authors[:, at]):
        raise ValueError(
            "the authors of a row change with the rows beside it; they must depend on its own key, tokens and state "
            "only, since rows end at different times"
        )
    if strategy.writers != "both" and bool((authors != (strategy.writers == "senior")).any()):
        raise ValueError(f"writers={strategy.writers!r} promises its author alone, but step selects the other one")
    if strategy.turn is not None:
        _checked("turn", strategy.turn, state)
    if strategy.starts is not None:
        _try_starts(strategy, strategy.starts, vocabulary, keys, tokens)


def _try_starts(strategy: Strategy, starts: Tensor, vocabulary: int, keys: Tensor, tokens: Tensor) -> None:
    """Check that authors change at tokens of ``starts`` only, and that a step does not tell these apart."""
    if starts.dtype != torch.bool or starts.dim() != 1 or len(starts) < vocabulary or not starts[:vocabulary].any():
        raise ValueError(
            f"starts is {_kind(starts)}; expected a bool for each of {vocabulary} token ids, one of them True"
        )
    inside = starts[:vocabulary].nonzero().squeeze(1)
    senior, state = strategy.init(keys)
    for token in tokens:
        ends = [_tensors(strategy.step(state, torch.full_like(keys, int(inside[i])))) for i in (0, -1)]
        if any(not torch.equal(x, y) for x, y in zip(*ends, strict=True)):
            raise ValueError("step tells tokens of starts apart; one of them may be dropped, so it must leave no trace")
        proposer = senior
        senior, state = strategy.step(state, token)
        if bool(((senior != proposer) & ~starts[token]).any()):
            raise ValueError("step changes the author at a token that is not in starts, where no token can be dropped")


def _written(strategy: Strategy, keys: Tensor, tokens: Tensor) -> tuple[Tensor, Any]:
    """The authors of all tokens and of the one after them, and the last state."""
    senior, state = _checked("init", strategy.init, keys)
    authors = [senior]
    for token in tokens:
        senior, state = _checked("step", strategy.step, state, token)
        authors.append(senior)
    return torch.stack(authors), state


def _checked(name: str, function: Callable[..., Any], *arguments: Any) -> tuple[Tensor, Any]:
    """What a function of a strategy returns, if it is what it should be and the arguments are still what they were."""
    given = _tensors(arguments)
    before, rows = [x.clone() for x in given], len(given[0])
    try:
        senior, state = function(*arguments)
    except Exception as error:
        raise ValueError(f"{name} failed on {rows} rows: {type(error).__name__}: {error}") from error
    parts = _tensors(state)
    like = parts if name == "init" else _tensors(arguments[0])
    rowwise = all(isinstance(x, Tensor) and x.shape[:1] == (rows,) for x in (senior, *parts))
    if not (rowwise and parts and senior.dtype == torch.bool and senior.dim() == 1 and _types(parts) == _types(like)):
        raise ValueError(
            f"{name} returned {', '.join(map(_kind, (senior, *parts)))} for {rows} rows; expected a bool tensor of "
            f"shape [{rows}], True where the senior writes, and a NamedTuple of tensors whose first dimension is the "
            "row, so that rows can be dropped and reordered, with the types and shapes that it had before"
        )
    if not all(map(torch.equal, given, before)):
        raise ValueError(f"{name} changed its arguments in place; return new tensors (x + 1, not x += 1)")
    return senior, state


def _tensors(state: Any) -> list[Any]:
    """The tensors in a (nested) NamedTuple, and whatever else is in it."""
    return [x for part in state for x in _tensors(part)] if isinstance(state, tuple | list) else [state]


def _types(parts: list[Any]) -> list[Any]:
    return [(x.dtype, x.shape[1:]) for x in parts]


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
