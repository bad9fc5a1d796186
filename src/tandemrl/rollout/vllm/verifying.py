"""Draws the senior's tokens in drafts, after one forward pass of its stock runner over several tokens of each row.

A place is a (row, depth) of a round of drafts.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from tandemrl.rollout.vllm.drafting import Round
from tandemrl.rollout.vllm.planner import ForwardPass

LOGITS_AT_ONCE = 256
"""How many places have their logits in memory at once, besides the last place of each row, which the runner has."""


class Draws(NamedTuple):
    """The tokens drawn at some places, with their log-probs.

    rows: the row of each place in the round. depths: the depth of each place.
    """

    rows: np.ndarray
    depths: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray


def draws(runner: Any, forward: ForwardPass, step: Round) -> list[Draws]:
    """Draw the senior's tokens at all its places in a round.

    The runner's own sampling is skipped, since it draws at one place per row only.

    Args:
        runner: the senior's model runner, which has just launched ``forward``.
        forward: the ``verify_pass`` of the round.
        step: the round.
    """
    state, runner.execute_model_state = runner.execute_model_state, None
    batch = runner.input_batch
    order = np.array([step.index[id] for id in batch.req_ids])
    counts = dict(zip(forward.ids, forward.count, strict=True))
    ends = np.cumsum([counts[id] for id in batch.req_ids])
    row, depth = step.senior[order].nonzero()
    behind = step.last[order][row] - depth  # tokens of the row that were read after this place
    final, further = np.flatnonzero(behind == 0), np.flatnonzero(behind)
    known = step.outputs[order]

    def drawn(some: np.ndarray, logits: Tensor) -> Draws:
        rows, depths = row[some], depth[some]
        sampler, device = runner.sampler, logits.device
        metadata = _at_places(batch.sampling_metadata, rows, known[rows] + depths, device)
        sampler.topk_topp_sampler.token_keys = step.keys[order[rows], depths]
        sampler.topk_topp_sampler.min_p = _min_p(runner, rows, device)
        output = sampler(logits=logits, sampling_metadata=metadata)
        sampler.topk_topp_sampler.min_p = None
        tokens, logprobs = output.sampled_token_ids, output.logprobs_tensors.logprobs
        return Draws(order[rows], depths, *(each[:, 0].cpu().numpy() for each in (tokens, logprobs)))

    each = [drawn(final, state.logits)]  # by row of the batch, as `row` is
    for some in np.split(further, range(LOGITS_AT_ONCE, len(further), LOGITS_AT_ONCE)):
        if len(some):
            places = torch.from_numpy(ends[row[some]] - 1 - behind[some]).to(state.hidden_states.device)
            each.append(drawn(some, runner.model.compute_logits(state.hidden_states[places])))
    return each


def _at_places(metadata: SamplingMetadata, rows: np.ndarray, known: np.ndarray, device: Any) -> SamplingMetadata:
    """The sampling parameters of some places.

    Args:
        metadata: the sampling parameters of the batch.
        rows: the row of each place in the batch.
        known: how many tokens the row has written before each place.
        device: where the parameters are needed.
    """
    at = torch.from_numpy(rows).to(device)

    def taken(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[at]

    penalties: dict[str, Any] = {}
    if not metadata.no_penalties:
        written = [metadata.output_token_ids[row][:n] for row, n in zip(rows.tolist(), known.tolist(), strict=True)]
        names = ("prompt_token_ids", "frequency_penalties", "presence_penalties", "repetition_penalties")
        penalties = {name: taken(getattr(metadata, name)) for name in names} | {"output_token_ids": written}
    return dataclasses.replace(
        metadata,
        temperature=taken(metadata.temperature),
        top_p=taken(metadata.top_p),
        top_k=taken(metadata.top_k),
        logitsprocs=LogitsProcessors(),  # min_p alone, which is ours here
        **penalties,
    )


def _min_p(runner: Any, rows: np.ndarray, device: Any) -> Tensor | None:
    """The ``min_p`` of each place, given its row in the batch; None if no row of the batch has one."""
    ids = runner.input_batch.req_ids
    values = np.array([runner.requests[id].sampling_params.min_p for id in ids], dtype=np.float32)
    return torch.from_numpy(values[rows]).to(device) if values.any() else None
