"""A run whose rewards teach nothing says so, while it runs and at its end, with the reason."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.runs import config
from typer.testing import CliRunner

from tandemrl.cli.main import app
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
        (
            {"reward/answer_present": 0.0},
            "every reward is 0: the scorer finds an answer in 0% of the texts",
        ),
        ({"reward/answer_present": 1.0}, "hardly an answer is right. The problems are too hard"),
        ({"reward/mean": 1.0, "reward/acc": 1.0}, "every reward is 1: the problems are too easy"),
        ({"response/truncated": 1.0}, "every reward is 0, and 100% of the texts are cut off at rollout.max_tokens=64"),
        (
            {"reward/mean": 0.5, "reward/acc": 0.5, "reward/std": 0.5},
            "the mean reward is 0.500, and nearly all",
        ),
        ({"reward/unscored": 1.0}, "the judge scored no text"),
    ],
)
def test_the_reason_follows_from_the_metrics(changed: dict[str, float], reason: str) -> None:
    assert reason in cause(FLAT | changed, load(overrides=["rollout.max_tokens=64"]), GRPO)


def test_such_a_run_says_so_at_both_doors(tiny_pair: Path, tmp_path: Path) -> None:
    extra = ("train.eval_every=0", "train.save_every=3", "train.log_samples=0", "data.eval=[]")
    said = io.StringIO()
    train(
        config(tiny_pair, tmp_path / "a", *extra), reward=lambda row, text: 0.0, console=Console(file=said, width=400)
    )
    lines = [line for line in said.getvalue().splitlines() if "to learn" in line]
    assert lines[0].startswith("  nothing to learn from the rewards of the last 3 steps: every reward is 0: hardly an")
    assert lines[1].startswith("nothing to learn: 0 of 3 steps")
    ending = f"done: {tmp_path}/a, but its rewards taught it nothing: see above"
    assert said.getvalue().splitlines()[-1] == ending

    (tmp_path / "config.yaml").write_text("train: {lr: 3.0e-4}\n")  # an empty file is refused
    unreadable = tmp_path / "rows.jsonl"  # problems in a language that the pair does not know
    row = {"data_source": "mine", "prompt": "2 + 3 = ?", "reward_model": {"ground_truth": "none of these"}}
    unreadable.write_text("".join(json.dumps(row) + "\n" for _ in range(4)))
    overrides = [
        *(f"{name}={tiny_pair}/{who}" for name, who in (("model.senior", "senior"), ("model.junior", "junior"))),
        *extra, f"data.train={unreadable}", "reward.scorers.mine=boxed", f"output_dir={tmp_path}/b", "train.steps=3",
        "train.prompts_per_step=4", "rollout.group_size=2", "rollout.max_tokens=32", "data.max_prompt_tokens=128",
    ]  # fmt: skip
    result = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "config.yaml"), *overrides])
    assert result.exit_code == 0, result.output
    assert result.output.count("done: ") == 1
    assert "b, but its rewards taught it nothing: see above" in result.output
