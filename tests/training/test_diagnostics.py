"""A run says, while it goes on, that its rewards teach nothing, and that the senior has not learned to stop."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runs import config, metrics, samples
from tandemrl.config import load
from tandemrl.evals import EvalResult
from tandemrl.losses import RECIPES
from tandemrl.training import evaluation
from tandemrl.training.diagnostics import cause, no_signal_warning, stopping_warning
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


# -------------------------------------------------------------------------------------------- senior that does not stop


@pytest.mark.parametrize(
    ("solo", "rollouts", "counts", "parts"),
    [
        (0.35, 0.01, (512, 256), True),
        (0.09, 0.0, (512, 256), False),  # within the margin
        (0.35, 0.30, (512, 256), False),
        (0.01, 0.35, (512, 256), False),  # the other way round
        (0.25, 0.0, (8, 16), False),  # 2 of 8: chance
        (0.875, 0.0, (8, 16), True),
        (1.0, 0.0, (1, 1), False),
    ],
)
def test_the_shares_part_beyond_the_margin_and_beyond_chance(solo, rollouts, counts, parts):
    values = {"eval/truncation_rate": solo, "response/truncated_at_eval": rollouts, "tandem/senior_frac": 0.5}
    said = stopping_warning(values, *counts)
    assert (said is not None) == parts
    assert stopping_warning(values | {"tandem/senior_frac": 1.0}, *counts) is None


def test_a_run_whose_senior_alone_does_not_stop_says_so_once(tiny_pair, tmp_path, monkeypatch):
    original = evaluation.evaluate_solo

    def never_ending(*arguments: Any) -> EvalResult:
        found = original(*arguments)
        return replace(found, metrics=found.metrics | {"macro": found.metrics["macro"] | {"truncation_rate": 1.0}})

    monkeypatch.setattr(evaluation, "evaluate_solo", never_ending)
    screen = io.StringIO()
    settings = ["eval.train_samples=2", "eval.train_problems=16", "train.eval_every=1", "train.steps=2"]
    train(config(tiny_pair, tmp_path, *settings), console=Console(file=screen, width=200))
    assert screen.getvalue().count("warning: the limit of tokens cuts off 100% of the held-out texts") == 1
    for line in metrics(tmp_path):
        written = [one for one in samples(tmp_path) if one["step"] == line["step"]]
        lengths = [sum(author >= 0 for author in one["author"]) for one in written]
        cut = [one["stop_reason"] == "length" or n > 64 for one, n in zip(written, lengths, strict=True)]
        assert line["response/truncated_at_eval"] == sum(cut) / len(cut) < 0.9
