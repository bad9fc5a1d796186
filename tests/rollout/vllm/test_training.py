"""Training and evaluation with ``rollout.engine: vllm``: the same run as with the reference engine, to rounding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pairs import VLLM

from runs import metrics
from tandemrl.config import Config, load, to_yaml
from tandemrl.training.loop import train

pytestmark = VLLM


def config(pair: Path, out: Path, engine: str, *extra: str) -> Config:
    return load(
        "quickstart_vllm",
        [
            f"model.senior={pair}/senior", f"model.junior={pair}/junior", f"output_dir={out}",
            f"rollout.engine={engine}", "rollout.vllm.kv_cache_gb=0.05", "train.prompts_per_step=4", "train.steps=2",
            "train.save_every=2", "train.eval_every=2", "train.threads=1", "eval.train_problems=4",
            "data.eval=[synthetic:plain:heldout:8]", *extra,
        ],
    )  # fmt: skip


def assert_same(torch_run: Path, vllm_run: Path) -> None:
    for ours, theirs in zip(metrics(torch_run), metrics(vllm_run), strict=True):
        for name in ("reward/mean", "tandem/senior_frac", "tandem/senior_draw_frac", "tokens/response"):
            assert ours[name] == theirs[name], name
        assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-5)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)
        assert theirs["mismatch/mean_abs"] < 1e-4
        assert theirs["weights/version_lag"] == 0
    assert metrics(torch_run)[-1]["eval/pass@1"] == metrics(vllm_run)[-1]["eval/pass@1"]


def test_a_run_is_the_same_with_either_engine(tiny_pair: Path, tmp_path: Path) -> None:
    """Same keys, same draws, same tokens: rewards are equal, losses to rounding, and every sync was read back."""
    assert_same(*(train(config(tiny_pair, tmp_path / each, each), quiet=True) for each in ("torch", "vllm")))


@pytest.mark.slow
def test_two_processes_with_an_engine_each_train_what_one_process_trains(tiny_pair: Path, tmp_path: Path) -> None:
    wanted = train(config(tiny_pair, tmp_path / "one", "torch"), quiet=True)
    two = config(tiny_pair, tmp_path / "two", "vllm", "parallel.dp_shard=2", "rollout.vllm.multiprocess=true")
    file = tmp_path / "two.yaml"
    file.write_text(to_yaml(two))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    command = [str(Path(sys.executable).parent / "tandemrl"), "train", "--config", str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*launch, *command], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(wanted, tmp_path / "two")
