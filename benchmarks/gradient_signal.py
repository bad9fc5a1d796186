"""How much of a policy gradient is signal, for several ways to write rollouts with the same weights.

Each condition is a set of config keys. For every block of prompts, which are the same for all conditions, rollouts are
written, scored and turned into the gradient of one optimiser step by the functions of the training loop. With gradients
g of n blocks, whose expectation is the true gradient, these estimates have no bias:

- |signal|² is the mean of g_i·g_j over pairs i ≠ j, and |g|² the mean of g_i·g_i. ``signal_share`` is their quotient.
- the cosine between the true gradients of two conditions: the mean of g_i·h_j over i ≠ j, divided by the norms of both
  signals. Its standard error is a jackknife over blocks.

Gradients are compared in every ``--every``-th coordinate of each tensor, which keeps their expectation.

    python benchmarks/gradient_signal.py --config runs/smollm2/config.yaml --blocks 8 \\
        solo=selection.strategy=solo,model.junior=null tandem= --out benchmarks/results/gradient_signal.json
"""

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from _common import about

from tandemrl.config import load
from tandemrl.rewards.rollouts import score_rollouts
from tandemrl.rollout.collect import generate
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
    flat = torch.zeros(blocks, sum(len(p.detach().flatten()[::every]) for p in parameters))
    told: list[dict[str, float]] = []

    def keep(setup: Any, models: Any, part: str, loss: float, totals: Any, clock: Any) -> float:
        grads = [p.grad.flatten()[::every] if p.grad is not None else torch.zeros(1) for p in parameters]
        flat[len(told)] = torch.cat(grads)
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm().item()
        models.policy.zero_grad(set_to_none=True)
        return norm

    updates.optimizer_step = keep  # type: ignore[assignment]
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
        done = updates.update_policy(setup, models, mini, Clock(setup.device), first=True, learns=True, fresh=True)
        rollouts = experience.rollouts
        told.append(
            {
                "reward": fmean(r.reward for r in rollouts),
                "zero_variance": experience.metrics["groups/zero_variance"],
                "senior_tokens": fmean(float((r.author == Author.SENIOR).sum()) for r in rollouts),
                "response_tokens": fmean(float(r.response_tokens) for r in rollouts),
                "grad_norm": done["grad_norm"],
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


def cosine(gram: np.ndarray, a: Sequence[int], b: Sequence[int]) -> float:
    """The cosine between the true gradients of two conditions, whose blocks are these rows of the Gram matrix."""
    signals = off_diagonal(gram[np.ix_(a, a)]), off_diagonal(gram[np.ix_(b, b)])
    if min(signals) <= 0:
        return float("nan")
    return off_diagonal(gram[np.ix_(a, b)]) / (signals[0] * signals[1]) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conditions", nargs="+", help="NAME=KEY=VALUE,KEY=VALUE…; semicolons within a value")
    parser.add_argument("--config")
    parser.add_argument("--keys", default="", help="keys of every condition, with commas between them")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--every", type=int, default=16)
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
    gram = (stacked @ stacked.T).double().numpy() * given.every
    n, names = given.blocks, list(found)
    places = {name: list(range(i * n, (i + 1) * n)) for i, name in enumerate(names)}
    for name, place in places.items():
        own = gram[np.ix_(place, place)]
        found[name] |= {"signal": off_diagonal(own), "square": float(np.trace(own) / n)}
        found[name]["signal_share"] = found[name]["signal"] / found[name]["square"]
    cosines = {}
    for a, b in itertools.combinations(names, 2):
        without = [[i for i in range(n) if i != left_out] for left_out in range(n)]
        each = np.array([cosine(gram, np.array(places[a])[kept], np.array(places[b])[kept]) for kept in without])
        error = float(((n - 1) * ((each - each.mean()) ** 2).mean()) ** 0.5)
        cosines[f"{a}, {b}"] = {"cosine": cosine(gram, places[a], places[b]), "standard_error": error}
    result = {"conditions": found, "cosines": cosines, "gram": gram.tolist(), "blocks": n, **about()}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"conditions": found, "cosines": cosines}, indent=1))


if __name__ == "__main__":
    main()
