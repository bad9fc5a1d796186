"""A run goes on with repaired code if the user says so, and with nothing else that is another."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandemrl.config import load
from tandemrl.losses import RECIPES, Recipe
from tandemrl.training.checkpoint import check_folder
from tandemrl.training.checkpoint import runs as module
from tandemrl.training.checkpoint.storage import CheckpointError
from tandemrl.training.state import Run

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
