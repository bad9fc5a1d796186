"""The settings of what is optimised. No torch."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tandemrl.config.fields import (
    Allowed,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    component,
)
from tandemrl.config.recipes import KINDS, Kind, kind_of


@dataclass(frozen=True)
class LossConfig:
    """What is optimised: the recipe, and what replaces or extends it. If a key takes null, that means the recipe's own
    value, unless its explanation says otherwise."""

    recipe: Annotated[str, component(KINDS)] = "grpo"
    """The algorithm: advantage, surrogate, reduction and clip range. `module:name` = a custom Recipe, or a function
    that returns one."""
    parameters: dict[str, Any] = field(default_factory=dict, hash=False)
    """Parameters of a custom recipe that is a function."""
    junior_weight: Fraction = 0.0
    """Loss weight of the junior's tokens: 0 = tandem GRPO, 1 = plain GRPO on every token."""
    word_ends: bool = True
    """With `before_word`: a senior that ends its word, where the junior takes over, has made a choice, which is trained
    like a token of its own. false leaves it out; the gradient is then biased."""
    clip_low: Fraction | None = None
    """The probability ratio is clipped at 1 - clip_low."""
    clip_high: NonNegativeFloat | None = None
    """The probability ratio is clipped at 1 + clip_high."""
    dual_clip: Annotated[float, Allowed("0 (off) or above 1", lambda x: x == 0 or x > 1)] | None = None
    """Bound of the loss at negative advantages; 0 = off."""
    kl_coef: NonNegativeFloat = 0.0
    """Coefficient of the KL to the initial policy; 0 = off."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL in the loss: Schulman's k2 or k3. The gradient of k1 has expectation 0 there."""
    kl_in_reward: bool = False
    """Subtract the KL (always k1, summed over trained tokens) from the reward instead of adding it to the loss."""
    junior_kl_coef: NonNegativeFloat = 0.0
    """λ_jun: coefficient of a KL that pulls the senior towards the junior on the junior's tokens (0 in the paper)."""
    entropy_coef: float = 0.0
    """Coefficient of an entropy bonus on trained tokens; 0 = off."""
    normalise_by: Literal["weight", "response"] = "weight"
    """What the loss is divided by. weight: the sum of the token weights; response: the number of response tokens,
    whoever generated them."""
    reduction: (
        Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "token_sum_constant"] | None
    ) = None
    """How the losses of tokens become one number. token_mean: the mean over tokens (DAPO); sequence_mean_token_mean:
    the mean over sequences of each one's mean (GRPO as first published); sequence_mean_token_sum: the mean over
    sequences of each one's sum; token_sum_constant: the same, divided by rollout.max_tokens (Dr. GRPO). The critic's
    loss is reduced in the same way."""
    importance: Literal["none", "token", "sequence"] | None = None
    """Level of truncated importance sampling (TIS) of the trainer's log-probs against the engine's."""
    importance_cap: PositiveFloat | None = None
    """Truncated importance sampling: the maximum weight, to which larger ones are clipped."""
    overlong_buffer: int | None = None
    """DAPO's overlong penalty: it grows over the last `overlong_buffer` tokens before rollout.max_tokens; 0 = off."""
    filter_zero_variance: bool | None = None
    """Leave groups whose rewards are all equal out of the update."""
    kl_target: float | None = None
    """With kl_in_reward: adapt kl_coef so that the KL per trained token becomes this, in nats; null = fixed."""
    gamma: PositiveFraction = 1.0
    """With ppo: discount per trained token."""
    lam: Fraction = 0.95
    """With ppo: λ of generalised advantage estimation."""
    value_clip: PositiveFloat | None = 0.5
    """With ppo: how far the critic's values may move per update before they are clipped; null = no clipping."""

    @property
    def kind(self) -> Kind:
        """What is known of the recipe before it is made."""
        return kind_of(self.recipe)

    @property
    def loss_kl_coef(self) -> float:
        """The coefficient of the KL in the loss."""
        return 0.0 if self.kl_in_reward else self.kl_coef
