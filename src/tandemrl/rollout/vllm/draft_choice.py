"""Chooses from step to step how far the junior drafts in vLLM. This module does not import vllm."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tandemrl.rollout.drafting import VLLM_CPU, VLLM_CUDA, Choice, Drafts, Load, Pair, Size
from tandemrl.rollout.engine import EngineError, Passes
from tandemrl.rollout.vllm.kv_state import JUNIOR, SENIOR, KVState
from tandemrl.rollout.vllm.modes import DRAFTING, SchedulingMode

STATS_WINDOW = 4096
"""If more tokens than this have been drafted, or written where both may write, the counts of both are halved. A server
has one endless call, in which old counts would otherwise outweigh new ones."""
AUTHOR_PRIOR = 8
"""How many tokens of each author are added to those seen, so that the assumed shares of the authors begin equal."""


class Chosen(NamedTuple):
    """How far the junior drafts in the next step, with the load and the counts by which it was chosen."""

    choice: Choice
    load: Load
    passes: Passes


class DraftChooser:
    """Chooses how far the junior drafts, by the rows that decode and by what the call has shown so far.

    Args:
        drafts: the choices there are, and what they should cost.
    """

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts
        self.begin_call()

    def begin_call(self) -> None:
        """Forget all counts, so that a call depends on its own requests only."""
        self._choice = Choice()
        self._seen = np.zeros(4, np.int64)  # drafted, accepted; written by the junior and the senior where both may

    def count_drafts(self, counts: Passes) -> None:
        """Count the drafted and accepted tokens of a round."""
        self._seen[:2] += counts.drafted, counts.accepted
        self._forget()

    def count_authors(self, authors: np.ndarray) -> None:
        """Count the authors of written tokens of requests in which both may write."""
        self._seen[2:] += np.bincount(authors, minlength=2)
        self._forget()

    def _forget(self) -> None:
        """Halve the counts once they are large, so that old ones weigh less, also if nothing is drafted any more."""
        if max(self._seen[0], self._seen[2:].sum()) > STATS_WINDOW:
            self._seen //= 2

    def reads_alone(self, mode: SchedulingMode, rows: int, context: float) -> bool:
        """Whether the junior also reads prompts of rows that the senior writes alone, so that it can draft for them.

        Args:
            mode: the scheduling mode.
            rows: how many rows there are.
            context: how many tokens the new rows have, on average.
        """
        if mode != "auto":
            return mode == "draft"
        return self.drafts.choose(Choice(), Load(rows, context, 1.0), Passes()).ahead > 0

    def choose(self, mode: SchedulingMode, state: KVState, slots: np.ndarray) -> Chosen:
        """Choose how far the junior drafts in the next step, provided that the step continues these requests.

        The drafts are then as long as the slots that the scheduler gives them, on all ranks.

        Args:
            mode: the scheduling mode.
            state: the state of the requests.
            slots: their slots.
        """
        if mode not in DRAFTING:
            return Chosen(Choice(), Load(0), Passes())
        drafted, accepted, junior, senior = self._seen.tolist()
        passes = Passes(drafted=drafted, accepted=accepted)
        slots = slots[state.known[JUNIOR, slots]]
        load = Load(len(slots))
        if len(slots):
            share = (senior + AUTHOR_PRIOR) / (junior + senior + 2 * AUTHOR_PRIOR)
            may_write = state.writers[:, slots]
            shares = np.where(may_write.all(0), share, may_write[SENIOR])
            load = Load(len(slots), float(state.length[slots].mean()), float(shares.mean()))
            self._choice = self.drafts.choose(self._choice, load, passes, always=mode == "draft")
        return Chosen(self._choice, load, passes)


def pair_of(runners: Mapping[int, Any]) -> Pair:
    """What both models should cost on their device, given their model runners by author.

    Raises:
        EngineError: transformers does not know an architecture.
    """
    costs = VLLM_CPU if torch.device(runners[SENIOR].device).type == "cpu" else VLLM_CUDA
    return Pair(_size(runners[SENIOR]), _size(runners[JUNIOR]), costs)


def _size(runner: Any) -> Size:
    """The size of this rank's part of a model.

    It is counted on a model without weights, since vLLM packs the weights.

    Raises:
        EngineError: transformers does not know the architecture.
    """
    config, parallel = runner.model_config, runner.parallel_config
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config.hf_text_config)
    except ValueError as error:
        raise EngineError(
            f"{config.model}: transformers cannot say how large it is, which chooses drafts ({error}); set "
            "rollout.vllm.mode=draft and rollout.draft_tokens to a number"
        ) from None
    heads = config.get_num_kv_heads(parallel) * config.get_head_size()
    whole = Size.of(model, cached=2 * heads * config.get_num_layers(parallel))
    return whole._replace(parameters=whole.parameters // parallel.tensor_parallel_size)
