"""Estimators against brute force: every subset of the samples, every resample of the problems."""

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from tandemrl.evals.measures import votes
from tandemrl.evals.stats import macro_interval, maj_at_k, pass_at_k, seed_interval


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


@pytest.mark.parametrize("k", [0, 5])
def test_estimators_refuse_values_out_of_range(k):
    with pytest.raises(ValueError, match="k <= samples"):
        pass_at_k(0, 4, k)
    with pytest.raises(ValueError, match="k <= samples"):
        maj_at_k(["a"] * 4, [False] * 4, k)


def majority_by_brute_force(answers, correct, k):
    """Every ordered draw of k samples; the most frequent answer wins, ties go to the first seen. An answer that was
    graded both ways is right as often as its samples are."""
    right = {a: np.mean([c for b, c in zip(answers, correct, strict=True) if a == b]) for a in answers}
    total = count = 0
    for draw in permutations(range(len(answers)), k):
        voted = [answers[i] for i in draw if answers[i] is not None]
        count += 1
        if voted:
            total += right[max(voted, key=voted.count)]  # max keeps the first of equals
    return total / count


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=6))
def test_maj_at_k_is_the_mean_over_all_ordered_draws(samples):
    answers, correct = zip(*samples, strict=True)
    for k in range(1, len(answers) + 1):
        expected = majority_by_brute_force(answers, correct, k)
        assert maj_at_k(answers, correct, k) == pytest.approx(expected, abs=1e-12)


def resampled_by_hand(sets, resamples, seed):
    """Independent of ``macro_interval`` but for the generator: resample counts instead of values, sorted quantiles."""
    rng = np.random.default_rng(seed)
    means = np.zeros(resamples)
    for values in sets:
        for r in range(resamples):
            counts = np.bincount(rng.integers(len(values), size=len(values)), minlength=len(values))
            means[r] += sum(float(c) * v for c, v in zip(counts, values, strict=True)) / len(values) / len(sets)
    means.sort()

    def quantile(q):
        below = int(np.floor(q * (resamples - 1)))
        above = min(below + 1, resamples - 1)
        return means[below] + (q * (resamples - 1) - below) * (means[above] - means[below])

    return np.mean([np.mean(values) for values in sets]), quantile(0.025), quantile(0.975)


@pytest.mark.parametrize("sizes", [(1,), (7,), (40, 3, 11)])
def test_bootstrap_interval_is_that_of_an_independent_implementation(sizes):
    rng = np.random.default_rng(1)
    sets = [rng.random(size) for size in sizes]
    assert macro_interval(sets, resamples=101, seed=9) == pytest.approx(resampled_by_hand(sets, 101, 9), abs=1e-12)


def test_seed_interval_is_students():
    """t(0.975, 4 degrees of freedom) = 2.776 in every table."""
    assert seed_interval([0, 0, 0, 0, 5]).high == pytest.approx(1 + 2.776 * np.sqrt(5) / np.sqrt(5), abs=1e-3)
    assert seed_interval([0.2, 0.2, 0.2]) == pytest.approx((0.2, 0.2, 0.2))


def test_a_problem_of_two_sets_is_resampled_in_both_together():
    """The same 40 problems under two names are as uncertain as under one; of a few shared ones by plain loops."""
    values = np.random.default_rng(3).normal(size=40)
    ids = [str(i) for i in range(40)]
    one = macro_interval([values], resamples=400, seed=5)
    assert macro_interval([values, values], [ids, ids], resamples=400, seed=5) == pytest.approx(one)
    apart = macro_interval([values, values], resamples=400, seed=5)
    assert apart.high - apart.low < 0.8 * (one.high - one.low)

    a, b = dict(zip("uvwx", (1.0, 2.0, 3.0, 4.0), strict=True)), dict(zip("wxyz", (5.0, 6.0, 7.0, 9.0), strict=True))
    draws, rng = [], np.random.default_rng(7)
    strata = (["u", "v"], ["w", "x"], ["y", "z"])
    indices = [rng.integers(2, size=(300, 2)) for _ in strata]
    for i in range(300):
        drawn = [names[j] for names, index in zip(strata, indices, strict=True) for j in index[i]]
        sums = [sum(side[name] for name in drawn if name in side) / 4 for side in (a, b)]
        draws.append(np.mean(sums))
    found = macro_interval([np.array([*side.values()]) for side in (a, b)], [[*a], [*b]], resamples=300, seed=7)
    assert found == pytest.approx((np.mean([2.5, 6.75]), *np.quantile(draws, [0.025, 0.975])))


@pytest.mark.parametrize(("value", "size"), [(0.0, 8), (1.0, 8), (0.0, 1), (1.0, 64)])
def test_equal_rates_have_the_interval_of_clopper_and_pearson(value, size):
    exact = binomtest(int(value * size), size).proportion_ci(method="exact")
    found = macro_interval([np.full(size, value)], resamples=2000, seed=1, ends=(0.0, 1.0))
    assert found == pytest.approx((value, exact.low, exact.high), abs=2e-3)


def test_equal_values_are_not_certain_in_one_set_of_two_nor_between_the_ends():
    equal, other = np.zeros(8), np.array([0.0, 1.0, 1.0, 0.0])
    both = [macro_interval([equal, other], resamples=2000, seed=1, ends=ends) for ends in (None, (0.0, 1.0))]
    assert both[0].high + 0.02 < both[1].high
    halves = macro_interval([np.full(8, 0.5)], resamples=2000, seed=1, ends=(0.0, 1.0))
    away = 0.5 * (1 - 0.05 ** (1 / 8))  # each side is half of the draws
    assert halves == pytest.approx((0.5, 0.5 - away, 0.5 + away), abs=0.01)
    assert macro_interval([equal], resamples=20, seed=1) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("values", [[], [0.1], [0.1, np.nan]])
def test_intervals_refuse_bad_input(values):
    with pytest.raises(ValueError, match="interval over seeds"):
        seed_interval(values)
    if values != [0.1]:
        with pytest.raises(ValueError, match="bootstrap"):
            macro_interval([np.array(values)], resamples=10, seed=0)


@pytest.mark.parametrize(
    ("answers", "correct", "classes"),
    [
        (["5", "5.0", r"\frac{10}{2}", "5 apples", r"5 \text{ more apples}", "$5$"], True, 1),
        (["5", "5.0", r"\frac{10}{2}", "5 apples", r"5 \text{ more apples}", "$5$"], False, 1),
        (["5 apples", "5"], False, 1),
        (["1,000", "1000", "$1{,}000$", "1001"], False, 2),
        (["0.5", "50%", "50"], False, 1),  # over the second
        (["50%", "50", "0.5"], False, 1),
        (["5", "-5", "5/6", "5 or 6", "5 million"], False, 5),
        (["x+1", "1+x", "x-1"], False, 2),
        (["Paris", "paris", "Rome"], False, 2),
        (["", " ", "\n"], False, 0),
        (["a" * 300, "A" * 300], False, 2),  # not compared
    ],
)
def test_equal_answers_vote_together(answers, correct, classes):
    voted = votes([*answers, None], [correct] * (len(answers) + 1))
    assert len(set(voted) - {None}) == classes
    assert voted[-1] is None


def test_correct_answers_do_not_vote_with_wrong_ones():
    assert votes(["7", "7.0", "8", "8.0", "7"], [True, True, False, False, True]) == ["7", "7", "8", "8", "7"]
    assert votes(["7", "7.0", "7"], [True, True, False]) == ["7", "7.0", "7"]  # graded both ways: by itself
