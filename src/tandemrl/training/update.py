"""From scored rollouts to new weights: mini-batches, frozen log-probs where needed, advantages, optimiser steps."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from tandemrl.distributed.world import World
from tandemrl.losses import (
    adapt_kl_coef,
    add_totals,
    average_metrics,
    compute_advantages,
    explained_variance,
    gae,
    kl_penalty,
    overlong_penalty,
    policy_loss,
    reduce,
    sequence_sum,
    token_rewards,
    token_weights,
    totals,
    value_loss,
    whiten,
    zero_variance_groups,
)
from tandemrl.models.batching import micro_batches, pack, pack_tokens
from tandemrl.models.lora import adapter_free
from tandemrl.models.sharding import clip_gradients
from tandemrl.training.profiling import Cost, Work, update_flops
from tandemrl.training.run import Run, TrainError, check_mismatch, learning_rate
from tandemrl.types import (
    Author,
    Batch,
    Group,
    Metrics,
    Rollout,
    Totals,
)


class MicroBatch(NamedTuple):
    """Some rollouts of the step, by number, and what they are packed into."""

    rows: Tensor
    batch: Batch


def update(run: Run, groups: Sequence[Group], step: int) -> Metrics:
    """One optimiser step per mini-batch of prompts, on advantages computed over all prompts of the step; where there is
    a critic, of both models.

    Every process is given all rollouts. Each data rank computes its share of the micro-batches; what depends on all of
    them (totals, KL in the reward, metrics) is summed over the ranks. Unscored rollouts (`Group.scored`) take no part.
    """
    config, loss = run.config, run.config.loss
    learnt = [group.scored for group in groups]
    rollouts = [r for group in learnt for r in group.rollouts]
    group_ids = torch.tensor([r.group for r in rollouts], dtype=torch.int64)
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
    with run.clock("logprobs"):
        mini_batches = [
            [m._replace(batch=add_logprobs(run, m.batch, old=needs_old)) for m in mini] for mini in mini_batches
        ]
    senior = torch.tensor([float((r.author == Author.SENIOR).sum()) for r in rollouts])
    junior = torch.tensor([float((r.author == Author.JUNIOR).sum()) for r in rollouts])
    counts = (senior + loss.junior_weight * junior) * used
    metrics = {
        "groups/zero_variance": flat.float().mean().item() if rollouts else 0.0,
        "groups/dropped": float(sum(not group.rollouts for group in learnt)),
        "lr": learning_rate(config, step),
    }
    if loss.kl_in_reward:
        kl = kl_of(run, mini_batches, len(rollouts))
        measured = (kl.sum() / counts.sum().clamp(min=1)).item()
        metrics |= {"kl/coef": run.kl_coef, "kl/per_token": measured}
    if run.critic is not None:
        mini_batches, found = with_gae(run, mini_batches, rewards)
        metrics |= found
    else:
        if loss.kl_in_reward:
            rewards -= run.kl_coef * kl
        advantages = compute_advantages(run.recipe, rewards, group_ids, counts)
        mini_batches = [
            [m._replace(batch=replace(m.batch, advantages=per_token(advantages[m.rows], m.batch))) for m in mini]
            for mini in mini_batches
        ]

    for part, peak in (("policy", config.train.lr), ("critic", config.train.critic_lr)):
        for group in run.parts[part].optimizer.param_groups if part in run.parts else ():
            group["lr"] = learning_rate(config, step, peak)
    updates = [[m.batch for m in mini] for mini in mini_batches if mini]
    learn = run.critic is None or step > config.train.critic_warmup_steps
    results = []
    for i, batches in enumerate(updates):
        with run.clock("forward_backward"):
            result = optimise(run, batches, first=i == 0, learn=learn)
        if run.critic is not None:
            with run.clock("critic"):
                result |= optimise_critic(run, batches)
        results.append(result)
    results = results or [{"loss": 0.0, "grad_norm": 0.0}]  # a step without any usable group
    if loss.kl_target is not None and updates and learn:
        run.kl_coef = adapt_kl_coef(run.kl_coef, measured, target=loss.kl_target)
    names = dict.fromkeys(name for result in results for name in result)
    means = {name: fmean(result[name] for result in results if name in result) for name in names}
    return metrics | {"updates": float(len(updates))} | means


def split(run: Run, rollouts: Sequence[Rollout], rows: Tensor) -> list[MicroBatch]:
    """This data rank's micro-batches of some rollouts, within the token budget: as many as every other rank has."""
    chosen, world = [rollouts[i] for i in rows.tolist()], run.world
    bins = micro_batches(
        [len(r.tokens) for r in chosen],
        run.config.train.tokens_per_micro_batch,
        parts=world.data_size,
        groups=[r.group for r in chosen],
    )
    return [
        MicroBatch(rows[b], pack([chosen[i] for i in b], run.device))
        if b
        else MicroBatch(rows[:1], pack_tokens([[0]], run.device))  # a rank without work still joins the collectives
        for b in bins[world.data_rank :: world.data_size]
    ]


