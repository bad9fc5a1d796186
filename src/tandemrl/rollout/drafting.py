"""How far the junior writes ahead before the senior reads it: as far as pays, by what both models should cost.

The cost of a pass is modelled, not measured: a measured one would make the rounding of log-probs, and so a resumed run,
depend on what else the machine does. The tokens are the same whatever is chosen.
"""

from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedModel

from tandemrl.rollout.engine import Passes

LENGTHS = (2, 4, 8, 12, 16)
"""Drafts to choose from."""
GAIN = 1.1
"""How much cheaper than single tokens a draft must look."""
PRIOR = Passes(drafted=20, accepted=16)
"""Stands for what is not known of a call's texts when it begins."""


class Costs(NamedTuple):
    """Seconds on a kind of device. Of a pass: for each layer; for each parameter, to fetch it; for each parameter and
    token, to use it. And of a draw for all rows."""

    layer: float
    fetch: float
    use: float
    draw: float


CPU = Costs(150e-6, 0.4e-9, 0.03e-9, 300e-6)
"""Of one thread, in float32."""
CUDA = Costs(100e-6, 0.5e-12, 4e-15, 300e-6)
"""By the figures of an H200 in bfloat16; never measured."""


class Size(NamedTuple):
    """Of a model. parameters: those that a pass uses."""

    layers: int
    parameters: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Size":
        config, embeddings = model.config.get_text_config(), model.get_input_embeddings()
        embedded = 0 if config.tie_word_embeddings else sum(p.numel() for p in embeddings.parameters())
        parameters = sum(p.numel() for p in model.parameters()) - embedded
        return cls(int(config.num_hidden_layers), parameters)


@dataclass(frozen=True)
class DraftLength:
    """Tokens of the next draft; 0 = a single token of each row.

    Args:
        tokens: of every draft; None = as many as pay.
    """

    tokens: int | None
    senior: Size
    junior: Size
    costs: Costs

    def __call__(self, rows: int, passes: Passes, *, solo: bool = False) -> int:
        """Args: passes: of the call so far. solo: the senior writes alone, and without drafts no junior has to read."""
        if self.tokens is not None:
            return self.tokens
        kept = {length: self._kept(length, passes, 1.0 if solo else 0.5) for length in LENGTHS}
        per_token = {length: self._seconds(length, rows) / kept[length] for length in LENGTHS}
        best = min(per_token, key=per_token.__getitem__)
        single = self._pass(self.senior, rows) + (0.0 if solo else self._pass(self.junior, rows)) + self.costs.draw
        return best if GAIN * per_token[best] < single else 0

    def _seconds(self, length: int, rows: int) -> float:
        """Of a draft and its verification."""
        draws = 2 * length * self.costs.draw
        return length * self._pass(self.junior, rows) + self._pass(self.senior, rows * length) + draws

    def _pass(self, size: Size, tokens: int) -> float:
        c = self.costs
        return size.layers * c.layer + size.parameters * (c.fetch + tokens * c.use)

    def _kept(self, length: int, passes: Passes, share: float) -> float:
        """Tokens of a draft that a row keeps, on average: those up to the first that the senior draws otherwise.

        Args:
            share: of the tokens whose author is the senior.
        """
        drafted, accepted = passes.drafted + PRIOR.drafted, passes.accepted + PRIOR.accepted
        wrong = share * (1 - accepted / drafted)
        return (1 - (1 - wrong) ** length) / wrong if wrong > 0 else float(length)
