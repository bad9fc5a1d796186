"""The recipes, one row each: functions by name, and choices. No torch, so that the config can read it.

To add an algorithm, write its functions and its row of the table here; a new surrogate also has an entry in ``CLIPS``.
A row names an estimator of ``losses.advantages`` (None: advantages per token, from a critic), a surrogate of
``losses.surrogates`` and a reduction; its other choices are fields of ``losses.Recipe``.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from tandemrl.config.fields import is_own

Importance = Literal["none", "token", "sequence"]
Reduction = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant"]

CLIPS = {"ppo_clip": ("clip_low", "clip_high", "dual_clip"), "cispo": ("clip_low", "clip_high"), "reinforce": ()}
"""The surrogates of ``losses.surrogates``, and what each clips by. One that clips by nothing has no ratio, hence no
correction for a second update. All are 0 where the advantage is 0 (see ``losses.idle``)."""


class Kind(NamedTuple):
    """A row of the table, and what it says of itself."""

    name: str
    says: str
    advantage: str | None
    surrogate: str
    reduction: Reduction
    choices: Mapping[str, Any] = {}

    @property
    def critic(self) -> bool | None:
        """Whether it needs a critic; None if that is not known before it is made."""
        return None if is_own(self.name) else self.advantage is None

    @property
    def clips(self) -> tuple[str, ...]:
        """The clip ranges that it uses, or may use."""
        return CLIPS.get(self.surrogate, CLIPS["ppo_clip"])


def _row(name: str, says: str, advantage: str | None, surrogate: str, reduction: Reduction, **choices: Any) -> Kind:
    return Kind(name, says, advantage, surrogate, reduction, choices)


_PPO: dict[str, float] = {"clip_low": 0.2, "clip_high": 0.2}
_TABLE = (
    # The tandem paper's (arXiv 2606.28166): verl's GRPO, that is DeepSeekMath's advantage (arXiv 2402.03300) with the
    # token mean and dual clip that verl has by default. That of 2402.03300 is reduction="sequence_mean_token_mean".
    _row("grpo", "DeepSeekMath's", "group_normalised", "ppo_clip", "token_mean", **_PPO, dual_clip=3.0),
    # arXiv 2503.20783: no std, no length in a denominator.
    _row("dr_grpo", "no division by deviation or length", "group_centred", "ppo_clip", "token_sum_constant", **_PPO),
    # arXiv 2503.14476: clip-higher, token mean, dynamic sampling, overlong buffer 4096 of 20480 tokens.
    _row(
        "dapo",
        "a higher upper clip, groups with equal rewards left out, a penalty for overlong responses",
        "group_normalised",
        "ppo_clip",
        "token_mean",
        clip_low=0.2,
        clip_high=0.28,
        filter_zero_variance=True,
        overlong_share=0.2,
    ),
    # arXiv 2507.18071, ranges of section 5.1.
    _row(
        "gspo",
        "one ratio per sequence",
        "group_normalised",
        "ppo_clip",
        "sequence_mean_token_mean",
        clip_low=3e-4,
        clip_high=4e-4,
        ratio_level="sequence",
    ),
    # arXiv 2506.13585: no lower bound; upper bound 5 as in ScaleRL (arXiv 2510.13786).
    _row("cispo", "clipped importance weights", "group_normalised", "cispo", "token_mean", clip_high=4.0),
    # arXiv 2402.14740: the whole completion is one action, no clipping, for on-policy updates.
    _row("rloo", "a leave-one-out baseline, no clipping", "leave_one_out", "reinforce", "sequence_mean_token_sum"),
    # arXiv 2501.03262, the variant with a group baseline.
    _row(
        "reinforce_pp",
        "REINFORCE++: a group baseline, advantages whitened over the batch",
        "group_centred",
        "ppo_clip",
        "token_mean",
        **_PPO,
        whiten=True,
    ),
    # arXiv 1707.06347 with GAE (arXiv 1506.02438) and a critic.
    _row("ppo", "with a critic, model.critic", None, "ppo_clip", "token_mean", **_PPO, whiten=True),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _TABLE}


def kind_of(name: str) -> Kind:
    """What is known of a recipe by its name: of one of the user's own, little.

    Raises:
        KeyError: there is no such recipe.
    """
    return Kind(name, "", None, "", "token_mean") if is_own(name) else KINDS[name]
