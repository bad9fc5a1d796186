"""The batch plan, which says what the batch keys mean together. It is printed before a run."""

import math
from dataclasses import replace

from tandemrl.config.schema import Config


def batch_plan(config: Config) -> str:
    """The sizes of the batches in one training step, in words. If every sequence has its full length, there are as many
    micro-batches as it says.

    Examples:
        >>> print(batch_plan(load(overrides=["train.prompts_per_step=16", "train.mini_batch_prompts=8"])))
        batch plan per step: 16 prompts -> 128 rollouts -> 2 update(s)
            an update: 64 sequences, each <= 1088 tokens, in <= 10 micro-batch(es)
    """
    prompts = config.train.prompts_per_step
    per_update = config.train.mini_batch_prompts or prompts
    sequences = per_update * config.rollout.group_size
    micro = math.ceil(sequences / max(1, config.train.tokens_per_micro_batch // config.longest_sequence))
    return (
        f"batch plan per step: {prompts} prompts -> {prompts * config.rollout.group_size} rollouts -> "
        f"{prompts // per_update} update(s)\n"
        f"    an update: {sequences} sequences, each <= {config.longest_sequence} tokens, in <= {micro} micro-batch(es)"
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
