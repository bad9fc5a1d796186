"""Terms that hold the policy back, divergence from a reference model and length, and the rewards they end up in.

Entropy comes from the caller, who has the logits.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int8, Int64
from torch import Tensor

from tandemrl.losses.reduce import require_one_of
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


def kl_penalty(
    old_logprobs: Float[Tensor, " t"],
    ref_logprobs: Float[Tensor, " t"],
    weights: Float[Tensor, " t"],
    *,
    kind: KLKind = "k1",
) -> Float[Tensor, " t"]:
    """w·kl(old, reference) of every token: times a coefficient, what KL in the reward takes off it (Ziegler et al.,
    arXiv 1909.08593, equation 2). 0 at weight 0, whatever the log-probs there. Σ / Σw is the measured KL.

    ``old_logprobs`` are those of the policy that sampled.
    """
    return weights * torch.where(weights > 0, kl(old_logprobs, ref_logprobs, kind=kind), 0.0)


def token_rewards(
    outcomes: Float[Tensor, " s"],
    author: Int8[Tensor, " t"],
    sequence_ids: Int64[Tensor, " t"],
    *,
    penalty: Float[Tensor, " t"] | None = None,
) -> Float[Tensor, " t"]:
    """Rewards per token, as ``gae`` takes them: each sequence's outcome at its last response token, minus ``penalty``.

    Whoever wrote that last token: ``gae`` passes the reward of an untrained one to the trained token before it. A
    sequence without a response has no reward. ``penalty``: KL coefficient times ``kl_penalty``.
    """
    index = torch.arange(author.shape[0], device=author.device)
    last = index.new_full(outcomes.shape, -1)
    last = last.scatter_reduce(0, sequence_ids, torch.where(author >= 0, index, -1), "amax")
    rewards = outcomes.new_zeros(author.shape)
    rewards[last[last >= 0]] = outcomes[last >= 0]
    return rewards if penalty is None else rewards - penalty


def adapt_kl_coef(coef: float, kl: float, *, target: float, gain: float = 0.1, limit: float = 0.2) -> float:
    """The KL coefficient of the next step, after a step whose KL was ``kl`` nats per token (arXiv 1909.08593,
    section 2.2): coef·(1 + gain·e), where e = kl / target − 1 is kept within ±``limit``.

    Raises:
        ValueError: ``target`` is not positive, or gain·limit is not in (0, 1).

    Examples:
        >>> [round(adapt_kl_coef(0.1, kl, target=0.05), 4) for kl in (0.0, 0.05, 0.055, 1.0)]
        [0.098, 0.1, 0.101, 0.102]
    """
    if target <= 0 or not 0 < gain * limit < 1:
        raise ValueError(f"target={target}, gain={gain}, limit={limit}: target must be positive, gain·limit in (0, 1)")
    error = max(-limit, min(limit, kl / target - 1))
    return coef * (1 + gain * error)


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
