"""vLLM on a GPU: its tokens against the torch engine's, its speed against stock vLLM's, and training runs with it.

    python benchmarks/vllm_cuda.py                       # every part, each in a process of its own
    python benchmarks/vllm_cuda.py --parts exact speed
    python benchmarks/vllm_cuda.py --smoke               # every part with tiny models on a CPU: that it works

| part | what |
|---|---|
| exact | float32: lazy, lockstep and draft write what the torch engine writes, also with CUDA graphs and after a sync |
| speed | bfloat16: seconds of stock vLLM, of this library solo, and in tandem, lazy and with drafts |
| train | 20 training steps in bfloat16, lazy, with every gate, the weights handed over in the process |
| sleep | the same while the engine gives its memory back between rollouts |

Each prints JSON lines as it goes. The models are random, with Qwen3-0.6B's shapes, in `exact` four layers of them. In
`speed`, rows of 256 tokens follow prompts of 128; the junior has the senior's weights, so that drafts are accepted, and
the author is redrawn after words of 1.4 tokens. Its arms start together and are measured one by one. In `exact`, a
completion that differs from the torch engine's counts as a tie if the two tokens arrive together in the race that
decides (float64, transformers' own model), else as different.
"""

import argparse
import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import models
import numpy as np
import torch
from _common import about, wait_for_turn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

PARTS = {"exact": 240, "speed": 300, "train": 200, "sleep": 200}
"""Each with the seconds that it may take."""
SECONDS = 120  # to start an arm, and then to measure it
TIE = 1e-3
PROMPT = 128
QUIET = {"kernel_config": {"enable_jit_warmup": False}}
"""Further arguments of every engine: what vLLM would compile before the first request is compiled when first used."""


class Arm(NamedTuple):
    """An engine, of ``speed``. modes: of our scheduler; stock vLLM has none."""

    engine: str
    modes: Sequence[str] = ("",)
    eager: bool = False
    options: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}


ARMS = {
    "stock": Arm("stock"),
    "solo": Arm("solo", ["lazy"]),
    "tandem": Arm("tandem", ["lazy", "lockstep", "draft"]),
    "stock, eager": Arm("stock", eager=True),
    "tandem, eager": Arm("tandem", ["lazy", "draft"], eager=True),
    # What ours is built on: the older model runner, and the host waits for each token.
    "stock, V1 runner": Arm("stock", [""], False, {"async_scheduling": False}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
}


def main() -> None:
    options = parser().parse_args()
    logging.disable_progress_bar()
    if options.smoke:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if options.arm:
        return arm(options)
    if len(options.parts) > 1:
        for part in options.parts:
            command = [sys.executable, __file__, f"--parts={part}", *["--smoke"][: options.smoke]]
            try:
                subprocess.run(command, timeout=PARTS[part] * (5 if options.smoke else 1), check=True)
            except subprocess.SubprocessError as error:
                say({"part": part, "error": str(error)})
        return None
    {"exact": exact, "speed": speed, "train": train, "sleep": partial(train, sleep=True)}[options.parts[0]](options)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    p.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), help="of the speed part")
    p.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    p.add_argument("--arm", choices=list(ARMS), help="one arm of the speed part, in this process")
    p.add_argument("--models", type=Path, help="where the arm's models are")
    return p


def say(line: Mapping[str, Any]) -> None:
    import vllm

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    command = shlex.join(["python", "benchmarks/vllm_cuda.py", *sys.argv[1:]])
    facts = {"vllm": vllm.__version__, "device": device, "command": command}
    print(json.dumps({"benchmark": "vllm_cuda", **line} | about() | facts), flush=True)


def device(options: argparse.Namespace) -> str:
    return "cpu" if options.smoke else "cuda"


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    models.tokenizer().save_pretrained(folder)
    return folder


