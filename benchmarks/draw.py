"""Ways to draw a token from log-probs and a key: their cost, and how often two models that share the key draw the same.

    OMP_NUM_THREADS=1 python benchmarks/draw.py --out benchmarks/results/draw.jsonl
    OMP_NUM_THREADS=1 python benchmarks/draw.py --pair SENIOR JUNIOR DATA   # of trained models, on texts of the pair

- ``inverse_cdf``: the token at which the cumulative distribution, in vocabulary order, passes one uniform number.
- ``race``: arg min of exponential times over probabilities (the Gumbel-max trick), one time per token.
- ``race_in_blocks``: the library's, ``rollout.sampling.draw_token``: blocks of 64 ids first, then ids of the block.

Agreement is measured at positions where the distributions differ as a senior's and a junior's do: synthetic ones (heavy
tails over a shuffled vocabulary, the second model's logits disturbed), or a pair's own. ``bound``: 1 - total variation,
which no way of drawing can exceed. A drafted token is accepted as often as the draws agree. Prints one JSON line each.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import about, write_lines
from torch import Tensor

from tandemrl.models.sampling import draw_token
from tandemrl.selection.draws import fold_in, uniforms

VOCABULARIES = (512, 8192, 32_768, 151_936)
SYNTHETIC = {"peaked": (2.0, 0.5), "medium": (1.2, 0.7), "flat": (0.9, 0.7)}
"""Exponent of the tail, and standard deviation of the junior's logits around the senior's."""


def inverse_cdf(logprobs: Tensor, keys: Tensor) -> Tensor:
    cdf = logprobs.double().exp_().cumsum_(-1)
    target = uniforms(keys, torch.zeros_like(keys))[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, target, right=True).clamp_(max=logprobs.shape[1] - 1).squeeze(1)


def race(logprobs: Tensor, keys: Tensor) -> Tensor:
    times = uniforms(keys[:, None], torch.arange(logprobs.shape[1])).clamp_(min=2.0**-54).log_().neg_()
    return (times / logprobs.exp()).argmin(-1)


DRAWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "inverse_cdf": inverse_cdf,
    "race": race,
    "race_in_blocks": draw_token,
}


def synthetic(vocabulary: int, kind: str, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Log-probs of a senior and a junior, [rows, vocabulary]."""
    generator = torch.Generator().manual_seed(seed)
    exponent, noise = SYNTHETIC[kind]
    zipf = -exponent * torch.arange(1, vocabulary + 1).log()
    order = torch.rand(rows, vocabulary, generator=generator).argsort(-1)
    senior = zipf.expand(rows, -1).gather(1, order)
    junior = senior + noise * torch.randn(rows, vocabulary, generator=generator)
    return senior.log_softmax(-1), junior.log_softmax(-1)


def agreement(senior: Tensor, junior: Tensor, keys: Tensor) -> dict[str, float]:
    """Of every way of drawing, at the rows of both models' log-probs, and the bound."""
    same = {name: float((draw(senior, keys) == draw(junior, keys)).double().mean()) for name, draw in DRAWS.items()}
    return same | {"bound": float(torch.minimum(senior.exp(), junior.exp()).sum(-1).mean())}


def cost(vocabulary: int, rows: int, rounds: int) -> dict[str, float]:
    """Milliseconds per step, medians over rounds in which the ways take turns."""
    logprobs, _ = synthetic(vocabulary, "medium", rows, seed=0)
    seconds: dict[str, list[float]] = {name: [] for name in DRAWS}
    for number in range(rounds):
        keys = fold_in(torch.arange(rows), torch.full((rows,), number))
        for name, draw in DRAWS.items():
            start = time.perf_counter()
            draw(logprobs, keys)
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def pair_logprobs(senior: str, junior: str, data: str, problems: int) -> tuple[Tensor, Tensor, Tensor]:
    """Both models' log-probs [t, v] at the senior's positions of tandem texts of the pair, and the tokens' keys."""
    from transformers import AutoModelForCausalLM

    from tandemrl.config import SelectionConfig
    from tandemrl.data.loading import load_rows
    from tandemrl.data.rows import encode_prompts
    from tandemrl.models.loading import load_model, load_tokenizer
    from tandemrl.rollout.engine import Request, Sampling
    from tandemrl.rollout.schedule import schedule_of
    from tandemrl.rollout.torch_engine import TorchEngine
    from tandemrl.selection.draws import SAMPLING, request_key, stream

    tokenizer = load_tokenizer(senior)
    engine = TorchEngine(*(load_model(path).eval() for path in (senior, junior)), tokenizer)
    models = [AutoModelForCausalLM.from_pretrained(path).eval() for path in (senior, junior)]
    strategy = schedule_of(SelectionConfig(), tokenizer, engine.vocabulary).strategy(1)
    prompts, _ = encode_prompts(load_rows([data]), tokenizer, max_prompt_tokens=1024, suffix="")
    requests = [
        Request(prompt.tokens, (request_key(0, 0, i, 0),), Sampling(max_tokens=64), strategy)
        for i, prompt in enumerate(prompts[:problems])
    ]
    found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    with torch.inference_mode():
        for request, (completion,) in zip(requests, engine.generate(requests), strict=True):
            text = torch.tensor([[*request.prompt, *completion.tokens.tolist()]])
            senior_written = torch.from_numpy(completion.author == 1)
            for model, rows in zip(models, found, strict=False):
                logits = model(input_ids=text, use_cache=False).logits[0, len(request.prompt) - 1 : -1]
                rows.append(logits[senior_written, : engine.vocabulary].float().log_softmax(-1))
            key = stream(torch.tensor([completion.key]), SAMPLING)
            found[2].append(fold_in(key, torch.arange(len(completion.tokens)))[senior_written])
    return torch.cat(found[0]), torch.cat(found[1]), torch.cat(found[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--samples", type=int, default=1500, help="synthetic positions per vocabulary and kind")
    parser.add_argument("--pair", nargs=3, metavar=("SENIOR", "JUNIOR", "DATA"))
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines: list[dict[str, Any]] = []

    def line(what: str, **values: Any) -> None:
        lines.append({"benchmark": "draw", "what": what} | values | about())
        print(json.dumps(lines[-1]), flush=True)

    def rounded(values: dict[str, float]) -> dict[str, float]:
        return {name: round(value, 4) for name, value in values.items()}

    if options.pair:
        senior, junior, keys = pair_logprobs(*options.pair, options.problems)
        names = ["/".join(Path(path).parts[-3:]) for path in options.pair[:2]]
        line(
            "pair",
            senior=names[0],
            junior=names[1],
            positions=len(keys),
            agreement=rounded(agreement(senior, junior, keys)),
        )
    else:
        for vocabulary in VOCABULARIES:
            for rows in options.rows:
                if rows * vocabulary <= 2**23:
                    line("cost_ms", vocabulary=vocabulary, rows=rows, **rounded(cost(vocabulary, rows, options.rounds)))
            for kind in SYNTHETIC:
                rows = max(1, 2**22 // vocabulary)
                parts = [
                    agreement(*synthetic(vocabulary, kind, rows, seed), fold_in(torch.tensor(seed), torch.arange(rows)))
                    for seed in range(max(1, min(options.samples, 200 * rows) // rows))
                ]
                mean = {name: statistics.fmean(part[name] for part in parts) for name in parts[0]}
                line("agreement", vocabulary=vocabulary, shape=kind, positions=rows * len(parts), **rounded(mean))
    if options.out:
        write_lines(options.out, lines)


if __name__ == "__main__":
    main()
