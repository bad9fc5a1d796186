"""Sums over the tokens of sequences, denominators, and the check of a choice."""

from typing import Any, get_args

import torch
from torch import Tensor

from tandemrl.types import IntPerToken, PerSequence, PerToken


def sequence_sum(x: PerToken, sequence_ids: IntPerToken, *, num_sequences: int) -> PerSequence:
    """The sum of ``x`` over the tokens of each sequence, and 0 for a sequence without tokens."""
    return x.new_zeros(num_sequences).index_add(0, sequence_ids, x)


def divisor(count: float | Tensor, like: Tensor) -> Tensor:
    """``count`` as a denominator: 1 where the count is 0, since the numerator is 0 there too.

    Args:
        count: A number or a tensor.
        like: the result gets this tensor's dtype and device.
    """
    count = torch.as_tensor(count, dtype=like.dtype, device=like.device)
    return torch.where(count > 0, count, torch.ones_like(count))


def require_one_of(name: str, value: str, allowed: Any) -> None:
    """Refuse a ``value`` that is not in the Literal type ``allowed``.

    Raises:
        ValueError: the value is not allowed; the message names the argument and the allowed values.
    """
    if value not in get_args(allowed):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(get_args(allowed))}")