def ours(senior: Path, junior: Path | None, dtype: str, kv_cache_gb: float, rows: int, eager: bool, ahead: int) -> Any:
    """This library's engine."""
    from tandemrl.config import RolloutConfig, VllmConfig
    from tandemrl.rollout.vllm.engine import VllmEngine

    v = VllmConfig(kv_cache_gb=kv_cache_gb, gpu_memory_utilization=0.1, enforce_eager=eager)
    config = RolloutConfig(engine="vllm", max_rows=rows, draft_tokens=ahead, vllm=v)
    tokenizer = models.tokenizer()
    return VllmEngine(senior, junior, tokenizer, config, dtype=dtype, longest=1024, engine_args=QUIET)


def words(vocabulary: int) -> torch.Tensor:
    """A table of the ids that begin a word: 70 % of them, drawn once. The tokenizer of these models knows 258 ids."""
    return torch.from_numpy(np.random.default_rng(0).random(vocabulary) < 0.7)


def prompts(count: int, vocabulary: int, seed: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(vocabulary, size=lengths[i % len(lengths)]).tolist() for i in range(count)]


# ------------------------------------------------------------------------------------------------------------ exactness


def exact(options: argparse.Namespace) -> None:
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # its products of float32 would be those of TF32
    from tandemrl.models.loading import prepare
    from tandemrl.rollout.engine import Request, Sampling
    from tandemrl.rollout.sync import sync_weights
    from tandemrl.rollout.torch_engine import TorchEngine
    from tandemrl.selection import bernoulli, chunk, solo, word
    from tandemrl.selection.draws import request_key

    rows, tokens = (8, 16) if options.smoke else (64, 64)
    with tempfile.TemporaryDirectory() as home:
        folders = {name: Path(home, name) for name in ("senior", "junior", "next")}
        for seed, name in enumerate(folders):
            saved(peaked(options, seed, near=name == "junior"), folders[name])

        def torch_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
            return AutoModelForCausalLM.from_pretrained(folders[name], dtype=dtype).to(device(options)).eval()

        vocabulary = torch_model("senior").config.vocab_size
        kinds = [word(0.5, 4, words(vocabulary)), bernoulli(0.5), chunk(5, "senior"), solo("senior"), solo("junior")]
        settings = [Sampling(tokens, ignore_eos=True), Sampling(tokens, temperature=0.7, top_k=20, ignore_eos=True)]
        given = prompts(rows, vocabulary, 1, (1, 7, 257, 33, 64, 129, 16))
        asked = [
            Request(prompt, (request_key(0, 0, i, 0),), settings[i % 2], kinds[i % 5]) for i, prompt in enumerate(given)
        ]
        wanted = {}
        for senior in ("senior", "next"):
            engine = TorchEngine(prepare(torch_model(senior)), prepare(torch_model("junior")), models.tokenizer())
            wanted[senior] = flat(engine.generate(asked))
            del engine
        exactly = cache(partial(torch_model, dtype=torch.float64))
        for graphs in (False,) if options.smoke else (True, False):
            start = time.perf_counter()
            pair, kv_cache_gb = (folders["senior"], folders["junior"]), 0.5 if options.smoke else 4
            engine = ours(*pair, "float32", kv_cache_gb, rows, not graphs, 4)
            start_s = round(time.perf_counter() - start, 1)
            for senior in ("senior", "next"):
                if senior == "next":
                    sync_weights(torch_model(senior), engine, 1)
                for mode in ("lazy", "lockstep", "draft"):
                    engine.call_workers("tandem_mode", mode)
                    start = time.perf_counter()
                    found = flat(engine.generate(asked))
                    line = {"part": "exact", "graphs": graphs, "synced": senior == "next", "mode": mode}
                    counts = compared(
                        found, wanted[senior], asked, lambda who, name=senior: exactly(name if who else "junior")
                    )
                    seconds = {"s": round(time.perf_counter() - start, 1), "start_s": start_s}
                    say(line | counts | {"passes": engine.passes._asdict()} | seconds)


def peaked(options: argparse.Namespace, seed: int, *, near: bool) -> PreTrainedModel:
    """A model whose distributions are not uniform. near: the first one with some noise, which often draws the same."""
    shape: dict[str, Any] = dict(models.SIZES["tiny"])
    if not options.smoke:
        shape = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, **models.QWEN3["qwen3-0.6b"]}
        shape["num_hidden_layers"] = 4
    with torch.device(device(options)):
        model = models.qwen3(0 if near else seed, tie_word_embeddings=True, initializer_range=0.06, **shape)
    generator = torch.Generator(device(options)).manual_seed(seed)
    for parameter in model.parameters() if near else ():
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        parameter.data += 0.1 * parameter.data.std(correction=0) * noise
    return model


def flat(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [completion for group in groups for completion in group]


def compared(found: list[Any], wanted: list[Any], asked: list[Any], model: Callable[[int], Any]) -> dict[str, Any]:
    """How many completions are equal in tokens and authors, tied, or different."""
    from tandemrl.rollout.engine import check_authors

    counts, worst, lags = Counter(rows=len(found), equal=0, tied=0, different=0), 0.0, []
    for request, one, other in zip(asked, found, wanted, strict=True):
        check_authors([one], request.strategy)
        if np.array_equal(one.tokens, other.tokens) and np.array_equal(one.author, other.author):
            counts["equal"] += 1
            worst = max(worst, float(np.abs(one.behaviour_logprobs - other.behaviour_logprobs).max()))
            continue
        lags.append(lag(one, other, request, model))
        counts["tied" if lags[-1] < TIE else "different"] += 1
    return dict(counts) | {"logprobs_apart": worst, "lags": lags}


@torch.no_grad()
def lag(one: Any, other: Any, request: Any, model: Callable[[int], Any]) -> float:
    """By how much the later one of the first two tokens that differ is late, as a share of the winner's time."""
    from tandemrl.models.sampling import BLOCK, Truncation, kept_tokens, race_times
    from tandemrl.selection.draws import SAMPLING, fold_in, stream

    first = int(np.flatnonzero(one.tokens != other.tokens)[0])
    if not np.array_equal(one.author[: first + 1], other.author[: first + 1]):
        return float("inf")
    author, sampling = model(int(one.author[first])), request.sampling
    ids = torch.tensor([[*request.prompt, *one.tokens[:first].tolist()]], device=author.device)
    logits = author(input_ids=ids, use_cache=False).logits[:, -1] / sampling.temperature
    logits = logits.masked_fill(~kept_tokens(logits, Truncation(sampling.top_k, sampling.top_p, 0.0)), -torch.inf)
    key = fold_in(stream(torch.tensor([one.key]), SAMPLING), torch.tensor([first]))
    blocks = torch.nn.functional.pad(logits[0].softmax(-1).cpu(), (0, -logits.shape[-1] % BLOCK)).view(-1, BLOCK)
    times = race_times(key, logits.shape[-1])[0]
    between = times[BLOCK:] / blocks.sum(-1)
    late = []
    for block, place in (divmod(int(each.tokens[first]), BLOCK) for each in (one, other)):
        within = times[:BLOCK] / blocks[block]
        late.append(max(float(between[block] / between.min()), float(within[place] / within.min())) - 1)
    return max(late)


# ---------------------------------------------------------------------------------------------------------------- speed


def speed(options: argparse.Namespace) -> None:
    """Start the arms together, unless their caches would not fit, and measure one after the other."""
    small = options.smoke or torch.cuda.get_device_properties(0).total_memory < 100 * 2**30
    waves = [[name] for name in options.arms] if options.smoke else [options.arms]
    if small and not options.smoke:
        waves = [[n for n in options.arms if (ARMS[n].engine == "tandem") == tandem] for tandem in (False, True)]
    with tempfile.TemporaryDirectory() as home:
        with torch.device(device(options)):
            model = models.model("tiny" if options.smoke else "qwen3-0.6b", seed=0)
        saved(model.to(torch.float32 if options.smoke else torch.bfloat16), Path(home))
        del model
        lines = [line for wave in waves for line in measured(wave, options, home)]
    stock = {(line["rows"], line["eager"]): line["median_s"] for line in lines if line["arm"].startswith("stock")}
    stock |= {(line["rows"], False): line["median_s"] for line in lines if line["arm"] == "stock"}
    ratios = {
        f"{line['arm']} {line['mode']} {line['rows']}": round(line["median_s"] / stock[line["rows"], line["eager"]], 3)
        for line in lines
        if (line["rows"], line["eager"]) in stock
    }
    say({"part": "speed", "ratios_to_stock": ratios})


def measured(names: Sequence[str], options: argparse.Namespace, home: str) -> Iterator[dict[str, Any]]:
    """The lines of some arms, printed, too."""
    running = {}
    for name in names:
        command = [sys.executable, __file__, f"--arm={name}", f"--models={home}", *["--smoke"][: options.smoke]]
        environment = os.environ | ARMS[name].environment
        running[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
    for process in running.values():
        next((line for line in process.stdout if line == "ready\n"), None)
    for name, process in running.items():
        if process.poll() is None:
            process.stdin.write("\n")
            process.stdin.flush()
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                yield json.loads(line)
        if process.wait():
            say({"part": "speed", "arm": name, "error": f"exit code {process.returncode}"})


def arm(options: argparse.Namespace) -> None:
    """Start, say so, wait, measure; the alarm ends a process that hangs."""
    signal.alarm(SECONDS if not options.smoke else 4 * SECONDS)
    chosen, start = ARMS[options.arm], time.perf_counter()
    sizes, tokens, repeats = ([8, 64, 256], 256, 3) if not options.smoke else ([2, 4], 8, 1)
    sizes = [64] if (chosen.eager or chosen.environment) and not options.smoke else sizes
    eager = chosen.eager or options.smoke
    dtype = "float32" if options.smoke else "bfloat16"
    config = json.loads((options.models / "config.json").read_text())
    vocabulary = config["vocab_size"]
    token_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    kv_bytes = max(2**26, max(sizes) * (PROMPT + tokens + 32) * token_bytes)
    if chosen.engine == "stock":
        write = stock_writer(options, dtype, kv_bytes, eager, chosen.options)
    else:
        junior = options.models if chosen.engine == "tandem" else None
        kv_cache_gb = (2 if junior else 1) * kv_bytes / 2**30
        engine = ours(options.models, junior, dtype, kv_cache_gb, max(sizes), eager, 7 if junior else 0)
        write = our_writer(engine, solo=junior is None)
    start_s = round(time.perf_counter() - start, 1)
    signal.alarm(0)  # others may be measured first
    wait_for_turn()
    signal.alarm(SECONDS)
    runs = itertools.count()
    for rows, mode in itertools.product(sorted(sizes, key=lambda n: n != 64), chosen.modes):
        seconds, facts = [], {}
        for length in (tokens // 4, *[tokens] * repeats):
            given = prompts(rows, vocabulary, next(runs), (PROMPT,))
            start = time.perf_counter()
            facts = write(given, length, mode)
            seconds.append(round(time.perf_counter() - start, 3))
        median = statistics.median(seconds[1:])
        line = {"part": "speed", "arm": options.arm, "mode": mode, "rows": rows, "tokens": tokens, "prompt": PROMPT}
        measures = {"median_s": median, "s_all": seconds[1:], "tokens_per_s": round(rows * tokens / median, 1)}
        say(line | {"eager": chosen.eager, "dtype": dtype, **measures, "start_s": start_s, **facts})
    sys.stdout.flush()
    os._exit(0)  # vLLM takes seconds to shut down


def stock_writer(
    options: argparse.Namespace, dtype: str, kv_bytes: int, eager: bool, more: Mapping[str, Any]
) -> Callable[..., dict[str, Any]]:
    from vllm import LLM, SamplingParams

    on_cpu = {} if options.smoke else {"gpu_memory_utilization": 0.1}
    llm = LLM(
        model=str(options.models), dtype=dtype, max_model_len=1024, skip_tokenizer_init=True, max_num_seqs=256,
        kv_cache_memory_bytes=kv_bytes, enforce_eager=eager, generation_config="vllm", **QUIET, **on_cpu, **more,
    )  # fmt: skip
    settings = llm.llm_engine.vllm_config
    runner, ahead = "V2" if settings.use_v2_model_runner else "V1", bool(settings.scheduler_config.async_scheduling)

    def write(given: list[list[int]], tokens: int, mode: str) -> dict[str, Any]:
        params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt} for prompt in given], params, use_tqdm=False)
        return {"runner": runner, "async_scheduling": ahead}

    return write


