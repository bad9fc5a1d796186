"""Updates the weights from mini-batches with advantages: losses, gradients, optimiser steps, learning rates.

Gradients are summed, not averaged, since losses divide by totals over all micro-batches and data ranks of an optimiser
step.
"""

import math
from contextlib import nullcontext
from statistics import fmean

import torch
from torch import Tensor

from tandemrl.config import TrainConfig
from tandemrl.losses import average_metrics, log_ratio, policy_loss, reduce, value_loss, with_word_ends
from tandemrl.models.lora import dropping
from tandemrl.models.sharding import clip_gradients
from tandemrl.processes.world import World
from tandemrl.training.experience import MiniBatch, MiniBatches
from tandemrl.training.gates import TrainError, check_mismatch
from tandemrl.training.profiling import Clock
from tandemrl.training.state import Models, RunSetup, move_state
from tandemrl.types import Author, Metrics, Totals


def update(
    setup: RunSetup,
    models: Models,
    mini_batches: MiniBatches,
    step: int,
    clock: Clock,
    *,
    learns: bool = True,
    fresh: bool = True,
) -> Metrics:
    """Take one optimiser step for each mini-batch, of the policy and of the critic, if there is one.

    Args:
        learns: whether the policy is updated. If not, it stays as it is.
        fresh: whether the policy's present weights wrote the rollouts, so that its log-probs must match the engine's.
            If not, ``async_rollouts`` checks the match.

    Returns:
        Metrics, as means over the mini-batches.
    """
    train = setup.config.train
    peaks = {"policy": train.lr, "critic": train.critic_lr}
    for part, (_, optimizer) in models.trained.items():
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step, peaks[part])
    results: list[Metrics] = []
    for mini in (mini for mini in mini_batches if mini.micro):
        here = setup.world.rank // setup.config.parallel.tp  # those that share matrices leave out the same inputs
        key = (setup.config.train.seed, step, len(results), here)
        with clock("forward_backward"), dropping(models.policy, key, setup.device) if learns else nullcontext():
            unseen = not any("mismatch/mean_abs" in result for result in results)
            result = update_policy(setup, models, mini, clock, compares=unseen, learns=learns, fresh=fresh)
        if models.critic is not None:
            with clock("critic"):
                result |= update_critic(setup, models, mini, clock)
        results.append(result)
    updates = {"updates": float(len(results))}
    results = results or [{"loss": 0.0, "grad_norm": 0.0}]  # a step without any usable group
    names = dict.fromkeys(name for result in results for name in result)
    return updates | {name: fmean(result[name] for result in results if name in result) for name in names}


def update_policy(
    setup: RunSetup, models: Models, mini: MiniBatch, clock: Clock, *, compares: bool, learns: bool, fresh: bool
) -> Metrics:
    """Take one optimiser step of the policy over the micro-batches of a mini-batch.

    Args:
        compares: whether to compare the log-probs of trainer and engine, since no mini-batch of the training step
            before this one had a token of the senior.
        learns: whether the policy is updated. If not, metrics are measured only.
        fresh: whether the policy's present weights wrote the rollouts. If not, the mismatch with the engine is measured
            but not checked.

    Raises:
        TrainError: log-probs do not match the engine's, or the gradient is not finite. Nothing was updated.
    """
    coefficients = setup.coefficients
    difference: list[Tensor] = []
    loss_sum = torch.zeros((), device=setup.device)
    sums: dict[str, Tensor] = {}
    for _, batch, weight in mini.micro:
        senior = batch.author == Author.SENIOR
        select = (weight > 0) | senior | ((batch.author >= 0) & (coefficients.junior_kl_coef > 0))
        with torch.set_grad_enabled(learns):
            scores = setup.scores(models.policy, batch, select)
        pairs = zip(scores[:2], scores[2:], strict=True)
        ends = torch.ones_like(scores.end_logprobs, dtype=torch.bool)  # all are the senior's
        batch, weight, (logprobs, entropy, senior) = with_word_ends(batch, weight, *pairs, (senior, ends))
        plain = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs  # before the step's updates
        difference.append((plain - batch.behaviour_logprobs)[senior])
        loss, parts = policy_loss(
            setup.recipe,
            batch,
            logprobs,
            weights=weight,
            totals=mini.totals,
            entropy=entropy if coefficients.entropy_coef else entropy.detach(),
            coefficients=coefficients,
        )
        if learns:
            loss.backward()
        loss_sum = loss_sum + loss.detach()
        for name, value in parts.items():
            sums[name] = sums[name] + value if name in sums else value
    sums = {name: setup.world.data_sum(value) for name, value in sums.items()}
    loss_value = setup.world.data_sum(loss_sum).item()
    metrics = {name: value.item() for name, value in average_metrics(sums, mini.forwarded).items()}
    if compares and (gaps := logprob_mismatch(setup.world, torch.cat(difference))):
        metrics |= gaps
        if fresh:
            check_mismatch(setup.mismatch_limit, gaps["mismatch/mean_abs"])
    norm = optimizer_step(setup, models, "policy", loss_value, mini.totals, clock) if learns else 0.0
    return {"loss": loss_value, "grad_norm": norm} | metrics


