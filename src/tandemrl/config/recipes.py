"""The recipes, one row each: functions by name, and choices. No torch, so that the config can read it.
``losses.RECIPES`` has the same rows with the functions themselves.

To add an algorithm, write its functions and its row of the table here; a new surrogate also has an entry in ``CLIPS``.
A row names an estimator of ``losses.advantages`` (None: advantages per token, from a critic), a surrogate of
``losses.surrogates`` and a reduction; its other choices are fields of `Recipe`.
"""

import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Importance = Literal["none", "token", "sequence"]
RatioLevel = Literal["token", "sequence"]
Reduction = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant"]

CLIPS = {"ppo_clip": ("clip_low", "clip_high", "dual_clip"), "cispo": ("clip_low", "clip_high"), "reinforce": ()}
"""The surrogates of ``losses.surrogates``, and what each clips by. One that clips by nothing has no ratio, hence no
correction for a second update. All are 0 where the advantage is 0 (see ``losses.idle``)."""


class Recipe(NamedTuple):
    """One algorithm, as the choices that it makes along the loss chain.

    advantage: the group estimator, or its name in ``losses.advantages``. None stands for per-token advantages from a
        critic (``gae``).
    surrogate: the function that gives each token its loss, see ``tandemrl.losses.surrogates``, or its name there.
    reduction: how the losses of tokens become one number, see ``reduce``.
    clip_low, clip_high: how far a ratio may lie below and above 1. None leaves that side open.
    dual_clip: the bound c on the loss where the advantage is negative, see ``ppo_clip``. None sets no bound.
    ratio_level: whether each token has its own ratio, or all tokens of a sequence share one (GSPO).
    whiten: whether the advantages are whitened over the trained tokens of the batch.
    importance, importance_cap: level and cap of truncated importance sampling, which corrects for the difference
        between the sampler's log-probs and the trainer's. See ``importance_weights``.
    filter_zero_variance: whether groups whose outcomes are all equal are left out of the loss.
    overlong_share: the buffer of ``overlong_penalty`` as a share of the longest response. 0 means no length penalty.
    says: what is special about it, for the reference of the config.
    """

    name: str
    advantage: Callable[..., Any] | str | None
    surrogate: Callable[..., Any] | str
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
    says: str = ""

    @property
    def critic(self) -> bool:
        """Whether it needs a critic."""
        return self.advantage is None

    @property
    def grouped(self) -> bool:
        """Whether an advantage comes from the other rollouts of a group. What a custom function reads is not known."""
        return bool(library_name(self.advantage))

    @property
    def clips(self) -> tuple[str, ...]:
        """The clip ranges that it uses, or may use. Without any, its surrogate does not compare with old log-probs, so
        that a second update on the same rollouts is not corrected for."""
        return CLIPS.get(library_name(self.surrogate), CLIPS["ppo_clip"])


def library_name(function: Callable[..., Any] | str | None) -> str:
    """The name by which a row of the table calls a function of the library; "" for one of the user's, or none."""
    if function is None or isinstance(function, str):
        return function or ""
    module, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    ours = module.startswith("tandemrl.losses.") and getattr(sys.modules[module], name, None) is function
    return name if ours else ""


def _row(name: str, says: str, advantage: str | None, surrogate: str, reduction: Reduction, **choices: Any) -> Recipe:
    return Recipe(name, advantage, surrogate, reduction, says=says, **choices)


_PPO: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
_DAPO = "a higher upper clip, groups with equal rewards left out, a penalty for overlong responses"
_WHITENED = "REINFORCE++: a group baseline, advantages whitened over the batch"
_TABLE = (
    # The tandem paper's (arXiv 2606.28166): verl's GRPO, that is DeepSeekMath's advantage (arXiv 2402.03300) with the
    # token mean and dual clip that verl has by default. That of 2402.03300 is reduction="sequence_mean_token_mean".
    _row("grpo", "DeepSeekMath's", "group_normalised", "ppo_clip", "token_mean", **_PPO, dual_clip=3.0),
    # arXiv 2503.20783: no std, no length in a denominator.
    _row("dr_grpo", "no division by deviation or length", "group_centred", "ppo_clip", "token_sum_constant", **_PPO),
    # arXiv 2503.14476: clip-higher, token mean, dynamic sampling, overlong buffer 4096 of 20480 tokens.
    _row("dapo", _DAPO, "group_normalised", "ppo_clip", "token_mean")._replace(
        clip_low=0.2, clip_high=0.28, filter_zero_variance=True, overlong_share=0.2
    ),
    # arXiv 2507.18071, ranges of section 5.1.
    _row("gspo", "one ratio per sequence", "group_normalised", "ppo_clip", "sequence_mean_token_mean")._replace(
        clip_low=3e-4, clip_high=4e-4, ratio_level="sequence"
    ),
    # arXiv 2506.13585: no lower bound; upper bound 5 as in ScaleRL (arXiv 2510.13786).
    _row("cispo", "clipped importance weights", "group_normalised", "cispo", "token_mean", clip_high=4.0),
    # arXiv 2402.14740: the whole completion is one action, no clipping, for on-policy updates.
    _row("rloo", "a leave-one-out baseline, no clipping", "leave_one_out", "reinforce", "sequence_mean_token_sum"),
    # arXiv 2501.03262, the variant with a group baseline.
    _row("reinforce_pp", _WHITENED, "group_centred", "ppo_clip", "token_mean", **_PPO, whiten=True),
    # arXiv 1707.06347 with GAE (arXiv 1506.02438) and a critic.
    _row("ppo", "with a critic, model.critic", None, "ppo_clip", "token_mean", **_PPO, whiten=True),
)

KINDS = {recipe.name: recipe for recipe in _TABLE}
