"""The contract: out-of-range knobs, and completions whose author channel is missing, short or altered, are refused."""

import dataclasses

import numpy as np
import pytest
import torch

from helpers import VOCABULARY, strategies
from tandemrl.rollout.engine import Completion, Draws, EngineError, Sampling, check_authors, check_completion
from tandemrl.selection import Strategy, bernoulli, replay
from tandemrl.selection.draws import request_key

OUT_OF_RANGE = [
    ("max_tokens", 0, "at least 1"),
    ("temperature", -0.1, "0 .greedy. or a positive number"),
    ("temperature", float("nan"), "0 .greedy. or a positive number"),
    ("top_p", 0.0, r"in \(0, 1\]"),
    ("top_k", -1, r"0 \(off\) or a positive number"),
    ("min_p", 1.01, r"in \[0, 1\]"),
    ("repetition_penalty", 0.0, "positive"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), OUT_OF_RANGE)
def test_sampling_out_of_range_names_the_knob(name, value, allowed):
    with pytest.raises(ValueError, match=rf"sampling\.{name} must be {allowed}, got {value}"):
        Sampling(**{name: value})


# ---------------------------------------------------------------------------------------------------------- completions


def written(strategy: Strategy, *, count: int = 6, length: int = 12, seed: int = 0) -> list[Completion]:
    """Completions of different lengths with random tokens, as an engine that obeys the contract would return them."""
    generator = np.random.default_rng(seed)
    completions = []
    for sample in range(count):
        key = request_key(seed, 0, 0, sample)
        tokens = generator.integers(0, VOCABULARY, length - sample)
        told = replay(strategy, torch.tensor([key]), torch.from_numpy(tokens)[None], torch.tensor([len(tokens)]))
        author = told.author[0].numpy()
        completions.append(Completion(key, tokens, author, np.full(len(tokens), -1.0, np.float32), "length"))
    return completions


def altered(completion: Completion, name: str, index: int, value: float) -> Completion:
    channel = getattr(completion, name).copy()
    channel[index] = value
    return dataclasses.replace(completion, **{name: channel})


@pytest.fixture
def good() -> Completion:
    return written(bernoulli(0.5))[0]


@pytest.mark.parametrize("name", ["author", "behaviour_logprobs"])
def test_a_missing_or_short_channel_is_refused(good, name):
    channel = getattr(good, name)
    for broken, found in (
        (None, "is missing for 12 tokens"),
        (channel[:-1], "has 11 entries for 12 tokens"),
        (np.append(channel, channel[:1]), "has 13 entries for 12 tokens"),
        (channel[:0], "has 0 entries"),
    ):
        object.__setattr__(good, name, broken)  # an engine's own type may allow what `Completion` does not
        with pytest.raises(EngineError, match=rf"completion {good.key}: {name} {found}"):
            check_completion(good)


def test_a_completion_without_tokens_passes():
    check_completion(Completion(1, np.zeros(0, int), np.zeros(0, np.int8), np.zeros(0, np.float32), "abort"))


@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        ("author", (-1, 2), r"authors must be 0 \(junior\), 1 \(senior\) or -1"),
        ("behaviour_logprobs", (np.nan, np.inf, -np.inf), "behaviour_logprobs are not finite"),
    ],
)
def test_impossible_values_are_refused(good, name, values, match):
    check_completion(good)
    for value in values:
        with pytest.raises(EngineError, match=match):
            check_completion(altered(good, name, 11, value))


@pytest.mark.parametrize("name", strategies())
def test_authors_of_every_strategy_are_confirmed(name):
    strategy = strategies()[name]
    completions = written(strategy, length=40)
    drawn = check_authors(completions, strategy)
    assert 0 <= drawn.senior <= drawn.total
    if name == "bernoulli":  # one draw per token
        assert drawn == Draws(sum(len(c.tokens) for c in completions), sum(int(c.author.sum()) for c in completions))
    assert (drawn.total > 0) == (name in ("word", "word_aligned", "bernoulli"))


@pytest.mark.parametrize("name", strategies())
def test_any_single_changed_author_is_found(name):
    """Every token of every completion, one at a time: the error names the completion and the token."""
    strategy = strategies()[name]
    completions = written(strategy)
    for row, completion in enumerate(completions):
        for index in range(len(completion.tokens)):
            mutant = altered(completion, "author", index, 1 - completion.author[index])
            mutants = [*completions[:row], mutant, *completions[row + 1 :]]
            with pytest.raises(EngineError, match=rf"completion {completion.key}: token {index} .* \(1 tokens differ"):
                check_authors(mutants, strategy)
