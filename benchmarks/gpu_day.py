"""Everything to be measured on one GPU, in the order of its worth, in a given time; what each command printed is kept.

    python benchmarks/gpu_day.py --seconds 800 --model Qwen/Qwen2.5-Coder-0.5B-Instruct --data data/gsm8k
    python benchmarks/gpu_day.py --list              # the stages, and what has a result
    python benchmarks/gpu_day.py train-4b-lora       # these alone

Stages follow each other; in a stage, chains of commands run at once. What is timed has the GPU to itself: only a check
of equality runs while engines start. A command runs in a process group of its own, which is killed at its limit or when
the time is over. Its result goes to `results/gpu_day/NAME.json`: device, versions, command, seconds, and the JSON lines
that it printed; of one that failed, the end of its output, too.
"""

import argparse
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from _common import about

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "gpu_day"
SHARED = "gpu_train.py --steps=3 rollout.max_tokens=256"


class Command(NamedTuple):
    """limit_s: after which it is killed; None = what is left. arguments: of python; {left}, {model}, {data}."""

    limit_s: float | None
    arguments: str


COMMANDS = {
    "graph-check": Command(100, "graph_step.py --parts check"),
    "vllm-speed": Command(300, "vllm_cuda.py --parts speed"),
    "graph-speed": Command(90, "graph_step.py --parts speed eager profile --seconds 75"),
    "gsm8k": Command(None, "gsm8k_qwen.py --model {model} --data {data} --work runs/gsm8k_qwen --seconds {left}"),
    "vllm-train": Command(200, "vllm_cuda.py --parts train"),
    "vllm-sleep": Command(200, "vllm_cuda.py --parts sleep"),
    "vllm-exact": Command(240, "vllm_cuda.py --parts exact"),
    "train-4b-lora": Command(300, f"{SHARED} model.lora.rank=32"),
    "train-4b-offload": Command(300, f"{SHARED} parallel.offload_optimizer=true"),
    "train-4b": Command(300, "gpu_train.py"),  # about 110 GiB
    "tests": Command(300, "-m pytest -q tests/test_cuda.py"),
}
STAGES: list[list[list[str]]] = [
    [["graph-check"], ["vllm-speed"]],
    [["graph-speed"]],
    [["gsm8k"], ["vllm-train", "vllm-sleep", "vllm-exact"]],
    *([[name]] for name in ("train-4b-lora", "train-4b-offload", "tests", "train-4b")),
]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", choices=[*COMMANDS, []], metavar="NAME")
    p.add_argument("--list", action="store_true")
    p.add_argument("--seconds", type=float, default=3600, help="for everything")
    p.add_argument("--model", default="Qwen/Qwen2.5-Coder-0.5B-Instruct", help="of gsm8k")
    p.add_argument("--data", default="data/gsm8k", help="of gsm8k")
    p.add_argument("--results", type=Path, default=RESULTS)
    o = p.parse_args()
    if o.list:
        for stage in STAGES:
            for name in itertools.chain(*stage):
                done = "done" if (o.results / f"{name}.json").is_file() else "-"
                print(f"{name:18} {done:5} {COMMANDS[name].arguments}")
            print()
        return 0
    o.results.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + o.seconds, 0
    for stage in [[[name]] for name in o.names] or STAGES:
        with ThreadPoolExecutor(len(stage)) as pool:
            failed += sum(pool.map(lambda chain: sum(run(name, end, o) for name in chain), stage))
    return failed


def run(name: str, end: float, o: argparse.Namespace) -> bool:
    """Whether a command failed. Without ten seconds left, it does not begin."""
    command, left = COMMANDS[name], end - time.monotonic()
    if left < 10:
        print(f"{name}: no time left", flush=True)
        return False
    words = shlex.split(command.arguments.format(left=int(left - 5), model=o.model, data=o.data))
    words = words if words[0] == "-m" else [str(HERE / words[0]), *words[1:]]
    result = measured(words, left if command.limit_s is None else min(left, command.limit_s))
    (o.results / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{name}: exit code {result['exit_code']} after {result['seconds']} s {result['output_tail']}", flush=True)
    return result["exit_code"] != 0


def measured(words: Sequence[str], limit_s: float) -> dict:
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        printed = output.read()
    import torch  # after the command has the GPU's memory no more

    found = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "command": shlex.join(["python", *words]),
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - start, 1),
        "device": found and {"name": found.name, "memory_gib": round(found.total_memory / 2**30, 1)},
        "versions": about(),
        "lines": [json.loads(line) for line in printed.split("\n") if line.startswith("{") and line.endswith("}")],
        "output_tail": printed[-4000:] if process.returncode else "",
    }


if __name__ == "__main__":
    sys.exit(main())
