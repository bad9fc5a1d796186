"""A few whole training steps of a pair with random weights, through `training.loop`, on a GPU; any config key.

    python benchmarks/gpu_train.py                                    # Qwen3-4B with a 0.6B junior, bfloat16, word
    python benchmarks/gpu_train.py --senior qwen3-0.6b rollout.engine=vllm rollout.vllm.junior_quantization=fp8
    python benchmarks/gpu_train.py --smoke                            # tiny, on a CPU: that the script works

Prints one JSON line: the gate's numbers (`mismatch/…`, between the engine's log-probs and the trainer's), seconds per
phase and tokens/s (`train.profile`), and peak memory. The models say nothing, what they cost is real. Nothing
is saved: a checkpoint of the 4B policy and its optimiser has 48 GB.
"""

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import models
import torch
from _common import about
from transformers.utils import logging

import tandemrl.training.loop
from tandemrl.config import load
from tandemrl.data.rows import Row
from tandemrl.files import read_json_lines
from tandemrl.training.preflight import Preflight

REPORTED = ("mismatch/", "time/", "tokens", "draft/", "passes/", "entropy", "grad_norm", "senior")


def main() -> None:
    options = parser().parse_args()
    if options.smoke:
        options.senior = options.junior = "tiny"
        options.overrides = ["model.device=cpu", "model.dtype=float32", "rollout.max_tokens=16", *options.overrides]
        options.steps, options.completions = 2, 8
    logging.disable_progress_bar()
    print(json.dumps(measure(options)), flush=True)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--senior", default="qwen3-4b", choices=[*models.SIZES, *models.QWEN3])
    p.add_argument("--junior", default="qwen3-0.6b", choices=[*models.SIZES, *models.QWEN3])
    p.add_argument("--completions", type=int, default=64, help="per step, in groups of 8")
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--models", type=Path, default=Path("runs/benchmark_models"), help="where the models are built")
    p.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="config keys")
    return p


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The result line."""
    senior, junior = (folder(getattr(options, who), who, options.models) for who in ("senior", "junior"))
    tandemrl.training.checkpoint.save = lambda run: []  # type: ignore[assignment]  # nothing is saved, and needs no room
    Preflight.space = lambda self: "nothing is saved"  # type: ignore[method-assign]  # likewise
    with tempfile.TemporaryDirectory() as out:
        config = load(
            None,
            [
                f"model.senior={senior}",
                f"model.junior={junior}",
                "model.device=cuda",
                "model.dtype=bfloat16",
                "model.gradient_checkpointing=true",
                "data.train=synthetic:plain:train:256",
                "data.eval=[]",
                f"train.prompts_per_step={options.completions // 8}",
                f"train.steps={options.steps}",
                "train.eval_every=0",
                "train.profile=true",
                "train.tokens_per_micro_batch=16384",
                "rollout.group_size=8",
                "rollout.max_tokens=512",
                f"output_dir={out}",
                *options.overrides,
            ],
        )
        tandemrl.training.loop.train(config, resume="never", reward=alternating, quiet=True)
        steps = [line for _, line in read_json_lines(Path(out, "metrics.jsonl"))]
    cuda = config.model.device.startswith("cuda")
    return about() | {
        "benchmark": "gpu_train",
        "senior": options.senior,
        "junior": options.junior,
        "overrides": list(options.overrides),
        "completions": options.completions,
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "steps": [{name: value for name, value in step.items() if name.startswith(REPORTED)} for step in steps],
    }


CALLS = itertools.count()


def alternating(row: Row, text: str) -> float:
    """A reward that costs nothing and differs within every group, so that the update leaves none out. (Random models
    write ids that this tokenizer does not have, so their texts are mostly empty.)"""
    return float(next(CALLS) % 2)


def folder(name: str, who: str, home: Path) -> Path:
    """The model's folder, built unless it is there; in bfloat16 where it is one of the large ones."""
    path = home / name / who
    if not (path / "config.json").is_file():
        if name in models.SIZES:
            models.build(name, home)
        else:
            with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
                model = models.model(name, seed=int(who == "junior"))
            model.to(torch.bfloat16).save_pretrained(path)
            models.tokenizer().save_pretrained(path)
    return path


if __name__ == "__main__":
    main()
