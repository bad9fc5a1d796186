"""Peak memory of log-probs and entropies, forward and backward, beside what the [t, v] logits alone would take.

    OMP_NUM_THREADS=1 python benchmarks/head_memory.py --out benchmarks/results/head_memory.json

Prints one JSON line. `peak_mb` is the most memory, in 10⁶ bytes, that the pass needs above its inputs (hidden states,
targets, weight) and the weight's gradient; the gradient of the hidden states counts. On CPU it is the growth of the
resident set of a fresh process (VmHWM after it was reset, minus VmRSS before), so that the buffers of the matrix
library count too; on CUDA it is the allocator's peak. `fraction` is that over the 4·t·v bytes of float32 logits.
`accumulating` is the same where the weight has a gradient already, as in all micro-batches of a step but the first;
it is measured on an eighth of the tokens.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _common import about, write_lines

from tandemrl.models import head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the matrix products")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", type=Path, help="also write the line to this file")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options)))
        return
    # Memory that an earlier part of this process freed would hide some of the growth.
    child = subprocess.run([sys.executable, *sys.argv, "--measure"], stdout=subprocess.PIPE, check=True)
    line = json.loads(child.stdout)
    print(json.dumps(line))
    if options.out:
        write_lines(options.out, [line])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    t, v, h = options.tokens, options.vocabulary, options.hidden
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(t, h, generator=generator).to(options.device)
    weight = (torch.randn(v, h, generator=generator) / h**0.5).to(options.device).requires_grad_()
    targets = torch.randint(0, v, (t,), generator=generator).to(options.device)
    settings = head.HeadSettings(v, head.ForwardOptions(autocast=None if dtype == torch.float32 else dtype))

    def run(tokens: int) -> float:
        """Seconds of a forward and a backward over the first tokens."""
        start = time.perf_counter()
        own = hidden[:tokens].detach().requires_grad_()
        logprobs, entropy = head.linear_logprobs(own, weight, None, targets[:tokens], settings)
        (logprobs.sum() + 0.01 * entropy.sum()).backward()
        if options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    run(8)  # libraries and their threads
    weight.grad = None
    peak, seconds = above(options.device, lambda: run(t))
    first = peak - weight.numel() * weight.element_size()
    again, _ = above(options.device, lambda: run(max(1, t // 8)))
    logits = 4 * t * v
    return about() | {
        "benchmark": "head_memory",
        "device": options.device,
        "dtype": options.dtype,
        "tokens": t,
        "vocabulary": v,
        "hidden": h,
        "logits_per_chunk": head.LOGITS_PER_CHUNK,
        "logits_mb": round(logits / 1e6, 1),
        "peak_mb": round(first / 1e6, 1),
        "fraction": round(first / logits, 4),
        "accumulating": {"peak_mb": round(again / 1e6, 1), "fraction": round(again / logits, 4)},
        "seconds": round(seconds, 2),
        "tflops": round(8 * t * v * h / seconds / 1e12, 4),
    }


def above(device: str, run: Any) -> tuple[int, float]:
    """(bytes by which memory in use grew at most during ``run()``, what it returned)."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        return torch.cuda.max_memory_allocated() - before, result
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = resident("VmRSS")
    result = run()
    return resident("VmHWM") - before, result


def resident(field: str) -> int:
    """VmRSS, now, or VmHWM, its peak; bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
