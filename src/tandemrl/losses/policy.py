"""The policy loss of a micro-batch: weights → surrogate → + β·kl − c·entropy → × importance weight → ``reduce``
(→ + λ_jun·kl on junior tokens, divided by all response tokens).

``losses.surrogates`` has what a surrogate makes of each token: for GRPO and PPO ``ppo_clip``, max(−r·A, −clip(r)·A)
with r = exp(logprobs − old_logprobs). kl is k3 = eᵈ − d − 1 with d = ref_logprobs − logprobs (``penalties.kl``).
Everything else of the loss, and all that it is divided by, is here. A recipe's row is in ``config.recipes``; ``loss.*``
overrides it key by key, and ``train.async_steps`` adds importance weights per token
(``training.arguments.resolve_recipe``).

The denominators are global: ``Totals`` counts every micro-batch of every rank of the optimiser step. The
step's loss is then the plain sum of the micro-batch losses, whatever the split (gradients that are averaged over ranks,
as DDP and FSDP do, must be multiplied by the number of ranks). A sequence lies in one micro-batch, never in two.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Int8
from torch import Tensor

from tandemrl.config.recipes import Importance, RatioLevel, Recipe, Reduction, library_name
from tandemrl.losses.penalties import KLKind, kl
from tandemrl.losses.recipes import losses_of
from tandemrl.losses.surrogates import (
    clip_range,
    divisor,
    importance_weights,
    log_ratio,
    require_one_of,
    sequence_old_logprobs,
    sequence_sum,
)
from tandemrl.types import Author, Batch, IntPerToken, PerSequence, PerToken, Scalar, Totals

NormaliseBy = Literal["weight", "response"]


class Coefficients(NamedTuple):
    """The terms of a loss beside its recipe's own, and what it is divided by. The names are those of ``loss.*``.

    entropy_coef: this times the entropy of the policy is subtracted. kl_coef, kl_kind: this times the KL to the
    reference, of this kind, is added. junior_kl_coef: λ_jun, see ``policy_loss``. normalise_by, constant: see
    ``reduce``.
    """

    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: KLKind = "k3"
    junior_kl_coef: float = 0.0
    normalise_by: NormaliseBy = "weight"
    constant: float | None = None


def policy_loss(
    recipe: Recipe,
    batch: Batch,
    logprobs: PerToken,
    *,
    weights: PerToken,
    totals: Totals,
    entropy: PerToken | None = None,
    coefficients: Coefficients = Coefficients(),  # noqa: B008 - immutable
) -> tuple[Scalar, dict[str, Scalar]]:
    """The share of this micro-batch in the loss of the optimiser step, and detached sums for metrics.

    Tokens of weight 0 have no influence, with one exception: ``junior_kl_coef`` (λ_jun) adds
    λ_jun · Σ k3 / response tokens, where the sum runs over the tokens that the junior wrote. Since the junior sampled
    them, k3 estimates KL(junior ‖ senior) there, and its gradient pulls the senior towards the junior. The denominator
    is all response tokens of the step under either ``normalise_by``, so the term shrinks with the junior's share.

    Args:
        recipe: the algorithm.
        batch: the micro-batch. Without ``old_logprobs`` this is the first update of the step, and ``logprobs`` are the
            log-probs before it, too.
        logprobs: log-probs of the policy now, with their gradient.
        weights: token weights, see ``token_weights``.
        totals: the counts of the whole optimiser step, over all ranks and micro-batches.
        entropy: entropy of the policy at each token, in nats.
        coefficients: the further terms.

    Returns:
        loss: the loss of the step is the sum over its micro-batches and ranks.
        metrics: sums to add over micro-batches and ranks; ``average_metrics`` divides them by the totals. Σw·value of
            ``ratio``, of ``clip_fraction`` (1 where the ratio is outside the clip range, whatever the advantage's
            sign), of ``approx_kl`` (k3 of old against new), and of ``importance``, ``entropy`` and ``ref_kl`` where
            they are computed; and ``junior_kl``, the plain sum over the tokens that the junior wrote.

    Raises:
        ValueError: a coefficient is set without the channel that it multiplies, the surrogate does not use a clip range
            that is set or does not return a loss for each token, or a choice is unknown.
    """
    c, sequence_ids, num_sequences = coefficients, batch.sequence_ids, batch.num_sequences
    require_one_of("ratio_level", recipe.ratio_level, RatioLevel)
    require_one_of("importance", recipe.importance, Importance)
    for name, coef, channel, tensor in (
        ("entropy_coef", c.entropy_coef, "entropy", entropy),
        ("kl_coef", c.kl_coef, "ref_logprobs", batch.ref_logprobs),
        ("junior_kl_coef", c.junior_kl_coef, "junior_logprobs", batch.junior_logprobs),
    ):
        if coef != 0.0 and tensor is None:
            raise ValueError(f"{name}={coef} needs {channel}: pass it or set {name} to 0")

    # Masked on entry, not only in the reduction: there, a NaN at a weight-0 token would still have a NaN gradient.
    trained = weights > 0
    new = torch.where(trained, logprobs, 0.0)
    old = new.detach() if batch.old_logprobs is None else torch.where(trained, batch.old_logprobs, 0.0)
    ratio_old = old
    if recipe.ratio_level == "sequence":
        ratio_old = sequence_old_logprobs(new, old, weights, sequence_ids, num_sequences=num_sequences)

    x = losses_of(recipe, new, ratio_old, torch.where(trained, batch.advantages, 0.0))

    with torch.no_grad():
        ratio = log_ratio(new, ratio_old).exp()
        low, high = clip_range(recipe.clip_low, recipe.clip_high)
        per_token = {
            "ratio": ratio,
            "clip_fraction": ((ratio < low) | (ratio > high)).to(ratio.dtype),
            "approx_kl": kl(old, new, kind="k3"),
        }
    if batch.ref_logprobs is not None:
        per_token["ref_kl"] = kl(new, torch.where(trained, batch.ref_logprobs, 0.0), kind=c.kl_kind)
        x = x + c.kl_coef * per_token["ref_kl"]
    if entropy is not None:
        per_token["entropy"] = torch.where(trained, entropy, 0.0)
        x = x - c.entropy_coef * per_token["entropy"]
    if recipe.importance != "none":
        per_token["importance"] = importance_weights(
            old,
            batch.behaviour_logprobs,
            weights,
            sequence_ids,
            num_sequences=num_sequences,
            level=recipe.importance,
            cap=recipe.importance_cap,
        )
        x = x * per_token["importance"]
    loss = reduce(
        x,
        weights,
        batch.author,
        sequence_ids,
        num_sequences=num_sequences,
        totals=totals,
        reduction=recipe.reduction,
        normalise_by=c.normalise_by,
        constant=c.constant,
        shares=batch.shares,
    )
    metrics = {name: (weights * value.detach()).sum() for name, value in per_token.items()}
    if batch.junior_logprobs is not None:
        written = batch.author == Author.JUNIOR
        junior, senior = (torch.where(written, each, 0.0) for each in (batch.junior_logprobs, logprobs))
        pull = kl(junior, senior, kind="k3").sum()
        loss = loss + c.junior_kl_coef * pull / divisor(totals.response_tokens, pull)
        metrics["junior_kl"] = pull.detach()
    return loss, metrics


def reduce(
    x: PerToken,
    weights: PerToken,
    author: Int8[Tensor, " t"],
    sequence_ids: IntPerToken,
    *,
    num_sequences: int,
    totals: Totals,
    reduction: Reduction,
    normalise_by: NormaliseBy = "weight",
    constant: float | None = None,
    shares: PerSequence | None = None,
) -> Scalar:
    """The share of this micro-batch in the loss of the optimiser step, from losses ``x`` and weights ``w`` per token.

    - ``token_mean``: Σ w·x / Σw (DAPO, arXiv 2503.14476, equation 8).
    - ``sequence_mean_token_mean``: the mean over sequences of Σ w·x / Σw (GRPO, arXiv 2402.03300, equation 3).
    - ``sequence_mean_token_sum``: the mean over sequences of Σ w·x (RLOO, arXiv 2402.14740).
    - ``token_sum_constant``: the mean over sequences of Σ w·x / ``constant`` (Dr. GRPO, arXiv 2503.20783), with
      ``constant`` the longest response allowed, in tokens.

    Under ``normalise_by="response"`` the first two divide by the number of response tokens, whoever wrote them, instead
    of by Σw. The loss then shrinks with the senior's share. Sequences with Σw = 0 add nothing and are not counted as
    sequences; their response tokens count in ``token_mean`` under ``normalise_by="response"``. Entries of ``x`` at
    weight 0 are ignored, even NaN. Without any positive weight the result is 0, and so is its gradient.

    Args:
        totals: the counts of the whole optimiser step, over all ranks and micro-batches, not of this micro-batch.
            ``training.experience.pack_mini_batches`` counts them once: every process has all rollouts. Gradients are
            added over processes, never averaged.
        shares: of each sequence in its episode, whose sequences count as one: what it has of the denominator of
            ``sequence_mean_token_mean``. They sum to 1 over an episode. None: each sequence is one.

    Raises:
        ValueError: ``reduction`` or ``normalise_by`` is unknown, or ``token_sum_constant`` has no positive
            ``constant``.
    """
    require_one_of("reduction", reduction, Reduction)
    require_one_of("normalise_by", normalise_by, NormaliseBy)
    weighted = torch.where(weights > 0, x, 0.0) * weights
    if reduction == "token_mean":
        count = totals.weight if normalise_by == "weight" else totals.response_tokens
        return weighted.sum() / divisor(count, weighted)
    if reduction == "token_sum_constant":
        if constant is None or constant <= 0:
            raise ValueError(f"constant={constant}: reduction token_sum_constant needs the longest response in tokens")
        return weighted.sum() / (constant * divisor(totals.sequences, weighted))
    per_sequence = sequence_sum(weighted, sequence_ids, num_sequences=num_sequences)
    if reduction == "sequence_mean_token_mean":
        counted = weights if normalise_by == "weight" else (author >= 0).to(weights.dtype)
        per_sequence = per_sequence / divisor(
            sequence_sum(counted, sequence_ids, num_sequences=num_sequences), per_sequence
        )
        per_sequence = per_sequence if shares is None else per_sequence * shares
    return per_sequence.sum() / divisor(totals.sequences, per_sequence)


def totals(weights: PerSequence, response_tokens: PerSequence) -> Totals:
    """The counts of some sequences as 0-d tensors, in float64.

    Args:
        weights: Σw over the tokens of each sequence.
        response_tokens: how many tokens of each sequence either author wrote.
    """
    weights = weights.double()
    return Totals((weights > 0).double().sum(), response_tokens.double().sum(), weights.sum())


def average_metrics(sums: Mapping[str, Tensor], totals: Totals) -> dict[str, Tensor]:
    """Means of the metrics of ``policy_loss``, from their sums over a whole optimiser step.

    ``junior_kl`` is divided by the number of response tokens, every other metric by Σw. ``totals`` are those of the
    rollouts that were summed over, so without ``idle`` ones.
    """
    return {
        name: value / divisor(totals.response_tokens if name == "junior_kl" else totals.weight, value)
        for name, value in sums.items()
    }


def idle(
    recipe: Recipe,
    advantages: PerSequence,
    token_counts: PerSequence,
    coefficients: Coefficients = Coefficients(),  # noqa: B008 - immutable
) -> Bool[Tensor, " s"]:
    """Which rollouts add exactly 0 to the loss and to its gradient, so that no model needs to read them.

    These are the rollouts whose advantage is exactly 0, or none of whose tokens has a weight, if every term of the loss
    is multiplied by the advantage. With a KL or entropy term, with advantages per token from a critic, and with a
    surrogate of the user's (what it does at 0 is not known), no rollout is idle.

    Args:
        recipe: the algorithm.
        advantages: the advantage of each rollout, see ``compute_advantages``.
        token_counts: Σw over the tokens of each rollout.
        coefficients: the further terms of the loss.
    """
    by_advantage = not recipe.critic and library_name(recipe.surrogate)
    if not by_advantage or coefficients.kl_coef or coefficients.entropy_coef or coefficients.junior_kl_coef:
        return torch.zeros_like(advantages, dtype=torch.bool)
    return (advantages == 0) | (token_counts == 0)
