"""Rollouts, updates, weight syncs and whole steps of a real model: SmolLM2-135M-Instruct, beside the CPU's limits.

    OMP_NUM_THREADS=1 python benchmarks/pretrained_speed.py --trl-python TRL_VENV/bin/python

Prints one JSON line per part, on one thread, in float32 and in CPU seconds: they leave out the time that other
processes took, but not that these empty the caches. What is compared takes turns in one process (in `step`, process by
process); ratios are taken within a round. Each part is written when it is done; parts that `--out` has are left out.

- rollout ROWS: tokens per CPU second of a whole call, prompts included. Prompts are word problems under the model's
  chat template, each with 8 completions of exactly --max-tokens tokens (EOS does not stop). Contestants: `transformers`
  (`model.generate`), `vllm` (stock, with log-probs; left out where it is not installed), `solo`, `tandem` (`word`,
  p 0.5, K 32, a junior of the same weights), and `tandem auto N` and `solo auto N`: with drafts by the senior's first
  N layers.
- bfloat16: tokens per CPU second of `solo` in bfloat16 and in float32.
- sync: a weight sync, whose version and checksum are verified, and copying alone.
- step: GRPO steps in turn with TRL's GRPOTrainer (`step_time.py`, `peers/trl.py`), solo and tandem.

Limits, measured in the same process: the matrix products of one decoding step alone (`products`); and, per call, the
larger of FLOPs / (best square product) and bytes of the weights / (bandwidth of reading) (`roofline`), where a prompt
counts once per group.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import step_time
import torch
from _common import about, cpu_seconds, over_rounds, ratios, write_lines
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tandemrl.apps.experiments.pretrained import MODEL
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import Prompt, encode_prompts
from tandemrl.files import read_json_lines
from tandemrl.models.loading import load_model, load_tokenizer
from tandemrl.rollout.engine import Passes, Request, Sampling
from tandemrl.rollout.sync import sync_weights
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, solo, word
from tandemrl.selection.boundaries import word_boundary_table
from tandemrl.selection.draws import request_key
from tandemrl.training.host_memory import keep_freed_memory

GROUP = 8
"""Completions per prompt."""
PEAK_SIZES = (1024, 2048)
Contestant = Callable[[list[list[int]], int], Passes | None]
"""(the prompt of every row, round) -> the passes, where it counts them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="folder, or name on the hub")
    parser.add_argument("--parts", nargs="+", choices=["rollout", "bfloat16", "sync", "step"], help="default: all")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--max-tokens", type=int, default=44)
    parser.add_argument("--layers", type=int, default=10, help="of the cut junior")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--completions", type=int, default=64, help="of a step")
    parser.add_argument("--steps", type=int, default=6, help="turns, of which the first is not counted")
    parser.add_argument("--trl-python", metavar="PYTHON", help="interpreter that has TRL; without it no step")
    parser.add_argument("--without", nargs="*", default=[], help="contestants that stay away")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "pretrained_speed.jsonl")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as `tandemrl train` does; every contestant in this process profits from it
    found = {}
    if options.out.is_file():
        found = {line["part"]: line for _, line in read_json_lines(options.out)}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        **{f"rollout {rows}": partial(rollout, options.model, rows, options) for rows in options.rows},
        "bfloat16": partial(measure_bfloat16, options.model, options),
        "sync": partial(measure_sync, options.model, options),
        "step": partial(step, options.model, options),
    }
    for part, measure in parts.items():
        asked = options.parts is None or part.split()[0] in options.parts
        if part in found or not asked or (part == "step" and options.trl_python is None):
            continue
        mine, busy = cpu_seconds()
        start = time.perf_counter()
        line = {"benchmark": "pretrained_speed", "part": part, "model": Path(options.model).name}
        line |= about() | measure()
        wall, used = time.perf_counter() - start, cpu_seconds()
        line["cores_others"] = round(max(0.0, used[1] - busy - (used[0] - mine)) / wall, 2)
        line["command"] = shlex.join(["python", *sys.argv]).replace(str(options.trl_python), "TRL_VENV/bin/python")
        found[part] = line
        print(json.dumps(line), flush=True)
        write_lines(options.out, [found[each] for each in parts if each in found])


# ------------------------------------------------------------------------------------------------------------- rollouts


