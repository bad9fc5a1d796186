"""Algorithms as values, made of the rows of ``config.recipes``, and the loss chain that runs any of them.

weights → surrogate → + β·kl − c·entropy → × importance weight → reduce (→ + λ_jun·kl on junior tokens).

A recipe is data, so an ablation is ``RECIPES["grpo"]._replace(surrogate=my_surrogate)``. Its two functions have these
signatures: ``advantage(rewards, group_ids) -> advantages``, one entry per rollout (``Advantage``), and
``surrogate(logprobs, old_logprobs, advantages, *, clip_low, clip_high, dual_clip) -> loss per token`` (``Surrogate``).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from tandemrl.config.recipes import CLIPS, KINDS, Importance, Reduction
from tandemrl.losses import advantages as estimators
from tandemrl.losses import surrogates
from tandemrl.losses.advantages import whiten
from tandemrl.losses.penalties import KLKind, kl
from tandemrl.losses.reduce import NormaliseBy, divisor, reduce, require_one_of
from tandemrl.losses.surrogates import (
    RatioLevel,
    Surrogate,
    clip_range,
    importance_weights,
    log_ratio,
    sequence_old_logprobs,
)
from tandemrl.types import Author, Batch, Totals

Advantage = Callable[[Tensor, Tensor], Tensor]


class Recipe(NamedTuple):
    """One algorithm, as the choices that it makes along the loss chain.

    advantage: the group estimator. None stands for per-token advantages from a critic (``gae``).
    surrogate: the function that gives each token its loss, see ``tandemrl.losses.surrogates``.
    reduction: how the losses of tokens become one number, see ``reduce``.
    clip_low, clip_high: how far a ratio may lie below and above 1. None leaves that side open.
    dual_clip: the bound c on the loss where the advantage is negative, see ``ppo_clip``. None sets no bound.
    ratio_level: whether each token has its own ratio, or all tokens of a sequence share one (GSPO).
    whiten: whether the advantages are whitened over the trained tokens of the batch.
    importance, importance_cap: level and cap of truncated importance sampling, which corrects for the difference
        between the sampler's log-probs and the trainer's. See ``importance_weights``.
    filter_zero_variance: whether groups whose outcomes are all equal are left out of the loss.
    overlong_share: the buffer of ``overlong_penalty`` as a share of the longest response. 0 means no length penalty.
    """

    name: str
    advantage: Advantage | None
    surrogate: Surrogate
    reduction: Reduction
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_level: RatioLevel = "token"
    whiten: bool = False
    importance: Importance = "none"
    importance_cap: float = 2.0
    filter_zero_variance: bool = False
    overlong_share: float = 0.0


ESTIMATORS: dict[str | None, Advantage | None] = {
    kind.advantage: None if kind.advantage is None else getattr(estimators, kind.advantage) for kind in KINDS.values()
}
SURROGATES: dict[str, Surrogate] = {name: getattr(surrogates, name) for name in CLIPS}
"""The library's surrogates. The loss of each is 0, and has gradient 0, at every token whose advantage is 0."""
RECIPES = {
    name: Recipe(name, ESTIMATORS[kind.advantage], SURROGATES[kind.surrogate], kind.reduction, **kind.choices)
    for name, kind in KINDS.items()
}
"""The rows of ``config.recipes`` with their functions."""


