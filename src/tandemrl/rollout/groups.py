"""Scores finished completions, and groups them by prompt."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from tandemrl.data.rows import RENDERED, Prompt, Row
from tandemrl.rewards.protocol import NO_SCORE, TrainerState
from tandemrl.rewards.scoring import Graded, Scorer
from tandemrl.rollout.collect import CompletionBatch
from tandemrl.rollout.engine import LOST, Completion
from tandemrl.types import Author, Group, Response, Rollout

_UNSCORED = Graded(NO_SCORE)
_QUESTION, _ANSWER = "What is two and two?", "It is four."
_TAIL = 256
"""Where in a prompt the beginning of the answer is looked for first: in so many tokens at its end."""


class ResponseReader:
    """Turns token ids into the `Response` that rewards, judges and files get, in training and everywhere else.

    Args:
        ends: the ids that end a turn, whichever author wrote it, if there are several turns. The end of the last turn
            is known from its completion.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ends = {*ends, tokenizer.eos_token_id, tokenizer.pad_token_id}
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids, *(index for index, token in added if token.special)}
        self._header = _header(tokenizer)

    def of(self, completion: Completion, opened: str = "") -> Response:
        """The response of a completion to a prompt that ends with ``opened``; an agent's answer, if it gave one."""
        if completion.transcript is not None and completion.transcript.answer is not None:
            return Response.of(completion.transcript.answer)
        turns = [turn.tolist() for turn in completion.turns]
        if turns and completion.transcript is None and completion.stop_reason == "eos":
            turns[-1].pop()
        return self.of_turns(turns, completion.tokens.tolist(), opened)

    def of_turns(self, turns: Sequence[Any], ids: Iterable[Any], opened: str = "") -> Response:
        """The response of turns, of which all tokens after the prompt are ``ids``."""
        written = [*map(self._ended, turns)]
        text = "\n".join(self._tokenizer.batch_decode(written))
        plain = text
        if not self._special.isdisjoint(chain(*written)):
            plain = "\n".join(self._tokenizer.batch_decode(written, skip_special_tokens=True))
        return Response(text, plain, opened, tuple(map(int, ids)))

    def opened(self, prompt: Sequence[int], row: Row | None = None) -> str:
        """What a prompt holds after the markup before an answer: the beginning of the response."""
        for tail in (prompt[-_TAIL:], prompt):
            text = self._tokenizer.decode(list(tail))
            for header in filter(None, (self._header, self._header.rstrip())):
                if header in text:
                    return str(text.rpartition(header)[2]).lstrip("" if header == self._header else "\n")
        if row is not None and row.extra_info.get(RENDERED):  # for a base model, as TinyZero's
            _, found, opened = str(row.messages[-1]["content"]).rpartition("\nAssistant:")
            return opened if found else ""
        return ""

    def _ended(self, turn: Iterable[Any]) -> list[int]:
        """A turn without its end and without padding."""
        ids = [*map(int, turn)]
        while ids and ids[-1] in self._ends:
            ids.pop()
        return ids


def _header(tokenizer: Any) -> str:
    """What the chat template writes between a question and an answer; "" if it has none of its own."""
    question, answer = ({"role": role, "content": text} for role, text in (("user", _QUESTION), ("assistant", _ANSWER)))
    try:
        text = tokenizer.apply_chat_template([question, answer, question], tokenize=False)
    except Exception:  # a template is a program that came with a model; prompts that need it were refused before
        return ""
    header, found, _ = text.partition(_QUESTION)[2].partition(_ANSWER)
    return str(header) if found else ""


def score_rollouts(
    batch: CompletionBatch,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    *,
    ends: Collection[int] = (),
    state: TrainerState | None = None,
) -> list[Group]:
    """Score every finished text as a whole, whoever wrote which part of it.

    The text of an episode is what the authors wrote in its turns; what the environment said is in the transcript. Texts
    that are `engine.LOST` get no score.

    A function that compares the responses to a prompt is not called for the only one that is not lost.

    Args:
        ends: see `ResponseReader`.
        state: how far the run has come, for reward functions that ask for it.
    """
    reader, read = ResponseReader(tokenizer, ends), dict[tuple[int, int], Response]()
    for g, (prompt, completions) in enumerate(zip(batch.prompts, batch.completions, strict=True)):
        opened = reader.opened(prompt.tokens, prompt.row)
        read |= {(g, index): reader.of(each, opened) for index, each in enumerate(completions)}
    whole = [(g, index) for g, index in read if batch.completions[g][index].stop_reason not in LOST]
    left = Counter(g for g, _ in whole)
    compared = [any(term.grouped for term in scorer.terms_of(prompt.row)) for prompt in batch.prompts]
    whole = [(g, i) for g, i in whole if not compared[g] or left[g] > 1 or len(batch.completions[g]) == 1]
    graded = scorer.graded(
        [(batch.prompts[place[0]].row, read[place]) for place in whole],
        [batch.completions[g][index].transcript for g, index in whole],
        groups=[g for g, _ in whole],
        state=state,
    )
    found, groups = dict(zip(whole, graded, strict=True)), []
    for g, (prompt, completions) in enumerate(zip(batch.prompts, batch.completions, strict=True)):
        rollouts, logged = [], dict[str, list[float]]()
        for index, completion in enumerate(completions):
            each = found.get((g, index), _UNSCORED)
            response = read[g, index]
            rollouts.append(rollout_of(prompt, completion, group=g, index=index, graded=each, response=response))
            for name, values in each.metrics.items():
                logged.setdefault(name, []).extend(values)
        groups.append(Group(prompt.row.example_id, tuple(rollouts), logged))
    return groups


def rollout_of(
    prompt: Prompt, completion: Completion, *, group: int, index: int, graded: Graded = _UNSCORED, **read: Response
) -> Rollout:
    """The rollout of a prompt and a completion.

    Args:
        read: its ``response``, if that is known.
    """
    begun = prompt.tokens if completion.prompt is None else completion.prompt
    context, told = np.full(len(begun), Author.CONTEXT), completion.handover_logprobs
    branches = (rollout_of(prompt, each, group=group, index=index, graded=graded) for each in completion.branches)
    return Rollout(
        example_id=prompt.row.example_id,
        group=group,
        index=index,
        key=completion.key,
        tokens=np.concatenate([begun, completion.tokens]),
        author=np.concatenate([context, completion.author]),
        behaviour_logprobs=np.concatenate([np.zeros(len(context)), completion.behaviour_logprobs]),
        reward=graded.score.value,
        reward_parts=graded.score.parts,
        logged=graded.extra,
        stop_reason=completion.stop_reason,
        turns=max(1, len(completion.turns)),
        transcript=completion.transcript,
        policy_version=completion.policy_version,
        handover_logprobs=None if told is None else np.concatenate([np.zeros(len(context)), told]),
        branches=tuple(branches),
        **read,
    )
