"""Decoding with two models beside decoding with one, on vLLM; all contestants take turns in one process.

    python benchmarks/tandem_cost.py --out benchmarks/results/tandem_cost.jsonl
    python benchmarks/tandem_cost.py --settings tiny-1,kv-1500 --rounds 3

Prints one JSON line per setting (model of `models.py`, rows, prompt tokens) and a verdict per bar on stderr:

- bare: plain `vllm.LLMEngine` with the senior and the same arguments, no tandem worker, no log-probs;
- stock: the same engine, returning the log-prob of every token, as every contestant below does;
- solo: our engine, the senior alone;
- lockstep, lazy, majority: our engine's modes, strategy `word` (p 0.5, K 32), a random table of boundary tokens.

Decoding only: the clock runs from the end of the first engine step, which computes all prompts and writes the first
token of every row, until the call returns. Every row writes the same number of tokens (EOS does not stop), at
temperature 1, without prefix caching, in float32, eagerly. Each round times every contestant once on the same prompts;
who goes first changes from round to round; ratios are taken within a round: the median over rounds, and the 5 % and
95 % quantiles. One round before them is not timed. Each setting has a process of its own.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from _common import about, cpu_seconds, write_lines

from tandemrl.config import RolloutConfig, VllmConfig
from tandemrl.models.loading import load_tokenizer
from tandemrl.rollout.engine import Completion, Request, Sampling
from tandemrl.rollout.vllm.planner import SchedulingMode
from tandemrl.selection import Strategy, solo, word
from tandemrl.selection.draws import request_key

MODES: tuple[SchedulingMode, ...] = ("lockstep", "lazy", "majority")
CONTESTANTS = ("bare", "stock", "solo", *MODES)
PAIRS = [
    ("stock", "bare"),
    ("solo", "stock"),
    ("lockstep", "stock"),
    ("lazy", "stock"),
    ("lazy", "bare"),
    ("lazy", "solo"),
    ("lazy", "lockstep"),
    ("majority", "stock"),
    ("majority", "lazy"),
]
PROB_SENIOR, MAX_GAP_TOKENS, BOUNDARY_SHARE = 0.5, 32, 0.7
BLOCK_SIZE = 128  # vLLM's default on a CPU
KV_CACHE_GB = 4  # an upper bound; the number of blocks decides


@dataclass(frozen=True, slots=True)
class Setting:
    """Write ``tokens`` after ``prompt`` tokens in each of ``rows`` rows. bars: the largest ratios that are accepted."""

    model: str
    rows: int
    prompt: int
    tokens: int
    bars: dict[str, float] = field(default_factory=dict)


def _both(bar: float) -> dict[str, float]:
    return {"lazy / solo": bar, "lazy / stock": bar}


SETTINGS = {
    "tiny-1": Setting("tiny", 1, 32, 256, _both(1.05)),
    "tiny-8": Setting("tiny", 8, 32, 256),
    "tiny-32": Setting("tiny", 32, 32, 256),
    "mid-1": Setting("mid", 1, 32, 96, _both(1.05)),
    "mid-8": Setting("mid", 8, 32, 64),
    "mid-32": Setting("mid", 32, 32, 48),
    "mid-8-1000": Setting("mid", 8, 1000, 48),
    "kv-1500": Setting("kv", 8, 1500, 64, _both(1.40)),
    "kv-4000": Setting("kv", 8, 4000, 64, _both(1.35)),
}
EVERYWHERE = {"lazy / lockstep": 1.03}


class Clock:
    """Wall and CPU seconds of this process since the end of an engine's first step; counts the steps."""

    def __init__(self, engine: Any) -> None:
        self.steps, self.wall, self.cpu = 0, 0.0, 0.0
        self._step = engine.step
        engine.step = self.step

    def step(self) -> Any:
        outputs = self._step()
        self.steps += 1
        if self.steps == 1:
            self.wall, self.cpu = time.perf_counter(), time.process_time()
        return outputs

    def read(self, steps: int | None) -> tuple[float, float]:
        """Since the first step. steps: how many there must be if that one computed all prompts; None: any number."""
        seconds = time.perf_counter() - self.wall, time.process_time() - self.cpu
        if steps not in (None, self.steps):
            raise RuntimeError(f"{self.steps} engine steps for {steps} tokens per row: prompts must share one step")
        self.steps = 0
        return seconds


