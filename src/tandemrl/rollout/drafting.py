"""How many tokens the junior drafts before the senior reads them, and how many of them the senior accepts.

The length is chosen by what the passes of both should cost.

The cost of a pass is modelled, not measured. A measured one would make the rounding of log-probs, and so a resumed run,
depend on what else the machine does. The tokens are the same whatever length is chosen.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from tandemrl.rollout.engine import Passes

LENGTHS = (2, 4, 8, 12, 16)
"""The draft lengths to choose from, in tokens."""
GAIN = 1.1
"""By what factor drafts must look cheaper than single tokens to be used."""
PRIOR = Passes(drafted=20, accepted=16)
"""Assumed counts of drafted and accepted tokens, added to those of the call."""
OPTIMISTIC_PRIOR = Passes(drafted=20, accepted=19)
"""The prior where lazy decoding is the other choice: the acceptance rate becomes known only if drafts are tried."""

Flags = TypeVar("Flags", Tensor, np.ndarray)


def count_accepted(guesses: Flags, right: Flags) -> Passes:
    """Count draft acceptance, for any engine: how many drafted tokens the senior could refuse, and how many it accepts.

    ``Passes.acceptance`` is the share, which the metric ``draft/acceptance`` and the choice of the length go by. The
    junior's own tokens do not count, since nobody can refuse them. The callers are `decoding_rows.Block.cost` and
    vLLM's `drafting.Round.settle`. The ``acceptance`` of an evaluation is another measure: how many of the senior's
    tokens the junior would have drawn, too (`evals.reading`).

    Args:
        guesses: for each place, whether the junior drafted a token there, the senior is the author, and the row keeps
            a token there (so up to and with the first one in each draft that is not right).
        right: for each place, whether the senior draws the drafted token, too.
    """
    return Passes(drafted=int(guesses.sum()), accepted=int((guesses & right).sum()))


class Costs(NamedTuple):
    """What operations cost on a kind of device, in seconds."""

    layer: float
    """Of a pass, for each layer."""
    fetch: float
    """Of a pass, for each parameter: to fetch it from memory."""
    use: float
    """Of a pass, for each parameter and token: to compute with it."""
    draw: float
    """To draw a token for all rows."""
    launch: float = 0.0
    """Of a pass, whatever the model."""
    fetch_cached: float = 0.0
    """Of a pass, for each number in the KV cache of a row: to fetch it from memory."""
    attend: float = 0.0
    """Of a pass, for each number in the KV cache and token: to attend to it."""
    round: float = 0.0
    """Of a round in which every row gets tokens, beside its passes and draws."""


CPU = Costs(150e-6, 0.4e-9, 0.03e-9, 300e-6)
"""The torch engine on one CPU thread, in float32."""
CUDA = Costs(1.5e-3, 0.5e-12, 4e-15, 300e-6)
"""The torch engine on CUDA. A layer takes as long as its kernels' launches, which were measured with an H100 and a slow
core; the rest is by the specified figures of an H200 in bfloat16."""
VLLM_CPU = Costs(50e-6, 0.2e-9, 0.0115e-9, 450e-6, 1.5e-3, 0.083e-9, 0.0133e-9, 1.1e-3)
"""vLLM on one CPU thread, in float32, in eager mode."""
VLLM_CUDA = Costs(20e-6, 0.5e-12, 4e-15, 300e-6, 1e-3, 0.5e-12, 16e-15, 1e-3)
"""vLLM on CUDA, by the specified figures of an H200 in bfloat16 and guesses of the host's share; never measured."""


class Size(NamedTuple):
    """The size of a model.

    layers: how many layers it has. parameters: how many parameters a pass uses. cached: how many numbers each token
    adds to the KV cache; 0 leaves the cost of attention out.
    """

    layers: int
    parameters: int
    cached: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel, *, cached: int = 0) -> "Size":
        config, embeddings = model.config.get_text_config(), model.get_input_embeddings()
        embedded = 0 if config.tie_word_embeddings else sum(p.numel() for p in embeddings.parameters())
        parameters = sum(p.numel() for p in model.parameters()) - embedded
        return cls(int(config.num_hidden_layers), parameters, cached)


@dataclass(frozen=True)
class DraftLength:
    """Chooses how many tokens the junior drafts next. 0 means a single token for each row, without a draft.

    Args:
        tokens: a fixed length of every draft. None chooses the length that should cost least.
        lazy: whether a model computes nothing where it is the author of no token, and the token after a draft comes
            with it, as in vLLM. Else both models read every single token, and the senior reads every draft.
    """

    tokens: int | None
    senior: Size
    junior: Size
    costs: Costs
    lazy: bool = False

    def __call__(self, rows: int, passes: Passes, *, share: float = 0.5, context: float | int = 0) -> int:
        """The length of the next draft.

        Args:
            rows: how many rows are being decoded.
            passes: what the call cost so far.
            share: the share of tokens whose author is the senior.
            context: how many tokens a row has so far, on average.
        """
        if self.tokens is not None:
            return self.tokens
        known = passes + (OPTIMISTIC_PRIOR if self.lazy else PRIOR)
        wrong = share * (1 - known.accepted / known.drafted)

        def per_token(length: int) -> float:
            places = length + self.lazy
            kept = (1 - (1 - wrong) ** places) / wrong if wrong > 0 else float(places)
            return self.draft(length, rows, share, context) / kept

        best = min(LENGTHS, key=per_token)
        return best if GAIN * per_token(best) < self.single(rows, share, context) else 0

    def single(self, rows: int, share: float = 0.5, context: float | int = 0) -> float:
        """Seconds for one token of every row, without a draft."""
        wanted = self._wanted(share, rows), self._wanted(1 - share, rows)
        seconds = self.costs.round + (sum(wanted) if self.lazy else 1) * self.costs.draw
        for size, part, needed in ((self.senior, share, wanted[0]), (self.junior, 1 - share, wanted[1])):
            # Sooner or later it reads every token, unless it writes none.
            seconds += self._forward(size, rows * (part > 0), context, rows=rows * part, wanted=needed)
        return seconds

    def draft(self, length: int, rows: int, share: float = 0.5, context: float | int = 0) -> float:
        """Seconds for a draft of every row and what the senior makes of it."""
        places, last = length + self.lazy, self.lazy * self._wanted(1 - share, rows)
        read = self._wanted(share, rows * places)
        junior = self._forward(self.junior, rows, context, rows=rows) + self.costs.draw
        senior = (
            self._forward(self.senior, rows * places * (share > 0), context, rows=rows * read, wanted=read)
            + read * places * self.costs.draw
        )
        return self.costs.round + (length + last) * junior + senior

    def _wanted(self, share: float, places: int) -> float:
        """The probability that a pass takes place of a model that is the author at this share of some places."""
        return 1 - (1 - share) ** places if self.lazy else float(share > 0)

    def _forward(
        self, size: Size, tokens: int, context: float | int, *, rows: float | int, wanted: float | int = 1
    ) -> float:
        """Expected seconds of a pass over some tokens of some rows, if it takes place with probability ``wanted``."""
        c = self.costs
        once = c.launch + size.layers * c.layer + size.parameters * c.fetch
        cached = size.cached * context * (c.fetch_cached * rows + c.attend * tokens)
        return wanted * once + size.parameters * tokens * c.use + cached
