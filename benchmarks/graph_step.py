"""Decoding by CUDA graphs against decoding that asks the host after each token: the same tokens, and how fast.

    python benchmarks/graph_step.py               # Qwen3-0.6B configurations with random weights
    python benchmarks/graph_step.py --smoke       # tiny models on a CPU: that every line works; nothing is captured

Prints one JSON line per result, at once. `check`: tokens and authors in float32, before and after new weights. `speed`:
tokens/s and ms per step in bfloat16, of `generate` as users call it, prompts included. `variant`: the same without a
part of what makes it fast. `profile`: which kernels a step consists of. A part that fails prints its error, and the
next one follows; none begins after --seconds.
"""

import argparse
import functools
import json
import os
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from models import model, tokenizer
from transformers import PreTrainedModel

from tandemrl.models.loading import prepare
from tandemrl.rollout import device_steps, torch_engine
from tandemrl.rollout.engine import Completion, Request, Sampling
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection.strategies import Strategy, solo, word

BEGAN = time.perf_counter()
PROMPT = 32


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--smoke", action="store_true")
    p.add_argument("--seconds", type=float, default=85.0)
    p.add_argument("--parts", nargs="+", default=["check", "speed", "eager", "variant", "profile"])
    options = p.parse_args()
    on_cuda = torch.cuda.is_available() and not options.smoke
    device, name = ("cuda", "qwen3-0.6b") if on_cuda else ("cpu", "tiny")
    many = [8, 64, 256] if on_cuda else [2, 4]
    if not on_cuda:
        torch_engine.DeviceSteps = functools.partial(device_steps.DeviceSteps, static=True)  # type: ignore[misc]
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "model": name}
    emit("about", **about, device=torch.cuda.get_device_name() if on_cuda else "cpu", at_s=elapsed())
    with torch.device(device):
        pair = [prepare(model(name, seed)) for seed in (0, 1)]
    emit("models", at_s=elapsed())
    strategies = {"tandem": tandem(pair[0].config.vocab_size), "solo": solo()}
    run = Parts(options.seconds)
    for part in sorted(options.parts, key=lambda name: name != "check"):
        if part == "check":
            for who in strategies:
                run(part, functools.partial(check, pair, strategies[who], 64 if on_cuda else 4), who=who)
            continue
        for parameter in (parameter for each in pair for parameter in each.parameters()):
            parameter.data = parameter.data.to(torch.bfloat16)
        if part == "speed":
            for rows in sorted(many, key=lambda n: n != 64):
                for who in strategies:
                    run(part, functools.partial(speed, pair, strategies[who], rows, 256 if on_cuda else 20), who=who)
        elif part == "eager":
            for who in strategies:
                what = functools.partial(
                    speed, pair, strategies[who], many[1], 32 if on_cuda else 8, host_every=1, repeats=1
                )
                run(part, what, who=who)
        elif part == "variant":
            for variant in VARIANTS:
                run(
                    part, functools.partial(varied, variant, pair, strategies["tandem"], many[1], on_cuda), what=variant
                )
        elif part == "profile":
            for who in strategies:
                run(part, functools.partial(profile, pair, strategies[who], many[1], on_cuda), who=who)
    emit("end", at_s=elapsed())


