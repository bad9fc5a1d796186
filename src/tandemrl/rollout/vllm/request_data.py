"""What the planner and the stock model runners are told of requests, and what of them is refused."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from tandemrl.rollout.engine import EngineError
from tandemrl.rollout.vllm.planner import Admission
from tandemrl.selection import Strategy


def refuse_unsupported(scheduled: SchedulerOutput) -> None:
    """Refuse a step that asks for something that tandem decoding does not support.

    Raises:
        EngineError: it does.
    """
    for name in ("scheduled_encoder_inputs", "kv_cache_block_copies", "new_block_ids_to_zero"):
        if getattr(scheduled, name):
            raise EngineError(f"the scheduler asks for {name}, which tandem decoding does not support")


def admission(new: NewRequestData, strategies: Mapping[str, Strategy], *, has_junior: bool) -> Admission:
    """What the planner has to know of a new request.

    Args:
        new: the request, as ``call.sampling_params`` makes them.
        strategies: the strategies that requests can name.
        has_junior: whether the engine has a junior.

    Raises:
        EngineError: nobody knows its strategy, or it needs a junior.
    """
    sampling = new.sampling_params
    extra = None if sampling is None else sampling.extra_args
    if sampling is None or extra is None or new.prompt_token_ids is None:
        raise EngineError(f"request {new.req_id}: it is not of a tandem engine's call")
    name = str(extra["tandem_strategy"])
    if name not in strategies:
        known = ", ".join(sorted(strategies)) or "none"
        raise EngineError(f"request {new.req_id}: strategy {name!r} is not registered; registered: {known}")
    strategy = strategies[name]
    if not has_junior and strategy.writers != "senior":
        raise EngineError(f"request {new.req_id}: its strategy needs a junior and the engine has none")
    history, stops = extra.get("tandem_history", ()), frozenset(sampling.stop_token_ids or ())
    length, key = len(new.prompt_token_ids), int(extra["tandem_key"])
    return Admission(new.req_id, length, key, strategy, history, extra.get("tandem_row"), stops)


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


class _Tokens(list[int]):
    """A list of tokens that numpy can copy from an array.

    vLLM copies the whole history of a row whenever the row comes back into its batch. For 8k tokens that takes 230 µs
    from a Python list, and 2 µs from the array.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self._array = np.empty(max(64, 2 * len(tokens)), dtype=np.int32)
        self._array[: len(tokens)] = tokens

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._array[: len(self)]

    def append(self, token: int) -> None:
        if len(self) == len(self._array):
            self._array = np.concatenate([self._array, np.empty_like(self._array)])
        self._array[len(self)] = token
        super().append(token)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def __setitem__(self, index: Any, token: Any) -> None:
        super().__setitem__(index, token)
        self._array[: len(self)][index] = token

    def __reduce__(self) -> Any:
        return list, (list(self),)


def mirror_tokens(runner: Any, ids: Iterable[str]) -> None:
    """Give the rows that come back into the batch token lists that are quick to copy (``_Tokens``)."""
    live = runner.input_batch.req_id_to_index
    for id in ids:
        if id not in live and type((state := runner.requests[id]).output_token_ids) is not _Tokens:
            state.prompt_token_ids = _Tokens(state.prompt_token_ids)
            state.output_token_ids = _Tokens(state.output_token_ids)
