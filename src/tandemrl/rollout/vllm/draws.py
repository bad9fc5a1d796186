"""The draws of a round of drafts (``drafting.Round``), with the stock model runners of vLLM 0.32.

A place is a (row, depth) of the round. **The senior** draws after one pass of its runner over several tokens of each
row (``senior_draws``). **The junior** drafts without waiting for the host, in one pass after the other on the device
(``JuniorLoop``). A pass of vLLM's model runner needs the host: for the scheduler's updates, the batch, its inputs and
the tokens before it. In a draft all of that is known beforehand, except for the tokens, and only the next pass reads
those. So only the first pass of a draft is a pass of the runner. The others work as in vLLM's own proposers. Tokens,
positions and slots are written to the runner's own buffers. The runner builds its metadata from them, and replays its
CUDA graph for decoding, if it has one. A CUDA graph of the whole loop would save the kernel launches of the draw. But
it would take one graph for each number of rows, draft length and kind of sampling, and vLLM builds the metadata in
Python.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata

from tandemrl.rollout.vllm.drafting import Draws, Round
from tandemrl.rollout.vllm.planner import ForwardPass

LOGITS_AT_ONCE = 256
"""How many places have their logits in memory at once, besides the last place of each row, which the runner has."""
BACKENDS = frozenset({"CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"})
"""Attention backends whose passes read no memory on the host that the next pass overwrites."""


def senior_draws(runner: Any, forward: ForwardPass, step: Round) -> list[Draws]:
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
    at, names = torch.from_numpy(rows).to(device), ["temperature", "top_p", "top_k"]
    own: dict[str, Any] = {"logitsprocs": LogitsProcessors()}  # min_p alone, which is ours here
    if not metadata.no_penalties:
        names += ["prompt_token_ids", "frequency_penalties", "presence_penalties", "repetition_penalties"]
        places = zip(rows.tolist(), known.tolist(), strict=True)
        own["output_token_ids"] = [metadata.output_token_ids[row][:n] for row, n in places]
    values = {name: getattr(metadata, name) for name in names}
    own |= {name: None if value is None else value[at] for name, value in values.items()}
    return dataclasses.replace(metadata, **own)


def _min_p(runner: Any, rows: np.ndarray, device: Any) -> Tensor | None:
    """The ``min_p`` of each place, given its row in the batch; None if no row of the batch has one."""
    ids = runner.input_batch.req_ids
    values = np.array([runner.requests[id].sampling_params.min_p for id in ids], dtype=np.float32)
    return torch.from_numpy(values[rows]).to(device) if values.any() else None


def stays_on_device(runner: Any, step: Round, depth: int, forward: ForwardPass) -> bool:
    """Whether the rest of the draft can be written by a ``JuniorLoop``.

    If not, the next depth is a pass of the runner, too. That is so

    - at the last depth, after which there is nothing left to do;
    - if a row with a slot is not in the pass, because the junior has more to read than one pass can take (a loop may
      begin at the next depth);
    - if penalties count the tokens of the draft, which vLLM keeps in lists on the host, or if the model looks back at
      tokens, which vLLM keeps there as well;
    - if tokens have several positions each (rotary positions of images);
    - with attention backends other than ``BACKENDS``.

    Text-only models without vLLM's own speculation, LoRA, connectors and parallelism other than that of tensors are all
    that is ever run. The loop never asks for cascade attention.

    Args:
        runner: the junior's model runner, which has just launched ``forward``.
        step: the round.
        depth: the depth of ``forward``.
        forward: the pass.
    """
    with_slot = np.count_nonzero(step.ahead >= depth)
    if depth + 1 == step.depths or len(forward.rows) < with_slot or not forward.ends.all():
        return False
    backends = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
    return bool(
        backends <= BACKENDS
        and runner.input_batch.sampling_metadata.no_penalties
        and runner.lookback_token_ids is None
        and not runner.uses_mrope
    )


class JuniorLoop:
    """Writes the rest of a draft, from the depth whose pass the junior's runner has just launched.

    All depths but the last are launched at once, since they are needed whoever the authors are. The host looks at the
    tokens of a depth while the device computes later ones. Only ``draws`` waits for the device.

    A row without a slot at a depth reads its last position again and writes its KV to the padding slot, and ``draws``
    leaves it out. The runner is not told about the draft. When the round is over it is told what was written, as after
    any round, and it fills its buffers anew for each pass of its own.

    Args:
        runner: the junior's model runner.
        step: the round.
        depth: the depth of the pass that was just launched.
    """

    def __init__(self, runner: Any, step: Round, depth: int) -> None:
        self._runner, self._first, self._drawn = runner, depth, list[tuple[Tensor, Tensor, Any]]()
        """By depth: the tokens and log-probs by row of the batch, on the host once the event has happened, if any."""
        self._rows = rows = runner.input_batch.num_reqs
        self._order = order = np.array([step.index[id] for id in runner.input_batch.req_ids])
        positions = step.positions[order, depth:].T  # by (pass, row), as all that follows
        self._lengths = torch.from_numpy(positions.astype(np.int32) + 1)
        self._going = (step.ahead[order, None] >= np.arange(depth, step.depths)).T
        known = np.stack([step.keys.numpy()[order, depth:].T, positions, self._going])
        self._keys, self._positions, self._with_slot = async_tensor_h2d(known, runner.device)
        self._mode, self._descriptor, *_ = runner._determine_batch_execution_and_padding(
            num_tokens=rows,
            num_reqs=rows,
            num_scheduled_tokens_np=np.ones(rows, np.int32),
            max_num_scheduled_tokens=1,
            use_cascade_attn=False,
        )
        starts = runner.query_start_loc
        self._starts = torch.arange(len(starts.cpu), dtype=starts.cpu.dtype).clamp_(max=rows)
        starts.gpu.copy_(torch.arange(len(starts.gpu), device=runner.device).clamp_(max=rows))
        runner.positions[rows : self._descriptor.num_tokens].zero_()
        state, runner.execute_model_state = runner.execute_model_state, None
        self._draw(state.logits)
        for _ in range(depth + 1, step.depths - 1):
            self._draw(self._forward())

    def draws(self, depth: int) -> Draws:
        """Wait for what the junior draws at a depth, and return it. At the last depth, this also launches the pass."""
        number = depth - self._first
        if number == len(self._drawn):
            self._draw(self._forward())
        tokens, logprobs, ready = self._drawn[number]
        if ready is not None:
            ready.synchronize()
        going = self._going[number]
        rows = self._order[going]
        return Draws(rows, np.full_like(rows, depth), tokens.numpy()[going], logprobs.numpy()[going])

    # ---------------------------------------------------------------------------------------------------------- details

    def _draw(self, logits: Tensor) -> None:
        """Draw the token of every row at the next depth. ``logits`` (row of the batch, v) are overwritten."""
        sampler = self._runner.sampler
        sampler.topk_topp_sampler.token_keys = self._keys[len(self._drawn)]
        output = sampler(logits=logits, sampling_metadata=self._runner.input_batch.sampling_metadata)
        self._tokens = output.sampled_token_ids[:, 0]
        tokens, logprobs, ready = self._tokens, output.logprobs_tensors.logprobs[:, 0], None
        if tokens.device.type == "cuda":
            tokens, ready = tokens.to("cpu", non_blocking=True), torch.cuda.Event()
            logprobs = logprobs.to("cpu", non_blocking=True)
            ready.record()
        self._drawn.append((tokens, logprobs, ready))

    def _forward(self) -> Tensor:
        """Run the pass that reads the tokens of the last ``_draw``, and return its logits, by row of the batch."""
        runner, rows, number = self._runner, self._rows, len(self._drawn)
        runner.input_ids.gpu[:rows].copy_(self._tokens)
        runner.positions[:rows].copy_(self._positions[number])
        runner.seq_lens[:rows].copy_(self._positions[number] + 1)
        runner.optimistic_seq_lens_cpu[:rows].copy_(self._lengths[number])
        padded, padded_rows = self._descriptor.num_tokens, self._descriptor.num_reqs or rows
        table = runner.input_batch.block_table
        table.compute_slot_mapping(rows, runner.query_start_loc.gpu[: rows + 1], runner.positions[:rows])
        if not self._going[number].all():
            table[0].slot_mapping.gpu[:rows].masked_fill_(self._with_slot[number] == 0, PAD_SLOT_ID)
        by_group, by_layer = runner._get_slot_mappings(
            num_tokens_padded=padded, num_reqs_padded=padded_rows, num_tokens_unpadded=rows
        )
        whole = self._mode == CUDAGraphMode.FULL  # attention, too, is in the graph, with all its rows
        # It is to see one token per row. Its own buffer on the host may still be on its way to the device.
        own, runner.query_start_loc = (
            runner.query_start_loc,
            SimpleNamespace(cpu=self._starts, gpu=runner.query_start_loc.gpu),
        )
        metadata, _ = runner._build_attention_metadata(
            num_tokens=rows,
            num_reqs=rows,
            max_query_len=1,
            num_tokens_padded=padded if whole else None,
            num_reqs_padded=padded_rows if whole else None,
            slot_mappings=by_group,
        )
        runner.query_start_loc = own
        with set_forward_context(
            metadata,
            runner.vllm_config,
            num_tokens=padded,
            cudagraph_runtime_mode=self._mode,
            batch_descriptor=self._descriptor,
            slot_mapping=by_layer,
            is_padding=runner._prepare_padding_mask(rows, padded),
        ):
            hidden: Tensor = runner._model_forward(
                input_ids=runner.input_ids.gpu[:padded],
                positions=runner.positions[:padded],
                **runner._init_model_kwargs(),
            )
        logits: Tensor = runner.model.compute_logits(hidden[:rows])
        return logits
