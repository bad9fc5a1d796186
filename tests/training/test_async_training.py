"""Training with ``train.async_steps=1``: rollouts one step old, corrected, gated, and carried through a kill."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runs import SMALL, assert_same_run, config, kill, metrics, samples
from tandemrl.losses import RECIPES
from tandemrl.rollout import collect
from tandemrl.rollout.sync import sync_weights
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.training.arguments import resolve_recipe
from tandemrl.training.async_rollouts import snapshot_policy, writer_mismatch
from tandemrl.training.build import build
from tandemrl.training.checkpoint import storage as checkpoint
from tandemrl.training.gates import TrainError
from tandemrl.training.loop import train

ASYNC = ["train.async_steps=1", "train.steps=4", "eval.train_problems=2"]


@pytest.fixture(scope="module")
def whole(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of four steps that saves after the second and the fourth."""
    return train(config(tiny_pair, tmp_path_factory.mktemp("run") / "whole", *ASYNC), quiet=True)


def test_rollouts_are_one_step_old_and_corrected_for(whole: Path) -> None:
    """The first of a run are not: nobody had written ahead."""
    lines = metrics(whole)
    assert [line["weights/version_lag"] for line in lines] == [0, 1, 1, 1]
    assert [line["policy_version"] for line in samples(whole)] == [0] * 32 + [1] * 16 + [2] * 16
    assert RECIPES["grpo"].importance == "none"
    assert lines[0]["importance"] == pytest.approx(1, abs=1e-4)
    assert all(abs(line["importance"] - 1) > 1e-6 for line in lines[1:])


def test_importance_correction_is_automatic_unless_it_is_chosen(tiny_pair: Path, tmp_path: Path) -> None:
    def importance(*extra: str) -> str:
        return resolve_recipe(RECIPES["grpo"], config(tiny_pair, tmp_path, *extra)).importance

    assert importance() == "none"
    assert importance("train.async_steps=1") == "token"
    assert importance("train.async_steps=1", "loss.importance=none") == "none"
    assert importance("train.async_steps=1", "loss.importance=sequence") == "sequence"


def test_trainer_and_engine_are_compared_by_the_weights_that_wrote(whole: Path) -> None:
    first, *later = metrics(whole)
    assert first["mismatch/mean_abs"] < 1e-5
    assert "mismatch/writer_mean_abs" not in first
    for line in later:
        assert 0 < line["mismatch/writer_mean_abs"] < 1e-5
        assert line["mismatch/writer_mean_abs"] <= line["mismatch/writer_max_abs"] < 1e-4
        assert line["mismatch/mean_abs"] > 1e-4  # what the policy has learnt since


def test_killed_with_rollouts_ahead_it_resumes_as_if_nothing_had_been(tiny_pair, whole, tmp_path):
    """In the third step, after a checkpoint that holds the rollouts of the third."""
    out = tmp_path / "killed"
    (tmp_path / "empty.yaml").write_text("train: {}\n")
    models = [f"model.senior={tiny_pair}/senior", f"model.junior={tiny_pair}/junior", f"output_dir={out}"]
    command = ["train", "--config", f"{tmp_path}/empty.yaml", *SMALL, *models, *ASYNC]
    kill(command, "tandemrl.training.tracking:Tracker.step", 3)
    assert checkpoint.latest(out) == out / "checkpoints" / "step_2"
    [ahead] = checkpoint.load(out / "checkpoints" / "step_2")["ahead"]
    assert ahead["step"] == 3
    assert {each["policy_version"] for group in ahead["completions"] for each in group} == {1}
    third = metrics(whole)[2]
    assert ahead["mismatch"] == {k: v for k, v in third.items() if k.startswith("mismatch/writer_")}
    train(config(tiny_pair, out, *ASYNC), quiet=True)
    assert_same_run(whole, out, step=4)


@pytest.mark.parametrize(
    ("call", "save_every", "trained"),
    [(1, 9, []), (2, 1, [1])],
    ids=["the first step's", "the second step's, in a checkpoint"],
)
def test_rollouts_of_another_temperature_stop_the_run(tiny_pair, tmp_path, monkeypatch, call, save_every, trained):
    """Before they are learnt from, and before a checkpoint has them."""
    generate, calls = TorchEngine.generate, 0

    def hotter(self: TorchEngine, requests: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            requests = [
                dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, temperature=1.3)) for r in requests
            ]
        return generate(self, requests, **settings)

    monkeypatch.setattr(TorchEngine, "generate", hotter)
    knobs = ("train.eval_every=0", f"train.save_every={save_every}")
    with pytest.raises(TrainError, match="trainer and engine differ"):
        train(config(tiny_pair, tmp_path, *ASYNC, *knobs), quiet=True)
    record = tmp_path / "metrics.jsonl"
    assert ([line["step"] for line in metrics(tmp_path)] if record.exists() else []) == trained
    assert checkpoint.latest(tmp_path) is None


def test_the_weights_that_wrote_are_taken_back_for_a_moment(tiny_pair: Path, tmp_path: Path) -> None:
    setup, models, _ = build(config(tiny_pair, tmp_path, "train.tokens_per_micro_batch=400"))
    sync_weights(models.policy, models.engine, version=0)
    compare = snapshot_policy(setup, models.policy)
    with torch.no_grad():
        for parameter in models.policy.parameters():
            parameter.mul_(1.02)
    learnt = [parameter.clone() for parameter in models.policy.parameters()]
    prompts = [(i, setup.prompts[i]) for i in range(4)]
    written = collect.generate(
        models.engine,
        prompts,
        strategy=setup.schedule.strategy(1),
        sampling=setup.sampling,
        group_size=4,
        seed=0,
        step=1,
    )
    assert compare(written)["mismatch/writer_mean_abs"] < 1e-5
    assert all(map(torch.equal, learnt, models.policy.parameters()))
    assert writer_mismatch(setup, models.policy, written)["mismatch/writer_mean_abs"] > 1e-3
    juniors = [[dataclasses.replace(c, author=np.minimum(c.author, 0)) for c in g] for g in written.completions[:3]]
    late = written._replace(completions=[*juniors, written.completions[3]])  # beyond the budget of the first rollouts
    assert writer_mismatch(setup, models.policy, late)["mismatch/writer_mean_abs"] > 1e-3
