"""Training on a GPU: packed sequences in this library against transformers' own padded step, on Qwen3 configurations.

    python benchmarks/gpu_step.py                 # Qwen3-0.6B and 4B with random weights, bfloat16 compute
    python benchmarks/gpu_step.py --who packed --models qwen3-0.6b --compile      # or --liger, --rectangles, …
    python benchmarks/gpu_step.py --smoke         # tiny configurations on a CPU: that the script works

A step is forward, backward, clipping and AdamW on the same sequences and the same loss, the mean of −log p over the
responses, with float32 weights under autocast and the same gradient checkpointing:

| who | what |
|---|---|
| packed | `forward.token_logprobs`: no padding, prompts of a group once, chunked LM head |
| padded | `AutoModelForCausalLM(input_ids, attention_mask)` with SDPA, right-padded rows, cross-entropy of its logits |

Both take micro-batches of at most --micro-batch tokens; padding counts. Each runs in a process of its own, and prints
one JSON line: tokens/s (tokens of the sequences, each prompt once per sequence), MFU (useful FLOPs, see
`benchmarks/update.py`, over the measured matmul peak: shared prompts count once in both), peak memory.

Whole training steps are `gpu_train.py`; everything for GPUs, in order: `gpu_day.py`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _common import about, given_lengths, write_lines
from models import QWEN3, model
from torch import Tensor
from transformers import PreTrainedModel

from tandemrl.models import attention
from tandemrl.models.batching import micro_batches, pack
from tandemrl.models.compile import compile_layers, use_liger
from tandemrl.models.forward import token_logprobs
from tandemrl.models.head import ForwardOptions
from tandemrl.models.loading import prepare
from tandemrl.training.profiling import cost_of, matmul_peak, update_flops
from tandemrl.types import Author, Rollout

CHANGES = {
    "compile": "model.compile",
    "liger": "model.liger",
    "activation_offload": "model.activation_offload",
    "rectangles": "attention without torch's varlen kernels",
}


def main() -> None:
    options = parser().parse_args()
    if not options.who and not torch.cuda.is_available() and not options.smoke:
        print("no CUDA device: smoke test on the CPU, nothing is measured", file=sys.stderr)
        options.smoke = True
    if options.smoke:
        options.models, options.device, options.dtype = ["tiny"], "cpu", "float32"
        options.prompt, options.longest, options.micro_batch, options.steps = 8, 48, 256, 2
    if options.who:
        print(json.dumps(measure(options)))
        return
    lines = [
        run([__file__, *flags(options), f"--models={name}", f"--who={who}"])
        for name in options.models
        for who in ("packed", "padded")
    ]
    if options.out and not options.smoke:
        write_lines(options.out, lines)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", nargs="+", default=list(QWEN3), help="which of models.py")
    p.add_argument("--lengths", choices=["equal", "lognormal"], default="lognormal")
    p.add_argument("--longest", type=int, default=3072, help="tokens of a sequence, at most")
    p.add_argument("--prompt", type=int, default=256, help="of them, tokens of the prompt")
    p.add_argument("--sequences", type=int, default=32, help="per step, in groups of 8")
    p.add_argument("--micro-batch", type=int, default=16384, help="tokens per forward and backward")
    p.add_argument("--steps", type=int, default=5, help="after one that is not counted")
    p.add_argument("--no-checkpointing", action="store_true", help="keep activations instead of recomputing them")
    p.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    p.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    for name, explanation in CHANGES.items():
        p.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=f"of packed: {explanation}")
    p.add_argument("--smoke", action="store_true", help="tiny, on the CPU; writes no file")
    p.add_argument("--who", choices=["packed", "padded"], help="one measure, in this process")
    p.add_argument("--out", type=Path, help="also write the lines to this file")
    return p


def flags(options: argparse.Namespace) -> list[str]:
    names = ("lengths", "longest", "prompt", "sequences", "micro_batch", "steps", "dtype", "device")
    options_set = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    switches = [name for name in ("no_checkpointing", *CHANGES) if getattr(options, name)]
    return options_set + [f"--{name.replace('_', '-')}" for name in switches]


def run(command: list[str]) -> dict[str, Any]:
    """A script in a process of its own, whose memory nobody else uses; the JSON object that it prints last."""
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True)
    line = json.loads(done.stdout.strip().splitlines()[-1])
    print(json.dumps(line), flush=True)
    return line


# ------------------------------------------------------------------------------------------------------------- one step


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The result line: medians over steps."""
    device, (name,) = torch.device(options.device), options.models
    compute = getattr(torch, options.dtype)
    with device:
        policy = model(name, seed=0)
    if not options.no_checkpointing:
        policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy.train()  # transformers recomputes in training mode only; nothing here is random
    if options.who == "packed":
        prepare(policy)
        if options.rectangles:
            attention.varlen_attn = None  # type: ignore[assignment]  # as on a torch that has none
        if options.liger:
            use_liger(policy)
        if options.compile:
            compile_layers(policy)
        policy.train(not options.no_checkpointing)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0, fused=options.device == "cuda")
    rollouts = made_up(options, policy.config.vocab_size)
    lengths = [len(rollout.tokens) for rollout in rollouts]
    responses = sum(rollout.response_tokens for rollout in rollouts)
    losses = packed(policy, rollouts, options) if options.who == "packed" else padded(policy, rollouts, options)

    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    peak = matmul_peak(device, compute)
    seconds, value = [], 0.0
    for _ in range(options.steps + 1):
        wait()
        if options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        value = 0.0
        for loss in losses:
            with torch.autocast(device.type, dtype=compute, enabled=compute != torch.float32):
                part = loss() / responses
            part.backward()
            value += part.item()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait()
        seconds.append(time.perf_counter() - start)
    typical = statistics.median(seconds[1:])
    shared = [options.prompt] * sum(rollout.index > 0 for rollout in rollouts)
    flops = update_flops(cost_of(policy), lengths, predictions=responses, shared=shared)
    memory = torch.cuda.max_memory_allocated() / 2**30 if options.device == "cuda" else None
    return about() | {
        "benchmark": "gpu_step",
        "who": options.who,
        "model": name,
        "parameters": sum(p.numel() for p in policy.parameters()),
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
        "dtype": options.dtype,
        "checkpointing": not options.no_checkpointing,
        "changes": [name for name in CHANGES if getattr(options, name)],
        "lengths": options.lengths,
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "micro_batches": len(losses),
        "loss": round(value, 5),
        "median_s": round(typical, 4),
        "s_all": [round(x, 4) for x in seconds[1:]],
        "tokens_per_s": round(sum(lengths) / typical, 1),
        "peak_tflops": round(peak / 1e12, 2),
        "mfu": round(flops / typical / peak, 4),
        "memory_gib": None if memory is None else round(memory, 2),
    }


