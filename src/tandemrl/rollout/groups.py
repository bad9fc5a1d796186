"""Scores finished completions, and groups them by prompt."""

from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tandemrl.data.rows import Prompt
from tandemrl.rewards.scoring import Scorer
from tandemrl.rollout.collect import CompletionBatch
from tandemrl.rollout.engine import LOST, Completion
from tandemrl.types import Author, Group, Rollout


def response_text(completion: Completion, tokenizer: Any) -> str:
    """The text that the authors wrote, without special tokens. Turns are joined by line breaks."""
    turns = [turn.tolist() for turn in completion.turns]
    return "\n".join(tokenizer.batch_decode(turns, skip_special_tokens=True))


def score_rollouts(batch: CompletionBatch, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> list[Group]:
    """Score every finished text as a whole, whoever wrote which part of it.

    The text of an episode is what the authors wrote in its turns; what the environment said is in the transcript. Texts
    that are `engine.LOST` get no score.
    """
    pairs = [
        (prompt, c)
        for prompt, group in zip(batch.prompts, batch.completions, strict=True)
        for c in group
        if c.stop_reason not in LOST
    ]
    items = [(prompt.row, response_text(completion, tokenizer)) for prompt, completion in pairs]
    scores = iter(scorer.score(items, [completion.transcript for _, completion in pairs]))
    groups = []
    for g, (prompt, completions) in enumerate(zip(batch.prompts, batch.completions, strict=True)):
        rollouts = []
        for index, completion in enumerate(completions):
            rollout = unscored(prompt, completion, group=g, index=index)
            if completion.stop_reason in LOST:
                rollouts.append(replace(rollout, reward_parts={"unscored": 1.0}))
                continue
            result = next(scores)
            rollouts.append(replace(rollout, reward=result.value, reward_parts=result.parts))
        groups.append(Group(prompt.row.example_id, tuple(rollouts)))
    return groups


def unscored(prompt: Prompt, completion: Completion, *, group: int, index: int) -> Rollout:
    """The rollout of a prompt and a completion, with a reward of 0 until it is scored."""
    context, told = np.full(len(prompt.tokens), Author.CONTEXT), completion.handover_logprobs
    return Rollout(
        example_id=prompt.row.example_id,
        group=group,
        index=index,
        key=completion.key,
        tokens=np.concatenate([prompt.tokens, completion.tokens]),
        author=np.concatenate([context, completion.author]),
        behaviour_logprobs=np.concatenate([np.zeros(len(context)), completion.behaviour_logprobs]),
        reward=0.0,
        stop_reason=completion.stop_reason,
        turns=max(1, len(completion.turns)),
        transcript=completion.transcript,
        policy_version=completion.policy_version,
        handover_logprobs=None if told is None else np.concatenate([np.zeros(len(context)), told]),
    )
