"""How much of a policy gradient is signal, for several ways to write rollouts with the same weights.

Each condition is a set of config keys. For every block of prompts, which are the same for all conditions, rollouts are
written, scored and turned into the gradient of one optimiser step by the functions of the training loop. What an
optimiser follows in the long run is the expectation of that gradient, the *signal*. With gradients g of n blocks:

- |signal|² is the mean of g_i·g_j over pairs i ≠ j, and E|g|² the mean of g_i·g_i. Both have no bias; ``signal_share``
  is their quotient.
- the cosine between the signals of two conditions: the mean of g_i·h_j over i ≠ j, divided by the norms of both. As a
  ratio it can exceed 1. It is not a number (NaN) where an estimate of |signal|² is not positive.

Standard errors are jackknives over blocks. Products are over random coordinates, the same for all conditions, one in
``--every`` of each tensor. ``square`` must be near ``grad_norm_square``, which is over all coordinates.

    python benchmarks/gradient_signal.py --config smollm2 --blocks 8 solo=selection.strategy=solo,model.junior=null \\
        self=model.junior=runs/smollm2-pair/senior weak= --out benchmarks/results/gradient_signal.json
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from _common import about

from tandemrl.config import load
from tandemrl.rollout.collect import generate
from tandemrl.rollout.groups import score_rollouts
from tandemrl.training import update as updates
from tandemrl.training.build import build
from tandemrl.training.experience import add_group_advantages, make_experience, pack_mini_batches
from tandemrl.training.loop import sync_weights
from tandemrl.training.profiling import Clock
from tandemrl.types import Author


def gradients(keys: list[str], config: str | None, blocks: int, every: int) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradients of all blocks, as rows, and means of what the rollouts were."""
    settings = load(config, [*keys, "train.mini_batch_prompts=null", "train.max_logprob_mismatch=1"])
    torch.set_num_threads(settings.train.threads or 1)
    run = build(settings)
    setup, models, progress = run
    sync_weights(models.policy, models.engine, version=0)
    parameters = [p for p in models.policy.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randperm(p.numel(), generator=generator)[: max(1, p.numel() // every)] for p in parameters]
    flat = torch.zeros(blocks, sum(map(len, drawn)))
    told: list[dict[str, float]] = []

    def keep(setup: Any, models: Any, part: str, loss: float, totals: Any, clock: Any) -> float:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        scaled = [(g.numel() / len(i)) ** 0.5 * g.flatten()[i] for g, i in zip(grads, drawn, strict=True)]
        flat[len(told)] = torch.cat(scaled)
        norm = torch.stack([g.norm() for g in grads]).norm().item()
        models.policy.zero_grad(set_to_none=True)
        return norm

    updates.optimizer_step = keep  # type: ignore[assignment]  # in place of the step
    for block in range(blocks):
        examples = progress.sampler.next(settings.train.prompts_per_step)
        completions = generate(
            models.engine,
            [(example, setup.prompts[example]) for example in examples],
            strategy=setup.schedule.strategy(1),
            sampling=setup.sampling,
            group_size=settings.rollout.group_size,
            seed=settings.train.seed,
            step=block + 1,
        )
        groups = score_rollouts(completions, setup.scorer, setup.tokenizer)
        experience = make_experience(setup, groups)
        mini_batches = add_group_advantages(setup, pack_mini_batches(setup, experience), experience, 0.0)
        (mini,) = mini_batches
        done = updates.update_policy(setup, models, mini, Clock(setup.device), compares=True, learns=True, fresh=True)
        rollouts = experience.rollouts
        told.append(
            {
                "reward": fmean(r.reward for r in rollouts),
                "zero_variance": experience.metrics["groups/zero_variance"],
                "senior_tokens": fmean(float((r.author == Author.SENIOR).sum()) for r in rollouts),
                "response_tokens": fmean(float(r.response_tokens) for r in rollouts),
                "grad_norm_square": done["grad_norm"] ** 2,
                "mismatch": done["mismatch/mean_abs"],
            }
            | {name: value for name, value in done.items() if name in ("entropy", "loss")}
        )
        print(f"block {block + 1}: {told[-1]}", flush=True)
    models.engine.close()
    return flat, {name: fmean(each[name] for each in told) for name in told[0]}


def off_diagonal(products: np.ndarray) -> float:
    """The mean over pairs of different blocks."""
    n = len(products)
    return float((products.sum() - np.trace(products)) / (n * (n - 1)))


def share(gram: np.ndarray, a: Sequence[int]) -> float:
    """|signal|² / E|g|² of the condition whose blocks are these rows of the Gram matrix."""
    own = gram[np.ix_(a, a)]
    return off_diagonal(own) / float(np.trace(own) / len(own))


def cosine(gram: np.ndarray, a: Sequence[int], b: Sequence[int]) -> float:
    """The cosine between the signals of two conditions, whose blocks are these rows of the Gram matrix."""
    signals = off_diagonal(gram[np.ix_(a, a)]), off_diagonal(gram[np.ix_(b, b)])
    if min(signals) <= 0:
        return float("nan")
    return off_diagonal(gram[np.ix_(a, b)]) / (signals[0] * signals[1]) ** 0.5


def with_error(of: Callable[..., float], *places: Sequence[int]) -> dict[str, float]:
    """A function of blocks, and its standard error by the jackknife, which leaves out one block at a time."""
    n = len(places[0])
    each = np.array([of(*([p for i, p in enumerate(place) if i != out] for place in places)) for out in range(n)])
    return {"value": of(*places), "standard_error": float(((n - 1) * each.var()) ** 0.5)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conditions", nargs="+", help="NAME=KEY=VALUE,KEY=VALUE…")
    parser.add_argument("--config")
    parser.add_argument("--keys", default="", help="keys of every condition, with commas between them")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--models", default="", help="what the models are, for the record")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    all_gradients, found = [], dict[str, Any]()
    for condition in given.conditions:
        name, _, keys = condition.partition("=")
        started = time.process_time()
        print(name, flush=True)
        assignments = [key for key in f"{given.keys},{keys}".split(",") if key]
        flat, means = gradients(assignments, given.config, given.blocks, given.every)
        all_gradients.append(flat)
        found[name] = {"keys": assignments} | means | {"cpu_s": time.process_time() - started}
    stacked = torch.cat(all_gradients)
    gram = (stacked @ stacked.T).double().numpy()
    n, names = given.blocks, list(found)
    places = {name: list(range(i * n, (i + 1) * n)) for i, name in enumerate(names)}
    for name, place in places.items():
        own = gram[np.ix_(place, place)]
        found[name] |= {"signal": off_diagonal(own), "square": float(np.trace(own) / n)}
        found[name]["signal_share"] = with_error(partial(share, gram), place)
    pairs = itertools.combinations(names, 2)
    cosines = {f"{a}, {b}": with_error(partial(cosine, gram), places[a], places[b]) for a, b in pairs}
    result = {
        "conditions": found,
        "cosines": cosines,
        "gram": gram.tolist(),
        "blocks": n,
        "models": given.models,
        **about(),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"conditions": found, "cosines": cosines}, indent=1))


if __name__ == "__main__":
    main()
