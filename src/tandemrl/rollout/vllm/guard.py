"""Refuses a request of vLLM's server in its front end, with status 400, where the worker could only end the engine."""

from typing import Any

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor

from tandemrl.rollout.vllm.versions import misdone


class Guard(LogitsProcessor):
    """A logits processor, since vLLM asks these about every request of every endpoint; it changes no logits."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises:
        ValueError: names what tandem decoding cannot do.
        """
        problems = {
            "a request without a seed": sampling_params.seed is None,
            "prompt_logprobs": sampling_params.prompt_logprobs is not None,
            "structured outputs (a response format, a forced or strict tool call)": (
                sampling_params.structured_outputs is not None
            ),
            **misdone(sampling_params),
        }
        for name, present in problems.items():
            if present:
                raise ValueError(f"not possible in tandem decoding: {name}")

    def __init__(self, *_: Any) -> None:
        pass

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass
