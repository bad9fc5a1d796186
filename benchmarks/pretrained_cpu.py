"""One training step of a pretrained model in settings that users choose, each in a process of its own: memory, time,
gates, beside what `tandemrl plan` says of the same keys.

    tandemrl data build gsm8k --out data/gsm8k
    python benchmarks/pretrained_cpu.py --model Qwen/Qwen2.5-Coder-0.5B-Instruct --data data/gsm8k

A step is that of `gsm8k_tandem` but for size and reward: 2 prompts x 4 rollouts of at most 64 tokens, the model beside
its copy. So short a text has no answer yet: the reward is the share of digits, which differs within a group.
`peak_gib` is the largest resident memory of the process: weights, caches, and what Python and torch themselves need.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _common import about, digit_fraction

from tandemrl.files import read_json_lines

SETTINGS = {
    "torch, float32": ("model.dtype=float32",),
    "torch, bfloat16": ("model.dtype=bfloat16",),
    "torch, float32, drafts": ("model.dtype=float32", "rollout.draft_tokens=4"),
    "torch, float32, LoRA 32": ("model.dtype=float32", "model.lora.rank=32", "train.lr=1e-5"),
    "vllm, float32": ("model.dtype=float32", "rollout.engine=vllm"),
    "vllm, bfloat16": ("model.dtype=bfloat16", "rollout.engine=vllm"),
}
KEPT = re.compile(r"time/|mismatch|grad_norm|reward/mean|acceptance|truncation|length")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True)
    p.add_argument("--data", type=Path, required=True, help="the folder with train.parquet")
    p.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "pretrained_cpu.json")
    o = p.parse_args()
    common = [
        *("--config", "gsm8k_tandem", f"model.senior={o.model}", f"model.junior={o.model}", "model.device=cpu"),
        *(f"data.train=[{o.data / 'train.parquet'}]", "data.max_prompt_tokens=256", "train.prompts_per_step=2"),
        *("train.mini_batch_prompts=2", "rollout.group_size=4", "rollout.max_tokens=64", "rollout.max_rows=8"),
        *("train.steps=1", "train.eval_every=0", "train.eval_first=false", "rollout.vllm.kv_cache_gb=0.5"),
        *("reward.scorers.openai/gsm8k=pretrained_cpu:digits", "reward.timeout_s=120"),  # its process imports torch
        *("train.tokens_per_micro_batch=2560", f"train.threads={o.threads}"),
    ]
    found = list[dict[str, Any]]()
    for name in o.settings:
        found.append(measured(common, name))
        result = {"model": Path(o.model).name, "about": about(), "settings": found}
        o.out.write_text(json.dumps(result, indent=1) + "\n")


def digits(row: Any, text: str) -> float:
    return digit_fraction(text)


def measured(common: list[str], name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        keys = [*common, *SETTINGS[name], f"output_dir={folder}/run"]
        plan = subprocess.run([*TANDEMRL, "plan", *keys, "--device", "cpu"], capture_output=True, text=True)
        planned = re.search(r"([\d.,]+) GiB +at most", plan.stdout)
        begin = time.perf_counter()
        run = subprocess.Popen([*TANDEMRL, "train", *keys], stdout=sys.stderr, env=os.environ | ENVIRONMENT)
        _, status, usage = os.wait4(run.pid, 0)
        wall_s = time.perf_counter() - begin
        log = read_json_lines(Path(folder) / "run" / "metrics.jsonl") if status == 0 else ()
        metrics = {k: v for _, step in log for k, v in step.items() if KEPT.search(k)}
    line = {"setting": name, "command": ["tandemrl", "train", *keys], "exit": os.waitstatus_to_exitcode(status)}
    line |= {"planned_gib": float(planned[1]) if planned else plan.stdout[-500:] + plan.stderr[-500:]}
    line |= {"peak_gib": usage.ru_maxrss / 2**20, "wall_s": wall_s, "cpu_s": usage.ru_utime, "metrics": metrics}
    print(json.dumps(line), flush=True)
    return line


TANDEMRL = (sys.executable, "-m", "tandemrl")
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TOKENIZERS_PARALLELISM": "false"}
ENVIRONMENT |= {"PYTHONPATH": str(Path(__file__).parent)}  # for the reward

if __name__ == "__main__":
    main()
