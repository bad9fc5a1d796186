"""The strategy of each training step, made from ``selection.*`` of a config."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from tandemrl.config import ConfigError, SelectionConfig
from tandemrl.config.fields import is_own
from tandemrl.config.strategies import Kind
from tandemrl.processes.names import function_named, instantiate
from tandemrl.selection.boundaries import start_table, step_tables, word_boundary_table, word_start_tables
from tandemrl.selection.strategies import Strategy, annealed, linear, per_group
from tandemrl.selection.whole_words import text_tables


class Schedule(NamedTuple):
    """Who writes in each training step, as functions of the step, which counts from 1.

    strategy: the strategy. prob_senior: the probability with which the strategy draws the senior, for checks of the
    draws; None for strategies that do not draw.
    """

    strategy: Callable[[int], Strategy]
    prob_senior: Callable[[int], float | None]


def schedule_of(
    selection: SelectionConfig, tokenizer: PreTrainedTokenizerBase, vocabulary: int, *, by_text: bool = False
) -> Schedule:
    """The schedule that ``selection.*`` describes. Its token tables are built once, here.

    Args:
        vocabulary: how many token ids the models can write.
        by_text: whether they have two vocabularies, so that words are a property of the text. Then ``tokenizer`` and
            ``vocabulary`` are those of the senior.

    Raises:
        ConfigError: a strategy of the user's own cannot be made, or does not read what is set.
        ValueError: the tokenizer's vocabulary does not suit the strategy.
    """
    s, kind = selection, kind_in_use(selection)
    offered: dict[str, Callable[[], object]] = {
        "boundary": cache(partial(word_boundary_table, tokenizer, vocabulary)),
        "starts": cache(partial(start_table, tokenizer, vocabulary)),
        "texts": cache(partial(text_tables, tokenizer, vocabulary)),
        "words": cache(partial(word_start_tables, tokenizer, vocabulary)),
        "steps": cache(partial(step_tables, tokenizer, vocabulary)),
        "tokenizer": lambda: tokenizer,
        "vocabulary": lambda: vocabulary,
        "max_gap_tokens": lambda: s.max_gap_tokens,
        "chunk_size": lambda: s.chunk_size,
        "first": lambda: s.first,
        "who": lambda: s.first,
    }
    where = f"selection.strategy={s.strategy}"
    if s.anneal_steps and not kind.draws:
        raise ConfigError(f"selection.anneal_steps={s.anneal_steps}: must be 0 with {s.strategy}, which draws nothing")

    def make(prob_senior: float) -> Strategy:
        given = offered | {"prob_senior": lambda: prob_senior}
        own = partial(instantiate, kind.path, where, ConfigError, s.parameters, **given)
        if by_text and kind.by_text is not None:
            found = instantiate(kind.by_text, where, ConfigError, s.parameters, strategy=own, **given)
        else:
            found = own()
        if not isinstance(found, Strategy):
            raise ConfigError(f"{where}: returned a {type(found).__name__}; return a Strategy, such as bernoulli(0.5)")
        return per_group(found) if s.draws == "per_group" else found

    if s.prob_senior_final is None:
        strategy = make(s.prob_senior)
        drawn = s.prob_senior if kind.draws and not is_own(s.strategy) else None
        return Schedule(lambda step: strategy, lambda step: drawn)
    prob = linear(s.prob_senior, s.prob_senior_final, s.anneal_steps)
    at = annealed(make, prob)
    return Schedule(lambda step: at(step - 1), lambda step: None if is_own(s.strategy) else prob(step - 1))


def kind_in_use(selection: SelectionConfig) -> Kind:
    """What the strategy says of itself; one of the user's own by its parameters and its docstring.

    Raises:
        ConfigError: it cannot be imported.
    """
    kind = selection.kind
    if not is_own(kind.name):
        return kind
    function = function_named(kind.path, f"selection.strategy={kind.name}", ConfigError)
    takes = inspect.signature(function).parameters
    says = (inspect.getdoc(function) or "").partition("\n")[0]
    return kind._replace(says=says, parameters=tuple(name for name in kind.parameters if name in takes))
