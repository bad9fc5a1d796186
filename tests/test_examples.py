"""Scripts under examples/, run as a reader would run them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def with_pair(tiny_pair: Path, tmp_path: Path) -> Path:
    """A folder in which the tiny pair is built already."""
    shutil.copytree(tiny_pair, tmp_path / "runs" / "tiny")
    return tmp_path


def test_the_ablation_trains_with_its_own_strategy_and_loss(with_pair: Path) -> None:
    small = ["train.prompts_per_step=4", "rollout.group_size=4", "rollout.max_tokens=32"]
    done = run_example("ablation.py", *small, "train.eval_every=0", cwd=with_pair)
    assert done.returncode == 0, done.stderr
    lines = (with_pair / "runs" / "ablation" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 5
    for printed, line in zip(done.stdout.splitlines(), lines, strict=True):
        metrics = json.loads(line)
        assert printed.startswith(f"step {metrics['step']}: reward {metrics['reward/mean']:.3f}")

    samples = (with_pair / "runs" / "ablation" / "samples.jsonl").read_text().splitlines()
    authors = [[a for a in json.loads(line)["author"] if a >= 0] for line in samples]
    assert len(authors) == 5 * 16
    assert all(author[:16] == [1] * len(author[:16]) for author in authors)  # the senior opens
    assert all(author == sorted(author, reverse=True) for author in authors)  # and never comes back
    assert any(0 in author for author in authors)

    again = run_example("ablation.py", *small, cwd=with_pair)  # another run must not pass for this one
    assert again.returncode != 0
    assert "already holds a run" in again.stderr
