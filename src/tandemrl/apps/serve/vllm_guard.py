"""Refuses requests in the front end of vLLM's server, with status 400. A refusal in the worker would end the engine."""

from typing import Any

from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor

from tandemrl.rollout.vllm.versions import misdone


class Guard(LogitsProcessor):
    """A logits processor that changes no logits. vLLM asks such processors about every request of every endpoint."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse sampling parameters that tandem decoding does not support.

        Raises:
            ValueError: a parameter is not supported. The message names it.
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