class Parts:
    """Runs parts one by one, whatever happens in those before."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, part: str, function: Callable[[], dict[str, Any]], **about: Any) -> None:
        if elapsed() > self.seconds:
            emit(part, **about, skipped=True, at_s=elapsed())
            return
        try:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                found = function()
            found["warnings"] = sorted({str(each.message)[:300] for each in heard})
        except Exception:
            found = {"error": traceback.format_exc()[-3000:]}
        emit(part, **about, **found, at_s=elapsed())
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def emit(part: str, **values: Any) -> None:
    print(json.dumps({"part": part, **values}), flush=True)


def elapsed() -> float:
    return round(time.perf_counter() - BEGAN, 1)


def tandem(vocabulary: int) -> Strategy:
    """Authors drawn anew at a quarter of all ids, and at the latest after 32 tokens."""
    begins = torch.rand(vocabulary, generator=torch.Generator().manual_seed(0)) < 0.25
    return word(0.5, 32, begins)


def engine(pair: list[PreTrainedModel], strategy: Strategy, host_every: int | str) -> TorchEngine:
    junior = None if strategy.writers == "senior" else pair[1]
    if host_every == "auto" and not torch.cuda.is_available():
        host_every = 16
    return TorchEngine(pair[0], junior, tokenizer(), host_every=host_every)


def requests(strategy: Strategy, rows: int, tokens: int, *, ends: bool) -> list[Request]:
    g = torch.Generator().manual_seed(rows)
    prompts = torch.randint(2, 258, (rows, PROMPT), generator=g).tolist()
    stops = tuple(range(1000 if ends else 0, 150_000, 199)) if ends and torch.cuda.is_available() else ()
    if ends and not stops:
        stops = tuple(range(7, 258, 50))
    return [
        Request(
            prompt[: PROMPT - (i % 8 if ends else 0)],
            (i,),
            Sampling(
                max_tokens=tokens - (i % 5 if ends else 0),
                temperature=0.8 if ends and i % 3 == 0 else 1.0,
                stop_token_ids=stops,
                ignore_eos=not ends,
            ),
            strategy,
        )
        for i, prompt in enumerate(prompts)
    ]


def generated(engine: TorchEngine, asked: list[Request]) -> tuple[list[Completion], float]:
    synchronize()
    began = time.perf_counter()
    done = [each for group in engine.generate(asked) for each in group]
    synchronize()
    return done, time.perf_counter() - began


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def compared(one: list[Completion], other: list[Completion]) -> dict[str, Any]:
    """How many rows are equal; of the others, where they part; the largest difference of log-probs before that."""
    parts, gap = [], 0.0
    for a, b in zip(one, other, strict=True):
        n = min(len(a.tokens), len(b.tokens))
        differ = ((a.tokens[:n] != b.tokens[:n]) | (a.author[:n] != b.author[:n])).nonzero()[0]
        same = int(differ[0]) if len(differ) else n
        if len(differ) or len(a.tokens) != len(b.tokens) or a.stop_reason != b.stop_reason:
            parts.append([a.key, same])
        if same:
            gap = max(gap, float(abs(a.behaviour_logprobs[:same] - b.behaviour_logprobs[:same]).max()))
    tokens = sum(len(a.tokens) for a in one)
    return {"rows": len(one), "tokens": tokens, "rows_that_differ": len(parts), "first": parts[:8], "logprob_gap": gap}


def check(pair: list[PreTrainedModel], strategy: Strategy, rows: int) -> dict[str, Any]:
    eager, graph = engine(pair, strategy, 1), engine(pair, strategy, "auto")
    asked = requests(strategy, rows, 64, ends=True)
    before, eager_s = generated(eager, asked)
    first, _ = generated(graph, asked)
    again, graph_s = generated(graph, asked)
    found = {"capture": compared(before, first), "replay": compared(before, again)}
    found |= {"authors": [int((a.author == w).sum()) for w in (0, 1) for a in before[:1]], **captured(graph)}
    old = {name: parameter.clone() for name, parameter in pair[0].named_parameters()}
    graph.load_weights([(name, value * 1.02) for name, value in old.items()], 1)  # in place, for both engines
    asked = asked[: rows // 2]
    found["new_weights"] = compared(generated(eager, asked)[0], generated(graph, asked)[0])
    graph.load_weights(list(old.items()), 2)
    return found | {"eager_s": round(eager_s, 2), "graph_s": round(graph_s, 2)}


def captured(graph: TorchEngine) -> dict[str, Any]:
    steps = graph._alone
    kinds = [] if steps is None else [[*key[:2], known[1] is not None] for key, known in steps._graphs.items()]
    return {"graphs": kinds}


def speed(
    pair: list[PreTrainedModel],
    strategy: Strategy,
    rows: int,
    tokens: int,
    *,
    host_every: int | str = "auto",
    repeats: int = 3,
) -> dict[str, Any]:
    graph, asked = engine(pair, strategy, host_every), requests(strategy, rows, tokens, ends=False)
    generated(graph, requests(strategy, rows, 2, ends=False))  # kernels are loaded
    _, first = generated(graph, asked)
    times = [generated(graph, asked)[1] for _ in range(repeats)]
    s = statistics.median(times)
    memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    return {
        "rows": rows,
        "tokens_each": tokens,
        "tokens_per_s": round(rows * tokens / s),
        "ms_per_step": round(1e3 * s / tokens, 3),
        "seconds": [round(each, 3) for each in times],
        "capture_s": round(first - s, 2),
        "peak_gb": round(memory, 1),
        **captured(graph),
    }


@contextmanager
def _patched(name: str, value: Any) -> Iterator[None]:
    old = getattr(device_steps, name)
    setattr(device_steps, name, value)
    try:
        yield
    finally:
        setattr(device_steps, name, old)


VARIANTS = {"as_it_is": None, "own_norms": ("plain_norms", lambda models: []), "one_stream": None, "every_32": None}


def varied(variant: str, pair: list[PreTrainedModel], strategy: Strategy, rows: int, on_cuda: bool) -> dict[str, Any]:
    tokens, every = (96 if on_cuda else 8), 32 if variant == "every_32" else "auto"
    patch: tuple[str, Any] = VARIANTS[variant] or ("GRAPHS", device_steps.GRAPHS)
    if variant == "one_stream":

        class OneStream(device_steps.Step):
            def __init__(self, *given: Any, **named: Any) -> None:
                super().__init__(*given, **{**named, "side": None})

        patch = "Step", OneStream
    with _patched(*patch):
        return speed(pair, strategy, rows, tokens, host_every=every, repeats=2)


def profile(pair: list[PreTrainedModel], strategy: Strategy, rows: int, on_cuda: bool) -> dict[str, Any]:
    graph, asked = engine(pair, strategy, "auto"), requests(strategy, rows, 32 if on_cuda else 8, ends=False)
    generated(graph, asked)
    kinds = [torch.profiler.ProfilerActivity.CUDA if on_cuda else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as found:
        generated(graph, asked)
    lines = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    steps = 32 if on_cuda else 8
    return {
        "kernels_per_step": round(sum(e.count for e in lines) / steps),
        "kernel_us_per_step": round(sum(e.self_device_time_total for e in lines) / steps),
        "kernels": [
            [e.key[:90], round(e.count / steps, 1), round(e.self_device_time_total / steps, 1)] for e in lines[:28]
        ],
    }


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
