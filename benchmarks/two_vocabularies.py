"""What a junior with a vocabulary of its own costs: one process, both in turn, medians over rounds.

    OMP_NUM_THREADS=1 python benchmarks/two_vocabularies.py --threads 1

Prints one JSON line per batch size, with CPU seconds per token of the response:

- one: strategy `before_word` (p 0.5) in one vocabulary;
- two: the same with the junior's tokenizer loaded once more, as if it were another. Every word of the junior is spelled
  and tokenised again, and each model has a batch, a cache and a pass of its own.

Both write the responses to the same prompts, but other ones: the junior's random numbers differ. A response ends with
EOS, and the next one takes its place, so the batch is full but for the end.
"""

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from _common import about, cpu_seconds, ratios, tiny_senior, write_lines
from transformers.utils import logging

from tandemrl.data.loading import load_rows
from tandemrl.data.rows import encode_prompts
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.engine import Engine, Request, Sampling
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, before_word
from tandemrl.selection.boundaries import start_table
from tandemrl.selection.draws import request_key
from tandemrl.selection.whole_words import before_text_word, text_tables

PER_ROW = 3
"""Responses per row of the batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="HF folder of both models; default: the tiny pair's senior")
    parser.add_argument("--data", default="synthetic:plain:train:96")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="batch sizes")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="torch threads, 0 = leave")
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    lines = []
    for rows in options.rows:
        contestants = prepare(options.model or tiny_senior(), rows, options)
        names, seconds = list(contestants), {name: list[float]() for name in contestants}
        tokens = dict.fromkeys(names, 0)
        for number in range(-1, options.rounds):  # one untimed round
            for name in names[number % 2 :] + names[: number % 2]:
                start = cpu_seconds()[0]
                written = contestants[name](number)
                if number >= 0:
                    tokens[name] += written
                    seconds[name].append((cpu_seconds()[0] - start) / written)
        line = about() | {
            "benchmark": "two_vocabularies",
            "command": shlex.join(["python", *sys.argv]),
            "model": "tiny" if options.model is None else options.model.name,
            "rows": rows,
            "max_tokens": options.max_tokens,
            "rounds": options.rounds,
            "tokens": tokens,
            "median_cpu_ms_per_token": {name: round(1e3 * statistics.median(seconds[name]), 3) for name in names},
            "ratios": ratios(seconds, [("two", "one")]),
        }
        lines.append(line)
        print(json.dumps(line), flush=True)
    if options.out is not None:
        write_lines(options.out, lines)


def prepare(path: Path, rows: int, options: argparse.Namespace) -> dict[str, Callable[[int], int]]:
    """Name -> function of the round that writes the responses, and returns how many tokens they have."""
    tokenizer = load_tokenizer(path)
    senior, junior = (load_model(path) for _ in range(2))
    prompts, _ = encode_prompts(load_rows([options.data]), tokenizer, max_prompt_tokens=512)
    sampling = Sampling(max_tokens=options.max_tokens)

    def contestant(engine: Engine, strategy: Strategy) -> Callable[[int], int]:
        def run(number: int) -> int:
            requests = [
                Request(prompt.tokens, (request_key(number, 0, i, 0),), sampling, strategy, junior_prompt=prompt.tokens)
                for i, prompt in enumerate(prompts[: PER_ROW * rows])
            ]
            return sum(len(c.tokens) for group in engine.generate(requests) for c in group)

        return run

    vocabulary = senior.get_output_embeddings().weight.shape[0]
    return {
        "one": contestant(
            TorchEngine(senior, junior, tokenizer, max_rows=rows), before_word(0.5, start_table(tokenizer, vocabulary))
        ),
        "two": contestant(
            TorchEngine(senior, junior, tokenizer, junior_tokenizer=load_tokenizer(path), max_rows=rows),
            before_text_word(0.5, text_tables(tokenizer, vocabulary)),
        ),
    }


if __name__ == "__main__":
    main()