def compute_advantages(
    recipe: Recipe, rewards: Float[Tensor, " s"], group_ids: Int64[Tensor, " s"], token_counts: Float[Tensor, " s"]
) -> Float[Tensor, " s"]:
    """The advantage of each rollout.

    Pass the whole batch, with the rollouts of every rank, before it is split into mini-batches.

    Args:
        rewards: reward of each rollout.
        group_ids: the group of each rollout.
        token_counts: Σw over the tokens of each rollout. If the recipe whitens, the rollout counts with this weight.

    Raises:
        ValueError: the recipe takes its advantages from a critic, or its function did not return one for each rollout.
    """
    if recipe.advantage is None:
        raise ValueError(f"recipe {recipe.name}: advantages are per token, from a critic; use gae() and whiten()")
    advantages = recipe.advantage(rewards, group_ids)
    if not (isinstance(advantages, Tensor) and advantages.is_floating_point() and advantages.shape == rewards.shape):
        raise ValueError(
            f"the advantage function returned {_kind(advantages)}; expected a float for each rollout, shape "
            f"{list(rewards.shape)}"
        )
    return whiten(advantages, token_counts) if recipe.whiten else advantages


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
    logprobs: Float[Tensor, " t"],
    *,
    weights: Float[Tensor, " t"],
    totals: Totals,
    entropy: Float[Tensor, " t"] | None = None,
    coefficients: Coefficients = Coefficients(),  # noqa: B008 - immutable
) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
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

    advantages = torch.where(trained, batch.advantages, 0.0)
    clips = {name: getattr(recipe, name) for name in ("clip_low", "clip_high", "dual_clip")}
    x = recipe.surrogate(new, ratio_old, advantages, **clips)
    require_per_token(x, new)

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
    )
    metrics = {name: (weights * value.detach()).sum() for name, value in per_token.items()}
    if batch.junior_logprobs is not None:
        written = batch.author == Author.JUNIOR
        junior, senior = (torch.where(written, each, 0.0) for each in (batch.junior_logprobs, logprobs))
        pull = kl(junior, senior, kind="k3").sum()
        loss = loss + c.junior_kl_coef * pull / divisor(totals.response_tokens, pull)
        metrics["junior_kl"] = pull.detach()
    return loss, metrics


def has_ratio(recipe: Recipe) -> bool:
    """Whether the surrogate compares with old log-probs, so that a second update on the same rollouts is corrected for.

    One that is not the library's is taken to do so.
    """
    return recipe.surrogate not in [SURROGATES[name] for name, clips in CLIPS.items() if not clips]


def is_grouped(recipe: Recipe) -> bool:
    """Whether an advantage comes from the other rollouts of a group. What a custom function reads is not known."""
    return recipe.advantage is not None and recipe.advantage in ESTIMATORS.values()


def idle(
    recipe: Recipe,
    advantages: Float[Tensor, " s"],
    token_counts: Float[Tensor, " s"],
    coefficients: Coefficients = Coefficients(),  # noqa: B008 - immutable
) -> Bool[Tensor, " s"]:
    """Which rollouts add exactly 0 to the loss and to its gradient, so that no model needs to read them.

    These are the rollouts whose advantage is exactly 0, or none of whose tokens has a weight, if every term of the loss
    is multiplied by the advantage. With a KL or entropy term, with advantages per token from a critic, and with a
    surrogate that is not one of ``SURROGATES`` (what it does at 0 is not known), no rollout is idle.

    Args:
        recipe: the algorithm.
        advantages: the advantage of each rollout, see ``compute_advantages``.
        token_counts: Σw over the tokens of each rollout.
        coefficients: the further terms of the loss.
    """
    by_advantage = recipe.advantage is not None and recipe.surrogate in SURROGATES.values()
    if not by_advantage or coefficients.kl_coef or coefficients.entropy_coef or coefficients.junior_kl_coef:
        return torch.zeros_like(advantages, dtype=torch.bool)
    return (advantages == 0) | (token_counts == 0)


def average_metrics(sums: Mapping[str, Tensor], totals: Totals) -> dict[str, Tensor]:
    """Means of the metrics of ``policy_loss``, from their sums over a whole optimiser step.

    ``junior_kl`` is divided by the number of response tokens, every other metric by Σw. ``totals`` are those of the
    rollouts that were summed over, so without ``idle`` ones.
    """
    return {
        name: value / divisor(totals.response_tokens if name == "junior_kl" else totals.weight, value)
        for name, value in sums.items()
    }


