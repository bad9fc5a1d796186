"""How a row's next token is drawn inside vLLM: by its key, as the reference engine draws it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from tandemrl.models.sampling import Truncation, draw_token, kept_tokens


class _Draw(torch.nn.Module):
    """Stands where vLLM draws: a counter-based key per row, so that batch, chunking, preemption and ranks cannot
    change a token, and truncation and drawing are the reference engine's."""

    token_keys: Tensor | None = None
    min_p: Tensor | None = None
    """By row, where vLLM has not applied it."""

    def forward(
        self, logits: Tensor, generators: Mapping[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
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
    """vLLM's sampler over the shared vocabulary, with our draw. A larger head's further ids are never drawn."""

    def __init__(self, logprobs_mode: Any, vocabulary: int) -> None:
        super().__init__(logprobs_mode)
        self.topk_topp_sampler = _Draw()  # type: ignore[assignment]  # has the same forward, but is no subclass
        self.vocabulary = vocabulary

    def forward(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        if logits.shape[-1] > self.vocabulary:
            logits[:, self.vocabulary :] = -torch.inf
        return super().forward(logits, *args, **kwargs)

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        if num_logprobs > 0:
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        index = token_ids[:, None]
        # The drawn token alone: no top-k, and no rank, which stock vLLM compiles a kernel for.
        return LogprobsTensors(index.to(torch.int32), logprobs.gather(-1, index), torch.zeros_like(token_ids))


def can_draft(params: SamplingParams) -> bool:
    """Whether ``verifying`` knows all that these parameters do to logits."""
    return not (
        params.logit_bias
        or params.min_tokens
        or params.bad_words
        or params.allowed_token_ids
        or params.logprob_token_ids
        or params.repetition_detection
        or params.thinking_token_budget is not None
    )
