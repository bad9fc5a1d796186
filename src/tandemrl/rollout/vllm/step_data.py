"""What passes between vLLM's scheduler, the planner and the stock model runners, in the forms that vLLM has for it."""

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from tandemrl.rollout.vllm.planner import Admission
from tandemrl.selection import Strategy


def admission(new: NewRequestData, strategies: Mapping[str, Strategy]) -> Admission:
    """What the planner has to know of a new request, which is as ``call.sampling_params`` makes them.

    Args:
        new: the request.
        strategies: the strategies that requests can name.
    """
    sampling: Any = new.sampling_params
    prompt: Any = new.prompt_token_ids
    extra, stops = sampling.extra_args, frozenset(sampling.stop_token_ids or ())
    strategy, history = strategies[extra["tandem_strategy"]], extra.get("tandem_history", ())
    return Admission(new.req_id, len(prompt), extra["tandem_key"], strategy, history, extra.get("tandem_row"), stops)


def set_outputs(runner: Any, id: str, before: int, tokens: Sequence[int]) -> None:
    """Tell a runner what was written in a request, in place of what it drew itself.

    Args:
        runner: the model runner.
        id: the request.
        before: how many written tokens of the request stay as they are.
        tokens: the tokens that follow them.
    """
    state = runner.requests.get(id)
    if state is None:
        return
    del state.output_token_ids[before:]
    state.output_token_ids.extend(tokens)
    batch = runner.input_batch
    index = batch.req_id_to_index.get(id)
    if index is not None:
        begin = batch.num_prompt_tokens[index] + before
        end = begin + len(tokens)
        batch.token_ids_cpu[index, begin:end] = tokens
        batch.is_token_ids[index, begin:end] = True
        batch.num_tokens_no_spec[index] = end


def mirror_tokens(runner: Any, ids: Iterable[str]) -> None:
    """Give the rows that come back into the batch token lists that are quick to copy.

    vLLM copies the whole history of a row whenever the row comes back into its batch. For 8k tokens that takes 230 µs
    from a list, and 2 µs from an array.
    """
    live = runner.input_batch.req_id_to_index
    for id in ids:
        if id not in live and not isinstance((state := runner.requests[id]).output_token_ids, array):
            state.prompt_token_ids = array("i", state.prompt_token_ids)
            state.output_token_ids = array("i", state.output_token_ids)


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
