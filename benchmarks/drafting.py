"""Drafts through handovers in the reference engine, beside its own single tokens: what a senior costs that is twelve
times its junior.

    OMP_NUM_THREADS=1 python benchmarks/drafting.py --threads 1 --out benchmarks/results/drafting.jsonl

Prints one JSON line per level of agreement and batch size, with the seconds to write --max-tokens tokens in every row
(EOS does not stop), temperature 1:

- solo: the senior alone, token by token;
- tandem: strategy `word` (p 0.5, K 32), token by token: both models read every token;
- tandem N, tandem auto: the same with `rollout.draft_tokens`;
- solo 8: the senior alone, its junior drafts.

The pairs are those of `distilled.py`, built if needed: the junior has learnt to write as the senior does, more or less
well. `acceptance`: how often both draw the same token, as the engine counts it. CPU seconds stand beside wall seconds:
on one thread they leave out the time that other processes took.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import distilled
import torch
from _common import about, write_lines
from decoding import alternate
from models import tokenizer

from tandemrl.models.loading import load_model
from tandemrl.rollout.engine import Passes, Request, Sampling
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, solo, word
from tandemrl.selection.draws import request_key

RATIO = 12
DRAFTS = (4, 8, "auto")
PAIRS = [
    ("tandem", "solo"),
    *((f"tandem {length}", other) for length in DRAFTS for other in ("solo", "tandem")),
    ("solo 8", "solo"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="batch sizes")
    parser.add_argument("--levels", nargs="+", default=list(distilled.LEVELS), choices=list(distilled.LEVELS))
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="torch threads, 0 = leave")
    parser.add_argument("--models", type=Path, default=Path("runs/benchmark_models"), help="built if needed")
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    lines = []
    for level in options.levels:
        pair = distilled.build(options.models, RATIO, level)
        for rows in options.rows:
            running, passes = contestants(pair, options)
            found = alternate(running, rows, options.rounds, PAIRS)
            line = about() | {
                "benchmark": "drafting",
                "level": level,
                "pair": distilled.describe(options.models, RATIO, level),
                "rows": rows,
                "prompt_tokens": options.prompt,
                "max_tokens": options.max_tokens,
                "rounds": options.rounds,
                "acceptance": {name: each.acceptance and round(each.acceptance, 3) for name, each in passes.items()},
                "tokens_per_senior_pass": {name: round(each.tokens / each.senior, 2) for name, each in passes.items()},
                **found,
            }
            lines.append(line)
            print(json.dumps(line), flush=True)
    if options.out is not None:
        write_lines(options.out, lines)


def contestants(
    pair: distilled.Pair, options: argparse.Namespace
) -> tuple[dict[str, Callable[[int, int], None]], dict[str, Passes]]:
    """Name -> function of (rows, round) that writes ``rows`` completions; and what the calls of each have cost."""
    senior, junior = (load_model(folder, dtype="float32", device="cpu") for folder in (pair.senior, pair.junior))
    generator = torch.Generator().manual_seed(1)
    prompts = distilled.prompts(pair, max(options.rows), options.prompt)
    sampling = Sampling(max_tokens=options.max_tokens, ignore_eos=True)
    boundary = torch.rand(distilled.VOCABULARY, generator=generator) < 0.7
    passes: dict[str, Passes] = {}

    def run(name: str, engine: TorchEngine, strategy: Strategy, rows: int, number: int) -> None:
        keyed = ((prompt, request_key(number, 0, i, 0)) for i, prompt in enumerate(prompts[:rows]))
        engine.generate([Request(tuple(prompt), (key,), sampling, strategy) for prompt, key in keyed])
        passes[name] = passes.get(name, Passes()) + engine.passes

    def contestant(name: str, draft_tokens: int | str, strategy: Strategy) -> Callable[[int, int], None]:
        engine = TorchEngine(senior, junior, tokenizer(), draft_tokens=draft_tokens)
        return partial(run, name, engine, strategy)

    both, alone = word(0.5, 32, boundary), solo("senior")
    running = {"solo": contestant("solo", 0, alone), "tandem": contestant("tandem", 0, both)}
    running |= {f"tandem {length}": contestant(f"tandem {length}", length, both) for length in DRAFTS}
    return running | {"solo 8": contestant("solo 8", 8, alone)}, passes


if __name__ == "__main__":
    main()