def our_writer(engine: Any, *, solo: bool) -> Callable[..., dict[str, Any]]:
    from tandemrl.rollout.engine import Request, Sampling
    from tandemrl.selection import solo as alone
    from tandemrl.selection import word
    from tandemrl.selection.draws import request_key

    strategy, calls = alone("senior") if solo else word(0.5, 32, words(engine.vocabulary)), itertools.count()

    def write(given: list[list[int]], tokens: int, mode: str) -> dict[str, Any]:
        engine.call_workers("tandem_mode", mode)
        sampling, call = Sampling(tokens, ignore_eos=True), next(calls)
        asked = [Request(p, (request_key(1, call, i, 0),), sampling, strategy) for i, p in enumerate(given)]
        engine.generate(asked)
        stats, acceptance = engine.stats(), engine.passes.acceptance
        passes = stats["passes"]
        facts = {"junior_passes": passes[0], "senior_passes": passes[1]}
        return facts | {"acceptance": None if acceptance is None else round(acceptance, 3)}

    return write


# ------------------------------------------------------------------------------------------------------------- training


def train(options: argparse.Namespace, *, sleep: bool = False) -> None:
    from tandemrl.config import load
    from tandemrl.files import read_json_lines
    from tandemrl.rollout.vllm import engine
    from tandemrl.training.loop import train as train_loop

    engine.EngineArgs = partial(engine.EngineArgs, **QUIET)  # type: ignore[misc,assignment]  # a class of vLLM
    calls, memory = itertools.count(), ["rollout.vllm.gpu_memory_utilization=0.3"]
    if sleep and not options.smoke:
        memory = ["rollout.vllm.kv_cache_gb=2", "rollout.vllm.sleep=true"]
    with tempfile.TemporaryDirectory() as home:
        senior, junior = models.build("tiny" if options.smoke else "mid", Path(home))
        config = load(
            None,
            [
                f"model.senior={senior}", f"model.junior={junior}", f"model.device={device(options)}",
                f"model.dtype={'float32' if options.smoke else 'bfloat16'}", "data.train=synthetic:plain:train:256",
                "data.eval=[]", "train.prompts_per_step=4", f"train.steps={2 if options.smoke else 20}",
                "train.eval_every=0", "train.lr=1e-5", "rollout.engine=vllm",
                f"rollout.max_tokens={16 if options.smoke else 96}", f"output_dir={home}/run",
                *memory,
            ],
        )  # fmt: skip
        start = time.perf_counter()
        # The models' texts are mostly empty; a reward that differs within every group leaves none out of the update.
        train_loop(config, resume="never", reward=lambda row, text: float(next(calls) % 2), quiet=True)
        seconds = time.perf_counter() - start
        steps = [line for _, line in read_json_lines(Path(home, "run", "metrics.jsonl"))]
    kept = ("mismatch/", "time/", "tokens", "weights/", "grad_norm", "tandem/senior_frac")
    shown = [{name: value for name, value in step.items() if name.startswith(kept)} for step in steps]
    peak = None if options.smoke else round(torch.cuda.max_memory_allocated() / 2**30, 2)
    part = "sleep" if sleep else "train"
    say({"part": part, "s": round(seconds, 1), "memory_gib": peak, "steps": len(steps), "each": shown})


if __name__ == "__main__":
    main()
