"""Penalties for divergence from a reference model and for length, and the per-token rewards that they enter.

Entropy is not computed here: the caller passes it, since only the caller has the logits.
"""

from typing import Literal

import torch
from jaxtyping import Int8
from torch import Tensor

from tandemrl.losses.surrogates import log_ratio, require_one_of
from tandemrl.types import IntPerSequence, IntPerToken, PerSequence, PerToken

KLKind = Literal["k1", "k2", "k3"]


def kl(logprobs: PerToken, ref_logprobs: PerToken, *, kind: KLKind = "k3") -> PerToken:
    """Per-token estimate (nats) of KL(policy ‖ reference) from tokens that the policy sampled.

    With d = ref_logprobs − logprobs, clamped to ±20: k1 = −d, k2 = d²/2, k3 = eᵈ − d − 1 ≥ 0 (Schulman 2020,
    "Approximating KL divergence"). The gradient of k1 has expectation 0: use it in the reward, not in the loss.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    require_one_of("kind", kind, KLKind)
    d = log_ratio(ref_logprobs, logprobs)
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d.square()
    return d.expm1() - d


def kl_penalty(old_logprobs: PerToken, ref_logprobs: PerToken, weights: PerToken) -> PerToken:
    """w·k1(old, reference) at every token: the KL penalty to subtract from the reward, before its coefficient
    (Ziegler et al., arXiv 1909.08593, equation 2).

    A token of weight 0 has penalty 0, whatever its log-probs are. The sum over all tokens divided by Σw is the
    measured KL, in nats per token.

    Args:
        old_logprobs: log-probs of the policy that sampled the tokens.
        ref_logprobs: log-probs of the reference model.
        weights: token weights, see ``token_weights``.
    """
    return weights * torch.where(weights > 0, kl(old_logprobs, ref_logprobs, kind="k1"), 0.0)


def token_rewards(
    outcomes: PerSequence, author: Int8[Tensor, " t"], sequence_ids: IntPerToken, *, penalty: PerToken | None = None
) -> PerToken:
    """Rewards per token, as ``gae`` takes them: each sequence's outcome at its last response token, minus ``penalty``.

    The outcome is put there whether the senior or the junior wrote that token: ``gae`` moves the reward of an untrained
    token to the trained token before it. The outcome of a sequence without a response is put nowhere.

    Args:
        outcomes: reward of each sequence as a whole.
        author: ``Author`` of each token.
        sequence_ids: the sequence of each token, 0 … s−1.
        penalty: KL coefficient times ``kl_penalty``. None stands for 0 at every token.
    """
    index = torch.arange(author.shape[0], device=author.device)
    last = index.new_full(outcomes.shape, -1)
    last = last.scatter_reduce(0, sequence_ids, torch.where(author >= 0, index, -1), "amax")
    rewards = outcomes.new_zeros(author.shape)
    rewards[last[last >= 0]] = outcomes[last >= 0]
    return rewards if penalty is None else rewards - penalty


def adapt_kl_coef(coef: float, kl: float, *, target: float) -> float:
    """The KL coefficient of the next step: coef·(1 + 0.1·e), where e = kl / target − 1 is clamped to ±0.2.

    This is the controller of Ziegler et al. (arXiv 1909.08593, section 2.2).

    Args:
        coef: the coefficient of the step that is over.
        kl: the KL measured in that step, in nats per token.
        target: the KL to hold, in nats per token; positive.

    Examples:
        >>> [round(adapt_kl_coef(0.1, kl, target=0.05), 4) for kl in (0.0, 0.05, 0.055, 1.0)]
        [0.098, 0.1, 0.101, 0.102]
    """
    return coef * (1 + 0.1 * max(-0.2, min(0.2, kl / target - 1)))


def overlong_penalty(lengths: IntPerSequence, *, max_tokens: int, buffer: int) -> PerSequence:
    """DAPO's soft overlong punishment, a number ≤ 0 to add to each reward (arXiv 2503.14476, equation 13).

    It is 0 for responses of up to ``max_tokens − buffer`` tokens. From there it falls linearly to −1 at ``max_tokens``
    tokens, and stays there beyond.

    Args:
        lengths: response tokens of each sequence.

    Raises:
        ValueError: ``buffer`` is not between 1 and ``max_tokens``.
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(f"buffer={buffer}: must be between 1 and max_tokens ({max_tokens})")
    excess = (lengths - (max_tokens - buffer)).clamp(0, buffer)
    return -excess.float() / buffer