@torch.no_grad()
def add_logprobs(run: Run, batch: Batch, *, old: bool) -> Batch:
    """Fill the channels of frozen models, and of policy and critic before their first update, where the loss needs
    them."""
    loss = run.config.loss
    models = {
        "old_logprobs": run.policy if old else None,
        "ref_logprobs": run.reference,
        "junior_logprobs": run.junior if loss.junior_kl_coef else None,
    }
    scored: dict[tuple[int, bool], Tensor] = {}  # one pass per distinct model: reference and junior may be the same
    channels = {}
    for name, model in models.items():
        if model is not None:
            bare = name == "ref_logprobs" and model is run.policy
            if (id(model), bare) not in scored:
                with adapter_free(model) if bare else nullcontext():
                    scored[id(model), bare] = run.logprobs(model, batch, batch.author >= 0)[0]
            channels[name] = scored[id(model), bare]
    if run.critic is not None:
        channels["old_values"] = run.values(batch, weights_of(run, batch) > 0)
    return replace(batch, **channels)


def kl_of(run: Run, mini_batches: Sequence[Sequence[MicroBatch]], rollouts: int) -> Tensor:
    """Σ w·k1 of old against reference log-probs, per rollout, from all data ranks: what is taken off its reward, before
    the coefficient."""
    kl = torch.zeros(rollouts, device=run.device)
    for rows, batch in (m for mini in mini_batches for m in mini):
        kl[rows] += sequence_sum(kl_at(run, batch), batch.sequence_ids, num_sequences=batch.num_sequences)
    return run.world.data_sum(kl).cpu()


def kl_at(run: Run, batch: Batch) -> Tensor:
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    return kl_penalty(batch.old_logprobs, batch.ref_logprobs, weights_of(run, batch))


@torch.no_grad()
def with_gae(
    run: Run, mini_batches: Sequence[Sequence[MicroBatch]], rewards: Tensor
) -> tuple[list[list[MicroBatch]], Metrics]:
    """Advantages and returns of every trained token; advantages are whitened over the whole step and all data ranks."""
    loss, flat = run.config.loss, [m for mini in mini_batches for m in mini]
    if not flat:
        return [[] for _ in mini_batches], {}
    parts = []
    for rows, b in flat:
        assert b.old_values is not None
        weight = weights_of(run, b)
        penalty = run.kl_coef * kl_at(run, b) if loss.kl_in_reward else None
        earned = token_rewards(rewards[rows].to(run.device), b.author, b.sequence_ids, penalty=penalty)
        found = gae(earned, b.old_values, weight > 0, b.sequence_ids, gamma=loss.gamma, lam=loss.lam)
        parts.append((*found, b.old_values, weight))
    advantages, returns, values, weight = (torch.cat(channel) for channel in zip(*parts, strict=True))
    explained = explained_variance(values, returns, weight, total=run.world.data_sum).item()
    if run.recipe.whiten:
        advantages = whiten(advantages, weight, total=run.world.data_sum)
    sizes = [len(m.batch.tokens) for m in flat]
    channels = zip(flat, advantages.split(sizes), returns.split(sizes), strict=True)
    batches = iter([replace(m.batch, advantages=a, returns=r) for m, a, r in channels])
    filled = [[m._replace(batch=next(batches)) for m in mini] for mini in mini_batches]
    return filled, {"value/explained_variance": explained}


def optimise(run: Run, batches: Sequence[Batch], *, first: bool, learn: bool = True) -> Metrics:
    """One optimiser step over micro-batches; the first of a training step also compares trainer and engine.

    Args:
        learn: False = only measure; the policy stays as it is.

    Raises:
        TrainError: log-probs do not match the engine's, or the gradient is not finite. Nothing was updated.
    """
    config, loss_config = run.config, run.config.loss
    weights = [weights_of(run, b) for b in batches]
    step_totals = total_over(run, batches)
    difference: list[Tensor] = []
    loss_sum = torch.zeros((), device=run.device)
    sums: dict[str, Tensor] = {}
    for batch, weight in zip(batches, weights, strict=True):
        senior = batch.author == Author.SENIOR
        select = (weight > 0) | senior | ((batch.author >= 0) & (loss_config.junior_kl_coef > 0))
        with torch.set_grad_enabled(learn):
            logprobs, entropy = run.logprobs(run.policy, batch, select)
        difference.append((logprobs.detach() - batch.behaviour_logprobs)[senior].abs())
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
        if learn:
            loss.backward()
        loss_sum = loss_sum + loss.detach()
        for name, value in parts.items():
            sums[name] = sums[name] + value if name in sums else value
    sums = {name: run.world.data_sum(value) for name, value in sums.items()}
    loss_value = run.world.data_sum(loss_sum).item()
    metrics = {name: value.item() for name, value in average_metrics(sums, step_totals).items()}
    if first:
        metrics |= mismatch(run.world, torch.cat(difference))
        if not config.train.async_steps:  # else the rollouts are of older weights
            check_mismatch(config, metrics.get("mismatch/mean_abs", 0.0))
    norm = move(run, "policy", loss_value, step_totals) if learn else 0.0
    return {"loss": loss_value, "grad_norm": norm} | metrics


