"""What a slow world costs: 32 episodes of three turns, whose answers come at once or take 200 ms.

    OMP_NUM_THREADS=1 python benchmarks/turns.py --threads 1

Prints one JSON line. Both worlds say the same, so the tokens are the same. In the slow one every answer, the last one
too, comes from a thread of its own that sleeps. Turns have a length of their own per episode (lognormal) or are all
of one (`--lengths equal`: all rows wait at the same time, and there is nothing else to decode meanwhile).

Wall seconds count what other processes take of the machine. On one thread, CPU seconds and those in which the engine
had nothing to do but wait (`waited`) are what the rollout would take alone: `own` is their sum.
"""

import argparse
import json
import os
import queue
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from _common import about, cpu_seconds, given_lengths, prompt_texts, ratios, write_lines
from models import build

from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.engine import Completion, Reply, Request, Sampling, Turn
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import word
from tandemrl.selection.boundaries import word_boundary_table
from tandemrl.selection.draws import request_key
from tandemrl.types import Transcript

TURNS, SAID = 3, 24
MODELS = Path("runs/benchmark_models")
PAIRS = [("slow", "instant")]


class World:
    """Says ``SAID`` tokens after every turn but the last; each answer takes ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.waited_s = seconds, 0.0
        self._ready: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def submit(self, turn: Turn) -> None:
        said = tuple(turn.tokens[:1].tolist()) * SAID if turn.index + 1 < TURNS else ()
        reply = Reply(turn.number, said, None if said else "turns")
        if self.seconds:
            threading.Timer(self.seconds, self._ready.put, (reply,)).start()
        else:
            self._ready.put(reply)

    def replies(self, *, wait: bool) -> list[Reply]:
        start = time.perf_counter()
        found = [self._ready.get()] if wait else []
        self.waited_s += time.perf_counter() - start
        while not self._ready.empty():
            found.append(self._ready.get())
        return found

    def transcript(self, number: int) -> Transcript:
        return Transcript(())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--turn-tokens", type=int, default=300, help="of the longest turn")
    parser.add_argument("--lengths", default="lognormal", choices=["lognormal", "equal"])
    parser.add_argument("--answer-s", type=float, default=0.2, help="seconds that an answer of the slow world takes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="torch threads, 0 = leave")
    parser.add_argument("--out", type=Path, help="also write the line to this file")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    line = about() | {
        "benchmark": "turns",
        "model": "tiny",
        **{name: getattr(options, name) for name in ("rows", "turn_tokens", "lengths", "answer_s", "rounds")},
        **measure(options),
    }
    print(json.dumps(line), flush=True)
    if options.out is not None:
        write_lines(options.out, [line])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a rollout in either world, in turn, after one untimed round."""
    pair = build("tiny", MODELS)
    tokenizer = load_tokenizer(pair[0])
    engine = TorchEngine(*map(load_model, pair), tokenizer)
    requests = episodes(engine, tokenizer, options)
    worlds = {"instant": 0.0, "slow": options.answer_s}
    wall, own, waited = ({name: list[float]() for name in worlds} for _ in range(3))
    others, written = [], 0
    for number in range(-1, options.rounds):
        told: dict[str, list[list[Completion]]] = {}
        for name in sorted(worlds, reverse=bool(number % 2)):
            world = World(worlds[name])
            (mine, busy), start = cpu_seconds(), time.perf_counter()
            told[name] = engine.generate(requests, responder=world)
            seconds = time.perf_counter() - start
            mine, busy = (after - before for after, before in zip(cpu_seconds(), (mine, busy), strict=True))
            if number >= 0:
                wall[name].append(seconds)
                own[name].append(mine + world.waited_s)
                waited[name].append(world.waited_s)
                others.append(max(0.0, busy - mine) / seconds)
        written = sum(len(c.tokens) for group in told["slow"] for c in group)
        assert all(len(c.turns) == TURNS for group in told["slow"] for c in group)
    return {
        "tokens": written,
        "median_s": medians(wall),
        "median_own_s": medians(own),
        "median_waited_s": medians(waited),
        "ratios": ratios(wall, PAIRS),
        "own_ratios": ratios(own, PAIRS),
        "cores_others": round(statistics.median(others), 2),
        "load1": round(os.getloadavg()[0], 2),
    }


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(values), 4) for name, values in seconds.items()}


def episodes(engine: TorchEngine, tokenizer: Any, options: argparse.Namespace) -> list[Request]:
    """One of each prompt; every turn is as long as it may be."""
    lengths = given_lengths(options.lengths, options.rows, options.turn_tokens, seed=0, step=0)
    strategy = word(0.5, 32, word_boundary_table(tokenizer, engine.vocabulary))
    return [
        Request(
            tokenizer.encode(text),
            (request_key(0, 0, i, 0),),
            Sampling(max_tokens=TURNS * tokens, ignore_eos=True),
            strategy,
            turn_tokens=tokens,
            observation_tokens=(TURNS - 1) * SAID,
        )
        for i, (text, tokens) in enumerate(zip(prompt_texts(options.rows), lengths, strict=True))
    ]


if __name__ == "__main__":
    main()
