"""Memory that rests on the host (``parallel.offload_*``) and rollouts written ahead change nothing that is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import runs
from processes import run
from runs import metrics
from tandemrl.models import sharding
from tandemrl.training import update
from tandemrl.training.loop import train
from tandemrl.training.state import move_state
from test_mesh_training import SHORT, samples

SHARED = ["train.async_steps=1", "train.save_every=1", "train.steps=3", "train.eval_every=3", "eval.train_problems=2"]
OFFLOADED = ["parallel.dp_shard=2", "parallel.offload_parameters=true", "parallel.offload_optimizer=true"]


def _train(pair: str, out: str, *overrides: str) -> tuple[set[str], list[str]]:
    """In one of the processes: the policies that FSDP was given, and how the optimiser's state travelled."""
    policies: set[str] = set()
    events: list[str] = []
    fully_shard, step = sharding.fully_shard, torch.optim.AdamW.step

    def sharded(module: Any, **settings: Any) -> Any:
        policies.add(type(settings["offload_policy"]).__name__)
        return fully_shard(module, **settings)

    def moved(optimizer: torch.optim.Optimizer, *, to_host: bool) -> None:
        events.append("to the host" if to_host else "to the device")
        move_state(optimizer, to_host=to_host)

    def stepped(optimizer: torch.optim.AdamW, *arguments: Any, **settings: Any) -> Any:
        events.append("step")
        return step(optimizer, *arguments, **settings)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharding, "fully_shard", sharded)
        patched.setattr(update, "move_state", moved)
        patched.setattr(torch.optim.AdamW, "step", stepped)
        train(runs.config(Path(pair), Path(out), *SHORT, *overrides), quiet=True)
    return policies, events


@pytest.fixture(scope="module")
def alone(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    assert _train(str(tiny_pair), str(out), *SHARED) == (set(), ["step"] * 6)
    return out


def test_two_processes_with_offload_train_what_one_trains(tiny_pair: Path, alone: Path, tmp_path: Path) -> None:
    """Three steps on gloo. Each process keeps its part of the weights that write, and compares its share."""
    out = tmp_path / "run"
    results = run(_train, 2, str(tiny_pair), str(out), *SHARED, *OFFLOADED)
    assert results == [({"CPUOffloadPolicy"}, ["to the device", "step", "to the host"] * 6)] * 2
    assert samples(out) == samples(alone)
    for line, expected in zip(metrics(out), metrics(alone), strict=True):
        assert line.keys() == expected.keys()
        for name in ("reward/mean", "weights/version_lag", "tokens/response", "loss", "grad_norm", "importance"):
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
        assert line.get("mismatch/writer_mean_abs", 0.0) < 1e-5
    assert "mismatch/writer_mean_abs" in metrics(out)[-1]
    left, right = runs.weights(out, 3), runs.weights(alone, 3)
    for name in left:
        assert (left[name] - right[name]).abs().mean() < 1e-5, name


def test_an_optimizers_state_goes_where_its_parameters_are() -> None:
    """A device without data stands for the one that the parameters are on."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(3)
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[parameter].items()}
    move_state(optimizer, to_host=True)
    assert all(torch.equal(optimizer.state[parameter][name], value) for name, value in before.items())
    away = nn.Parameter(torch.zeros(3, device="meta"))
    elsewhere = torch.optim.AdamW([away])
    elsewhere.state[away] = optimizer.state[parameter]
    move_state(elsewhere, to_host=False)
    assert {(v.device.type, v.shape) for v in elsewhere.state[away].values()} == {("meta", (3,)), ("meta", ())}
