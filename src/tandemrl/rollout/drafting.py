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
HOPE = Passes(drafted=20, accepted=19)
"""The same where the choice can change: only drafts tell how often drafts are right, so in doubt they are tried."""
MARGIN = 1.08
"""How much cheaper another choice must look than the one in force."""
STEADY = 8
"""Rounds that a choice is in force at least."""


class Costs(NamedTuple):
    """Seconds on a kind of device. Of a pass: for each layer; for each parameter, to fetch it; for each parameter and
    token, to use it. And of a draw for all rows.

    What a pass costs beside that: whatever the model; for each number in the KV cache of a row, to fetch it; for each
    number and token, to attend to it. And of a round in which every row is given tokens, beside its passes.
    """

    layer: float
    fetch: float
    use: float
    draw: float
    launch: float = 0.0
    fetch_cached: float = 0.0
    attend: float = 0.0
    round: float = 0.0


CPU = Costs(150e-6, 0.4e-9, 0.03e-9, 300e-6)
"""Of one thread, in float32."""
CUDA = Costs(100e-6, 0.5e-12, 4e-15, 300e-6)
"""By the figures of an H200 in bfloat16; never measured."""
VLLM_CPU = Costs(50e-6, 0.2e-9, 0.0115e-9, 450e-6, 1.5e-3, 0.083e-9, 0.0133e-9, 1.1e-3)
"""Of vLLM on one thread of a CPU, in float32, eagerly."""
VLLM_CUDA = Costs(20e-6, 0.5e-12, 4e-15, 300e-6, 1e-3, 0.5e-12, 16e-15, 1e-3)
"""Of vLLM on CUDA. By the figures of an H200 in bfloat16, with guesses of what the host needs; never measured."""


class Size(NamedTuple):
    """Of a model. parameters: those that a pass uses. cached: numbers that a token leaves in the KV cache; 0: what
    attention costs is left out."""

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
    """What is decoded. context: tokens of a row so far, on average. share: of the tokens whose author is the senior."""

    rows: int
    context: float | int = 0
    share: float = 0.5


class Pair(NamedTuple):
    """Two models on a device: what ways of decoding should cost."""

    senior: Size
    junior: Size
    costs: Costs

    def step(self, load: Load) -> float:
        """Seconds for a token of every row, if only its author computes it at once. The other one reads it later,
        with others; a model that no row wants has no pass."""
        seconds = self.costs.round
        for size, share in ((self.senior, load.share), (self.junior, 1 - load.share)):
            wanted = 1 - (1 - share) ** load.rows
            rows, tokens = load.rows * share, load.rows * (share > 0)
            seconds += self.forward(size, tokens, load.context, rows=rows, wanted=wanted) + wanted * self.costs.draw
        return seconds

    def draft(self, ahead: int, load: Load) -> float:
        """Seconds for a draft of ``ahead`` tokens and one more of every row, which needs no guess.

        The junior's last pass is for the rows in which that token is its own, and the senior reads all.
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
        """Seconds for so many tokens of a model.

        Args:
            rows: that they belong to, if there are fewer than tokens.
            wanted: how probable it is that there is a pass at all.
        """
        c = self.costs
        once = c.launch + size.layers * c.layer + size.parameters * c.fetch
        cached = size.cached * context * (c.fetch_cached * (tokens if rows is None else rows) + c.attend * tokens)
        return wanted * once + size.parameters * tokens * c.use + cached


def kept(length: int, wrong: float) -> float:
    """Tokens of a draft that a row keeps, on average: those up to the first that is wrong.

    Args:
        wrong: how probable that is of a token, if all before it are right.
    """
    return (1 - (1 - wrong) ** length) / wrong if wrong > 0 else float(length)


def wrong(passes: Passes, share: float, prior: Passes) -> float:
    """How probable it is that the senior is a token's author and draws another one than was drafted."""
    known = prior + passes
    return share * (1 - known.accepted / known.drafted)


@dataclass(frozen=True)
class DraftLength:
    """Tokens of the next draft; 0 = a single token of each row, which both models read at once.

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
        pair, draw = Pair(self.senior, self.junior, self.costs), self.costs.draw
        missed = wrong(passes, 1.0 if solo else 0.5, PRIOR)

        def per_token(length: int) -> float:
            drafted = length * (pair.forward(self.junior, rows) + 2 * draw)
            return (drafted + pair.forward(self.senior, rows * length)) / kept(length, missed)

        best = min(LENGTHS, key=per_token)
        single = pair.forward(self.senior, rows) + (0.0 if solo else pair.forward(self.junior, rows)) + draw
        return best if GAIN * per_token(best) < single else 0


class Choice(NamedTuple):
    """ahead: tokens that the junior writes ahead in every round; 0 = none. rounds: for how long that has been so."""

    ahead: int = 0
    rounds: int = STEADY


@dataclass(frozen=True)
class Drafts:
    """The choice from round to round, where a token that is not drafted is computed by its author alone.

    Args:
        tokens: of every draft; None = as many as pay.
        pair: None: there is nothing to choose.
    """

    tokens: int | None
    pair: Pair | None = None

    def choose(self, now: Choice, load: Load, passes: Passes, *, always: bool = False) -> Choice:
        """What is cheapest per token, if by ``MARGIN`` cheaper than what has been done for ``STEADY`` rounds.

        Args:
            passes: of the call so far. always: something is drafted in every round.
        """
        lengths = LENGTHS if self.tokens is None else (self.tokens,)
        options = lengths if always else (0, *lengths)
        same = now._replace(rounds=now.rounds + 1)
        if options == (now.ahead,) or (now.ahead in options and now.rounds < STEADY):
            return same
        if len(options) == 1:
            return Choice(options[0], 0)
        assert self.pair is not None
        missed = wrong(passes, load.share, HOPE)
        cost = {ahead: self.pair.draft(ahead, load) / kept(ahead + 1, missed) for ahead in lengths}
        cost |= {} if always else {0: self.pair.step(load)}
        best = min(cost, key=cost.__getitem__)
        return same if now.ahead in cost and cost[now.ahead] < MARGIN * cost[best] else Choice(best, 0)
