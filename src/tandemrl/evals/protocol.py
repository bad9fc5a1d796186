"""The protocol of evaluations: who writes, with which sampling and random numbers, and how texts are graded."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from tandemrl.config import EvalConfig, SelectionConfig
from tandemrl.data.messages import Response, Transcript
from tandemrl.data.rows import Prompt
from tandemrl.evals.measures import EvalError, Sample, author_runs, group_of, parts_of
from tandemrl.models.loading import context_of
from tandemrl.rewards.protocol import TrainerState
from tandemrl.rewards.scoring import Scorer
from tandemrl.rollout.collect import ResponseReader
from tandemrl.rollout.engine import LOST, Completion, Engine, Request, Sampling, generate_verified
from tandemrl.rollout.envs.episodes import EpisodeRunner
from tandemrl.selection import Strategy, Who, alternating_turns, first_turn, sentence, solo, turn, word
from tandemrl.selection.boundaries import step_tables, word_boundary_table
from tandemrl.selection.draws import request_key
from tandemrl.selection.whole_words import before_text_word, in_two_vocabularies, text_sentence, text_tables


@dataclass(frozen=True, slots=True)
class Profile:
    """The sampling that every phase of an evaluation shares, and the context it has to fit into.

    context: how many tokens prompt and response may have together. None means that the protocol sets no limit. reserve:
    how many tokens of the context stay unused.
    """

    sampling: Sampling
    context: int | None = None
    reserve: int = 0

    def longest(self, prompt_tokens: int) -> int:
        """How many tokens the longest sequence has that can follow from prompts of up to ``prompt_tokens`` tokens."""
        longest = prompt_tokens + self.sampling.max_tokens
        return longest if self.context is None else min(longest, self.context)


PROFILES: dict[str, Profile] = {
    "tiny": Profile(Sampling(max_tokens=64, temperature=1.0)),
    "paper": Profile(Sampling(max_tokens=3000, temperature=0.7, top_p=0.8, top_k=20), context=4096, reserve=8),
}


LONGEST = 2048
"""How many tokens a response may have if nothing says how many."""


def profile_of(config: EvalConfig) -> Profile:
    """The profile that a config names, or with ``profile: custom`` the one whose values it gives.

    Raises:
        EvalError: sampling is set for a profile that has its own.
    """
    if config.profile in PROFILES:
        if config.unread:
            unread = ", ".join(config.unread)
            raise EvalError(f"{unread}: eval.profile={config.profile} does not read it; set eval.profile=custom")
        return PROFILES[config.profile]
    sampling = Sampling(
        max_tokens=config.max_tokens, temperature=config.temperature, top_p=config.top_p, top_k=config.top_k
    )
    return Profile(sampling, config.context)


def run_of_model(model: str | Path) -> Path | None:
    """The folder of the run whose ``hf/`` holds a model, or None."""
    weights = Path(model).resolve().parent
    return weights.parent if weights.name == "hf" and (weights.parent / "config.yaml").is_file() else None


def sampling_of_model(model: str | Path | None) -> dict[str, Any]:
    """The values of ``profile: custom`` for a model of no run: those of its ``generation_config.json``, in its context.

    What that file does not say is temperature 1 and at most `LONGEST` tokens.

    Args:
        model: None is a model of which nothing is known, as behind an endpoint.
    """
    said: dict[str, Any] = {"temperature": 1.0, "max_tokens": LONGEST}
    with suppress(OSError, ValueError):  # without its files: loading the model says what is missing
        if model is not None and (context := context_of(AutoConfig.from_pretrained(model))) < 2**30:
            said["context"] = context
        stored = GenerationConfig.from_pretrained(model) if model is not None else GenerationConfig()
        drawn = ("temperature", "top_p", "top_k") if stored.do_sample else ()
        own = {key: getattr(stored, key) for key in drawn} | {"max_tokens": stored.max_new_tokens}
        said |= {key: value for key, value in own.items() if value is not None}
    return said


def sampling_for(profile: Profile, prompt: Prompt) -> Sampling:
    """The profile's sampling with ``max_tokens`` cut to what the context leaves after this prompt.

    Raises:
        EvalError: the prompt leaves no room for a response.
    """
    if profile.context is None:
        return profile.sampling
    room = profile.context - len(prompt.tokens) - profile.reserve
    if room < 1:
        what = f"row {prompt.row.example_id}: its prompt of {len(prompt.tokens)} tokens leaves no room in a context of"
        fix = "lower data.max_prompt_tokens, which drops such rows, or set eval.profile=custom, a larger eval.context"
        raise EvalError(f"{what} {profile.context} ({profile.reserve} reserved); {fix}")
    return replace(profile.sampling, max_tokens=min(profile.sampling.max_tokens, room))


def strategies(
    phase: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocabulary: int | None = None,
    selection: SelectionConfig | None = None,
    episodes: bool = False,
    by_text: bool = False,
) -> dict[str, Strategy]:
    """The strategies of a phase by the names of its arms.

    The tandem phase draws the authors of turns if training does, and those of words otherwise; of whole words, if the
    models have two vocabularies. The handoff phase has two arms that alternate by steps (between two vocabularies, at
    the first word after the end of a step), and in an environment three more that change authors between turns. In all
    other phases the senior writes alone.

    Args:
        vocabulary: how many token ids the models can write, if that is more than the tokenizer has.
        selection: the ``selection`` section for the tandem phase. None means its defaults.
        episodes: whether the authors take turns with an environment.
        by_text: whether the models have two vocabularies.
    """
    if phase not in ("tandem", "handoff"):
        return {"solo": solo("senior")}
    texts = text_tables(tokenizer, vocabulary) if by_text else None

    def of_turns(strategy: Strategy) -> Strategy:
        return strategy if texts is None else in_two_vocabularies(strategy, texts)

    if phase == "tandem":
        chosen = selection or SelectionConfig()
        prob = chosen.prob_senior
        if draws_turns(chosen):
            return {chosen.strategy: of_turns(turn(prob))}
        if texts is not None:
            return {"before_word": before_text_word(prob, texts)}
        return {"word": word(prob, chosen.max_gap_tokens, word_boundary_table(tokenizer, vocabulary))}
    if texts is None:
        by_steps = partial(sentence, steps=step_tables(tokenizer, vocabulary))
    else:
        by_steps = partial(text_sentence, texts=texts)
    arms = {"senior_first": by_steps("senior"), "junior_first": by_steps("junior")}
    if not episodes:
        return arms
    turns = {f"{who}_first_turns": of_turns(alternating_turns(who)) for who in get_args(Who)}
    return arms | turns | {"senior_then_junior": of_turns(first_turn("senior"))}


def draws_turns(selection: SelectionConfig) -> bool:
    """Whether training draws an author for each turn, so that the tandem phase does so, too."""
    return selection.kind.draws and selection.kind.by_turns


def generate_samples(
    arms: Mapping[str, Strategy],
    *,
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    profile: Profile,
    samples: int,
    seed: int,
    episode_runner: EpisodeRunner | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Sample]:
    """Write ``samples`` completions per prompt, arm by arm and in the order of the prompts, without grading them.

    Request keys are ``request_key(seed, 0, position of the prompt, sample)`` in every arm, so that two checkpoints (or
    two arms) get the same random numbers.

    Args:
        arms: the strategy of each arm.
        episode_runner: where the authors take turns with an environment. None means that a prompt gets one response.
            The token limit of the profile then holds for the authors' tokens in all turns together.
        progress: called with the number of newly written tokens.

    Raises:
        EvalError: there are no prompts, or a prompt leaves no room for a response.
        EngineError: a completion is missing or aborted, or its authors are not the strategy's; or the environment is
            broken, or never answers.
    """
    if not prompts:
        raise EvalError("nothing to evaluate: no prompts")
    written, same = [], same_problems(prompts, episodes=episode_runner is not None)
    reader = ResponseReader(tokenizer, () if episode_runner is None else episode_runner.ends)
    opened = [reader.opened(prompt.tokens, prompt.row) for prompt in prompts]
    for arm, strategy in arms.items():
        requests = []
        for problem, prompt in enumerate(prompts):
            keys = tuple(request_key(seed, 0, problem, sample) for sample in range(samples))
            sampling = sampling_for(profile, prompt)
            request = Request(prompt.tokens, keys, sampling, strategy, junior_prompt=prompt.junior)
            requests.append(request if episode_runner is None else episode_runner.episode(request, prompt.row))
        write = generate_verified if episode_runner is None else episode_runner.generate
        completions, _ = write(engine, requests, strategy, progress=progress)
        for i, completion in enumerate(completion for group in completions for completion in group):
            problem, number = divmod(i, samples)
            response = reader.of(completion, opened[problem])
            sample = sample_of(problem, prompts[problem], arm, number, completion, response)
            written.append(sample._replace(same_as=same[problem]))
    return written


def same_problems(prompts: Sequence[Prompt], *, episodes: bool) -> list[str | None]:
    """For each row, the example_id of the first one with the same problem, if that is another one.

    Two are the same if their prompts are; in an environment, which reads the row, too, if both are.
    """
    first: dict[object, str] = {}
    same: list[str | None] = []
    for prompt in prompts:
        row, key = prompt.row, (tuple(prompt.tokens), "")
        if episodes:
            read = {name: value for name, value in row.extra_info.items() if name not in ("index", "split")}
            key = (key[0], json.dumps([row.messages, row.ground_truth, read], sort_keys=True, default=repr))
        name = first.setdefault(key, row.example_id)
        same.append(None if name == row.example_id else name)
    return same


def grade(
    samples: Sequence[Sample], prompts: Sequence[Prompt], scorer: Scorer, state: TrainerState | None = None
) -> list[Sample]:
    """Score whole texts, whoever wrote which part.

    A sample is correct if the scorer's ``acc`` is 1; a format score alone does not suffice. A text to which the judge
    gave no score keeps the score None, as does one that is `LOST`, which is not scored at all and counts as wrong.

    Args:
        state: how far a run has come, for reward functions that ask for it. None: this is no run.
    """
    whole = [sample for sample in samples if sample.stop_reason not in LOST]
    items = [(prompts[sample.problem].row, sample.response) for sample in whole]
    episodes = [None if each.transcript is None else Transcript.from_json(each.transcript) for each in whole]
    groups = [(sample.arm, sample.problem) for sample in whole]
    scores = iter(scorer.score(items, episodes, groups=groups, state=state))

    def marked(sample: Sample) -> Sample:
        if sample.stop_reason in LOST:
            return sample._replace(score=None, correct=False)
        score = next(scores)
        value = float(score.value) if score.scored else None
        right, parts = score.parts["acc"] == 1.0, parts_of(score.parts)
        return sample._replace(score=value, correct=right, answer=score.answer, parts=parts)

    return [marked(sample) for sample in samples]


def verify(samples: Sequence[Sample], prompts: Sequence[Prompt], pool: Any) -> list[Sample]:
    """Let the judge score the reasoning of every correct sample. It accepts scores of at least ``judge.accept``.

    Raises:
        JudgeError: the judge is down or gives no scores.
        DataError: a row lacks a field that the judge is shown.
    """
    right = [i for i, sample in enumerate(samples) if sample.correct]
    shown = [(prompts[samples[i].problem].row, samples[i].text, samples[i].answer) for i in right]
    verified = [sample._replace(verified=False) for sample in samples]
    for i, mark in zip(right, pool.marks(shown), strict=True):
        accepted = mark is not None and mark >= pool.config.accept
        verified[i] = verified[i]._replace(judge=mark, verified=accepted)
    return verified


# --------------------------------------------------------------------------------------------------------------------


def sample_of(
    problem: int, prompt: Prompt, arm: str, number: int, completion: Completion, response: Response
) -> Sample:
    own = completion.author[completion.author >= 0]
    return Sample(
        problem=problem,
        example_id=prompt.row.example_id,
        set=prompt.row.data_source,
        arm=arm,
        sample=number,
        key=completion.key,
        text=response.text,
        plain=None if response.plain == response.text else response.plain,
        opened=response.opened,
        tokens=completion.tokens.tolist(),
        length=len(own),
        author=author_runs(completion.author),
        rounds=1 + int(np.count_nonzero(np.diff(own))) if len(own) else 0,
        senior_share=float(own.mean()) if len(own) else 0.0,
        stop_reason=completion.stop_reason,
        turns=max(1, len(completion.turns)),
        transcript=None if completion.transcript is None else completion.transcript.to_json(),
        group=group_of(prompt.row.extra_info),
    )