Run = Callable[[list[list[int]], int], tuple[float, float]]
"""(prompts, round) -> wall and CPU seconds of decoding."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, help="default 9, with --quick 3")
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of every setting's process")
    parser.add_argument("--models", type=Path, default=Path("runs/benchmark_models"), help="built if needed")
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    options = parser.parse_args()
    names = options.settings.split(",")
    if unknown := set(names) - set(SETTINGS):
        parser.error(f"unknown settings {sorted(unknown)}; there are {', '.join(SETTINGS)}")
    rounds = options.rounds or (3 if options.quick else 9)
    os.environ |= {
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }

    lines = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for name in names:
            line = processes.submit(measure, name, options.models, rounds, options.quick).result()
            line["command"] = shlex.join(["python", *sys.argv])
            lines.append(line)
            print(json.dumps(line), flush=True)
            for pair, verdict in line["bars"].items():
                print(f"{name}: {pair} {verdict}", file=sys.stderr, flush=True)
            if options.out is not None:
                write_lines(options.out, lines)


def measure(name: str, folder: Path, rounds: int, quick: bool) -> dict[str, Any]:
    """The JSON line of one setting."""
    import vllm

    setting = SETTINGS[name]
    if quick:
        setting = replace(setting, tokens=setting.tokens // 4)
    senior, junior = models.build(setting.model, folder)
    size = models.SIZES[setting.model]["vocab_size"]
    boundary = boundary_table(size)
    tandem, written = prepare_tandem(senior, junior, setting, boundary)
    contestants = prepare_stock(senior, setting) | tandem

    wall: dict[str, list[float]] = {contestant: [] for contestant in CONTESTANTS}
    cpu: dict[str, list[float]] = {contestant: [] for contestant in CONTESTANTS}
    others: list[float] = []
    for number in range(-1, rounds):
        prompts = np.random.default_rng(number + 1).integers(2, size, (setting.rows, setting.prompt)).tolist()
        first = number % len(CONTESTANTS)
        for contestant in CONTESTANTS[first:] + CONTESTANTS[:first]:
            (mine, busy), start = cpu_seconds(), time.perf_counter()
            wall_time, cpu_time = contestants[contestant](prompts, number)
            seconds = time.perf_counter() - start
            mine, busy = (after - before for after, before in zip(cpu_seconds(), (mine, busy), strict=True))
            if number >= 0:
                wall[contestant].append(wall_time)
                cpu[contestant].append(cpu_time)
                others.append(max(0.0, busy - mine) / seconds)
    wall_ratios = ratios(wall)
    bars = setting.bars | EVERYWHERE
    return about() | {
        "vllm": vllm.__version__,
        "benchmark": "tandem_cost",
        "setting": name,
        **{key: value for key, value in asdict(setting).items() if key != "bars"},
        "rounds": rounds,
        "dtype": "float32",
        "strategy": f"word, p {PROB_SENIOR}, K {MAX_GAP_TOKENS}, {BOUNDARY_SHARE:.0%} of the ids are boundaries",
        "lazy_wrote": authorship(written["lazy"], boundary),
        "ms_per_token_of_each_row": {
            key: round(1e3 * statistics.median(s) / (setting.tokens - 1), 3) for key, s in wall.items()
        },
        "ratios": wall_ratios,
        "cpu_ratios": ratios(cpu),
        "bars": {
            pair: f"{wall_ratios[pair]['median']} <= {bar} {'ok' if wall_ratios[pair]['median'] <= bar else 'NOT OK'}"
            for pair, bar in bars.items()
        },
        "wall_s": {key: [round(x, 4) for x in s] for key, s in wall.items()},
        "cpu_s": {key: [round(x, 4) for x in s] for key, s in cpu.items()},
        "cores_others": round(statistics.median(others), 2),
        "load": [round(x, 2) for x in os.getloadavg()],
    }


def boundary_table(size: int) -> torch.Tensor:
    """Bool[v]: a random ``BOUNDARY_SHARE`` of the ids, always the same. The models have no words; the share matters."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    return order < round(BOUNDARY_SHARE * size)


