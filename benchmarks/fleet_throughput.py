"""Tokens per second of rollouts: two workers on Ray, beside one engine in this process, on the same two cores.

    OMP_NUM_THREADS=1 python benchmarks/fleet_throughput.py --out benchmarks/results/fleet_throughput.json

SmolLM2-135M-Instruct writes tandem rollouts beside a copy of itself, where almost all the time is in matrix products.
Every round, each contestant generates the same requests, in units of --unit-groups groups:

- `engine, 1 thread` and `engine, 2 threads`: in this process;
- `engine, one batch`: with two threads, without units, so that all rows are decoded together;
- `2 workers`: on a local Ray cluster, with one thread each. Requests and completions go through Ray; no weights do.

Nothing else should run on the machine. Prints medians of the rounds with 90 % intervals, in tokens per second of wall
time, and relative to `engine, 2 threads`; --out is renewed after each round. It is checked that the workers write what
the engine with one thread does.
"""

import argparse
import json
import os
import shlex
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from _common import about, over_rounds, ratios

from tandemrl.apps.experiments.smollm2 import fetch
from tandemrl.config import RolloutConfig, load
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import encode_prompts
from tandemrl.models.loading import load_tokenizer
from tandemrl.rollout.engine import Completion, Engine, Request, Sampling
from tandemrl.rollout.factory import ModelSource, load_frozen, make_engine
from tandemrl.selection import word
from tandemrl.selection.boundaries import word_boundary_table
from tandemrl.selection.draws import request_key

BASELINE = "engine, 2 threads"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--prompts", type=int, default=8)
    p.add_argument("--group-size", type=int, default=8, help="completions per prompt")
    p.add_argument("--unit-groups", type=int, default=4, help="groups that are decoded together")
    p.add_argument("--max-tokens", type=int, default=44)
    p.add_argument("--rounds", type=int, default=5, help="an interval needs at least 5")
    p.add_argument("--out", type=Path)
    options = p.parse_args()
    folder = fetch().folder
    tokenizer = load_tokenizer(folder)
    source = ModelSource(str(folder), partial(load_frozen, str(folder), "float32", "cpu"))
    common = ["rollout.ray=local", f"rollout.max_rows={options.unit_groups * options.group_size}"]

    def engine(*overrides: str) -> Engine:
        config: RolloutConfig = load(None, [f"model.senior={folder}", *common, *overrides]).rollout
        return make_engine(config, source, source, tokenizer)

    units = f"rollout.unit_groups={options.unit_groups}"
    in_process = engine(units)
    engines: dict[str, tuple[int, Engine]] = {
        "engine, 1 thread": (1, in_process),
        BASELINE: (2, in_process),
        "engine, one batch": (2, engine(f"rollout.max_rows={options.prompts * options.group_size}")),
    }
    torch.set_num_threads(1)  # of workers, too, when they start
    engines[f"{options.workers} workers"] = 1, engine(units, f"rollout.workers={options.workers}")

    prompts, _ = encode_prompts(
        load_rows([f"synthetic:word_problems:train:{options.prompts}"]), tokenizer, max_prompt_tokens=512
    )
    strategy = word(0.5, 32, word_boundary_table(tokenizer, in_process.vocabulary))

    def requests(number: int) -> list[Request]:
        return [
            Request(
                prompt.tokens,
                tuple(request_key(number + 1, 0, i, k) for k in range(options.group_size)),
                Sampling(max_tokens=options.max_tokens),
                strategy,
            )
            for i, prompt in enumerate(prompts)
        ]

    names = [*engines]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, options.rounds):  # one untimed round
        written = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            threads, contestant = engines[name]
            torch.set_num_threads(threads)
            start = time.perf_counter()
            written[name] = contestant.generate(requests(number))
            took = time.perf_counter() - start
            tokens = sum(len(each.tokens) for group in written[name] for each in group)
            if number >= 0:
                seconds[name].append(took / tokens)  # a text is not the same in another batch
                rates[name].append(tokens / took)
            print(f"round {number}, {name}: {tokens} tokens in {took:.1f} s", file=sys.stderr, flush=True)
        same = [name for name in names if engines[name][0] == 1]
        assert all(texts(written[name]) == texts(written[same[0]]) for name in same), "not the same tokens"
        if number < 0:
            continue
        result = about() | {
            "benchmark": "fleet_throughput",
            "ray": version("ray"),
            "command": shlex.join(["python", *sys.argv]),
            "model": folder.name,
            "rows": options.prompts * options.group_size,
            "unit_groups": options.unit_groups,
            "tokens_per_s": {name: over_rounds(values) for name, values in rates.items()},
            "seconds_ratios": ratios(seconds, [(name, BASELINE) for name in names if name != BASELINE]),
            "load1": round(os.getloadavg()[0], 2),
        }
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    for _, contestant in engines.values():
        contestant.close()


def texts(completions: list[list[Completion]]) -> list[list[int]]:
    return [completion.tokens.tolist() for group in completions for completion in group]


if __name__ == "__main__":
    main()
