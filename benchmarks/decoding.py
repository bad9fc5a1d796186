"""Decoding on the reference engine beside `transformers.generate`: one process, the three in turn, medians over rounds.

    OMP_NUM_THREADS=1 python benchmarks/decoding.py --threads 1

Prints one JSON line per batch size, with the seconds to write --max-tokens tokens in every row (EOS does not stop):

- transformers: `model.generate`, sampling at temperature 1, with its own dynamic cache and SDPA attention;
- solo: our engine, the senior alone. Besides the tokens it returns authors and log-probs, each row from its own stream;
- tandem: our engine, strategy `word` (p 0.5, K 32), with a junior of the same size.

CPU seconds stand beside wall seconds: on one thread they leave out the time that other processes took.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _common import about, cpu_seconds, prompt_texts, ratios, tiny_senior, write_lines
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.engine import Request, Sampling
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, solo, word
from tandemrl.selection.boundaries import word_boundary_table
from tandemrl.selection.draws import request_key

PAIRS = [("solo", "transformers"), ("tandem", "solo"), ("tandem", "transformers")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="HF folder; default: the tiny pair's senior")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128], help="batch sizes")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="torch threads, 0 = leave")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    model = options.model or tiny_senior()
    contestants = prepare(model, options)

    lines = []
    for rows in options.rows:
        line = about() | {
            "benchmark": "decoding",
            "model": "tiny" if options.model is None else model.name,
            "dtype": options.dtype,
            "device": options.device,
            "rows": rows,
            "max_tokens": options.max_tokens,
            "rounds": options.rounds,
            **alternate(contestants, rows, options.rounds),
        }
        lines.append(line)
        print(json.dumps(line), flush=True)
    if options.out is not None:
        write_lines(options.out, lines)


def prepare(path: Path, options: argparse.Namespace) -> dict[str, Callable[[int, int], None]]:
    """Name -> function of (rows, round) that writes ``rows`` full-length completions of different prompts."""
    tokenizer = load_tokenizer(path)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype)).to(options.device).eval()
    senior, junior = (load_model(path, dtype=options.dtype, device=options.device) for _ in range(2))
    engine = TorchEngine(senior, junior, tokenizer)
    sampling = Sampling(max_tokens=options.max_tokens, ignore_eos=True)
    prompts = [tokenizer.encode(text) for text in prompt_texts(max(options.rows))]
    boundary = word_boundary_table(tokenizer, senior.get_output_embeddings().weight.shape[0])

    def transformers(rows: int, number: int) -> None:
        torch.manual_seed(number)
        batch = tokenizer.pad({"input_ids": prompts[:rows]}, padding_side="left", return_tensors="pt")
        out = theirs.generate(
            **batch.to(options.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=options.max_tokens,
            min_new_tokens=options.max_tokens,
        ).cpu()
        assert out.shape == (rows, batch["input_ids"].shape[1] + options.max_tokens)

    def ours(strategy: Strategy) -> Callable[[int, int], None]:
        def run(rows: int, number: int) -> None:
            requests = [
                Request(prompt, (request_key(number, 0, i, 0),), sampling, strategy)
                for i, prompt in enumerate(prompts[:rows])
            ]
            completions = engine.generate(requests)
            assert all(len(c.tokens) == options.max_tokens for group in completions for c in group)

        return run

    return {"transformers": transformers, "solo": ours(solo("senior")), "tandem": ours(word(0.5, 32, boundary))}


def alternate(
    contestants: dict[str, Callable[[int, int], None]],
    rows: int,
    rounds: int,
    pairs: Sequence[tuple[str, str]] = PAIRS,
) -> dict[str, Any]:
    """Time every contestant once per round, after one untimed round; medians, ratios and the load by others."""
    names = list(contestants)
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    others = []
    for number in range(-1, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:  # nobody always goes first
            (mine, busy), start = cpu_seconds(), time.perf_counter()
            contestants[name](rows, number)
            seconds = time.perf_counter() - start
            mine, busy = (after - before for after, before in zip(cpu_seconds(), (mine, busy), strict=True))
            if number >= 0:
                wall[name].append(seconds)
                cpu[name].append(mine)
                others.append(max(0.0, busy - mine) / seconds)
    return {
        "median_s": {name: round(statistics.median(wall[name]), 4) for name in names},
        "median_cpu_s": {name: round(statistics.median(cpu[name]), 4) for name in names},
        "ratios": ratios(wall, pairs),
        "cpu_ratios": ratios(cpu, pairs),
        "cores_others": round(statistics.median(others), 2),
        "load1": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    main()