def optimise_critic(run: Run, batches: Sequence[Batch]) -> Metrics:
    """One step of the critic towards the returns, over the same tokens and denominators as the policy's.

    Raises:
        TrainError: the gradient is not finite. The critic was not updated.
    """
    config, loss_config = run.config, run.config.loss
    step_totals = total_over(run, batches)
    loss_sum = torch.zeros((), device=run.device)
    for batch in batches:
        assert batch.old_values is not None
        assert batch.returns is not None
        weight = weights_of(run, batch)
        values = run.values(batch, weight > 0)
        loss = reduce(
            value_loss(values, batch.old_values, batch.returns, clip=loss_config.value_clip),
            weight,
            batch.author,
            batch.sequence_ids,
            num_sequences=batch.num_sequences,
            totals=step_totals,
            mode=run.recipe.mode,
            normalise_by=loss_config.normalise_by,
            constant=float(config.rollout.max_tokens),
        )
        loss.backward()
        loss_sum = loss_sum + loss.detach()
    loss_value = run.world.data_sum(loss_sum).item()
    return {"value/loss": loss_value, "value/grad_norm": move(run, "critic", loss_value, step_totals)}


def move(run: Run, part: str, loss: float, step_totals: Totals) -> float:
    """One optimiser step of a model; returns the norm of its gradient before clipping.

    Raises:
        TrainError: the gradient is not finite.
    """
    model, optimizer = run.parts[part]
    with run.clock("optimizer"):
        norm = clip_gradients(model.parameters(), run.config.train.grad_clip)
        if not math.isfinite(norm):
            raise TrainError(
                f"the gradient norm of the {part} is {norm} (loss {loss}): stopped before it reached the weights"
            )
        if float(step_totals.weight) > 0:  # else there is nothing to learn from, and weight decay alone is no training
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm


def total_over(run: Run, batches: Sequence[Batch]) -> Totals:
    """The totals of an optimiser step, over its micro-batches of all data ranks."""
    own = add_totals(
        totals(weights_of(run, b), b.author, b.sequence_ids, num_sequences=b.num_sequences) for b in batches
    )
    counts = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=run.device) for x in own])
    return Totals(*run.world.data_sum(counts).float())


def mismatch(world: World, gap: Tensor) -> Metrics:
    """Mean and largest |trainer - engine| log-prob of the senior tokens of all data ranks; none: nothing."""
    largest = gap.max() if len(gap) else gap.new_zeros(())
    total, count = world.data_sum(torch.stack([gap.sum(), gap.new_tensor(float(len(gap)))])).tolist()
    if not count:
        return {}
    return {"mismatch/mean_abs": total / count, "mismatch/max_abs": world.data_max(largest).item()}


def work(run: Run, groups: Sequence[Group], cost: Cost) -> Work:
    """What a step's rollouts and the update of the policy came to. A group's prompt counts once, as it is computed."""
    rollouts = [r for group in groups for r in group.scored.rollouts]
    flat = zero_variance_groups(
        torch.tensor([r.reward for r in rollouts], dtype=torch.float32),
        torch.tensor([r.group for r in rollouts], dtype=torch.int64),
    )
    used = [
        r for r, flat in zip(rollouts, flat.tolist(), strict=True) if not (flat and run.recipe.filter_zero_variance)
    ]
    whole = run.config.loss.junior_weight > 0 or run.config.loss.junior_kl_coef > 0
    predictions = sum(int((r.author >= (0 if whole else Author.SENIOR)).sum()) for r in used)
    later = [r for before, r in pairwise(used) if before.group == r.group]
    return Work(
        written=float(sum(r.response_tokens for group in groups for r in group.rollouts)),
        trained=float(sum(len(r.tokens) for r in used)),
        flops=float(
            update_flops(
                cost,
                [len(r.tokens) for r in used],
                predictions=predictions,
                shared=[len(r.tokens) - r.response_tokens for r in later],
            )
        ),
    )


def weights_of(run: Run, batch: Batch) -> Tensor:
    return token_weights(batch.author, junior_weight=run.config.loss.junior_weight)


def per_token(advantages: Tensor, batch: Batch) -> Tensor:
    """Each rollout's advantage on its response tokens."""
    spread = advantages.to(batch.tokens.device)[batch.sequence_ids]
    return torch.where(batch.author >= 0, spread, 0.0)