def made_up(options: argparse.Namespace, vocabulary: int) -> list[Rollout]:
    """Random tokens in groups of 8 that share a prompt."""
    rng = np.random.default_rng(0)
    lengths = given_lengths(options.lengths, options.sequences, options.longest - options.prompt, seed=0, step=0)
    rollouts: list[Rollout] = []
    for i, length in enumerate(lengths):
        new = rng.integers(vocabulary, size=options.prompt) if i % 8 == 0 else rollouts[-1].tokens[: options.prompt]
        tokens = np.concatenate([new, rng.integers(vocabulary, size=length)])
        author = np.repeat([Author.CONTEXT, Author.SENIOR], [options.prompt, length])
        rollouts.append(Rollout(str(i // 8), i // 8, i % 8, 0, tokens, author, np.zeros(len(tokens)), reward=0.0))
    return rollouts


def packed(policy: PreTrainedModel, rollouts: list[Rollout], options: argparse.Namespace) -> list[Callable[[], Tensor]]:
    """Per micro-batch, the sum of −log p over responses, as this library computes it."""
    compute = None if options.dtype == "float32" else getattr(torch, options.dtype)
    groups = [rollout.group for rollout in rollouts]
    bins = micro_batches([len(rollout.tokens) for rollout in rollouts], options.micro_batch, groups=groups)

    def loss(rows: list[int]) -> Tensor:
        batch = pack([rollouts[i] for i in rows], policy.device)
        forward = ForwardOptions(autocast=compute, activation_offload=options.activation_offload)
        logprobs, _ = token_logprobs(policy, batch, select=batch.author >= 0, options=forward)
        return -logprobs.sum()

    return [lambda rows=rows: loss(rows) for rows in bins]


def padded(policy: PreTrainedModel, rollouts: list[Rollout], options: argparse.Namespace) -> list[Callable[[], Tensor]]:
    """The same of transformers' own model: rows in the given order, as many as fit when padded to the longest."""
    bins: list[list[Rollout]] = [[]]
    for rollout in rollouts:
        rows = [*bins[-1], rollout]
        if len(rows) * max(len(r.tokens) for r in rows) > options.micro_batch:
            bins.append([])
        bins[-1].append(rollout)

    def loss(rows: list[Rollout]) -> Tensor:
        width = max(len(r.tokens) for r in rows)
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        mask, labels = torch.zeros_like(tokens), torch.full_like(tokens, -100)
        for i, r in enumerate(rows):
            tokens[i, : len(r.tokens)], mask[i, : len(r.tokens)] = torch.from_numpy(r.tokens), 1
            labels[i, options.prompt : len(r.tokens)] = tokens[i, options.prompt : len(r.tokens)]
        tokens, mask, labels = (x.to(policy.device) for x in (tokens, mask, labels))
        logits = policy(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")

    return [lambda rows=rows: loss(rows) for rows in bins]


if __name__ == "__main__":
    main()
