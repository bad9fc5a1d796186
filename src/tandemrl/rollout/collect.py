"""Prompts and an engine give completions, a replay of the author draws verifies who wrote each token, and the finished
texts are scored and grouped by prompt."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from tandemrl.data.rows import RENDERED, Prompt, Row
from tandemrl.rewards.protocol import NO_SCORE, TrainerState
from tandemrl.rewards.scoring import Graded, Scorer
from tandemrl.rollout.engine import (
    LOST,
    Completion,
    Draws,
    Engine,
    OnProgress,
    Passes,
    Request,
    Sampling,
    generate_verified,
)
from tandemrl.rollout.envs.episodes import EpisodeRunner
from tandemrl.selection import Strategy
from tandemrl.selection.draws import completion_keys
from tandemrl.types import Author, Group, Response, Rollout


class CompletionBatch(NamedTuple):
    """Completions of some prompts, one list per prompt, with the author draws of them all and the forward passes that
    they took."""

    prompts: list[Prompt]
    completions: list[list[Completion]]
    draws: Draws
    passes: Passes = Passes()


def generate(
    engine: Engine,
    prompts: Sequence[tuple[int, Prompt]],
    *,
    strategy: Strategy,
    sampling: Sampling,
    group_size: int,
    seed: int,
    step: int,
    drawn: int = 0,
    episode_runner: EpisodeRunner | None = None,
    progress: OnProgress | None = None,
) -> CompletionBatch:
    """Let an engine write ``group_size`` completions of each prompt, and verify their authors by replay.

    Args:
        prompts: pairs (number of the example in its dataset, prompt). The number enters the request keys.
        seed: seed of the run, which enters the request keys.
        step: training step, which enters the request keys.
        drawn: how many prompts already got completions in this step. Keys start after theirs, so that none is repeated.
        episode_runner: where the authors take turns with an environment. None means that a prompt gets one response.
        progress: called with the number of new tokens.

    Raises:
        EngineError: a completion is missing, in another's place, aborted, from other weights or lacks a channel, or
            its authors are not those the strategy gives for its key; or the environment is broken, or never answers.
    """
    requests, seen = [], Counter[int]()
    for example, prompt in prompts:
        # An example drawn twice in a step, as at the end of an epoch, is not copied.
        first = group_size * (drawn + seen[example])
        seen[example] += 1
        keys = completion_keys(seed, step, example, first, group_size, shared=strategy.shared_draws)
        request = Request(prompt.tokens, keys, sampling, strategy, junior_prompt=prompt.junior)
        requests.append(request if episode_runner is None else episode_runner.episode(request, prompt.row))
    write = generate_verified if episode_runner is None else episode_runner.generate
    completions, draws = write(engine, requests, strategy, progress=progress)
    passes = engine.passes  # now: the engine's next call may be about anything
    return CompletionBatch([prompt for _, prompt in prompts], completions, draws, passes)


# ---------------------------------------------------------------------------------------------------- scores and groups

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
