"""Finished completions -> scored groups."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from tandemrl.rewards.scoring import Scorer
from tandemrl.rollout.collect import Written
from tandemrl.types import Author, Group, Rollout


def score_rollouts(written: Written, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> list[Group]:
    """Grade every finished text as a whole, whoever wrote which part of it."""
    pairs = [(prompt, c) for prompt, group in zip(written.prompts, written.completions, strict=True) for c in group]
    texts = tokenizer.batch_decode([completion.tokens.tolist() for _, completion in pairs], skip_special_tokens=True)
    scores = iter(scorer.score([(prompt.row, text) for (prompt, _), text in zip(pairs, texts, strict=True)]))
    groups = []
    for g, (prompt, completions) in enumerate(zip(written.prompts, written.completions, strict=True)):
        context = np.full(len(prompt.tokens), Author.CONTEXT)
        rollouts = []
        for index, completion in enumerate(completions):
            result = next(scores)
            rollouts.append(
                Rollout(
                    example_id=prompt.row.example_id,
                    group=g,
                    index=index,
                    key=completion.key,
                    tokens=np.concatenate([prompt.tokens, completion.tokens]),
                    author=np.concatenate([context, completion.author]),
                    behaviour_logprobs=np.concatenate([np.zeros(len(context)), completion.behaviour_logprobs]),
                    reward=result.value,
                    reward_parts=result.parts,
                    stop_reason=completion.stop_reason,
                    policy_version=completion.policy_version,
                )
            )
        groups.append(Group(prompt.row.example_id, tuple(rollouts)))
    return groups
