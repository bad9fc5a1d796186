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
"""The prior where the choice can change during a call. It is optimistic, since the acceptance rate becomes known only
if drafts are tried."""
MARGIN = 1.08
"""By what factor another choice must look cheaper than the one in force."""
MIN_ROUNDS = 8
"""For how many rounds a choice stays in force at least."""


Flags = TypeVar("Flags", Tensor, np.ndarray)


def count_accepted(guesses: Flags, right: Flags) -> Passes:
    """Count draft acceptance, for any engine: how many drafted tokens the senior could refuse, and how many it accepts.

    ``Passes.acceptance`` is the share, which the metric ``draft/acceptance`` and the choice of the length go by. The
    junior's own tokens do not count, since nobody can refuse them.

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


class Load(NamedTuple):
    """What is being decoded.

    rows: how many rows. context: how many tokens a row has so far, on average. share: the share of tokens whose author
    is the senior.
    """

    rows: int
    context: float | int = 0
    share: float = 0.5


class Pair(NamedTuple):
    """The two models and their device, which tell what each way of decoding should cost."""

    senior: Size
    junior: Size
    costs: Costs

    def step(self, load: Load) -> float:
        """Seconds for one token of every row, if only its author's model computes it now.

        The other model reads it later, together with further tokens. A model that is the author of no row has no pass.
        """
        seconds = self.costs.round
        for size, share in ((self.senior, load.share), (self.junior, 1 - load.share)):
            wanted = 1 - (1 - share) ** load.rows
            rows, tokens = load.rows * share, load.rows * (share > 0)
            seconds += self.forward(size, tokens, load.context, rows=rows, wanted=wanted) + wanted * self.costs.draw
        return seconds

    def draft(self, ahead: int, load: Load) -> float:
        """Seconds for a draft of ``ahead`` tokens of every row, and for the token after it, which is not guessed.

        The junior's last pass is for the rows in which it is the author of that token. The senior reads all tokens.
        """
        places = load.rows * (ahead + 1)
        juniors, seniors = 1 - load.share**load.rows, 1 - (1 - load.share) ** places
        passes = ahead + juniors
        junior = self.forward(self.junior, load.rows, load.context) + self.costs.draw
        seconds = self.costs.round + passes * junior + seniors * (ahead + 1) * self.costs.draw
        tokens = places * (load.share > 0)
        return seconds + self.forward(self.senior, tokens, load.context, rows=load.rows * seniors, wanted=seniors)

    def forward(
        self, size: Size, tokens: int, context: float | int = 0, *, rows: float | None = None, wanted: float = 1.0
    ) -> float:
        """Expected seconds of one pass of a model.

        Args:
            size: the size of the model.
            tokens: how many tokens the pass reads.
            context: how many tokens a row has so far, on average.
            rows: how many rows the tokens belong to. None means one row for each token.
            wanted: the probability that the pass takes place.
        """
        c = self.costs
        once = c.launch + size.layers * c.layer + size.parameters * c.fetch
        cached = size.cached * context * (c.fetch_cached * (tokens if rows is None else rows) + c.attend * tokens)
        return wanted * once + size.parameters * tokens * c.use + cached


def kept(length: int, wrong: float) -> float:
    """How many tokens of a draft a row keeps, on average: those up to and with the first wrong one.

    Args:
        length: how many tokens are drafted.
        wrong: the probability that a token is wrong if all before it are right.
    """
    return (1 - (1 - wrong) ** length) / wrong if wrong > 0 else float(length)


def wrong(passes: Passes, share: float, prior: Passes) -> float:
    """The probability that the senior is the author of a token and draws another one than was drafted.

    Args:
        passes: the counts of drafted and accepted tokens so far.
        share: the share of tokens whose author is the senior.
        prior: counts to add to those of ``passes``.
    """
    known = prior + passes
    return share * (1 - known.accepted / known.drafted)


@dataclass(frozen=True)
class DraftLength:
    """Chooses the length of the next draft in tokens. At 0, each row gets a single token that both models read.

    Args:
        tokens: a fixed length of every draft. None chooses the length that should cost least.
    """

    tokens: int | None
    senior: Size
    junior: Size
    costs: Costs

    def __call__(self, rows: int, passes: Passes, *, solo: bool = False) -> int:
        """The length of the next draft.

        Args:
            rows: how many rows are being decoded.
            passes: what the call cost so far.
            solo: whether the senior writes alone, so that without drafts the junior reads nothing.
        """
        if self.tokens is not None:
            return self.tokens
        pair, draw = Pair(self.senior, self.junior, self.costs), self.costs.draw
        missed = wrong(passes, 1.0 if solo else 0.5, PRIOR)

        def per_token(length: int) -> float:
            drafted = length * (pair.forward(self.junior, rows) + 2 * draw)
            return (drafted + pair.forward(self.senior, rows * length)) / kept(length, missed)

        best = min(LENGTHS, key=per_token)
        single = pair.forward(self.senior, rows) + (0.0 if solo else pair.forward(self.junior, rows)) + draw
        return best if GAIN * per_token(best) < single else 0


class Choice(NamedTuple):
    """A choice that is in force.

    ahead: how many tokens the junior drafts in every round; 0 means no drafts. rounds: for how many rounds this choice
    has been in force.
    """

    ahead: int = 0
    rounds: int = MIN_ROUNDS


@dataclass(frozen=True)
class Drafts:
    """Chooses the length of drafts from round to round, for an engine in which only the author's model computes a token
    that is not drafted.

    Args:
        tokens: a fixed length of every draft. None chooses the length that should cost least.
        pair: the two models. It may be None where only one option is left to choose.
    """

    tokens: int | None
    pair: Pair | None = None

    def choose(self, now: Choice, load: Load, passes: Passes, *, always: bool = False) -> Choice:
        """The choice of the next round.

        The present choice stays in force for at least ``MIN_ROUNDS`` rounds. After that, the option that should cost
        least per token replaces it if it looks cheaper by the factor ``MARGIN``.

        Args:
            now: the present choice.
            load: what is being decoded.
            passes: what the call cost so far.
            always: whether every round must draft.
        """
        lengths = LENGTHS if self.tokens is None else (self.tokens,)
        options = lengths if always else (0, *lengths)
        same = now._replace(rounds=now.rounds + 1)
        if options == (now.ahead,) or (now.ahead in options and now.rounds < MIN_ROUNDS):
            return same
        if len(options) == 1:
            return Choice(options[0], 0)
        assert self.pair is not None
        missed = wrong(passes, load.share, OPTIMISTIC_PRIOR)
        cost = {ahead: self.pair.draft(ahead, load) / kept(ahead + 1, missed) for ahead in lengths}
        cost |= {} if always else {0: self.pair.step(load)}
        best = min(cost, key=cost.__getitem__)
        return same if now.ahead in cost and cost[now.ahead] < MARGIN * cost[best] else Choice(best, 0)
