"""A small training run, its files, and when two runs are the same."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from tandemrl.config import Config, load

SMALL = [
    "train.threads=1",
    "train.steps=3",
    "train.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_tokens=48",
    "train.save_every=2",
    "train.eval_every=2",
    "train.lr=3e-4",
    "eval.train_problems=4",
    "eval.train_samples=2",
    "eval.bootstrap=10",
    "data.train=synthetic:plain:train:64",
    "data.eval=synthetic:plain:heldout:16",
    "data.max_prompt_tokens=128",
]


def config(pair: Path, out: Path, *extra: str) -> Config:
    paths = [f"model.senior={pair}/senior", f"model.junior={pair}/junior", f"output_dir={out}"]
    return load(None, [*SMALL, *paths, *extra])


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def timeless(out: Path) -> list[dict[str, float]]:
    """Metrics that two identical runs share: all but the times."""
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "tokens/s"))} for line in metrics(out)]


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(out / "hf" / f"step_{step}" / "model.safetensors")


def assert_same_run(a: Path, b: Path, step: int) -> None:
    assert timeless(a) == timeless(b)
    assert (a / "samples.jsonl").read_text() == (b / "samples.jsonl").read_text()
    left, right = weights(a, step), weights(b, step)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
