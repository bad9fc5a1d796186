"""From scored rollouts to new weights: mini-batches, frozen log-probs where needed, advantages, optimiser steps."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from tandemrl.batching import micro_batches, pack, pack_tokens
from tandemrl.losses import (
    add_totals,
    average_metrics,
    compute_advantages,
    kl_in_reward,
    overlong_penalty,
    policy_loss,
    token_weights,
    totals,
    zero_variance_groups,
)
from tandemrl.parallel import World, clip_gradients
from tandemrl.run import Run, TrainError, check_mismatch, learning_rate
from tandemrl.types import Author, Batch, Group, Metrics, Rollout, Totals


class MicroBatch(NamedTuple):
    """Some rollouts of the step, by number, and what they are packed into."""

    rows: Tensor
    batch: Batch


def update(run: Run, groups: Sequence[Group], step: int) -> Metrics:
    """One optimiser step per mini-batch of prompts, on advantages computed over all prompts of the step.

    Every process is given all rollouts. Each data rank computes its share of the micro-batches; what depends on all of
    them (totals, KL in the reward, metrics) is summed over the ranks.
    """
    config, loss = run.config, run.config.loss
    rollouts = [r for group in groups for r in group.rollouts]
    group_ids = torch.tensor([r.group for r in rollouts])
    rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float32)
    flat = zero_variance_groups(rewards, group_ids)  # on the verifier's outcomes, before any shaping
    used = ~flat if run.recipe.filter_zero_variance else torch.ones_like(flat)
    if buffer := round(run.recipe.overlong_share * run.sampling.max_tokens):
        lengths = torch.tensor([r.response_tokens for r in rollouts])
        rewards += overlong_penalty(lengths, max_tokens=run.sampling.max_tokens, buffer=buffer)

    prompts = config.train.mini_batch_prompts or config.train.prompts_per_step
    mini_batches = [
        split(run, rollouts, (used & (group_ids // prompts == i)).nonzero().squeeze(1))
        for i in range(len(groups) // prompts)
    ]
    needs_old = len(mini_batches) > 1 or loss.kl_in_reward
    mini_batches = [
        [m._replace(batch=add_logprobs(run, m.batch, old=needs_old)) for m in mini] for mini in mini_batches
    ]
    if loss.kl_in_reward:
        penalties = torch.zeros(len(rollouts), device=run.device)
        for rows, b in (m for mini in mini_batches for m in mini):
            assert b.old_logprobs is not None
            assert b.ref_logprobs is not None
            none, weights = torch.zeros(len(rows), device=run.device), weights_of(run, b)
            shaped = kl_in_reward(none, b.old_logprobs, b.ref_logprobs, weights, b.sequence_ids, coef=loss.kl_coef)
            penalties[rows] += shaped
        rewards += run.world.data_sum(penalties).cpu()
    senior = torch.tensor([float((r.author == Author.SENIOR).sum()) for r in rollouts])
    junior = torch.tensor([float((r.author == Author.JUNIOR).sum()) for r in rollouts])
    counts = (senior + loss.junior_weight * junior) * used
    advantages = compute_advantages(run.recipe, rewards, group_ids, counts)

    for parameters in run.optimizer.param_groups:
        parameters["lr"] = learning_rate(config, step)
    updates = [
        [replace(batch, advantages=per_token(advantages[rows], batch)) for rows, batch in mini]
        for mini in mini_batches
        if mini
    ]
    results = [optimise(run, batches, first=i == 0) for i, batches in enumerate(updates)]
    results = results or [{"loss": 0.0, "grad_norm": 0.0}]  # a step without any usable group
    names = dict.fromkeys(name for result in results for name in result)
    means = {name: fmean(result[name] for result in results if name in result) for name in names}
    return {
        "groups/zero_variance": flat.float().mean().item(),
        "lr": learning_rate(config, step),
        "updates": float(len(updates)),
    } | means


def split(run: Run, rollouts: Sequence[Rollout], rows: Tensor) -> list[MicroBatch]:
    """This data rank's micro-batches of some rollouts, within the token budget: as many as every other rank has."""
    lengths = [len(rollouts[i].tokens) for i in rows.tolist()]
    world = run.world
    bins = micro_batches(lengths, run.config.train.tokens_per_micro_batch)
    bins += [[] for _ in range(-len(bins) % world.data_size)]
    return [
        MicroBatch(rows[b], pack([rollouts[i] for i in rows[b].tolist()], torch.zeros(len(b)), run.device))
        if b
        else MicroBatch(rows[:1], pack_tokens([[0]], run.device))  # a rank without work still joins the collectives
        for b in bins[world.data_rank :: world.data_size]
    ]


