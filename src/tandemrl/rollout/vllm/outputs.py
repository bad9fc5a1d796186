"""The tokens that the authors write in one engine step, in the form that vLLM's scheduler expects."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput


@dataclass
class TandemOutput(ModelRunnerOutput):
    """The output of a step, with what the scheduler has to know for the next step."""

    ahead: int | None = None
    """How far the junior drafts in the next step. None means as far as before."""
    handed: Collection[str] = ()
    """The requests that hand over to the model of another engine."""


def sampled(output: ModelRunnerOutput, ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The token that a stock model runner has sampled for each of some requests, and its log-prob.

    Args:
        output: the output of the runner, with exactly one token for each of the requests.
        ids: the requests.
    """
    at = [output.req_id_to_index[id] for id in ids]
    tokens = np.array([output.sampled_token_ids[i][0] for i in at], dtype=np.int64)
    if not at:
        return tokens, np.zeros(0, np.float32)
    assert output.logprobs is not None  # every request asks for them (``call.sampling_params``)
    return tokens, output.logprobs.logprobs[at, 0]


class Written:
    """The tokens that are written in a step and their log-probs, by (row of the step, depth).

    Depth 0 is the first token that a row writes in the step.

    Args:
        ahead: how many KV slots for drafts each row of the step has.
    """

    def __init__(self, ahead: Sequence[int]) -> None:
        self.ahead = np.array(ahead)
        shape = len(ahead), 1 + max(ahead)
        self.tokens, self._logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        self.count = np.zeros(len(ahead), np.int64)
        """How many tokens each row has written. They are those at its first depths."""

    def put(self, rows: np.ndarray, depths: np.ndarray | int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Store one token with its log-prob at each of some places, or at one depth of some rows."""
        self.tokens[rows, depths], self._logprobs[rows, depths] = tokens, logprobs

    def output(self, ids: list[str], ahead: int | None, handed: Collection[str]) -> TandemOutput:
        """The output of the step.

        Args:
            ids: the request of each row.
            ahead, handed: see `TandemOutput`.
        """
        kept = np.arange(self.tokens.shape[1]) < self.count[:, None]
        tokens, begin = self.tokens[kept].astype(np.int32), np.concatenate([[0], self.count.cumsum()]).tolist()
        return TandemOutput(
            req_ids=ids,
            req_id_to_index={id: i for i, id in enumerate(ids)},
            sampled_token_ids=[row[:n] for row, n in zip(self.tokens.tolist(), self.count.tolist(), strict=True)],
            logprobs=LogprobsLists(tokens[:, None], self._logprobs[kept][:, None], np.zeros_like(tokens), begin),
            ahead=ahead,
            handed=handed,
        )
