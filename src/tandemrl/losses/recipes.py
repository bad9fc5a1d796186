"""Algorithms as values, made of the rows of ``config.recipes``. ``losses.policy`` is the loss chain that runs any.

A recipe is data, so an ablation is ``RECIPES["grpo"]._replace(surrogate=my_surrogate)``; name it in ``loss.recipe``
(``module:name``), or pass it as ``train(recipe=…)``. Its two functions have these
signatures: ``advantage(rewards, group_ids) -> advantages``, one entry per rollout (``Advantage``), and
``surrogate(logprobs, old_logprobs, advantages, *, clip_low, clip_high, dual_clip) -> loss per token`` (``Surrogate``).
"""

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor

from tandemrl.config.recipes import KINDS, Importance, RatioLevel, Recipe, Reduction
from tandemrl.losses import advantages as estimators
from tandemrl.losses import surrogates
from tandemrl.losses.advantages import whiten
from tandemrl.losses.surrogates import require_one_of
from tandemrl.types import IntPerSequence, PerSequence, PerToken

RECIPES = {
    name: row._replace(
        advantage=None if row.advantage is None else getattr(estimators, str(row.advantage)),
        surrogate=getattr(surrogates, str(row.surrogate)),
    )
    for name, row in KINDS.items()
}
"""The rows of ``config.recipes`` with their functions."""


def compute_advantages(
    recipe: Recipe, rewards: PerSequence, group_ids: IntPerSequence, token_counts: PerSequence
) -> PerSequence:
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
    advantages = recipe.advantage(rewards, group_ids)  # type: ignore[operator]  # no name: see RECIPES
    if not (isinstance(advantages, Tensor) and advantages.is_floating_point() and advantages.shape == rewards.shape):
        raise ValueError(
            f"the advantage function returned {_kind(advantages)}; expected a float for each rollout, shape "
            f"{list(rewards.shape)}"
        )
    return whiten(advantages, token_counts) if recipe.whiten else advantages


def losses_of(recipe: Recipe, logprobs: PerToken, old_logprobs: PerToken, advantages: PerToken) -> PerToken:
    """What the recipe's surrogate makes of each token.

    Raises:
        ValueError: the surrogate does not use a clip range that is set, or it did not return a loss for each token (a
            mean would be broadcast to all tokens, and train with other gradients than its author meant), or one
            without a gradient although ``logprobs`` has one.
    """
    clips = {name: getattr(recipe, name) for name in ("clip_low", "clip_high", "dual_clip")}
    x = recipe.surrogate(logprobs, old_logprobs, advantages, **clips)  # type: ignore[operator]  # no name: see RECIPES
    if not (isinstance(x, Tensor) and x.is_floating_point() and x.shape == logprobs.shape):
        raise ValueError(
            f"the surrogate returned {_kind(x)}; expected a loss for each token, a float tensor of shape "
            f"{list(logprobs.shape)}: leave .mean() and .sum() to the recipe's reduction"
        )
    if logprobs.requires_grad and not x.requires_grad:
        raise ValueError("the surrogate returned a loss without a gradient: it must depend on logprobs undetached")
    return x


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
    signatures = {
        _try_advantage: "advantage(rewards, group_ids)",
        _try_surrogate: "surrogate(logprobs, old_logprobs, advantages, *, clip_low, clip_high, dual_clip)",
    }
    for tried, signature in signatures.items():
        try:
            tried(recipe)
        except ValueError:
            raise
        except Exception as error:
            what = f"the {signature.partition('(')[0]} function failed: {type(error).__name__}: {error}"
            raise ValueError(f"{what}; it is called as {signature}") from error


def _try_advantage(recipe: Recipe) -> None:
    if recipe.critic:
        return
    # Two groups of three rollouts; the rewards of the second are equal.
    rewards, groups = torch.tensor([1.0, 0.5, 0.0, 0.5, 0.5, 0.5]), torch.tensor([0, 1, 0, 1, 1, 0])
    estimated = compute_advantages(recipe, rewards, groups, torch.ones(len(rewards)))
    if not bool(estimated.isfinite().all()):
        raise ValueError(
            f"the advantage function returned {estimated.tolist()} for the rewards {rewards.tolist()} of the "
            f"groups {groups.tolist()}; expected finite numbers, also for a group with equal rewards"
        )


@torch.enable_grad()
def _try_surrogate(recipe: Recipe) -> None:
    # Tokens with ratios below, at and above 1 and advantages of either sign and 0; the last one is not trained on.
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0, -1.5, 0.0]).requires_grad_()
    old = torch.tensor([-0.5, -1.5, -1.5, -0.1, -3.0, -2.5, 0.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -0.5, 0.0, -2.0, 0.0])
    x = losses_of(recipe, logprobs, old, advantages)
    (gradient,) = torch.autograd.grad(x.sum(), logprobs, allow_unused=True)
    if gradient is None or not bool(gradient.any()):
        raise ValueError("the gradient of the surrogate with respect to logprobs is 0: nothing would be learned")
    if not bool((x.isfinite() & gradient.isfinite()).all()):
        raise ValueError(
            f"the surrogate or its gradient is not finite at advantages {advantages.tolist()}, logprobs "
            f"{logprobs.tolist()}, old_logprobs {old.tolist()}: {x.tolist()}, {gradient.tolist()}"
        )
