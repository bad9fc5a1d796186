"""A run whose rewards teach nothing says so, while it runs and at its end, with the reason."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.runs import config

from tandemrl.config import load
from tandemrl.losses import RECIPES
from tandemrl.training.diagnostics import cause, no_signal_warning
from tandemrl.training.loop import train

GRPO = RECIPES["grpo"]
FLAT = {
    "reward/mean": 0.0, "reward/std": 0.0, "reward/acc": 0.0, "groups/zero_variance": 1.0, "response/truncated": 0.0,
}  # fmt: skip
GOOD = FLAT | {"reward/mean": 0.5, "reward/acc": 0.5, "reward/std": 0.5, "groups/zero_variance": 0.25}


def warnings(*steps: dict[str, float], recipe: Any = GRPO) -> list[int]:
    """The steps, from 1, at which a run warns."""
    warning = no_signal_warning(load(), recipe)
    return [i for i, metrics in enumerate(steps, 1) if warning(metrics) is not None]


def test_it_warns_after_three_such_steps_and_then_more_seldom() -> None:
    assert warnings(*[FLAT] * 25) == [3, 6, 12, 24]
    assert warnings(*[FLAT, FLAT, GOOD] * 5) == []
    rare = FLAT | {"reward/mean": 0.01, "reward/std": 0.1, "groups/zero_variance": 0.9375}
    assert warnings(FLAT, rare, FLAT) == [3]
    assert warnings(*[FLAT | {"reward/std": 0.5}] * 3) == [3]  # equal within each group


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"reward/answer_present": 0.0}, "every reward is 0: the scorer finds an answer in 0% of the texts"),
        ({"reward/answer_present": 1.0}, "hardly an answer is right. The problems are too hard"),
        ({"reward/mean": 1.0, "reward/acc": 1.0}, "every reward is 1: the problems are too easy"),
        ({"response/truncated": 1.0}, "every reward is 0, and 100% of the texts are cut off at rollout.max_tokens=64"),
        ({"reward/mean": 0.5, "reward/acc": 0.5, "reward/std": 0.5}, "the mean reward is 0.500, and nearly all"),
        ({"reward/unscored": 1.0}, "the judge scored no text"),
    ],
)
def test_the_reason_follows_from_the_metrics(changed: dict[str, float], reason: str) -> None:
    assert reason in cause(FLAT | changed, load(overrides=["rollout.max_tokens=64"]))


def test_such_a_run_says_so(tiny_pair: Path, tmp_path: Path) -> None:
    extra = ("train.eval_every=0", "train.save_every=3", "train.log_samples=0", "data.eval=[]")
    said = io.StringIO()
    screen = Console(file=said, width=400)
    train(config(tiny_pair, tmp_path, *extra), reward=lambda row, text: 0.0, console=screen)
    (line,) = [line for line in said.getvalue().splitlines() if "to learn" in line]
    assert line.startswith("  nothing to learn from the rewards of the last 3 steps: every reward is 0: hardly an")
