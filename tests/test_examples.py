"""Scripts under examples/, run as a reader would run them."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_the_ablation_trains_with_its_own_strategy_and_loss(tiny_pair: Path, tmp_path: Path) -> None:
    overrides = [f"model.senior={tiny_pair}/senior", f"model.junior={tiny_pair}/junior", "train.eval_every=0"]
    overrides += ["train.prompts_per_step=4", "rollout.group_size=4", "rollout.max_tokens=32"]
    done = run_example("ablation.py", *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs" / "ablation" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 5
    for printed, line in zip(done.stdout.splitlines(), lines, strict=True):
        metrics = json.loads(line)
        assert printed.startswith(f"step {metrics['step']}: reward {metrics['reward/mean']:.3f}")

    samples = (tmp_path / "runs" / "ablation" / "samples.jsonl").read_text().splitlines()
    authors = [[a for a in json.loads(line)["author"] if a >= 0] for line in samples]
    assert len(authors) == 5 * 16
    assert all(author[:16] == [1] * len(author[:16]) for author in authors)  # the senior opens
    assert all(author == sorted(author, reverse=True) for author in authors)  # and never comes back
    assert any(0 in author for author in authors)

    again = run_example("ablation.py", *overrides, cwd=tmp_path)  # another run must not pass for this one
    assert again.returncode != 0
    assert "already holds a run" in again.stderr