def require_per_token(x: Any, logprobs: Float[Tensor, " t"]) -> None:
    """Refuse what a surrogate returned if it is not a loss for each token.

    A mean would otherwise be broadcast to all tokens, and train with other gradients than its author meant.

    Args:
        x: what the surrogate returned.
        logprobs: what it was given.

    Raises:
        ValueError: the shape or the type is wrong, or there is no gradient although ``logprobs`` has one.
    """
    if not (isinstance(x, Tensor) and x.is_floating_point() and x.shape == logprobs.shape):
        raise ValueError(
            f"the surrogate returned {_kind(x)}; expected a loss for each token, a float tensor of shape "
            f"{list(logprobs.shape)}: leave .mean() and .sum() to the recipe's reduction"
        )
    if logprobs.requires_grad and not x.requires_grad:
        raise ValueError("the surrogate returned a loss without a gradient: it must depend on logprobs undetached")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"{value!r:.60}, a {type(value).__name__}"


# ------------------------------------------------------------------------------------------------------------ the trial

RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "clip_low": ("None or in [0, 1]", lambda x: 0 <= x <= 1),
    "clip_high": ("None, 0 or positive", lambda x: 0 <= x < inf),
    "dual_clip": ("None or above 1", lambda x: 1 < x < inf),
    "importance_cap": ("positive", lambda x: 0 < x < inf),
    "overlong_share": ("in [0, 1)", lambda x: 0 <= x < 1),
}
"""What the numbers of a recipe must be, in words and as a test."""


def try_recipe(recipe: Recipe) -> None:
    """Check the choices of a recipe, and call its two functions on a few made-up rollouts and tokens.

    Raises:
        ValueError: the message says which field or function is at fault, and what it has to be or to return.
    """
    for field, allowed in (("reduction", Reduction), ("ratio_level", RatioLevel), ("importance", Importance)):
        require_one_of(field, getattr(recipe, field), allowed)
    for field, (words, holds) in RANGES.items():
        value = getattr(recipe, field)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (holds(value) if number else value is None and words.startswith("None")):
            raise ValueError(f"{field}={value!r}: must be {words}")
    if recipe.advantage is not None:  # two groups of three rollouts; the rewards of the second are equal
        rewards, groups = torch.tensor([1.0, 0.5, 0.0, 0.5, 0.5, 0.5]), torch.tensor([0, 1, 0, 1, 1, 0])
        with _named("advantage", "(rewards, group_ids)"):
            advantages = compute_advantages(recipe, rewards, groups, torch.ones(len(rewards)))
        if not bool(advantages.isfinite().all()):
            raise ValueError(
                f"the advantage function returned {advantages.tolist()} for the rewards {rewards.tolist()} of the "
                f"groups {groups.tolist()}; expected finite numbers, also for a group with equal rewards"
            )
    _try_surrogate(recipe)


@torch.enable_grad()
def _try_surrogate(recipe: Recipe) -> None:
    """Tokens with ratios below, at and above 1 and advantages of either sign and 0; the last one is not trained on."""
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0, -1.5, 0.0]).requires_grad_()
    old = torch.tensor([-0.5, -1.5, -1.5, -0.1, -3.0, -2.5, 0.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -0.5, 0.0, -2.0, 0.0])
    clips: dict[str, Any] = {name: getattr(recipe, name) for name in ("clip_low", "clip_high", "dual_clip")}
    with _named("surrogate", "(logprobs, old_logprobs, advantages, *, clip_low, clip_high, dual_clip)"):
        x = recipe.surrogate(logprobs, old, advantages, **clips)
    require_per_token(x, logprobs)
    (gradient,) = torch.autograd.grad(x.sum(), logprobs, allow_unused=True)
    if gradient is None or not bool(gradient.any()):
        raise ValueError("the gradient of the surrogate with respect to logprobs is 0: nothing would be learned")
    if not bool((x.isfinite() & gradient.isfinite()).all()):
        raise ValueError(
            f"the surrogate or its gradient is not finite at advantages {advantages.tolist()}, logprobs "
            f"{logprobs.tolist()}, old_logprobs {old.tolist()}: {x.tolist()}, {gradient.tolist()}"
        )


@contextmanager
def _named(what: str, signature: str) -> Iterator[None]:
    """A context in which an error that is no ValueError becomes one that names the function."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(
            f"the {what} function failed: {type(error).__name__}: {error}; it is called as {signature}"
        ) from error