def rollout(folder: str, rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per CPU second of every contestant at so many rows, and the CPU's limits."""
    tokenizer = load_tokenizer(folder)
    known, prompts = prompts_of(tokenizer, rows)
    senior = load_model(folder)
    contestants = prepare(folder, senior, tokenizer, rows, options)
    cpu: dict[str, list[float]] = {name: [] for name in contestants}
    products: list[float] = []
    passes = dict.fromkeys(contestants, Passes())
    names = list(contestants)
    for number in range(-1, options.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:  # nobody always goes first
            start = time.process_time()
            counted = contestants[name](prompts[:1] if number < 0 else prompts, number)  # one row warms up
            if number >= 0:
                cpu[name].append(time.process_time() - start)
                passes[name] += counted or Passes()
        products.append(products_of_a_step(senior, rows))
    tokens = rows * options.max_tokens
    limits = machine()
    weights = sum(p.numel() for p in senior.parameters())
    once = sum(len(each.tokens) for each in known)
    decoding = max(2 * weights * rows / limits["peak_flops"], 4 * weights / limits["bytes_per_s"])
    roofline = 2 * weights * once / limits["peak_flops"] + options.max_tokens * decoding
    accepted = {name: each.acceptance for name, each in passes.items() if each.acceptance is not None}
    return {
        "rows": rows,
        "max_tokens": options.max_tokens,
        "prompt_tokens": once,
        "rounds": options.rounds,
        "cut_layers": options.layers,
        "tokens_per_cpu_s": {name: round(tokens / statistics.median(each), 2) for name, each in cpu.items()},
        "limits": {
            "roofline": round(tokens / roofline, 2),
            "products, decoding alone": round(rows / min(products), 2),
            **{name: round(value / 1e9, 2) for name, value in limits.items()},
        },
        "cpu_ratios": ratios(
            cpu, [(a, b) for a in names for b in ("transformers", "vllm", "solo") if b in cpu and a != b]
        ),
        "acceptance": {name: round(value, 3) for name, value in accepted.items()},
        "cpu_s": {name: [round(x, 3) for x in each] for name, each in cpu.items()},
    }


def prompts_of(tokenizer: PreTrainedTokenizerBase, rows: int) -> tuple[list[Prompt], list[list[int]]]:
    """The prompts of word problems, and that of every row."""
    problems = load_rows([f"synthetic:word_problems:heldout:{-(-rows // GROUP)}"])
    known, _ = encode_prompts(problems, tokenizer, max_prompt_tokens=1000)
    return known, [list(known[row // GROUP].tokens) for row in range(rows)]


def measure_bfloat16(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per CPU second in both dtypes, in turn, the senior alone."""
    tokenizer = load_tokenizer(folder)
    models = {name: load_model(folder, dtype=name) for name in ("float32", "bfloat16")}
    found = {}
    for rows in options.rows:
        prompts = prompts_of(tokenizer, rows)[1]
        engines = {name: TorchEngine(model, None, tokenizer, max_rows=rows) for name, model in models.items()}
        runs = {name: ours(solo("senior"), engine, options.max_tokens) for name, engine in engines.items()}
        cpu: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(-1, options.rounds):
            for name in [*runs][:: 1 if number % 2 else -1]:
                start = time.process_time()
                runs[name](prompts[:1] if number < 0 else prompts, number)
                if number >= 0:
                    cpu[name].append(time.process_time() - start)
        found[str(rows)] = {
            "tokens_per_cpu_s": {n: round(rows * options.max_tokens / statistics.median(c), 2) for n, c in cpu.items()},
            "cpu_ratios": ratios(cpu, [("bfloat16", "float32")]),
        }
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    known = [flag for flag in ("avx512_bf16", "amx_bf16") if flag in flags]
    return {"rounds": options.rounds, "max_tokens": options.max_tokens, "instructions": known, "rows": found}


def prepare(
    folder: str, senior: PreTrainedModel, tokenizer: Any, rows: int, options: argparse.Namespace
) -> dict[str, Contestant]:
    """The contestants that take part; the others load no model."""
    both = word(0.5, 32, word_boundary_table(tokenizer, senior.get_output_embeddings().weight.shape[0]))
    drafts = f"auto {options.layers}"

    def transformers() -> Contestant:
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        length = {"max_new_tokens": options.max_tokens, "min_new_tokens": options.max_tokens}

        def run(prompts: list[list[int]], number: int) -> None:
            torch.manual_seed(number + 1)
            batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
            out = theirs.generate(**batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **length)
            assert out.shape == (len(prompts), batch["input_ids"].shape[1] + options.max_tokens)

        return run

    @cache
    def plain() -> TorchEngine:
        return TorchEngine(senior, load_model(folder), tokenizer, max_rows=rows)

    @cache
    def drafting() -> TorchEngine:
        cut = load_model(folder)
        cut.model.layers = cut.model.layers[: options.layers]
        cut.config.num_hidden_layers = options.layers
        return TorchEngine(senior, cut, tokenizer, max_rows=rows, draft_tokens="auto")

    makers: dict[str, Callable[[], Contestant | None]] = {
        "transformers": transformers,
        "vllm": partial(stock, folder, rows, options),
        "solo": lambda: ours(solo("senior"), plain(), options.max_tokens),
        "tandem": lambda: ours(both, plain(), options.max_tokens),
        f"tandem {drafts}": lambda: ours(both, drafting(), options.max_tokens),
        f"solo {drafts}": lambda: ours(solo("senior"), drafting(), options.max_tokens),
    }
    made = {name: make() for name, make in makers.items() if name not in options.without}
    return {name: each for name, each in made.items() if each is not None}


def ours(strategy: Strategy, engine: TorchEngine, max_tokens: int) -> Contestant:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)

    def run(prompts: list[list[int]], number: int) -> Passes:
        groups = [prompts[i : i + GROUP] for i in range(0, len(prompts), GROUP)]
        keys = [tuple(request_key(0, number + 1, i, j) for j in range(len(g))) for i, g in enumerate(groups)]
        written = engine.generate([Request(g[0], key, sampling, strategy) for g, key in zip(groups, keys, strict=True)])
        assert all(len(completion.tokens) == max_tokens for group in written for completion in group)
        return engine.passes

    return run


def stock(folder: str, rows: int, options: argparse.Namespace) -> Contestant | None:
    """Plain vLLM with one model; None where it is not installed."""
    try:
        from vllm import EngineArgs, LLMEngine, SamplingParams
    except ImportError:
        return None
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=folder,
            dtype="float32",
            max_num_seqs=rows,
            max_model_len=1024,
            enforce_eager=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
        )
    )
    torch.set_num_threads(1)
    length = {"max_tokens": options.max_tokens, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(**length, logprobs=0, flat_logprobs=True)

    def run(prompts: list[list[int]], number: int) -> None:
        engine.reset_prefix_cache()  # every round begins with new prompts, as a step of training does
        for i, prompt in enumerate(prompts):
            engine.add_request(f"{number}/{i}", {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            engine.step()

    return run


@torch.inference_mode()
def products_of_a_step(model: PreTrainedModel, rows: int) -> float:
    """CPU seconds of the matrix products of one decoding step and nothing else: every linear layer, in order."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {module.in_features: torch.randn(rows, module.in_features) for module in linear}
    start = time.process_time()
    for module in linear:
        nn.functional.linear(inputs[module.in_features], module.weight)
    return time.process_time() - start


def machine() -> dict[str, float]:
    """FLOP/s of the best square product and bytes per second of a sum, per CPU second of one thread."""

    def best(run: Callable[[], Any], seconds: float = 0.8) -> float:
        run()
        fastest, end = float("inf"), time.process_time() + seconds
        while time.process_time() < end:
            start = time.process_time()
            run()
            fastest = min(fastest, time.process_time() - start)
        return fastest

    peaks = []
    for n in PEAK_SIZES:
        a, b, out = (torch.randn(n, n) for _ in range(3))
        peaks.append(2 * n**3 / best(partial(torch.mm, a, b, out=out)))
    much = torch.ones(2**26)
    return {"peak_flops": max(peaks), "bytes_per_s": 4 * len(much) / best(much.sum)}


# ----------------------------------------------------------------------------------------------------------------- sync


def measure_sync(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds of a verified sync, and of copying the weights alone."""
    policy, senior = load_model(folder), load_model(folder)
    engine = TorchEngine(senior, None, load_tokenizer(folder))
    cpu: dict[str, list[float]] = {"sync": [], "copy": []}
    for number in range(options.rounds + 1):
        with torch.no_grad():
            next(policy.parameters()).add_(1e-4)  # what is verified is new
        start = time.process_time()
        checksum = sync_weights(policy, engine, version=number + 1)
        middle = time.process_time()
        engine.load_weights(policy.named_parameters(), number + 1)
        end = time.process_time()
        assert engine.policy_version == number + 1
        assert engine.fingerprint() == checksum
        if number:
            cpu["sync"].append(middle - start)
            cpu["copy"].append(end - middle)
    return {"rounds": options.rounds, "cpu_s": {name: over_rounds(each) for name, each in cpu.items()}}


# ---------------------------------------------------------------------------------------------------------- whole steps


def step(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    """`step_time.py` with this model: one process each, in turn step by step."""
    flags = [
        *(f"--model={folder}", f"--trl-python={options.trl_python}", f"--completions={options.completions}"),
        *(f"--micro-batch={min(16, options.completions)}", f"--max-tokens={options.max_tokens}"),
        *(f"--steps={options.steps}", "--warmup=1", "--rounds=1", "--threads=1", "--lr=1e-5"),
    ]
    with tempfile.TemporaryDirectory() as output:
        asked = step_time.parser().parse_args([*flags, f"--out={output}/step_time.json"])
        summary = step_time.compare(Path(folder), asked)
        lines = json.loads(asked.out.read_text())["lines"]
    cpu = {line["who"]: line["cpu_s_per_step_all"][1:] for line in lines}
    return {
        "completions": options.completions,
        "micro_batch": asked.micro_batch,
        "max_tokens": options.max_tokens,
        "rounds": len(cpu["trl"]),
        "cpu_s_per_step": {who: over_rounds(each) for who, each in cpu.items()},
        "cpu_ratios": ratios(cpu, [("solo", "trl"), ("tandem", "trl"), ("tandem", "solo")]),
        "update_tokens_per_s": {who: each["median"] for who, each in summary["update_tokens_per_s"].items()},
        "sync_share": {line["who"]: sync_share(line) for line in lines if line["who"] != "trl"},
        "peer": next(f"{line['library']} {line['version']}" for line in lines if line["who"] == "trl"),
    }


def sync_share(line: Mapping[str, Any]) -> float:
    """The weight sync's share of the step's wall seconds."""
    return round(line["split_s"]["sync"] / line["s_per_step"], 4)


if __name__ == "__main__":
    main()
