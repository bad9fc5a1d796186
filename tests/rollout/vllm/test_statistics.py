"""At temperature 1: every author's tokens have that author's softmax, and no draw knows of another."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from pairs import VLLM, flat, models, strategies
from transformers import PreTrainedModel

from helpers import VOCABULARY, chi_square_bound, prompts, reference_distribution, reference_logits
from tandemrl.rollout.engine import Completion, Request, Sampling, check_authors
from tandemrl.selection import Strategy, alternating, bernoulli, chunk
from tandemrl.selection.draws import request_key

pytestmark = VLLM

PAIR = "Llama junior"


def sample(
    engines, prompt: Sequence[int], strategy: Strategy, count: int, max_tokens: int, seed: int
) -> list[Completion]:
    """``count`` completions of one prompt, of exactly ``max_tokens`` tokens each."""
    keys = tuple(request_key(seed, 0, 0, i) for i in range(count))
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    completions = flat(engines(PAIR).generate([Request(tuple(prompt), keys, sampling, strategy)]))
    check_authors(completions, strategy)
    return completions


def channel(completions: Sequence[Completion], name: str) -> np.ndarray:
    return np.stack([getattr(c, name) for c in completions])


def softmax(model: PreTrainedModel, prompt: Sequence[int], written: Sequence[int] = ()) -> np.ndarray:
    """The distribution [v] of the token after ``written``."""
    return reference_distribution(reference_logits(model, prompt, [*written, 0])[-1], Sampling(), [], [])


def assert_drawn_from(tokens: np.ndarray, p: np.ndarray, other: np.ndarray) -> None:
    """The tokens have distribution ``p``, and there are enough of them to tell it from ``other``."""
    counts = np.bincount(tokens, minlength=VOCABULARY)
    statistic, bound = chi_square_bound(counts, p)
    assert statistic < bound
    statistic, bound = chi_square_bound(counts, other)
    assert statistic > 5 * bound


def test_first_tokens_have_their_authors_distribution(engines):
    """Per author the exact softmax, and the author does not depend on the draw."""
    prompt = prompts(1, seed=5, lengths=(3,))[0]
    completions = sample(engines, prompt, bernoulli(0.4), 6000, 1, seed=0)
    tokens, author = (channel(completions, name)[:, 0] for name in ("tokens", "author"))
    assert abs(author.mean() - 0.4) < 5 * np.sqrt(0.4 * 0.6 / len(author))
    by_senior, by_junior = (softmax(model, prompt) for model in models(PAIR))
    assert_drawn_from(tokens[author == 1], by_senior, by_junior)
    assert_drawn_from(tokens[author == 0], by_junior, by_senior)


@pytest.mark.parametrize(
    "strategy",
    [
        alternating("junior"),
        pytest.param(alternating("senior"), marks=pytest.mark.slow),
        pytest.param(chunk(2, "junior"), marks=pytest.mark.slow),
        chunk(2, "senior"),
    ],
)
def test_second_tokens_have_their_authors_distribution_given_the_first(engines, strategy):
    """Whether the author is the first token's or the model that had not read it yet."""
    prompt = prompts(1, seed=6, lengths=(2,))[0]
    completions = sample(engines, prompt, strategy, 4000, 2, seed=1)
    tokens, author = (channel(completions, name) for name in ("tokens", "author"))
    pair = models(PAIR)
    mine, others = pair if author[0, 1] else pair[::-1]
    for first in np.bincount(tokens[:, 0], minlength=VOCABULARY).argsort()[-2:]:
        given = tokens[tokens[:, 0] == first, 1]
        assert_drawn_from(given, softmax(mine, prompt, [first]), softmax(others, prompt, [first]))


# --------------------------------------------------------------------------------------------------------- independence


@torch.no_grad()
def ranks(prompt: Sequence[int], tokens: np.ndarray, author: np.ndarray) -> np.ndarray:
    """Where each token [n, l] lies in its author's cumulative distribution (mid-point), scaled to variance 1.

    If the draws are independent, every entry has mean 0 given everything that was drawn before it, so no product of two
    entries has another mean than 0.
    """
    whole = torch.cat([torch.tensor(prompt).expand(len(tokens), -1), torch.from_numpy(tokens)], 1)
    place = torch.from_numpy(tokens)[..., None]
    by: list[np.ndarray] = []
    for model in reversed(models(PAIR)):
        p = model(input_ids=whole).logits[:, len(prompt) - 1 : -1].double().softmax(-1)
        by.append((p.cumsum(-1) - p / 2).gather(-1, place)[..., 0].numpy())
    centred = np.where(author == 1, by[1], by[0]) - 0.5
    return centred / centred.std()


def z_score(x: np.ndarray, y: np.ndarray) -> float:
    """Standard deviations between the mean product of two uncorrelated samples of mean 0 and nought."""
    product = (x * y).ravel()
    return float(product.mean() / product.std() * np.sqrt(product.size))


@pytest.fixture(scope="module")
def drawn(engines) -> tuple[np.ndarray, np.ndarray]:
    """The ranks [n, l] of the tokens of 2000 completions, and their authors; the senior's share is 0.4."""
    prompt = prompts(1, seed=7, lengths=(5,))[0]
    completions = sample(engines, prompt, bernoulli(0.4), 2000, 16, seed=2)
    tokens, author = (channel(completions, name) for name in ("tokens", "author"))
    return ranks(prompt, tokens, author), author


def test_draws_are_uncorrelated_within_a_completion(drawn):
    """Of neighbours and at a distance; of one author, and of the junior and the senior."""
    rank, author = drawn
    assert abs(rank.mean()) * np.sqrt(rank.size) < 4
    for lag in (1, 2, 5):
        earlier, later = rank[:, :-lag], rank[:, lag:]
        change = author[:, lag:] - author[:, :-lag]
        for pairs in (change == 0, change == 1, change == -1):
            assert abs(z_score(earlier[pairs], later[pairs])) < 4
    assert z_score(rank, rank + 0.05 * np.roll(rank, 1, 1)) > 4  # the score is not blind


def test_draws_of_different_completions_are_uncorrelated(drawn):
    """Neighbouring keys, the same position."""
    rank, _ = drawn
    assert abs(z_score(rank[:-1], rank[1:])) < 4


def test_author_draws_are_independent_of_token_draws(drawn):
    """The author at a place knows nothing of the draws before, at and after that place."""
    rank, author = drawn
    chosen = author - 0.4
    for shift in (-1, 0, 1):
        inside = slice(max(shift, 0), 16 + min(shift, 0)), slice(max(-shift, 0), 16 + min(-shift, 0))
        assert abs(z_score(rank[:, inside[0]], chosen[:, inside[1]])) < 4
    assert abs(z_score(chosen[:, :-1], chosen[:, 1:])) < 4


@pytest.mark.parametrize("p", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("name", ["word", "word_aligned", "bernoulli"])
def test_the_senior_gets_its_share_of_the_draws(engines, name, p):
    strategy = strategies()[f"{name} {p}"]
    prompt = prompts(1, seed=9, lengths=(6,))[0]
    draws = check_authors(sample(engines, prompt, strategy, 200, 24, seed=4), strategy)
    assert draws.total > 400
    assert abs(draws.senior / draws.total - p) < 5 * np.sqrt(p * (1 - p) / draws.total)
