"""Components say what they can do: nobody asks for their names, and what a registry says is true."""

import ast
import inspect

import pytest

from tandemrl.config import load
from tandemrl.config.components import ENGINES, ENVIRONMENTS, RETRIEVERS
from tandemrl.config.recipes import KINDS as RECIPES
from tandemrl.config.strategies import KINDS as STRATEGIES
from tandemrl.config.strategies import Kind
from tandemrl.processes.names import named
from tandemrl.selection import Strategy
from test_imports import MODULES

KEYS = {
    "strategy": STRATEGIES,
    "recipe": RECIPES,
    "engine": ENGINES,
    "environment": ENVIRONMENTS,
    "retriever": RETRIEVERS,
}
TABLES = ("boundary", "words", "steps", "starts")
"""Parameters of strategies that are made of the tokenizer."""


def comparisons(tree: ast.AST) -> list[str]:
    """What compares a component with a name: ``x.strategy == "solo"``, ``recipe in ("ppo", …)``."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        asked = {getattr(side, "attr", getattr(side, "id", "")).rstrip("_") for side in sides} & KEYS.keys()
        names = {each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)}
        if any(names & KEYS[key].keys() for key in asked):
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("name", MODULES)
def test_nobody_asks_for_a_components_name(name: str) -> None:
    assert comparisons(ast.parse(MODULES[name].read_text())) == []


def test_the_test_above_finds_what_it_looks_for() -> None:
    planted = 'if config.selection.strategy != "solo" or "vllm" == engine or r.recipe in ("a", "ppo"): pass'
    assert len(comparisons(ast.parse(planted))) == 3
    assert comparisons(ast.parse('mode == "solo" or strategy == other')) == []


@pytest.mark.parametrize("kind", STRATEGIES.values(), ids=list(STRATEGIES))
def test_a_strategy_reads_the_parameters_that_it_names(kind: Kind) -> None:
    takes = ["first" if name == "who" else name for name in inspect.signature(named(kind.path)).parameters]
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
    assert path is None or callable(named(path))
