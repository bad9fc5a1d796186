"""Algorithms as values, made of the rows of ``config.recipes``. ``losses.policy`` is the loss chain that runs any.

A recipe is data, so an ablation is ``RECIPES["grpo"]._replace(surrogate=my_surrogate)``. Its two functions have these
signatures: ``advantage(rewards, group_ids) -> advantages``, one entry per rollout (``Advantage``), and
``surrogate(logprobs, old_logprobs, advantages, *, clip_low, clip_high, dual_clip) -> loss per token`` (``Surrogate``).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandemrl.config.recipes import CLIPS, KINDS, Importance, Reduction
from tandemrl.losses import advantages as estimators
from tandemrl.losses import surrogates
from tandemrl.losses.advantages import whiten
from tandemrl.losses.sums import require_one_of
from tandemrl.losses.surrogates import RatioLevel, Surrogate
from tandemrl.types import IntPerSequence, PerSequence, PerToken

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

    @property
    def critic(self) -> bool:
        """Whether it needs a critic."""
        return self.advantage is None

    @property
    def grouped(self) -> bool:
        """Whether an advantage comes from the other rollouts of a group. What a custom function reads is not known."""
        return self.advantage is not None and self.advantage in ESTIMATORS.values()

    @property
    def ratio(self) -> bool:
        """Whether the surrogate compares with old log-probs, so that a second update on the same rollouts is corrected
        for. One that is not the library's is taken to do so."""
        return self.surrogate not in [SURROGATES[name] for name, clips in CLIPS.items() if not clips]


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
    advantages = recipe.advantage(rewards, group_ids)
    if not (isinstance(advantages, Tensor) and advantages.is_floating_point() and advantages.shape == rewards.shape):
        raise ValueError(
            f"the advantage function returned {_kind(advantages)}; expected a float for each rollout, shape "
            f"{list(rewards.shape)}"
        )
    return whiten(advantages, token_counts) if recipe.whiten else advantages


def require_per_token(x: Any, logprobs: PerToken) -> None:
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
