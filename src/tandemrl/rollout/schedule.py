"""The strategy of each training step, made from ``selection.*`` of a config."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from tandemrl.config import SelectionConfig
from tandemrl.selection.boundaries import step_tables, word_boundary_table, word_start_tables
from tandemrl.selection.strategies import (
    Strategy,
    alternating,
    alternating_turns,
    annealed,
    bernoulli,
    chunk,
    linear,
    sentence,
    solo,
    turn,
    word,
    word_aligned,
)


class Schedule(NamedTuple):
    """Who writes in each training step, as functions of the step, which counts from 1.

    strategy: the strategy. prob_senior: the probability with which the strategy draws the senior, for checks of the
    draws; None for strategies that do not draw.
    """

    strategy: Callable[[int], Strategy]
    prob_senior: Callable[[int], float | None]


def schedule_of(selection: SelectionConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Schedule:
    """The schedule that ``selection.*`` describes. Its token tables are built once, here.

    Args:
        vocabulary: how many token ids the models can write.
    """
    s = selection
    make: Callable[[float], Strategy]
    if s.strategy == "word":
        boundary = word_boundary_table(tokenizer, vocabulary)
        make = partial(word, max_gap_tokens=s.max_gap_tokens, boundary=boundary)
    elif s.strategy == "word_aligned":
        tables = word_start_tables(tokenizer, vocabulary)
        make = partial(word_aligned, max_gap_tokens=s.max_gap_tokens, tables=tables)
    elif s.strategy in ("bernoulli", "turn"):
        make = bernoulli if s.strategy == "bernoulli" else turn
    else:
        if s.strategy == "sentence":
            fixed = sentence(s.first, step_tables(tokenizer, vocabulary))
        elif s.strategy == "chunk":
            fixed = chunk(s.chunk_size, s.first)
        else:
            by_first = {"alternating": alternating, "alternating_turns": alternating_turns, "solo": solo}
            fixed = by_first[s.strategy](s.first)
        return Schedule(lambda step: fixed, lambda step: None)
    if s.prob_senior_final is None:
        drawn = make(s.prob_senior)
        return Schedule(lambda step: drawn, lambda step: s.prob_senior)
    prob = linear(s.prob_senior, s.prob_senior_final, s.anneal_steps)
    strategy = annealed(make, prob)
    return Schedule(lambda step: strategy(step - 1), lambda step: prob(step - 1))
