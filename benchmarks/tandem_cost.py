"""Decoding with two models beside decoding with one, on vLLM; all contestants take turns in one process.

    python benchmarks/tandem_cost.py --out benchmarks/results/tandem_cost.jsonl
    python benchmarks/tandem_cost.py --settings tiny-1,kv-1500 --rounds 3
    python benchmarks/tandem_cost.py --settings 1:12-high-1,1:12-high-8 --rounds 3 --out again.jsonl

Prints one JSON line per setting and a verdict per bar on stderr. A setting is a pair (random weights of `models.py`, or
a senior and a smaller junior that agree, of `distilled.py`), rows and prompt tokens. Contestants:

- bare: plain `vllm.LLMEngine` with the senior and the same arguments, no tandem worker, no log-probs;
- stock: the same engine, returning the log-prob of every token, as every contestant below does;
- solo: our engine, the senior alone;
- lockstep, lazy, auto: our engine's modes, strategy `word` (p 0.5, K 32), a random table of boundary tokens;
- draft K: mode `draft` with K tokens.

Decoding only: the clock runs from the end of the first engine step, which reads what is not cached of all prompts and
writes the first token of every row, until the call returns. Every row writes the same number of tokens (EOS does not
stop), at temperature 1, in float32, eagerly. Rows share prompts in groups of eight, and all rounds have the same
prompts: an untimed round has them in the prefix cache. The random numbers differ from round to round. Each round times
every contestant once; who goes first changes from round to round; ratios are taken within a round: the median over
rounds, and the 5 % and 95 % quantiles. Bars hold for the ratios of CPU seconds: on one thread they leave out the time
that other processes took. Each setting has a process of its own, and its line is written when it is done; settings that
`--out` has already are left out, unless rounds, tokens or contestants were others.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import distilled
import models
import numpy as np
import torch
from _common import about, cpu_seconds, write_lines

from tandemrl.config import RolloutConfig, VllmConfig
from tandemrl.files import read_json_lines
from tandemrl.models.loading import load_tokenizer
from tandemrl.rollout.engine import Completion, Passes, Request, Sampling
from tandemrl.selection import solo, word
from tandemrl.selection.draws import request_key

PROB_SENIOR, MAX_GAP_TOKENS, BOUNDARY_SHARE = 0.5, 32, 0.7
BLOCK_SIZE = 128  # vLLM's default on a CPU
KV_CACHE_GB = 2  # an upper bound; the number of blocks decides
GROUP = 8
"""Rows that share a prompt, as the rollouts of a group do."""
CLEARLY, NEAR = 1.15, 1.15
"""By which ratio one of lazy and drafts is faster where auto has to take it; how near auto has to be everywhere."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Write ``tokens`` after ``prompt`` tokens in each of ``rows`` rows, in so many ``rounds``.

    model: one of ``models.SIZES``, or RATIO-LEVEL of ``distilled``. bars: the largest ratios of CPU seconds that are
    accepted. drafts: lengths of drafts that take part. acceptance: the smallest that is accepted.
    """

    model: str
    rows: int
    prompt: int
    tokens: int
    bars: Mapping[str, float] = field(default_factory=dict)
    rounds: int = 7
    drafts: tuple[int, ...] = ()
    acceptance: float | None = None

    @property
    def contestants(self) -> tuple[str, ...]:
        if not self.drafts:
            return ("bare", "stock", "solo", "lockstep", "lazy")
        return ("stock", "solo", "lockstep", "lazy", *(f"draft {length}" for length in self.drafts), "auto")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """What is related to what."""
        if not self.drafts:
            stock = [("stock", "bare"), ("lazy", "bare"), *((who, "stock") for who in self.contestants[2:])]
            return [*stock, ("lazy", "solo"), ("lazy", "lockstep")]
        drafting = self.contestants[4:]
        return [*((who, "stock") for who in self.contestants[1:]), *((who, "lazy") for who in drafting)]


def _both(bar: float) -> dict[str, float]:
    return {"lazy / solo": bar, "lazy / stock": bar, **EVERYWHERE}


EVERYWHERE = {"lazy / lockstep": 1.03}
OF_DRAFTS = {1: {"draft 8 / stock": 0.55}, 8: {"draft 8 / stock": 0.85}, 32: {}}
"""By rows, for a junior of a tenth of the senior that nearly always agrees."""
SHAPES = {
    (1, 32): (96, 7, (4, 8, 12)),
    (8, 32): (64, 7, (4, 8, 12)),
    (32, 32): (48, 5, (4, 8)),
    (1, 1500): (96, 5, (4, 8, 12)),
    (8, 1500): (48, 5, (4, 8)),
    (32, 1500): (32, 3, (4, 8)),
    (1, 4000): (64, 5, (4, 8, 12)),
    (8, 4000): (40, 3, (4, 8)),
    (32, 4000): (24, 3, (4, 8)),
}
"""By rows and prompt tokens: tokens, rounds, drafts."""


def _drafted(model: str, rows: int, prompt: int) -> Setting:
    tokens, rounds, drafts = SHAPES[rows, prompt]
    high = model.endswith("high")
    bars = OF_DRAFTS[rows] if model == "12-high" else {}
    return Setting(model, rows, prompt, tokens, bars, rounds, drafts, acceptance=0.9 if high else None)


SETTINGS = {
    "tiny-1": Setting("tiny", 1, 32, 256, _both(1.05)),
    "tiny-8": Setting("tiny", 8, 32, 256, EVERYWHERE),
    "tiny-32": Setting("tiny", 32, 32, 256, EVERYWHERE),
    "mid-1": Setting("mid", 1, 32, 96, _both(1.05)),
    "mid-8": Setting("mid", 8, 32, 64, EVERYWHERE),
    "mid-32": Setting("mid", 32, 32, 48, EVERYWHERE),
    "mid-8-1000": Setting("mid", 8, 1000, 48, EVERYWHERE),
    "kv-1500": Setting("kv", 8, 1500, 64, _both(1.40)),
    "kv-4000": Setting("kv", 8, 4000, 64, _both(1.35)),
    **{f"12-high-{rows}-{prompt}": _drafted("12-high", rows, prompt) for rows, prompt in SHAPES},
    **{
        f"{model}-{rows}-32": _drafted(model, rows, 32)
        for model in ("12-middle", "12-low", "7-high", "7-middle", "7-low")
        for rows in (1, 8)
    },
}


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


class Result(NamedTuple):
    """Of one call: wall and CPU seconds of decoding; what was written, by how many passes (not of stock vLLM)."""

    wall: float
    cpu: float
    written: Sequence[Completion] = ()
    passes: Passes = Passes()


Run = Callable[[list[list[int]], int], Result]
"""(prompts, round) -> what it cost."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default=",".join(SETTINGS), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, help="default: the setting's own, with --quick 3")
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens, or a half of those of drafts")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of every setting's process")
    parser.add_argument("--models", type=Path, default=Path("runs/benchmark_models"), help="built if needed")
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    options = parser.parse_args()
    names = options.settings.split(",")
    if unknown := set(names) - set(SETTINGS):
        parser.error(f"unknown settings {sorted(unknown)}; there are {', '.join(SETTINGS)}")
    os.environ |= {
        "OMP_NUM_THREADS": str(options.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",
    }

    known = {}
    if options.out is not None and options.out.is_file():
        known = {line["setting"]: line for _, line in read_json_lines(options.out)}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for name in names:
            setting = asked(SETTINGS[name], options)
            if name in known and all(known[name].get(key) == value for key, value in identity(setting).items()):
                print(f"{name}: {options.out} has it", file=sys.stderr, flush=True)
                continue
            line = processes.submit(measure, name, setting, options.models).result()
            line["command"] = shlex.join(["python", *sys.argv])
            known[name] = line
            print(json.dumps(line), flush=True)
            for what, verdict in line["bars"].items():
                print(f"{name}: {what} {verdict}", file=sys.stderr, flush=True)
            if options.out is not None:
                write_lines(options.out, [known[each] for each in SETTINGS if each in known])


def asked(setting: Setting, options: argparse.Namespace) -> Setting:
    """A setting as the options change it."""
    if options.quick:
        setting = replace(setting, tokens=setting.tokens // (2 if setting.drafts else 4), rounds=3)
    return replace(setting, rounds=options.rounds) if options.rounds else setting


def identity(setting: Setting) -> dict[str, Any]:
    """What a line says of its setting."""
    kept = {key: value for key, value in asdict(setting).items() if key not in ("bars", "drafts", "acceptance")}
    return {**kept, "contestants": list(setting.contestants)}


def measure(name: str, setting: Setting, folder: Path) -> dict[str, Any]:
    """The JSON line of one setting."""
    import vllm

    began = time.perf_counter()
    senior, junior, prompts = pair_of(setting, folder)
    boundary = boundary_table(models_vocabulary(senior))
    names = identity(setting)["contestants"]
    contestants = prepare_tandem(senior, junior, setting, boundary, names) | prepare_stock(senior, setting)

    results: dict[str, list[Result]] = {contestant: [] for contestant in names}
    others: list[float] = []
    for number in range(-1, setting.rounds):
        first = number % len(names)
        for contestant in names[first:] + names[:first]:
            if number < 0:
                contestants[contestant](prompts[::GROUP], number)  # from now on the prompts are in the prefix cache
            (mine, busy), start = cpu_seconds(), time.perf_counter()
            result = contestants[contestant](prompts, number)
            seconds = time.perf_counter() - start
            mine, busy = (after - before for after, before in zip(cpu_seconds(), (mine, busy), strict=True))
            if number >= 0:
                results[contestant].append(result)
                others.append(max(0.0, busy - mine) / seconds)
    wall = {who: [result.wall for result in each] for who, each in results.items()}
    cpu = {who: [result.cpu for result in each] for who, each in results.items()}
    passes = {who: sum((result.passes for result in each), Passes()) for who, each in results.items()}
    pairs = [(a, b) for a, b in setting.pairs if a in names and b in names]
    of_pair = {}
    if setting.drafts:
        faster = min((who for who in names if who == "lazy" or who.startswith("draft")), key=partial(middle, cpu))
        of_pair = {"pair": distilled.describe(folder, *distilled_name(setting.model)), "faster": faster}
        pairs += [("auto", faster)] if "auto" in names and ("auto", faster) not in pairs else []
    cpu_ratios = ratios(cpu, pairs)
    accepted = {who: round(each.acceptance, 3) for who, each in passes.items() if each.acceptance is not None}
    return about() | {
        "vllm": vllm.__version__,
        "benchmark": "tandem_cost",
        "setting": name,
        **identity(setting),
        **of_pair,
        "dtype": "float32",
        "strategy": f"word, p {PROB_SENIOR}, K {MAX_GAP_TOKENS}, {BOUNDARY_SHARE:.0%} of the ids are boundaries",
        "lazy_wrote": authorship(results["lazy"][-1].written, boundary),
        "acceptance": accepted,
        "tokens_per_senior_pass": {
            who: round(each.tokens / each.senior, 2) for who, each in passes.items() if each.senior
        },
        "ms_per_token_of_each_row": {who: round(1e3 * middle(wall, who) / (setting.tokens - 1), 3) for who in names},
        "cpu_ms_per_token_of_each_row": {who: round(1e3 * middle(cpu, who) / (setting.tokens - 1), 3) for who in names},
        "ratios": ratios(wall, pairs),
        "cpu_ratios": cpu_ratios,
        "bars": verdicts(setting, cpu, passes, cpu_ratios),
        "wall_s": {who: [round(x, 4) for x in s] for who, s in wall.items()},
        "cpu_s": {who: [round(x, 4) for x in s] for who, s in cpu.items()},
        "cores_others": round(statistics.median(others), 2),
        "load": [round(x, 2) for x in os.getloadavg()],
        "seconds": round(time.perf_counter() - began),
    }


def verdicts(
    setting: Setting,
    cpu: Mapping[str, list[float]],
    passes: Mapping[str, Passes],
    found: Mapping[str, Mapping[str, Any]],
) -> dict[str, str]:
    """What the issue of a setting's bars is. found: the ratios of CPU seconds."""

    def verdict(value: float, bar: float, *, most: bool = True) -> str:
        ok = value <= bar if most else value >= bar
        return f"{value:.3f} {'<=' if most else '>='} {bar} {'ok' if ok else 'NOT OK'}"

    said = {pair: verdict(found[pair]["median"], bar) for pair, bar in setting.bars.items() if pair in found}
    if not setting.drafts:
        return said
    drafts = [f"draft {length}" for length in setting.drafts]
    if setting.acceptance is not None:
        said["acceptance"] = verdict(passes[drafts[-1]].acceptance or 0.0, setting.acceptance, most=False)
    if "auto" in cpu:
        draft = min(drafts, key=partial(middle, cpu))
        slower, faster = sorted(("lazy", draft), key=partial(middle, cpu), reverse=True)
        said[f"auto / {faster}, the faster"] = verdict(found[f"auto / {faster}"]["median"], NEAR)
        if middle(cpu, slower) > CLEARLY * middle(cpu, faster):
            drafted = passes["auto"].drafted > 0.5 * passes[draft].drafted
            said["auto takes the faster"] = f"{faster} {'ok' if drafted == (faster == draft) else 'NOT OK'}"
    return said


def middle(seconds: Mapping[str, list[float]], who: str) -> float:
    return statistics.median(seconds[who])


def distilled_name(model: str) -> tuple[int, str]:
    """``12-high`` -> 12, ``high``."""
    ratio, level = model.split("-")
    return int(ratio), level


def pair_of(setting: Setting, folder: Path) -> tuple[Path, Path, list[list[int]]]:
    """Senior, junior, and a prompt for each row: what the senior might have written, or random ids."""
    groups = -(-setting.rows // GROUP)
    if setting.drafts:
        pair = distilled.build(folder, *distilled_name(setting.model))
        senior, junior, prompts = pair.senior, pair.junior, distilled.prompts(pair, groups, setting.prompt)
    else:
        senior, junior = models.build(setting.model, folder)
        size = models.SIZES[setting.model]["vocab_size"]
        prompts = np.random.default_rng(0).integers(2, size, (groups, setting.prompt)).tolist()
    return senior, junior, [prompts[row // GROUP] for row in range(setting.rows)]


def models_vocabulary(senior: Path) -> int:
    return int(json.loads((senior / "config.json").read_text())["vocab_size"])


def boundary_table(size: int) -> torch.Tensor:
    """Bool[v]: a random ``BOUNDARY_SHARE`` of the ids, always the same. The models have no words; the share matters."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    return order < round(BOUNDARY_SHARE * size)


def ratios(seconds: Mapping[str, list[float]], pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """For each pair, the ratio in every round: median, and 5 % and 95 % quantiles."""
    result = {}
    for a, b in pairs:
        each = np.array(seconds[a]) / np.array(seconds[b])
        low, median, high = np.quantile(each, [0.05, 0.5, 0.95]).round(3).tolist()
        result[f"{a} / {b}"] = {"median": median, "interval_90": [low, high]}
    return result


def engine_arguments(setting: Setting) -> dict[str, Any]:
    """All that is not cached of the prompts fits into one step, and all rows and prompts into the KV cache, twice."""
    context, groups = setting.prompt + setting.tokens, -(-setting.rows // GROUP)
    written = setting.rows * (setting.tokens // BLOCK_SIZE + 3)
    return {
        "max_num_batched_tokens": max(groups * setting.prompt, setting.rows * (BLOCK_SIZE + 16), context),
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 2 * (groups * (setting.prompt // BLOCK_SIZE + 1) + written) + 8,
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

        def run(prompts: list[list[int]], number: int) -> Result:
            for i, prompt in enumerate(prompts):
                engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
            while engine.has_unfinished_requests():
                engine.step()
            return Result(*clock.read(setting.tokens))

        return run

    return {"bare": contestant(None), "stock": contestant(0)}


def prepare_tandem(
    senior: Path, junior: Path, setting: Setting, boundary: torch.Tensor, names: Sequence[str]
) -> dict[str, Run]:
    """Our engine's contestants: an engine of its own for each length of drafts and for auto, one for the others."""
    from tandemrl.rollout.vllm.engine import VllmEngine

    sampling = Sampling(max_tokens=setting.tokens, ignore_eos=True)
    both, alone = word(PROB_SENIOR, MAX_GAP_TOKENS, boundary), solo("senior")

    def engine(draft_tokens: int | str) -> VllmEngine:
        config = RolloutConfig(
            engine="vllm",
            max_rows=setting.rows,
            draft_tokens=draft_tokens,  # type: ignore[arg-type]  # a number or auto
            vllm=VllmConfig(kv_cache_gb=KV_CACHE_GB, enforce_eager=True),
        )
        longest, arguments = setting.prompt + setting.tokens, engine_arguments(setting)
        return VllmEngine(senior, junior, load_tokenizer(senior), config, longest=longest, engine_args=arguments)

    def run(engine: VllmEngine, clock: Clock, name: str, mode: str, prompts: list[list[int]], number: int) -> Result:
        engine.call_workers("tandem_mode", mode)
        keys = [request_key(0, number + 1, i, 0) for i in range(len(prompts))]
        strategy = alone if name == "solo" else both
        groups = engine.generate([Request(p, (key,), sampling, strategy) for p, key in zip(prompts, keys, strict=True)])
        single = name in ("solo", "lockstep", "lazy")  # in the others, steps are more or less than tokens
        return Result(*clock.read(setting.tokens if single else None), [c for g in groups for c in g], engine.passes)

    plain = engine(0)
    plain_clock = Clock(plain.llm)
    contestants: dict[str, Run] = {}
    for name in names:
        if name.startswith("draft") or name == "auto":
            _, _, length = name.partition(" ")
            own = engine(int(length) if length else "auto")
            contestants[name] = partial(run, own, Clock(own.llm), name, "draft")
        elif name not in ("bare", "stock"):
            contestants[name] = partial(run, plain, plain_clock, name, "lazy" if name == "solo" else name)
    return contestants


def authorship(completions: Sequence[Completion], boundary: torch.Tensor) -> dict[str, float]:
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