def ratios(seconds: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """For each pair, the ratio in every round: median, and 5 % and 95 % quantiles."""
    result = {}
    for a, b in PAIRS:
        each = np.array(seconds[a]) / np.array(seconds[b])
        low, middle, high = np.quantile(each, [0.05, 0.5, 0.95]).round(3).tolist()
        result[f"{a} / {b}"] = {"median": middle, "interval_90": [low, high]}
    return result


def engine_arguments(setting: Setting) -> dict[str, Any]:
    """All prompts fit into one step, and all rows into the KV cache."""
    context = setting.prompt + setting.tokens
    return {
        "max_num_batched_tokens": max(setting.rows * setting.prompt, context),
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": setting.rows * (context // BLOCK_SIZE + 2) + 8,
        "use_tqdm_on_load": False,
    }


def prepare_stock(senior: Path, setting: Setting) -> dict[str, Run]:
    """Plain vLLM, with and without log-probs."""
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(senior),
            dtype="float32",
            max_num_seqs=setting.rows,
            max_model_len=setting.prompt + setting.tokens,
            kv_cache_memory_bytes=KV_CACHE_GB * 2**30,
            enable_prefix_caching=False,
            enforce_eager=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            disable_log_stats=True,
            **engine_arguments(setting),
        )
    )
    clock = Clock(engine)

    def contestant(logprobs: int | None) -> Run:
        params = SamplingParams(
            max_tokens=setting.tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        def run(prompts: list[list[int]], number: int) -> tuple[float, float]:
            for i, prompt in enumerate(prompts):
                engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
            while engine.has_unfinished_requests():
                engine.step()
            return clock.read(setting.tokens)

        return run

    return {"bare": contestant(None), "stock": contestant(0)}


def prepare_tandem(
    senior: Path, junior: Path, setting: Setting, boundary: torch.Tensor
) -> tuple[dict[str, Run], dict[str, list[Completion]]]:
    """Our engine's contestants, and what each of them wrote last."""
    from tandemrl.rollout.vllm.engine import VllmEngine

    engine = VllmEngine.start(
        senior,
        junior,
        load_tokenizer(senior),
        RolloutConfig(
            max_rows=setting.rows,
            vllm=VllmConfig(kv_cache_gb=KV_CACHE_GB, prefix_caching=False, enforce_eager=True),
        ),
        longest=setting.prompt + setting.tokens,
        engine_args=engine_arguments(setting),
    )
    clock = Clock(engine.backend.llm)
    sampling = Sampling(max_tokens=setting.tokens, ignore_eos=True)
    written: dict[str, list[Completion]] = {}

    def contestant(name: str, mode: SchedulingMode, strategy: Strategy) -> Run:
        def run(prompts: list[list[int]], number: int) -> tuple[float, float]:
            engine.set_mode(mode)
            keys = [request_key(0, number + 1, i, 0) for i in range(len(prompts))]
            requests = [Request(p, (key,), sampling, strategy) for p, key in zip(prompts, keys, strict=True)]
            groups = engine.generate(requests)
            seconds = clock.read(None if mode == "majority" else setting.tokens)  # where rows wait, steps are more
            written[name] = [completion for group in groups for completion in group]
            return seconds

        return run

    both = word(PROB_SENIOR, MAX_GAP_TOKENS, boundary)
    alone = contestant("solo", "lazy", solo("senior"))
    return {"solo": alone} | {mode: contestant(mode, mode, both) for mode in MODES}, written


def authorship(completions: list[Completion], boundary: torch.Tensor) -> dict[str, float]:
    """Shares of the tokens that are boundaries, that follow a token of the other author, that the senior wrote."""
    tokens = np.concatenate([completion.tokens for completion in completions])
    authors = np.stack([completion.author for completion in completions])
    return {
        "boundary_share": round(float(boundary.numpy()[tokens].mean()), 3),
        "switches_per_token": round(float((np.diff(authors) != 0).mean()), 3),
        "senior_share": round(float(authors.mean()), 3),
    }


if __name__ == "__main__":
    main()