@torch.no_grad()
def add_logprobs(run: Run, batch: Batch, *, old: bool) -> Batch:
    """Fill the channels of frozen models, and of the policy before its first update, where the loss needs them."""
    loss = run.config.loss
    models = {
        "old_logprobs": run.policy if old else None,
        "ref_logprobs": run.reference,
        "junior_logprobs": run.junior if loss.junior_kl_coef else None,
    }
    scored: dict[int, Tensor] = {}  # one pass per distinct model: reference and junior may be the same
    channels = {}
    for name, model in models.items():
        if model is not None:
            if id(model) not in scored:
                scored[id(model)] = run.logprobs(model, batch, batch.author >= 0)[0]
            channels[name] = scored[id(model)]
    return replace(batch, **channels)


def optimise(run: Run, batches: Sequence[Batch], *, first: bool) -> Metrics:
    """One optimiser step over micro-batches; the first of a training step also compares trainer and engine.

    Raises:
        TrainError: log-probs do not match the engine's, or the gradient is not finite. Nothing was updated.
    """
    config, loss_config = run.config, run.config.loss
    weights = [weights_of(run, b) for b in batches]
    step_totals = total_over(
        run.world,
        add_totals(
            totals(w, b.author, b.sequence_ids, num_sequences=b.num_sequences)
            for w, b in zip(weights, batches, strict=True)
        ),
        run.device,
    )
    difference: list[Tensor] = []
    loss_sum = torch.zeros(())
    sums: dict[str, Tensor] = {}
    for batch, weight in zip(batches, weights, strict=True):
        senior = batch.author == Author.SENIOR
        select = (weight > 0) | senior | ((batch.author >= 0) & (loss_config.junior_kl_coef > 0))
        logprobs, entropy = run.logprobs(run.policy, batch, select)
        difference.append((logprobs.detach() - batch.behaviour_logprobs)[senior].abs().cpu())
        loss, parts = policy_loss(
            run.recipe,
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs,
            behaviour_logprobs=batch.behaviour_logprobs,
            advantages=batch.advantages,
            author=batch.author,
            weights=weight,
            sequence_ids=batch.sequence_ids,
            num_sequences=batch.num_sequences,
            totals=step_totals,
            normalise_by=loss_config.normalise_by,
            constant=float(config.rollout.max_tokens),
            entropy=entropy if loss_config.entropy_coef else entropy.detach(),
            entropy_coef=loss_config.entropy_coef,
            ref_logprobs=batch.ref_logprobs,
            kl_coef=0.0 if loss_config.kl_in_reward else loss_config.kl_coef,
            kl_kind=loss_config.kl_kind,
            junior_logprobs=batch.junior_logprobs,
            junior_kl_coef=loss_config.junior_kl_coef,
        )
        loss.backward()
        loss_sum = loss_sum + loss.detach().cpu()
        for name, value in parts.items():
            sums[name] = sums[name] + value if name in sums else value
    sums = {name: run.world.data_sum(value) for name, value in sums.items()}
    loss_value = run.world.data_sum(loss_sum.to(run.device)).item()
    metrics = {name: value.item() for name, value in average_metrics(sums, step_totals).items()}
    if first:
        metrics |= mismatch(run.world, torch.cat(difference).to(run.device))
        if not config.train.async_steps:  # else the rollouts are of older weights
            check_mismatch(config, metrics.get("mismatch/mean_abs", 0.0))
    norm = clip_gradients(run.policy.parameters(), config.train.grad_clip)
    if not math.isfinite(norm):
        raise TrainError(f"the gradient norm is {norm} (loss {loss_value}): stopped before it reached the weights")
    if float(step_totals.weight) > 0:  # else there is nothing to learn from, and weight decay alone is no training
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return {"loss": loss_value, "grad_norm": norm} | metrics


def total_over(world: World, own: Totals, device: torch.device) -> Totals:
    """The totals of all data ranks."""
    counts = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=device) for x in own])
    return Totals(*world.data_sum(counts).float())


def mismatch(world: World, gap: Tensor) -> Metrics:
    """Mean and largest |trainer - engine| log-prob of the senior tokens of all data ranks; none: nothing."""
    largest = gap.max() if len(gap) else gap.new_zeros(())
    total, count = world.data_sum(torch.stack([gap.sum(), gap.new_tensor(float(len(gap)))])).tolist()
    if not count:
        return {}
    return {"mismatch/mean_abs": total / count, "mismatch/max_abs": world.data_max(largest).item()}


def weights_of(run: Run, batch: Batch) -> Tensor:
    return token_weights(batch.author, junior_weight=run.config.loss.junior_weight)


def per_token(advantages: Tensor, batch: Batch) -> Tensor:
    """Each rollout's advantage on its response tokens."""
    spread = advantages.to(batch.tokens.device)[batch.sequence_ids]
    return torch.where(batch.author >= 0, spread, 0.0)
