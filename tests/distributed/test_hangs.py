"""Where one process of two is stopped, the other ends by the time-out of a collective, and says where it waited."""

import importlib
import os
import signal
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _world

from processes import run
from tandemrl.config import Config, ParallelConfig, load
from tandemrl.processes.world import init_world
from test_restarts import overrides

LIMIT_S = 12.0  # on a busy machine a healthy process may be still for some of that
CALLS = {
    "start": ("tandemrl.training.build.make_optimizer", 0),
    "rollout": ("tandemrl.rollout.decoding.DecodingBatch.step", 1),
    "score": ("tandemrl.rewards.scoring.Scorer.score", 0),
    "update": ("tandemrl.training.update.policy_loss", 0),
    "sync": ("tandemrl.rollout.spread.SpreadEngine.load_weights", 1),  # 0: before the first step
    "eval": ("tandemrl.training.loop.evaluate", 0),
    "save": ("tandemrl.training.checkpoint.storage.save_tensors", 0),
}
"""Phase -> the call of a function, from 0, that process 1 never comes back from."""


def train(config: Config, function: str, call: int, stopped: Path) -> None:
    """Train; process 1 is stopped in a call of ``function``, when it writes ``stopped``."""
    module, _, name = function.rpartition(".")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        module, _, kind = module.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
    original, calls = getattr(owner, name), count()

    def stops(*args: Any, **options: Any) -> Any:
        if os.environ["RANK"] == "1" and next(calls) == call:
            stopped.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*args, **options)

    setattr(owner, name, stops)
    importlib.import_module("tandemrl.training.loop").train(config, quiet=True)


QUICK = {"rollout"}  # each case waits for a time-out; the others run in `make slow`


@pytest.mark.parametrize("phase", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in CALLS])
def test_a_stopped_process_ends_the_other_one(phase: str, tiny_pair: Path, tmp_path: Path) -> None:
    changes = [f"parallel.timeout_s={LIMIT_S}", "train.eval_every=1", "eval.train_problems=4", "train.save_every=1"]
    config = load(None, [*overrides(tiny_pair, tmp_path / "run"), *changes])
    with pytest.raises(RuntimeError, match="process 0 of 2 failed") as failure:
        run(train, 2, config, *CALLS[phase], tmp_path / "stopped")
    assert (tmp_path / "stopped").exists()
    text = str(failure.value)
    assert "Timed out waiting" in text
    if phase != "start":
        assert "LostProcessError: step 1, " + (phase if phase in ("rollout", "update") else "") in text
        assert "process 0 of 2 lost another one" in text


def limits(config: ParallelConfig) -> set[timedelta]:
    """The time-outs of all groups that a run has."""
    world = init_world(config, torch.device("cpu"))
    groups = [world.new_cpu_group()]
    assert {id(group) for group in groups} <= {id(group) for group in _world.pg_map}
    return {group._get_backend(torch.device("cpu")).options._timeout for group in _world.pg_map}


def test_every_group_times_out_when_the_run_does() -> None:
    timeouts = {timedelta(seconds=77)}
    assert run(limits, 2, ParallelConfig(tp=2, timeout_s=77.0)) == [timeouts, timeouts]
