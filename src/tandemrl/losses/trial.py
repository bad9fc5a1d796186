"""Tries a recipe on a few made-up tokens, before a run relies on it."""

from collections.abc import Callable
from math import inf
from typing import Any

import torch

from tandemrl.config.recipes import Importance, Reduction
from tandemrl.losses.recipes import Recipe, compute_advantages, require_per_token
from tandemrl.losses.reduce import require_one_of
from tandemrl.losses.surrogates import RatioLevel

OPTIONAL = ("clip_low", "clip_high", "dual_clip")
"""The numbers of a recipe that may be None."""
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
        if value is None and field in OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
            raise ValueError(f"{field}={value!r}: must be {words}")
    for field, function in (("advantage", recipe.advantage), ("surrogate", recipe.surrogate)):
        if not callable(function) and not (field == "advantage" and function is None):
            raise ValueError(f"{field}={function!r}: must be a function")
    _try_advantage(recipe)
    _try_surrogate(recipe)


def _try_advantage(recipe: Recipe) -> None:
    """Two groups of three rollouts; the rewards of the second are equal."""
    rewards, groups = torch.tensor([1.0, 0.5, 0.0, 0.5, 0.5, 0.5]), torch.tensor([0, 1, 0, 1, 1, 0])
    if recipe.advantage is None:
        return
    try:
        advantages = compute_advantages(recipe, rewards, groups, torch.ones(len(rewards)))
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(_failed("advantage", "(rewards, group_ids)", error)) from error
    if not bool(advantages.isfinite().all()):
        raise ValueError(
            f"the advantage function returned {advantages.tolist()} for the rewards {rewards.tolist()} of the groups "
            f"{groups.tolist()}; expected finite numbers, also for a group with equal rewards"
        )


def _try_surrogate(recipe: Recipe) -> None:
    """Tokens with ratios below, at and above 1 and advantages of either sign and 0; the last one is not trained on."""
    logprobs = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0, -1.5, 0.0]).requires_grad_()
    old = torch.tensor([-0.5, -1.5, -1.5, -0.1, -3.0, -2.5, 0.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -0.5, 0.0, -2.0, 0.0])
    clips: dict[str, Any] = {name: getattr(recipe, name) for name in ("clip_low", "clip_high", "dual_clip")}
    try:
        with torch.enable_grad():
            x = recipe.surrogate(logprobs, old, advantages, **clips)
    except ValueError:
        raise
    except Exception as error:
        signature = "(logprobs, old_logprobs, advantages, *, clip_low, clip_high, dual_clip)"
        raise ValueError(_failed("surrogate", signature, error)) from error
    require_per_token(x, logprobs)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(x.sum(), logprobs, allow_unused=True)
    if gradient is None or not bool(gradient.any()):
        raise ValueError("the gradient of the surrogate with respect to logprobs is 0: nothing would be learned")
    if not bool((x.isfinite() & gradient.isfinite()).all()):
        raise ValueError(
            f"the surrogate or its gradient is not finite at advantages {advantages.tolist()}, logprobs "
            f"{logprobs.tolist()}, old_logprobs {old.tolist()}: {x.tolist()}, {gradient.tolist()}"
        )


def _failed(what: str, signature: str, error: Exception) -> str:
    return f"the {what} function failed: {type(error).__name__}: {error}; it is called as {signature}"
