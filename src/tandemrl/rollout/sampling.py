"""From an author's logits to a token: penalties, temperature, truncation, one uniform. Pure tensor functions.

The order is vLLM's: penalties, temperature, min_p, top_k, top_p; what is kept is renormalised. Engine and trainer share
``kept_tokens``, so that truncated rollouts can be scored under the distribution they were drawn from.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor


class Truncation(NamedTuple):
    """Scalars, or one value per row as [b, 1] tensors. top_k 0, top_p 1 and min_p 0 keep everything."""

    top_k: int | Int64[Tensor, "b 1"]
    top_p: float | Float[Tensor, "b 1"]
    min_p: float | Float[Tensor, "b 1"]


def kept_tokens(logits: Float[Tensor, "b v"], truncation: Truncation) -> Bool[Tensor, "b v"]:
    """Which tokens survive min_p, then top_k, then top_p. ``logits`` are already divided by the temperature.

    min_p keeps tokens with at least min_p times the top probability. top_k keeps the k best and their ties. top_p keeps
    the smallest set of best tokens that holds at least top_p of what is left, at least one token (Holtzman et al. 2020,
    arXiv 1904.09751; min_p: arXiv 2407.01082).
    """
    device = logits.device
    top_k = torch.as_tensor(truncation.top_k, device=device).expand(logits.shape[0], 1)
    top_p = torch.as_tensor(truncation.top_p, device=device, dtype=logits.dtype).expand(logits.shape[0], 1)
    min_p = torch.as_tensor(truncation.min_p, device=device, dtype=logits.dtype).expand(logits.shape[0], 1)

    ordered, _ = logits.sort(dim=-1, descending=True)
    lowest = ordered[:, :1] + min_p.log()  # min_p 0 gives -inf: everything is kept
    kth = ordered.gather(1, (top_k - 1).clamp(0, logits.shape[1] - 1))
    lowest = torch.maximum(lowest, torch.where(top_k > 0, kth, -torch.inf))

    probs = ordered.masked_fill(ordered < lowest, -torch.inf).softmax(-1)
    before = probs.cumsum(-1) - probs  # mass of the strictly better tokens
    nucleus = ((before < top_p) | (top_p >= 1.0)) & (ordered >= lowest)
    last = nucleus.sum(-1, keepdim=True).clamp(min=1) - 1
    return logits >= torch.maximum(lowest, ordered.gather(1, last))


def penalise(
    logits: Float[Tensor, "b v"],
    *,
    seen_in_prompt: Bool[Tensor, "b v"],
    output_counts: Int64[Tensor, "b v"],
    repetition: Float[Tensor, "b 1"],
    presence: Float[Tensor, "b 1"],
    frequency: Float[Tensor, "b 1"],
) -> Float[Tensor, "b v"]:
    """Repetition penalty over prompt and output (CTRL, arXiv 1909.05858); presence and frequency over the output."""
    written = output_counts > 0
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen_in_prompt | written, scaled, logits)
    return logits - frequency * output_counts - presence * written


def draw(
    logits: Float[Tensor, "b v"], uniforms: Float64[Tensor, " b"]
) -> tuple[Int64[Tensor, " b"], Float[Tensor, " b"]]:
    """The token at which the cumulative distribution passes the uniform, and its log-prob.

    Inverse-CDF sampling in vocabulary order: a token is a function of its logits and one number, so the same uniforms
    give the same tokens in any batch, up to rounding of the logits.
    """
    logp = logits.log_softmax(-1)
    tokens = draw_token(logp, uniforms)
    return tokens, logp.gather(1, tokens[:, None]).squeeze(1)


def draw_token(logprobs: Float[Tensor, "b v"], uniforms: Float64[Tensor, " b"]) -> Int64[Tensor, " b"]:
    """The token alone, from normalised log-probs (see ``draw``)."""
    cdf = logprobs.double().exp_().cumsum_(-1)
    target = (uniforms[:, None] * cdf[:, -1:]).clamp_(max=cdf[:, -1:] * (1 - 1e-15))
    return torch.searchsorted(cdf, target, right=True).clamp_(max=logprobs.shape[1] - 1).squeeze(1)
