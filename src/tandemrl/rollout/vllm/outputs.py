"""What the authors write in one engine step, as vLLM's scheduler takes it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from tandemrl.rollout.vllm.planner import Chosen


@dataclass
class TandemOutput(ModelRunnerOutput):
    """What a step has written, and what the scheduler has to know for the next one."""

    chosen: Chosen | None = None
    """None: as before."""


def sampled(output: ModelRunnerOutput, ids: Sequence[str]) -> tuple[np.ndarray, LogprobsLists | None]:
    """The tokens that a stock runner has sampled, one of each request, with their log-probs."""
    at = [output.req_id_to_index[id] for id in ids]
    tokens = np.array([output.sampled_token_ids[i][0] for i in at], dtype=np.int64)
    if output.logprobs is None:
        return tokens, None
    token_ids, logprobs, ranks, _ = output.logprobs
    return tokens, LogprobsLists(token_ids[at], logprobs[at], ranks[at])


class Written:
    """Tokens by (row of the step, depth), with the log-probs that were asked for.

    Args:
        depths: tokens that a row can write in the step.
    """

    def __init__(self, rows: int, depths: int) -> None:
        self.tokens = np.zeros((rows, depths), np.int64)
        self.count = np.zeros(rows, np.int64)
        """Tokens that each row has written: those at the first depths."""
        self._logprobs: LogprobsLists | None = None  # by row, depth and place

    def put(
        self, rows: np.ndarray, depths: np.ndarray | int, tokens: np.ndarray, logprobs: LogprobsLists | None
    ) -> None:
        """Tokens of some places, with their log-probs."""
        self.tokens[rows, depths] = tokens
        if logprobs is None or not len(rows):
            return
        own = logprobs.logprobs.shape[1]
        ids, values, ranks, _ = self._logprobs = self._room(own)
        ids[rows, depths, :own], values[rows, depths, :own] = logprobs.logprob_token_ids, logprobs.logprobs
        ranks[rows, depths] = logprobs.sampled_token_ranks

    def output(self, ids: list[str], chosen: Chosen | None) -> TandemOutput:
        """Where a request has fewer log-probs than others, the id is 0 and the log-prob -inf."""
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
        """The log-probs so far, with room for so many at a place."""
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
