"""From per-token results to one scalar: where the policy loss is divided, and by what.

The term of ``loss.junior_kl_coef`` is divided in ``recipes.policy_loss``, by all response tokens.

The denominators are global: ``Totals`` counts every micro-batch of every rank of the optimiser step. The step's loss is
then the plain sum of the micro-batch losses, whatever the split (gradients that are averaged over ranks, as DDP and
FSDP do, must be multiplied by the number of ranks). A sequence lies in one micro-batch, never in two.
"""

from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int8, Int64
from torch import Tensor

from tandemrl.config.recipes import Reduction
from tandemrl.types import Totals

NormaliseBy = Literal["weight", "response"]


def sequence_sum(
    x: Float[Tensor, " t"], sequence_ids: Int64[Tensor, " t"], *, num_sequences: int
) -> Float[Tensor, " s"]:
    """The sum of ``x`` over the tokens of each sequence, and 0 for a sequence without tokens."""
    return x.new_zeros(num_sequences).index_add(0, sequence_ids, x)


def totals(weights: Float[Tensor, " s"], response_tokens: Float[Tensor, " s"]) -> Totals:
    """The counts of some sequences as 0-d tensors, in float64.

    Args:
        weights: Σw over the tokens of each sequence.
        response_tokens: how many tokens of each sequence either author wrote.
    """
    weights = weights.double()
    return Totals((weights > 0).double().sum(), response_tokens.double().sum(), weights.sum())


def require_one_of(name: str, value: str, allowed: Any) -> None:
    """Refuse a ``value`` that is not in the Literal type ``allowed``.

    Raises:
        ValueError: the value is not allowed; the message names the argument and the allowed values.
    """
    if value not in get_args(allowed):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(get_args(allowed))}")


def divisor(count: float | Tensor, like: Tensor) -> Tensor:
    """``count`` as a denominator: 1 where the count is 0, since the numerator is 0 there too.

    Args:
        count: A number or a tensor.
        like: the result gets this tensor's dtype and device.
    """
    count = torch.as_tensor(count, dtype=like.dtype, device=like.device)
    return torch.where(count > 0, count, torch.ones_like(count))


def reduce(
    x: Float[Tensor, " t"],
    weights: Float[Tensor, " t"],
    author: Int8[Tensor, " t"],
    sequence_ids: Int64[Tensor, " t"],
    *,
    num_sequences: int,
    totals: Totals,
    reduction: Reduction,
    normalise_by: NormaliseBy = "weight",
    constant: float | None = None,
) -> Float[Tensor, ""]:
    """The share of this micro-batch in the loss of the optimiser step, from losses ``x`` and weights ``w`` per token.

    - ``token_mean``: Σ w·x / Σw (DAPO, arXiv 2503.14476, equation 8).
    - ``sequence_mean_token_mean``: the mean over sequences of Σ w·x / Σw (GRPO, arXiv 2402.03300, equation 3).
    - ``sequence_mean_token_sum``: the mean over sequences of Σ w·x (RLOO, arXiv 2402.14740).
    - ``token_sum_constant``: the mean over sequences of Σ w·x / ``constant`` (Dr. GRPO, arXiv 2503.20783), with
      ``constant`` the longest response allowed, in tokens.

    Under ``normalise_by="response"`` the first two divide by the number of response tokens, whoever wrote them, instead
    of by Σw. The loss then shrinks with the senior's share. Sequences with Σw = 0 add nothing and are not counted as
    sequences; their response tokens count in ``token_mean`` under ``normalise_by="response"``. Entries of ``x`` at
    weight 0 are ignored, even NaN. Without any positive weight the result is 0, and so is its gradient.

    Args:
        totals: the counts of the whole optimiser step, over all ranks and micro-batches, not of this micro-batch.

    Raises:
        ValueError: ``reduction`` or ``normalise_by`` is unknown, or ``token_sum_constant`` has no positive
            ``constant``.
    """
    require_one_of("reduction", reduction, Reduction)
    require_one_of("normalise_by", normalise_by, NormaliseBy)
    weighted = torch.where(weights > 0, x, 0.0) * weights
    if reduction == "token_mean":
        count = totals.weight if normalise_by == "weight" else totals.response_tokens
        return weighted.sum() / divisor(count, weighted)
    if reduction == "token_sum_constant":
        if constant is None or constant <= 0:
            raise ValueError(f"constant={constant}: reduction token_sum_constant needs the longest response in tokens")
        return weighted.sum() / (constant * divisor(totals.sequences, weighted))
    per_sequence = sequence_sum(weighted, sequence_ids, num_sequences=num_sequences)
    if reduction == "sequence_mean_token_mean":
        counted = weights if normalise_by == "weight" else (author >= 0).to(weights.dtype)
        per_sequence = per_sequence / divisor(
            sequence_sum(counted, sequence_ids, num_sequences=num_sequences), per_sequence
        )
    return per_sequence.sum() / divisor(totals.sequences, per_sequence)
