"""How much of the machine's matrix product the update reaches, on a model of 63 million parameters (`models.py`, mid).

    OMP_NUM_THREADS=1 python benchmarks/update.py --threads 1

Times the update as the training loop does it, on made-up rollouts: packing, advantages, forward, backward, loss,
clipping, AdamW. Prints one JSON line and writes it to --out.

MFU is (6·N·t + attention) / seconds / peak. N: all weights but the embedding table, in matrix products of t tokens; the
LM head only for the tokens whose log-prob is computed. Attention: 12 FLOPs per pair of query and visible key, layer,
head and channel, forward and backward. A prompt that a group shares counts once; what is computed twice, such as the
logits, counts once; embeddings, norms, softmax, loss and optimiser do not count. Peak: the best of square products of
several sizes, in the same process, on as many threads. `mfu_cpu` divides by CPU instead of wall seconds: it leaves out
the time that other processes took.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import about, cpu_seconds, write_lines
from models import build
from step_time import parser as step_parser
from step_time import prepare

from tandemrl.training.experience import add_group_advantages, make_experience, pack_mini_batches
from tandemrl.training.profiling import Clock, cost_of, matmul_peak, update_flops
from tandemrl.training.state import Run
from tandemrl.training.update import update
from tandemrl.types import Author, Group, Rollout

PEAK_SIZES = (512, 1024, 2048)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", type=Path, default=Path("runs/benchmark_models"), help="where the model is built")
    p.add_argument("--name", default="mid", help="which of models.py")
    p.add_argument("--groups", type=int, default=2, help="prompts per update")
    p.add_argument("--group-size", type=int, default=4)
    p.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    p.add_argument("--shortest", type=int, default=512, help="tokens of a sequence, at least")
    p.add_argument("--longest", type=int, default=1024, help="tokens of a sequence, at most")
    p.add_argument("--micro-batch", type=int, default=3072, help="tokens per forward and backward")
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    p.add_argument("--compile", action="store_true", help="model.compile")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=0, help="torch threads, 0 = leave")
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "update.json")
    options = p.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    senior, _ = build(options.name, options.models)
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--group-size={options.group_size}", f"--completions={options.groups * options.group_size}"]
        flags += [f"--dtype={options.dtype}", *(["--compile"] if options.compile else [])]
        run = prepare(senior, step_parser().parse_args(flags), folder)
        line = measure(run, options)
    print(json.dumps(line))
    write_lines(options.out, [line])


def measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """The result line: medians over rounds, after one that is not counted."""
    # Made-up behaviour log-probs are far from the policy's.
    setup, models, _ = run
    train = replace(setup.config.train, tokens_per_micro_batch=options.micro_batch)
    setup = replace(setup, config=replace(setup.config, train=train), mismatch_limit=1e9)
    groups = made_up(models.policy.get_output_embeddings().out_features, options)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.tokens) for rollout in rollouts]
    responses = sum(rollout.response_tokens for rollout in rollouts)
    repeated = [options.prompt] * (len(rollouts) - len(groups))
    flops = update_flops(cost_of(models.policy), lengths, predictions=responses, shared=repeated)
    compute = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
    peaks, wall, cpu, others = [], [], [], []
    for number in range(options.rounds + 1):
        peaks.append(max(matmul_peak.__wrapped__(setup.device, compute, size, 0.3) for size in PEAK_SIZES))
        start = (time.perf_counter(), *cpu_seconds())
        experience = make_experience(setup, groups)
        mini_batches = add_group_advantages(setup, pack_mini_batches(setup, experience), experience, kl_coef=0.0)
        update(setup, models, mini_batches, number + 1, Clock())
        seconds, used, busy = (
            now - then for then, now in zip(start, (time.perf_counter(), *cpu_seconds()), strict=True)
        )
        if number:
            wall.append(seconds)
            cpu.append(used / torch.get_num_threads())
            others.append(max(0.0, busy - used) / seconds)
    peak = max(peaks)
    return about() | {
        "benchmark": "update",
        "model": options.name,
        "parameters": sum(p.numel() for p in models.policy.parameters()),
        "dtype": options.dtype,
        "compile": options.compile,
        "sequences": len(lengths),
        "tokens": sum(lengths) - sum(repeated),
        "response_tokens": responses,
        "micro_batch": options.micro_batch,
        "gflop": round(flops / 1e9, 1),
        "peak_gflops": round(peak / 1e9, 1),
        "peak_gflops_all": [round(x / 1e9, 1) for x in peaks],
        "median_s": round(statistics.median(wall), 3),
        "median_cpu_s": round(statistics.median(cpu), 3),
        "s_all": [round(x, 3) for x in wall],
        "tokens_per_s": round((sum(lengths) - sum(repeated)) / statistics.median(wall), 1),
        "mfu": round(flops / statistics.median(wall) / peak, 3),
        "mfu_best": round(flops / min(wall) / peak, 3),
        "mfu_cpu": round(flops / statistics.median(cpu) / peak, 3),
        "cores_others": round(statistics.median(others), 2),
        "load1": round(os.getloadavg()[0], 2),
    }


def made_up(vocabulary: int, options: argparse.Namespace) -> list[Group]:
    """Groups of random tokens under rewards that differ; lengths spread evenly over the allowed ones."""
    rng = np.random.default_rng(0)
    count = options.groups * options.group_size
    lengths = iter(rng.permutation(np.linspace(options.shortest, options.longest, count).astype(int)))
    groups = []
    for group in range(options.groups):
        prompt = rng.integers(vocabulary, size=options.prompt)
        rollouts = []
        for index in range(options.group_size):
            response = rng.integers(vocabulary, size=next(lengths) - options.prompt)
            author = np.repeat([Author.CONTEXT, Author.SENIOR], [len(prompt), len(response)])
            rollouts.append(
                Rollout(
                    example_id=str(group),
                    group=group,
                    index=index,
                    key=0,
                    tokens=np.concatenate([prompt, response]),
                    author=author,
                    behaviour_logprobs=np.where(author == Author.SENIOR, -np.log(vocabulary), 0.0),
                    reward=float(index % 2),
                )
            )
        groups.append(Group(str(group), tuple(rollouts)))
    return groups


if __name__ == "__main__":
    main()
