"""The settings of who generates what. No torch."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tandemrl.config.fields import (
    Allowed,
    Fraction,
    NonNegativeInt,
    PositiveFraction,
    PositiveInt,
    component,
)
from tandemrl.config.strategies import KINDS, Kind, kind_of


@dataclass(frozen=True)
class SelectionConfig:
    """Who generates which token."""

    strategy: Annotated[str, component(KINDS)] = "word"
    """When the author changes. `module:name` = a custom function that returns a Strategy."""
    parameters: dict[str, Any] = field(default_factory=dict, hash=False)
    """Parameters of a custom strategy. Those that have the name of a key below get its value."""
    prob_senior: Annotated[
        float, Allowed("in (0, 1]: without senior tokens nothing is trained", lambda p: 0 < p <= 1)
    ] = 0.5
    """p: probability that a draw falls to the senior."""
    max_gap_tokens: PositiveInt = 32
    """K: `word` redraws at the latest this many tokens after the last draw, `word_aligned` at the next safe place."""
    chunk_size: PositiveInt = 16
    """Tokens that an author generates at a time, with `chunk`."""
    first: Literal["senior", "junior"] = "senior"
    """Who starts (`sentence`, `chunk`, `alternating`, `alternating_turns`) or who generates everything (`solo`)."""
    prob_senior_final: PositiveFraction | None = None
    """With `anneal_steps`: prob_senior moves linearly to this value."""
    draws: Literal["per_rollout", "per_group"] = "per_rollout"
    """Whether each rollout draws its authors, or all of a group draw the same: then, as far as their texts take the
    same course, the luck of the draws cancels in the advantage."""
    max_untranslatable: Fraction = 0.01
    """Two vocabularies: stop if more than this share of a step's rollouts cannot be expressed in both (beyond chance,
    6σ). Such rollouts are not scored and not trained on."""
    anneal_steps: NonNegativeInt = 0
    """Training steps in which prob_senior moves to prob_senior_final; 0 = it stays."""

    @property
    def kind(self) -> Kind:
        """What the strategy says of itself."""
        return kind_of(self.strategy)
