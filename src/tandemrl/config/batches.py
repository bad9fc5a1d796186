"""The batch plan, which says what the batch keys mean together. It is printed before a run."""

import math
from dataclasses import dataclass, replace

from tandemrl.config.schema import Config


@dataclass(frozen=True)
class BatchPlan:
    """The sizes of the batches in one training step.

    ``micro_batches`` is an upper bound, which is reached if every sequence has its full length.
    """

    prompts: int
    rollouts: int
    updates: int
    sequences_per_update: int
    max_tokens_per_sequence: int
    micro_batches: int

    def __str__(self) -> str:
        return (
            f"batch plan per step: {self.prompts} prompts -> {self.rollouts} rollouts -> {self.updates} update(s)\n"
            f"    an update: {self.sequences_per_update} sequences, each <= {self.max_tokens_per_sequence} tokens, "
            f"in <= {self.micro_batches} micro-batch(es)"
        )


def batch_plan(config: Config) -> BatchPlan:
    """The batch plan of one training step.

    Examples:
        >>> plan = batch_plan(load(overrides=["train.prompts_per_step=16", "train.mini_batch_prompts=8"]))
        >>> plan.rollouts, plan.updates, plan.sequences_per_update
        (128, 2, 64)
    """
    per_update = config.train.mini_batch_prompts or config.train.prompts_per_step
    sequences = per_update * config.rollout.group_size
    per_micro_batch = max(1, config.train.tokens_per_micro_batch // config.longest_sequence)
    return BatchPlan(
        prompts=config.train.prompts_per_step,
        rollouts=config.train.prompts_per_step * config.rollout.group_size,
        updates=config.train.prompts_per_step // per_update,
        sequences_per_update=sequences,
        max_tokens_per_sequence=config.longest_sequence,
        micro_batches=math.ceil(sequences / per_micro_batch),
    )


def with_steps(config: Config, prompts: int) -> Config:
    """The config of a run over so many prompts: with the number of steps that ``train.epochs`` makes, if it is set.

    Examples:
        >>> config = load(overrides=["train.epochs=2.5", "train.prompts_per_step=16"])
        >>> with_steps(config, 100).train.steps  # six steps an epoch
        15
    """
    train = config.train
    if train.epochs is None:
        return config
    steps = max(1, int(train.epochs * (prompts // train.prompts_per_step)))
    return replace(config, train=replace(train, steps=steps))
