"""The tokens that the authors write in one engine step, in the form that vLLM's scheduler expects."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from tandemrl.rollout.vllm.draft_choice import Chosen


@dataclass
class TandemOutput(ModelRunnerOutput):
    """The output of a step, with what the scheduler has to know for the next step."""

    chosen: Chosen | None = None
    """How far the junior drafts in the next step. None means as far as before."""


def sampled(output: ModelRunnerOutput, ids: Sequence[str]) -> tuple[np.ndarray, LogprobsLists | None]:
    """The tokens that a stock model runner has sampled for some requests, with their log-probs.

    Args:
        output: the output of the runner, with exactly one token for each of the requests.
        ids: the requests.

    Returns:
        One token per request, in the order of ``ids``, and their log-probs, or None if none were asked for.
    """
    at = [output.req_id_to_index[id] for id in ids]
    tokens = np.array([output.sampled_token_ids[i][0] for i in at], dtype=np.int64)
    if output.logprobs is None:
        return tokens, None
    token_ids, logprobs, ranks, _ = output.logprobs
    return tokens, LogprobsLists(token_ids[at], logprobs[at], ranks[at])


class Written:
    """The tokens that are written in a step, by (row of the step, depth), with the log-probs that were asked for.

    Depth 0 is the first token that a row writes in the step.

    Args:
        rows: how many rows the step has.
        depths: how many tokens a row can write in the step.
    """

    def __init__(self, rows: int, depths: int) -> None:
        self.tokens = np.zeros((rows, depths), np.int64)
        self.count = np.zeros(rows, np.int64)
        """How many tokens each row has written. They are those at its first depths."""
        self._logprobs: LogprobsLists | None = None  # by row, depth and place

    def put(
        self, rows: np.ndarray, depths: np.ndarray | int, tokens: np.ndarray, logprobs: LogprobsLists | None
    ) -> None:
        """Store one token, with its log-probs, at each of some places.

        Args:
            rows: the row of each place.
            depths: the depth of each place, or one depth for all of them.
            tokens: the token at each place.
            logprobs: the log-probs at each place, or None if none were asked for.
        """
        self.tokens[rows, depths] = tokens
        if logprobs is None or not len(rows):
            return
        own = logprobs.logprobs.shape[1]
        ids, values, ranks, _ = self._logprobs = self._room(own)
        ids[rows, depths, :own], values[rows, depths, :own] = logprobs.logprob_token_ids, logprobs.logprobs
        ranks[rows, depths] = logprobs.sampled_token_ranks

    def output(self, ids: list[str], chosen: Chosen | None) -> TandemOutput:
        """The output of the step. A request with fewer log-probs than others is filled up with ids of 0 and -inf.

        Args:
            ids: the request of each row.
            chosen: how far the junior drafts in the next step; None means as far as before.
        """
        kept = np.arange(self.tokens.shape[1]) < self.count[:, None]
        logprobs = None
        if self._logprobs is not None:
            begin = np.concatenate([[0], self.count.cumsum()]).tolist()
            token_ids, values, ranks, _ = self._logprobs
            logprobs = LogprobsLists(token_ids[kept], values[kept], ranks[kept], begin)
        return TandemOutput(
            req_ids=ids,
            req_id_to_index={id: i for i, id in enumerate(ids)},
            sampled_token_ids=[row[:n] for row, n in zip(self.tokens.tolist(), self.count.tolist(), strict=True)],
            logprobs=logprobs,
            chosen=chosen,
        )

    def _room(self, width: int) -> LogprobsLists:
        """The log-probs so far, in arrays with room for ``width`` log-probs at each place."""
        had = 0 if self._logprobs is None else self._logprobs.logprobs.shape[2]
        if self._logprobs is not None and had >= width:
            return self._logprobs
        shape = (*self.tokens.shape, width)
        room = LogprobsLists(
            np.zeros(shape, np.int32), np.full(shape, -np.inf, np.float32), np.zeros(shape[:2], np.int64)
        )
        if self._logprobs is not None:
            room.logprob_token_ids[..., :had], room.logprobs[..., :had] = self._logprobs[:2]
            room.sampled_token_ranks[:] = self._logprobs.sampled_token_ranks
        return room
