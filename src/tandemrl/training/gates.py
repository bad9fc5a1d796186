"""Gates: checks that stop a run which would otherwise train something else than what was asked for."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tandemrl.config import Config, ConfigError
from tandemrl.data.rows import Prompt
from tandemrl.models.attention import PackedLayout
from tandemrl.models.batching import pack_tokens
from tandemrl.models.forward import packed_logits, with_gathered_parameters
from tandemrl.models.head import ForwardOptions
from tandemrl.models.sampling import kept_tokens
from tandemrl.processes.world import World
from tandemrl.rollout.engine import Draws
from tandemrl.selection import Strategy

SIGMAS = 6.0
"""How many standard deviations the share of senior draws may be off prob_senior: one false alarm in 10⁹ checks."""
MISMATCH = {"float32": 1e-3, "bfloat16": 2e-2}
"""The least defaults of train.max_logprob_mismatch, by compute dtype: the mean of |trainer - engine| over the log-probs
of senior tokens, in nats."""
ROUNDINGS = 4.0
"""In 16 bits, the default is at least this many times the senior's ``self_difference``. A correct engine stays at about
one; wrong weights are far beyond."""
HIGHEST = 0.5
"""The highest default, in nats. Beyond it, the check could not tell rounding from wrong weights."""
SELF_TOKENS, SELF_TAIL = 128, 64
"""``self_difference`` reads at most so many tokens at the end of a prompt: at least two prompts, and further ones up to
this many tokens together. It looks at so many places at the end of each, since many prompts begin with the same fixed
words."""


class TrainError(RuntimeError):
    """A check failed, and going on would train something else than what was asked for. The message gives the reason."""


def check_draws(draws: Draws, prob_senior: float | None, copies: int = 1) -> None:
    """Check that the senior's share of all author draws lies within 6σ of ``prob_senior``.

    The check counts draws, not tokens, since the length of a segment depends on who writes it.

    Args:
        draws: the author draws of a step.
        prob_senior: the probability to check against. None skips the check.
        copies: how many rollouts share each draw; 1 if every rollout draws for itself.

    Raises:
        TrainError: the share lies outside.
    """
    if prob_senior is None or draws.total == 0:
        return
    sigma = math.sqrt(prob_senior * (1 - prob_senior) * copies / draws.total)
    share = draws.senior / draws.total
    if abs(share - prob_senior) > SIGMAS * sigma + 1e-12:
        raise TrainError(
            f"{draws.senior} of {draws.total} author draws fell to the senior ({share:.4f}); selection.prob_senior is "
            f"{prob_senior} (6σ = {SIGMAS * sigma:.4f}). Authors are not drawn as configured."
        )


def check_starts(strategy: Strategy, options: ForwardOptions, step: int) -> None:
    """Check that the strategy of a step has the same tables as that of the first step, which are those of the trainer.

    Args:
        options: the trainer's.

    Raises:
        TrainError: it has others.
    """
    for table, first in ((strategy.starts, options.starts), (strategy.removed, options.removed)):
        if not (first is None if table is None else first is not None and torch.equal(table.cpu(), first.cpu())):
            raise TrainError(
                f"step {step}: its strategy has other starts or removed ids than that of step 1; give all the same"
            )


def mismatch_limit(config: Config, measure: Callable[[], float]) -> float:
    """The limit of ``check_mismatch`` for a run, in nats: train.max_logprob_mismatch, or its default.

    Args:
        measure: returns the ``self_difference`` of the senior. It is called only if the limit depends on it.

    Raises:
        ConfigError: the default would be above ``HIGHEST``, or is not a number.
    """
    limit, dtype = config.train.max_logprob_mismatch, config.model.dtype
    if limit is not None:
        return limit
    if dtype == "float32":
        return MISMATCH[dtype]
    moved = measure()
    if not ROUNDINGS * moved <= HIGHEST:
        raise ConfigError(
            f"model.dtype={dtype}: rounding moves the log-probs of model.senior by {moved:.2g} nats on average, too "
            "much to tell it from wrong weights in the engine; use model.dtype=float32, or set "
            "train.max_logprob_mismatch to the difference of trainer and engine that you accept"
        )
    return max(MISMATCH[dtype], ROUNDINGS * moved)


@torch.no_grad()
def self_difference(
    policy: PreTrainedModel,
    prompts: Sequence[Prompt],
    options: ForwardOptions,
    dtype: torch.dtype,
    world: World,
    device: torch.device,
) -> float:
    """How far a model's log-probs move, on average in nats, if its embeddings are rounded otherwise.

    Every later rounding then falls otherwise, too. So this is how far two correct computations of the same weights are
    apart, such as a pass over a whole text and cached decoding. It is Σ p·|Δ log p| over the vocabulary, the expected
    difference for a token that the model draws, averaged over places in a few prompts. All processes must call this
    together, and all get the same result.

    Args:
        options: the distribution that tokens are drawn from.
        dtype, device: in which and on which the model computes.
    """
    rows = sorted((prompt.tokens[-SELF_TOKENS:] for prompt in prompts), key=len)
    most = max(2, int((np.cumsum([*map(len, rows)]) <= SELF_TOKENS).sum()))
    batch = pack_tokens(rows[:most], device)
    places = batch.lengths[batch.sequence_ids] - batch.positions <= SELF_TAIL
    spans = np.split(np.arange(len(batch.tokens)), batch.lengths.cumsum(0)[:-1].tolist())
    logits, head = with_gathered_parameters(packed_logits, policy), policy.get_output_embeddings()

    def logprobs() -> tuple[Tensor, Tensor]:
        """Those of all tokens, and which of them can be drawn."""
        with torch.autocast(device.type, dtype=options.autocast, enabled=options.autocast is not None):
            z = logits(head, batch.tokens, batch.positions, PackedLayout(spans, device))
        z = z[places, : options.vocabulary].float() / options.temperature
        cut = options.truncation
        kept = torch.ones_like(z, dtype=torch.bool) if cut is None else kept_tokens(z, cut)
        return z - z.masked_fill(~kept, -torch.inf).logsumexp(-1, keepdim=True), kept

    plain, drawn = logprobs()
    generator = torch.Generator().manual_seed(0)  # on the CPU: every process of a mesh draws the same
    width = torch.finfo(dtype).eps / 2

    def round_otherwise(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        noise = 2 * torch.rand(output.shape, generator=generator) - 1
        return output.float().mul_(1 + width * noise.to(output.device)).to(output.dtype)

    hook = policy.get_input_embeddings().register_forward_hook(round_otherwise)
    try:
        moved, _ = logprobs()
    finally:
        hook.remove()
    expected = (drawn * plain.exp() * (moved - plain).abs()).sum(-1).mean().item()
    return float(np.max(world.gather(expected)))  # NaN if any is


def check_mismatch(limit: float, mean_abs: float) -> None:
    """Check that trainer and engine agree on the log-probs of senior tokens.

    Args:
        limit: see ``mismatch_limit``.
        mean_abs: the mean absolute difference of their log-probs, in nats.

    Raises:
        TrainError: ``mean_abs`` is above the limit, or not a number.
    """
    if not mean_abs <= limit:
        raise TrainError(
            f"trainer and engine differ by {mean_abs:.3g} nats per senior token on average (limit {limit:.3g}): stale "
            "or wrong weights, another temperature or truncation, or a numerical fault. Raise "
            "train.max_logprob_mismatch only if the difference is understood."
        )
