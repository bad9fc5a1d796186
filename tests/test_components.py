"""Components say what they can do: nobody asks for their names, and what a registry says is true."""

import inspect

import pytest

from tandemrl.config import load
from tandemrl.config.components import ENGINES, ENVIRONMENTS, RETRIEVERS
from tandemrl.config.strategies import KINDS as STRATEGIES
from tandemrl.config.strategies import Kind
from tandemrl.processes.names import import_object
from tandemrl.selection import Strategy

TABLES = ("boundary", "words", "steps", "starts")
"""Parameters of strategies that are made of the tokenizer."""


@pytest.mark.parametrize("kind", STRATEGIES.values(), ids=list(STRATEGIES))
def test_a_strategy_reads_the_parameters_that_it_names(kind: Kind) -> None:
    takes = ["first" if name == "who" else name for name in inspect.signature(import_object(kind.path)).parameters]
    assert sorted(name for name in takes if name not in TABLES) == sorted(kind.parameters)
    assert kind.draws == load(overrides=[f"selection.strategy={kind.name}"]).selection.kind.draws


@pytest.mark.parametrize("kind", [kind for kind in STRATEGIES.values()], ids=list(STRATEGIES))
def test_what_a_strategy_says_is_what_it_does(kind: Kind) -> None:
    from helpers import VOCABULARY, tokenizer
    from tandemrl.rollout.schedule import schedule_of

    schedule = schedule_of(load(overrides=[f"selection.strategy={kind.name}"]).selection, tokenizer(), VOCABULARY)
    made = schedule.strategy(1)
    assert isinstance(made, Strategy)
    assert (made.writers != "both") == kind.solo
    assert (made.starts is not None) == kind.drops
    assert (made.turn is not None) == (kind.by_turns or kind.drops)
    assert (schedule.prob_senior(1) is not None) == kind.draws


@pytest.mark.parametrize(
    "path", [each.path for each in (*ENGINES.values(), *ENVIRONMENTS.values(), *RETRIEVERS.values())]
)
def test_what_a_registry_names_is_there(path: str | None) -> None:
    assert path is None or callable(import_object(path))
