"""Terms that hold the policy back: divergence from a reference model, and length.

Entropy comes from the caller, who has the logits.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from tandemrl.losses.reduce import require_one_of, sequence_sum
from tandemrl.losses.surrogates import log_ratio

KLKind = Literal["k1", "k2", "k3"]


def kl(logprobs: Float[Tensor, " t"], ref_logprobs: Float[Tensor, " t"], *, kind: KLKind = "k3") -> Float[Tensor, " t"]:
    """Per-token estimate (nats) of KL(policy ‖ reference) from tokens that the policy sampled.

    With d = ref_logprobs − logprobs, clamped to ±20: k1 = −d, k2 = d²/2, k3 = eᵈ − d − 1 ≥ 0 (Schulman 2020,
    "Approximating KL divergence"). The gradient of k1 has expectation 0: use it in the reward, not in the loss.

    Raises:
        ValueError: unknown ``kind``.
    """
    require_one_of("kind", kind, KLKind)
    d = log_ratio(ref_logprobs, logprobs)
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d.square()
    return d.expm1() - d


def kl_in_reward(
    rewards: Float[Tensor, " s"],
    old_logprobs: Float[Tensor, " t"],
    ref_logprobs: Float[Tensor, " t"],
    weights: Float[Tensor, " t"],
    sequence_ids: Int64[Tensor, " t"],
    *,
    coef: float,
    kind: KLKind = "k1",
) -> Float[Tensor, " s"]:
    """Rewards minus ``coef`` times each sequence's Σ w·kl(old, reference) (Ziegler et al., arXiv 1909.08593, eq. 2).

    ``old_logprobs`` are those of the policy that sampled. Tokens of weight 0 (context, untrained junior tokens) carry
    no penalty.
    """
    penalty = weights * torch.where(weights > 0, kl(old_logprobs, ref_logprobs, kind=kind), 0.0)
    return rewards - coef * sequence_sum(penalty, sequence_ids, num_sequences=rewards.shape[0])


def overlong_penalty(
    lengths: Int64[Tensor, " s"], *, max_tokens: int, buffer: int, factor: float = 1.0
) -> Float[Tensor, " s"]:
    """DAPO's soft overlong punishment, to add to rewards (arXiv 2503.14476, equation 13).

    0 up to ``max_tokens − buffer`` response tokens, then linear down to −``factor`` at ``max_tokens`` and beyond.

    Raises:
        ValueError: ``buffer`` outside 1 … ``max_tokens``.
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(f"buffer={buffer}: must be between 1 and max_tokens ({max_tokens})")
    excess = (lengths - (max_tokens - buffer)).clamp(0, buffer)
    return -factor * excess.float() / buffer
