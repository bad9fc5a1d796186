"""Runs the commands of a list on a GPU, the first ones first, and keeps what each printed.

    python benchmarks/gpu_day.py                 # every command that has no result yet
    python benchmarks/gpu_day.py --list          # what there is, and what is done
    python benchmarks/gpu_day.py train-4b        # these alone, done or not

A command runs in a process group of its own, which is killed after `--limit-s` seconds. Its result goes to
`results/gpu_day/NAME.json`: device, versions, command, seconds, and the JSON lines that it printed; of one that failed,
the end of its output, and it is tried again.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from _common import about

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gpu_day"
SMALL = "gpu_train.py --senior=qwen3-0.6b --steps=3 rollout.max_tokens=256"
VLLM = "gpu_train.py --senior=qwen3-0.6b rollout.engine=vllm rollout.vllm.gpu_memory_utilization=0.4"
COMMANDS = {
    "train-0.6b": SMALL,
    "train-4b": "gpu_train.py",  # about 110 GiB
    "train-4b-lora": "gpu_train.py --steps=3 rollout.max_tokens=256 model.lora.rank=32",
    "train-4b-offload": "gpu_train.py --steps=3 rollout.max_tokens=256 parallel.offload_optimizer=true",
    "compile": f"{SMALL} model.compile=true",
    "drafts": f"{SMALL} rollout.draft_tokens=auto",
    "claims": "-m tandemrl experiment paper-claims --device cuda --seeds 0 --out runs/gpu-claims",
    "smollm2": "-m tandemrl experiment smollm2 --device cuda --workers 6 --out runs/gpu-smollm2",
    "vllm-exactness": "-m pytest -q -x tests/rollout/vllm/test_exactness.py tests/rollout/vllm/test_drafting.py",
    "vllm-train": VLLM,
    "vllm-draft": f"{VLLM} rollout.draft_tokens=auto",
    "vllm-256": f"{VLLM} --completions=256 rollout.max_rows=256",
    "vllm-sleep": f"{VLLM} rollout.vllm.sleep=true",
    "vllm-process": f"{VLLM} rollout.vllm.multiprocess=true",
    "vllm-quantised": f"{VLLM} rollout.vllm.junior_quantization=fp8",
}
"""Arguments of python: a script of this folder, or a module. A killed experiment goes on when it is given again."""


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", choices=[*COMMANDS, []], metavar="NAME")
    p.add_argument("--list", action="store_true")
    p.add_argument("--limit-s", type=float, default=480)
    options = p.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in options.names or COMMANDS:
        done = (file := RESULTS / f"{name}.json").is_file() and json.loads(file.read_text())["exit_code"] == 0
        if options.list:
            print(f"{name:18} {'done' if done else '-':5} {COMMANDS[name]}")
        elif options.names or not done:
            result = run(COMMANDS[name], options.limit_s)
            file.write_text(json.dumps(result, indent=1) + "\n")
            failed += result["exit_code"] != 0
            print(
                f"{name}: exit code {result['exit_code']} after {result['seconds']} s {result['output_tail']}",
                flush=True,
            )
    return failed


def run(command: str, limit_s: float) -> dict:
    words = shlex.split(command)
    words = words if words[0] == "-m" else [str(HERE / words[0]), *words[1:]]
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    found = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "command": f"python {command}",
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - start, 1),
        "device": found and {"name": found.name, "memory_gib": round(found.total_memory / 2**30, 1)},
        "versions": about(),
        "lines": [json.loads(line) for line in output.split("\n") if line.startswith("{") and line.endswith("}")],
        "output_tail": output[-4000:] if process.returncode else "",
    }


if __name__ == "__main__":
    sys.exit(main())
