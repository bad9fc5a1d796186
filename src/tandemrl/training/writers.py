"""The mismatch check for rollouts that are older than the trainer's weights (``train.async_steps``).

When the engine has received the trainer's weights and begins to write, each process of the trainer keeps a copy of its
part of the trained weights in host memory (with adapters, of the adapters alone). When the rollouts are finished, or a
checkpoint is about to be written, the trainer takes these weights back for one forward over a sample of the rollouts.
So the check compares the same weights on both sides, as it does without overlap. It leaves out the updates since then,
for which importance sampling corrects. At most two copies exist: the kept one, and the newer weights during that
forward.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from tandemrl.models.batching import pack, pack_tokens
from tandemrl.models.sharding import exchanged, trained_parts
from tandemrl.rollout.collect import CompletionBatch
from tandemrl.rollout.groups import unscored
from tandemrl.training.async_rollouts import Compare
from tandemrl.training.gates import check_mismatch
from tandemrl.training.state import RunSetup
from tandemrl.training.update import logprob_mismatch
from tandemrl.types import Author, Metrics


def remember(setup: RunSetup, policy: PreTrainedModel) -> Compare:
    """Keep a copy of the policy's weights.

    Returns:
        a function that takes the completions which these weights wrote, and returns the metrics of
        ``update.logprob_mismatch`` as ``mismatch/writer_…``, or none if the sample has no senior token. All processes
        must call it together. It raises a TrainError if the mean is above ``setup.mismatch_limit`` or not a number.
    """
    kept = [part.to("cpu", copy=True) for part in trained_parts(policy)]

    def compare(completions: CompletionBatch) -> Metrics:
        with exchanged(trained_parts(policy), kept):
            metrics = writer_mismatch(setup, policy, completions)
        check_mismatch(setup.mismatch_limit, metrics.get("mismatch/writer_mean_abs", 0.0))
        return metrics

    return compare


@torch.no_grad()
def writer_mismatch(setup: RunSetup, policy: PreTrainedModel, completions: CompletionBatch) -> Metrics:
    """The mismatch of the policy's present weights on the first completions, one micro-batch for each data rank."""
    pairs = [(p, c) for p, group in zip(completions.prompts, completions.completions, strict=True) for c in group]
    rollouts = [unscored(prompt, completion, group=0, index=i) for i, (prompt, completion) in enumerate(pairs)]
    budget, world = setup.config.train.tokens_per_micro_batch, setup.world
    sample = first_within([len(r.tokens) for r in rollouts], budget, rank=world.data_rank, size=world.data_size)
    # a rank without work still joins the collectives
    batch = pack([rollouts[i] for i in sample], setup.device) if sample else pack_tokens([[0]], setup.device)
    senior = batch.author == Author.SENIOR
    logprobs, _ = setup.logprobs(policy, batch, senior)
    gaps = logprob_mismatch(world, (logprobs - batch.behaviour_logprobs)[senior])
    return {name.replace("mismatch/", "mismatch/writer_"): value for name, value in gaps.items()}


def first_within(lengths: Sequence[int], budget: int, *, rank: int, size: int) -> list[int]:
    """The indices of the first sequences of this rank that have at most ``budget`` tokens together.

    The sequences of a rank are every ``size``-th one, from ``rank`` on.

    Examples:
        >>> first_within([3, 9, 3, 9, 3], 7, rank=0, size=2)
        [0, 2]
    """
    chosen: list[int] = []
    for i in range(rank, len(lengths), size):
        budget -= lengths[i]
        if budget < 0:
            break
        chosen.append(i)
    return chosen
