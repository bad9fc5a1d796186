"""Functions in place of config keys: told apart, recorded in the config, and asked for again."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandemrl.config import Config, ConfigError, RetrievalConfig, load, to_yaml
from tandemrl.data.messages import Transcript
from tandemrl.data.rows import Row
from tandemrl.losses import RECIPES, Recipe, ppo_clip
from tandemrl.rollout.engine import Engine
from tandemrl.rollout.envs.environment import Environment
from tandemrl.rollout.signatures import signature
from tandemrl.selection import Strategy, bernoulli
from tandemrl.training.arguments import describe, with_records
from tandemrl.training.checkpoint import check_folder
from tandemrl.training.checkpoint import runs as module
from tandemrl.training.checkpoint.storage import CheckpointError
from tandemrl.training.state import Run


def scaled(x: float, scale: float) -> float:
    return scale * x


def mostly_senior(step: int) -> Strategy:
    return bernoulli(0.9)


def mostly_junior(step: int) -> Strategy:
    return bernoulli(0.1)


def right(row: Row, text: str) -> float:
    return float(text == row.ground_truth)


def short(row: Row, text: str) -> float:
    return 1 / len(text)


class Sums(Environment):
    ends = frozenset({"done", "stop"})

    def __init__(self, *tools: Callable[..., Any], bonus: float = 0.0) -> None:
        self.tools, self.bonus = tools, bonus

    def score(self, row: Row, transcript: Transcript) -> float:
        return self.bonus + len(transcript.messages)


class Doubled(Sums):
    def score(self, row: Row, transcript: Transcript) -> float:
        return 2 * super().score(row, transcript)


def decoding(rows: int) -> Engine:
    raise AssertionError("nothing is made of a record")


RECIPE = RECIPES["grpo"]._replace(surrogate=partial(ppo_clip))
PASSED: dict[str, tuple[Any, Any]] = {
    "recipe": (RECIPE, RECIPE._replace(clip_low=0.1)),
    "strategy": (mostly_senior, mostly_junior),
    "environment": (Sums(scaled), Sums(short)),
    "engine": (partial(decoding, rows=8), partial(decoding, rows=9)),
    "reward": ({"right": right, "short": short}, {"short": short, "right": right}),  # acc is that of the first
}
"""By argument of ``train``: a function, and another one."""


def recorded(name: str, tmp_path: Path) -> Config:
    """The config of a run with a function, as read from its file."""
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(with_records(load(), **{name: PASSED[name][0]})))
    return load(file)


@pytest.mark.parametrize("name", PASSED)
def test_a_config_with_a_function_needs_that_function(name: str, tmp_path: Path) -> None:
    function, other = PASSED[name]
    config = recorded(name, tmp_path)
    assert with_records(config, **{name: function}) == config
    with pytest.raises(ConfigError, match=rf"functions\.{name}: .* passed is none\. .*{name}=FUNCTION"):
        with_records(config, **{name: None})
    with pytest.raises(ConfigError, match=rf"functions\.{name}: .* passed is .*\]\. Pass that function"):
        with_records(config, **{name: other})
    free = load(tmp_path / "config.yaml", [f"functions.{name}=null"])
    assert with_records(free, **{name: None}) == load()


def test_what_an_environment_keeps_in_use_makes_it_no_other_one() -> None:
    used = Sums(scaled)
    config = with_records(load(), environment=used)
    used.cache = {"question": "documents"}  # type: ignore[attr-defined]
    assert with_records(config, environment=used) == with_records(config, environment=Sums(scaled)) == config
    with pytest.raises(ConfigError, match=r"functions\.environment: "):
        with_records(config, environment=Sums(scaled, bonus=1.0))


def test_environments_are_told_apart_by_methods_tools_and_attributes() -> None:
    different = [Sums(), Sums(scaled), Sums(scaled, short), Sums(scaled, bonus=1.0), Doubled(scaled)]
    assert len({signature(each) for each in different}) == len(different)
    assert signature(Sums(scaled)) == signature(Sums(scaled))
    assert describe(Sums(scaled)) == f"{__name__}.Sums"


@dataclass
class Rules:
    limits: dict[str, list[int]]


def test_environments_are_told_apart_by_what_is_in_their_attributes() -> None:
    def with_rules(value: Any) -> str:
        environment = Sums()
        environment.rules = value  # type: ignore[attr-defined]
        return signature(environment)

    values = [[1], [2], [[1]], {"a": [1]}, {"a": [2]}, Rules({"a": [1]}), Rules({"a": [2]}), Path("a"), Path("b")]
    values += [RetrievalConfig(), RetrievalConfig(top_n=3)]
    assert len(set(map(with_rules, values))) == len(values)
    assert with_rules(Rules({"a": [1]})) == with_rules(Rules({"a": [1]}))
    assert with_rules(RetrievalConfig(timeout_s=9)) == with_rules(RetrievalConfig())  # may change on resume
    assert with_rules(load()) == with_rules(load(None, ["output_dir=elsewhere"]))  # compared as the run's config
    endless: list[Any] = []
    endless.append(endless)
    assert with_rules(endless) == with_rules(endless)


def recursive(base: float) -> Callable[[int], float]:
    """A function that closes over itself."""

    def countdown(n: int) -> float:
        return base if n == 0 else countdown(n - 1)

    return countdown


MAKERS: dict[str, Callable[[float], Any]] = {
    "closure": lambda scale: lambda x: scale * x,
    "code": lambda scale: (lambda x: x + 1.0) if scale == 1.0 else (lambda x: x + 2.0),
    "default": lambda scale: lambda x, factor=scale: x * factor,
    "keyword default": lambda scale: lambda x, *, factor=scale: x * factor,
    "recursive": recursive,
    "keyword of partial": lambda scale: partial(scaled, scale=scale),
    "partial": lambda scale: partial(scaled, scale),
    "mapping": lambda scale: {"scaled": partial(scaled, scale=scale)},
    "field": lambda scale: RECIPES["grpo"]._replace(clip_low=scale),
    "field's partial": lambda scale: RECIPES["grpo"]._replace(surrogate=partial(ppo_clip, clip_low=scale)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_signatures_tell_functions_apart(name: str) -> None:
    make = MAKERS[name]
    assert signature(make(1.0)) == signature(make(1.0)) != signature(make(2.0))


def test_a_change_of_a_module_changes_the_signature_of_its_functions(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    source = "def _length(text):\n    return len(text)\n\n\ndef reward(row, text):\n    return 1 / _length(text)\n"
    signatures = []
    for text in (source, source, source.replace("len(text)", "len(text.split())")):
        (tmp_path / "rewards_of_mine.py").write_text(text)
        signatures.append(signature(importlib.import_module("rewards_of_mine").reward))
    assert signatures[0] == signatures[1] != signatures[2]


# ---------------------------------------------------------------------------------------------------- code that changed


RUN: Any = SimpleNamespace(setup=SimpleNamespace(world=SimpleNamespace(main=True)))
NOW = {"recipe": "a", "data.train": "b", "my:reward": "c"}


def test_repaired_code_is_accepted_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "identity", lambda run: NOW)
    path, before = Path("step_5"), NOW | {"my:reward": "d"}
    with pytest.raises(CheckpointError, match=r"another my:reward; .*: --accept-changed reward$"):
        module.check_same_identity(RUN, before, path)
    assert module.check_same_identity(RUN, before, path, ["reward"]) == ("reward",)
    assert module.check_same_identity(RUN, NOW, path, ["reward"]) == ()
    with pytest.raises(CheckpointError, match=r"another data.train; a resume would mix runs$"):
        module.check_same_identity(RUN, before | {"data.train": "e"}, path, ["reward"])
    with pytest.raises(CheckpointError, match=r"--accept-changed data.train: expected one of reward, "):
        check_folder(load(), "auto", ["data.train"])


def test_what_a_recipe_says_of_itself_is_no_part_of_it() -> None:
    def identity(recipe: Recipe) -> dict[str, str]:
        facts: dict[str, Any] = {"prompts": [], "episode_runner": None, "judge": None}
        setup: Any = SimpleNamespace(
            config=load(), recipe=recipe, preflight=SimpleNamespace(environment_id={}), **facts
        )
        models: Any = SimpleNamespace(junior=None, reference=None, engine=SimpleNamespace(has_junior=False))
        progress: Any = SimpleNamespace(identity=None)
        return dict(module.identity(Run(setup, models, progress)))

    grpo = RECIPES["grpo"]
    assert identity(grpo._replace(says="other words")) == identity(grpo) != identity(grpo._replace(clip_high=0.3))
