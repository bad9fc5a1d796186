"""Estimators against brute force: every subset of the samples, every resample of the problems."""

from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrl.stats import (
    bootstrap_interval,
    macro_interval,
    maj_at_k,
    paired_bootstrap,
    pass_at_k,
    pass_at_k_per_problem,
)


@pytest.mark.parametrize("samples", range(1, 9))
def test_pass_at_k_is_the_mean_over_all_subsets(samples):
    for correct in range(samples + 1):
        outcomes = [1] * correct + [0] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = list(combinations(outcomes, k))
            brute = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(correct, samples, k) == pytest.approx(brute, abs=1e-15)


def test_pass_at_k_is_exact_where_floats_would_overflow():
    assert pass_at_k(1, 2000, 1000) == 0.5
    assert pass_at_k(0, 2000, 1000) == 0.0
    assert pass_at_k(1001, 2000, 1000) == 1.0


def test_pass_at_k_is_unbiased():
    """E over binomial(samples, p) of the estimator = 1 - (1 - p)^k."""
    p, samples, k = 0.3, 8, 4
    mean = sum(
        np.prod([p if x else 1 - p for x in outcome]) * pass_at_k(sum(outcome), samples, k)
        for outcome in product((0, 1), repeat=samples)
    )
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(("correct", "samples", "k"), [(0, 4, 5), (0, 4, 0), (5, 4, 2), (-1, 4, 2)])
def test_pass_at_k_refuses_values_out_of_range(correct, samples, k):
    with pytest.raises(ValueError, match=r"samples"):
        pass_at_k(correct, samples, k)
    with pytest.raises(ValueError, match=r"samples"):
        pass_at_k_per_problem(np.array([0, correct]), samples, k)


def test_per_problem_is_the_scalar_function_of_every_problem():
    correct = np.array([3, 0, 8, 1, 5])
    for k in (1, 2, 4, 8):
        assert pass_at_k_per_problem(correct, 8, k).tolist() == [pass_at_k(int(c), 8, k) for c in correct]


def majority_by_brute_force(answers, correct, k):
    """Every ordered draw of k samples; the most frequent answer wins, ties go to the first seen."""
    total = count = 0
    for draw in permutations(range(len(answers)), k):
        voted = [answers[i] for i in draw if answers[i] is not None]
        count += 1
        if voted:
            winner = max(voted, key=voted.count)  # max keeps the first of equals
            total += next(c for a, c in zip(answers, correct, strict=True) if a == winner)
    return total / count


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=6), st.data())
def test_maj_at_k_is_the_mean_over_all_ordered_draws(answers, data):
    right = data.draw(st.sets(st.sampled_from(["a", "b", "c"])))
    correct = [answer in right for answer in answers]
    for k in range(1, len(answers) + 1):
        expected = majority_by_brute_force(answers, correct, k)
        assert maj_at_k(answers, correct, k) == pytest.approx(expected, abs=1e-12)


def test_maj_at_k_refuses_bad_input():
    with pytest.raises(ValueError, match="k <= samples"):
        maj_at_k(["a"], [True], 2)
    with pytest.raises(ValueError, match="grades"):
        maj_at_k(["a", "b"], [True], 1)


def all_resample_means(values):
    return np.array(list(product(values, repeat=len(values)))).mean(axis=1)


def test_bootstrap_interval_approaches_the_enumeration_of_all_resamples():
    values = np.array([0.0, 0.17, 0.31, 0.58, 0.83, 0.99])  # irregular, so that no two resamples tie
    low, high = np.quantile(all_resample_means(values), [0.05, 0.95])
    interval = bootstrap_interval(values, resamples=20_000, seed=3, level=0.9)
    assert interval.mean == pytest.approx(0.48)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.015)


def test_bootstrap_interval_is_deterministic_in_the_seed():
    values = np.linspace(0, 1, 20) ** 2
    assert bootstrap_interval(values, resamples=100, seed=1) == bootstrap_interval(values, resamples=100, seed=1)
    assert bootstrap_interval(values, resamples=100, seed=1) != bootstrap_interval(values, resamples=100, seed=2)


def test_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        problems = rng.binomial(8, rng.beta(1, 1, size=60)) / 8
        interval = bootstrap_interval(problems, resamples=200, seed=trial)
        hits += interval.low <= 0.5 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_macro_weighs_sets_equally_and_resamples_within_sets():
    large, small = np.zeros(90), np.ones(10)
    interval = macro_interval([large, small], resamples=50, seed=0)
    assert interval == (0.5, 0.5, 0.5)  # constant sets: no resample can move between them
    pooled = bootstrap_interval(np.concatenate([large, small]), resamples=50, seed=0)
    assert pooled.mean == pytest.approx(0.1)
    assert pooled.low < pooled.high


def test_paired_bootstrap_keeps_the_pairs():
    rng = np.random.default_rng(5)
    a = rng.random(50)
    shifted = paired_bootstrap(a + 0.25, a, resamples=200, seed=0)
    assert shifted == pytest.approx((0.25, 0.25, 0.25))  # unpaired, the interval would be as wide as a's own
    with pytest.raises(ValueError, match="same problems"):
        paired_bootstrap(a, a[:-1], resamples=10, seed=0)


@pytest.mark.parametrize(
    ("values", "resamples", "level"),
    [([], 10, 0.95), ([[1.0]], 10, 0.95), ([np.nan], 10, 0.95), ([1.0], 0, 0.95), ([1.0], 10, 1.0)],
)
def test_bootstrap_refuses_bad_input(values, resamples, level):
    with pytest.raises(ValueError, match=r"bootstrap|resamples"):
        bootstrap_interval(np.array(values), resamples=resamples, seed=0, level=level)