def update_critic(setup: RunSetup, models: Models, mini: MiniBatch, clock: Clock) -> Metrics:
    """Take one optimiser step of the critic towards the returns, over the same tokens and denominators as the policy's.

    Raises:
        TrainError: the gradient is not finite. The critic was not updated.
    """
    critic, coefficients = models.critic, setup.coefficients
    assert critic is not None
    loss_sum = torch.zeros((), device=setup.device)
    for _, batch, weight in mini.micro:
        assert batch.old_values is not None
        assert batch.returns is not None
        values = setup.values(critic, batch, weight > 0)
        loss = reduce(
            value_loss(values, batch.old_values, batch.returns, clip=setup.config.loss.value_clip),
            weight,
            batch.author,
            batch.sequence_ids,
            num_sequences=batch.num_sequences,
            totals=mini.totals,
            reduction=setup.recipe.reduction,
            normalise_by=coefficients.normalise_by,
            constant=coefficients.constant,
            shares=batch.shares,
        )
        loss.backward()
        loss_sum = loss_sum + loss.detach()
    loss_value = setup.world.data_sum(loss_sum).item()
    norm = optimizer_step(setup, models, "critic", loss_value, mini.totals, clock)
    return {"value/loss": loss_value, "value/grad_norm": norm}


def optimizer_step(setup: RunSetup, models: Models, part: str, loss: float, totals: Totals, clock: Clock) -> float:
    """Clip the gradient of a model and take an optimiser step. Returns the norm of the gradient before clipping.

    Args:
        part: the name of the model, as in a checkpoint.
        loss: the value of the loss, for the message.

    Raises:
        TrainError: the gradient is not finite.
    """
    model, optimizer = models.trained[part]
    with clock("optimizer"):
        norm = clip_gradients(model.parameters(), setup.config.train.grad_clip)
        if not math.isfinite(norm):
            raise TrainError(
                f"the gradient norm of the {part} is {norm} (loss {loss}): stopped before it reached the weights"
            )
        if float(totals.weight) > 0:  # else weight decay alone would change the weights
            if offload := setup.config.parallel.offload_optimizer:
                move_state(optimizer, to_host=False)
            optimizer.step()
            if offload:
                move_state(optimizer, to_host=True)
        optimizer.zero_grad(set_to_none=True)
    return norm


def logprob_mismatch(world: World, difference: Tensor) -> Metrics:
    """How far the trainer's log-probs of senior tokens are from the engine's, over all data ranks.

    With d = trainer − engine (nats) for each of the n tokens, the metrics are:

    - ``mismatch/mean_abs``, ``mismatch/max_abs``: the mean and the largest |d|.
    - ``mismatch/ess``: (Σw)² / (n·Σw²) of the importance weights w = exp(d), with d clamped to ±20. This is the
      effective sample size (Kong 1992) as a share of the tokens. At 1 the tokens are as good as the trainer's own; at
      1/n a single token has all the weight.
    - ``mismatch/perplexity_ratio``: exp(−Σd / n), the trainer's perplexity of these tokens divided by the engine's. Its
      logarithm estimates KL(engine ‖ trainer), so it is mostly above 1.

    Without senior tokens there are no metrics.

    Args:
        difference: d of this data rank's senior tokens, before any update of the step.
    """
    gap, ratio = difference.abs(), log_ratio(difference, torch.zeros_like(difference)).double().exp()
    parts = (gap.sum(), difference.double().sum(), ratio.sum(), ratio.square().sum())
    largest = gap.max() if len(gap) else gap.new_zeros(())
    count = gap.new_tensor(len(gap), dtype=torch.float64)
    total, signed, weight, squared, count = world.data_sum(torch.stack([*(each.double() for each in parts), count]))
    if not count:
        return {}
    return {
        "mismatch/mean_abs": (total / count).item(),
        "mismatch/max_abs": world.data_max(largest).item(),
        "mismatch/ess": (weight.square() / (count * squared)).item(),
        "mismatch/perplexity_ratio": (-signed / count).exp().item(),
    }


def learning_rate(train: TrainConfig, step: int, peak: float) -> float:
    """The learning rate of a step: a linear warm-up over ``train.warmup_steps``, then constant or a cosine.

    The cosine would reach 0 one step after the last, so that every step learns.

    Args:
        step: the training step, from 1.
        peak: the learning rate after the warm-up.
    """
    if step <= train.warmup_steps:
        return peak * step / train.warmup_steps
    if train.schedule == "constant":
        return peak
    falling = max(1, train.steps - train.warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * (step - train.warmup_steps - 1) / falling))
