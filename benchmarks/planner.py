"""What tandem bookkeeping costs per engine step, without any model: the planner of `tandemrl.rollout.vllm.planner`.

    OMP_NUM_THREADS=1 python benchmarks/planner.py --out benchmarks/results/planner.jsonl

Prints one JSON line per mode and per state of prefix caching: milliseconds per step of --rows decoding requests under
strategy `word` (p 0.5, K 32, 70 % of the tokens are boundaries, so that about a third of the rows change hands in each
step), medians over --steps steps. A step is what the worker asks for: `finish`, `admit`, `schedule` (with the new
KV blocks of rows that need one), `token_keys` of each model's rows, and `postprocess`. Every --turnover steps one row
ends and another starts. The bar is 0.3 ms for the median step of 256 rows.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from _common import about, write_lines

from tandemrl.rollout.vllm.modes import SchedulingMode
from tandemrl.rollout.vllm.planner import Admission, Planner
from tandemrl.selection import word
from tandemrl.selection.draws import request_key

BAR_MS = 0.3
VOCABULARY, BOUNDARY_SHARE = 32768, 0.7
PARTS = ("finish_admit", "plan", "token_keys", "record")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=1000, help="prompt tokens per row")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per KV block")
    parser.add_argument("--turnover", type=int, default=4, help="steps between a row that ends and the next")
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    options = parser.parse_args()
    lines = []
    for mode in ("lazy", "lockstep"):
        for prefix_caching in (False, True):
            seconds, planner = simulate(mode, prefix_caching, options)
            total = [sum(step) for step in seconds]
            low, median, high = (1e3 * np.quantile(total, [0.05, 0.5, 0.95])).round(4).tolist()
            lines.append(
                about()
                | {
                    "benchmark": "planner",
                    "mode": mode,
                    "prefix_caching": prefix_caching,
                    **{key: getattr(options, key) for key in ("rows", "steps", "prompt", "block_size", "turnover")},
                    "computed_per_written": round(sum(planner.stats.computed) / sum(planner.stats.written), 3),
                    "ms_per_step": median,
                    "interval_90": [low, high],
                    "ms_per_part": {
                        part: round(1e3 * statistics.median(times), 4)
                        for part, times in zip(PARTS, zip(*seconds, strict=True), strict=True)
                    },
                    "bar": f"{median} <= {BAR_MS} {'ok' if median <= BAR_MS else 'NOT OK'}",
                    "load": [round(x, 2) for x in os.getloadavg()],
                    "command": shlex.join(["python", *sys.argv]),
                }
            )
            print(json.dumps(lines[-1]), flush=True)
    if options.out is not None:
        write_lines(options.out, lines)


def simulate(
    mode: SchedulingMode, prefix_caching: bool, options: argparse.Namespace
) -> tuple[list[tuple[float, ...]], Planner]:
    """Seconds of each of ``PARTS`` in every step, and the planner afterwards."""
    rows, size = options.rows, options.block_size
    longest = options.prompt + options.steps + 1
    num_blocks = (rows + options.steps // options.turnover + 1) * (longest // size + 1)
    planner = Planner(
        budget=1 << 30,
        block_size=size,
        num_blocks=num_blocks,
        prefix_caching=prefix_caching,
        mode=mode,
        capacity=rows,
    )
    random = np.random.default_rng(0)
    strategy = word(0.5, 32, torch.from_numpy(random.random(VOCABULARY) < BOUNDARY_SHARE))
    block: Iterator[int] = iter(range(num_blocks))
    length: dict[str, int] = {}  # of the live requests, oldest first
    started = 0

    def step(finished: list[str]) -> tuple[float, ...]:
        nonlocal started
        admissions = []
        while len(length) < rows:
            id = str(started)
            length[id] = options.prompt
            admissions.append(Admission(id, options.prompt, request_key(0, 0, started, 0), strategy))
            started += 1
        ids = list(length)
        new = {admission.id for admission in admissions}
        start = [0 if id in new else length[id] - 1 for id in ids]
        count = [length[id] - at for id, at in zip(ids, start, strict=True)]
        blocks = [
            [next(block) for _ in range(-(-(at + n) // size) - -(-at // size))] or None
            for at, n in zip(start, count, strict=True)
        ]
        tokens = random.integers(VOCABULARY, size=rows)
        marks = [time.perf_counter()]
        planner.finish(finished)
        planner.admit(admissions)
        marks.append(time.perf_counter())
        passes = planner.schedule(ids, start, count, blocks)
        marks.append(time.perf_counter())
        for own in passes:
            for work in own:
                planner.token_keys(work.ids)
        marks.append(time.perf_counter())
        planner.postprocess(tokens)
        marks.append(time.perf_counter())
        for id in ids:
            length[id] += 1
        return tuple(np.diff(marks).tolist())

    step([])  # the prompts
    seconds = []
    for number in range(options.steps):
        finished: list[str] = []
        if number % options.turnover == 0:
            finished = [next(iter(length))]
            del length[finished[0]]
        seconds.append(step(finished))
    return seconds, planner


if __name__ == "__main__":
    main()
