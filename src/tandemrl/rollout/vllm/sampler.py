"""Draws each row's next token inside vLLM with the row's key, as the reference engine does."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from tandemrl.models.sampling import Truncation, draw_token, kept_tokens


class _Draw(torch.nn.Module):
    """Replaces the module with which vLLM truncates and draws.

    Each row has a counter-based key, so that batching, chunking, preemption and the number of ranks cannot change a
    token. Truncation and drawing are those of the reference engine.
    """

    token_keys: Tensor | None = None
    """The key of each row. None stands for keys of 0."""
    min_p: Tensor | None = None
    """The ``min_p`` of each row, if vLLM has not applied it already."""

    def forward(
        self, logits: Tensor, generators: Mapping[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The token of each row, and the log-probs of all tokens after truncation.

        Args:
            logits: the logits (b, v), after penalties and temperature.
            generators: not used; they are vLLM's source of randomness.
            k: ``top_k`` of each row, or None.
            p: ``top_p`` of each row, or None.
        """
        least = self.min_p
        if k is not None or p is not None or least is not None:
            truncation = Truncation(
                0 if k is None else k[:, None].long(),
                1.0 if p is None else p[:, None],
                0.0 if least is None else least[:, None],
            )
            logits = logits.masked_fill(~kept_tokens(logits, truncation), -torch.inf)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        keys = self.token_keys if self.token_keys is not None else torch.zeros(len(logits), dtype=torch.int64)
        return draw_token(logprobs, keys.to(logits.device)), logprobs


class TandemSampler(Sampler):
    """vLLM's sampler, with our draw and limited to the shared vocabulary.

    Args:
        logprobs_mode: vLLM's setting of that name.
        vocabulary: the size of the smaller of the two LM heads. Ids from there on are never drawn.
    """

    def __init__(self, logprobs_mode: Any, vocabulary: int) -> None:
        super().__init__(logprobs_mode)
        self.topk_topp_sampler = _Draw()  # has the same forward, but is no subclass
        self.vocabulary = vocabulary

    def forward(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        if logits.shape[-1] > self.vocabulary:
            logits[:, self.vocabulary :] = -torch.inf
        return super().forward(logits, *args, **kwargs)

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        index = token_ids[:, None]
        # The drawn token alone: no top-k, and no rank, which stock vLLM compiles a kernel for.
        return LogprobsTensors(index.to(torch.int32), logprobs.gather(-1, index), torch.zeros_like(token_ids))
