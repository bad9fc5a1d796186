"""Estimators of the evaluation, in plain NumPy: pass@k, maj@k, and bootstrap intervals over problems.

Problems are the unit of resampling, never samples: the samples of one problem are not independent of each other. Every
interval is conditional on the checkpoint; it says nothing about the noise of another training seed.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import comb
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """An estimate and its two-sided percentile interval."""

    mean: float
    low: float
    high: float


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Probability that at least one of ``k`` samples is correct, estimated without bias from ``samples`` of them.

    ``1 - C(samples - correct, k) / C(samples, k)``, in exact integers; arXiv 2107.03374, equation 1.

    Raises:
        ValueError: ``k`` or ``correct`` is not in range.

    Example:
        >>> pass_at_k(correct=1, samples=4, k=2)
        0.5
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= samples, got {samples} samples")
    if not 0 <= correct <= samples:
        raise ValueError(f"correct must be between 0 and {samples} (samples), got {correct}")
    return float(1 - Fraction(comb(samples - correct, k), comb(samples, k)))


def pass_at_k_per_problem(correct: np.ndarray, samples: int, k: int) -> np.ndarray:
    """``pass_at_k`` of every problem; ``correct`` holds one count per problem, each of ``samples`` samples.

    Raises:
        ValueError: ``k`` or a count is not in range.

    Example:
        >>> pass_at_k_per_problem(np.array([0, 1, 4]), samples=4, k=2)
        array([0. , 0.5, 1. ])
    """
    correct = np.asarray(correct, dtype=np.int64)
    if correct.size and not 0 <= correct.min() <= correct.max() <= samples:
        raise ValueError(f"correct must be between 0 and {samples} (samples), got {correct.min()} to {correct.max()}")
    return np.take([pass_at_k(c, samples, k) for c in range(samples + 1)], correct)


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Probability that the majority answer of ``k`` samples, drawn without replacement, is correct. Exact.

    Samples without an answer (None) are drawn but do not vote; no vote at all counts as wrong. Tied answers win with
    equal probability, which is what "first seen" means on average over the order of the samples. An answer that was
    graded both ways counts with the fraction of its samples that were correct.

    Raises:
        ValueError: lengths differ, or ``k`` is not in range.

    Example:
        >>> maj_at_k(["7", "7", "5"], [True, True, False], k=3)
        1.0
    """
    samples = len(answers)
    if len(correct) != samples:
        raise ValueError(f"maj@{k}: {samples} answers but {len(correct)} grades")
    if not 1 <= k <= samples:
        raise ValueError(f"maj@{k} needs 1 <= k <= samples, got {samples} samples")
    grades: dict[str, list[bool]] = {}
    for answer, grade in zip(answers, correct, strict=True):
        if answer is not None:
            grades.setdefault(answer, []).append(bool(grade))
    silent = samples - sum(len(g) for g in grades.values())
    wins = Fraction(0)
    for winner, own in grades.items():
        if not any(own):
            continue
        others = [len(g) for answer, g in grades.items() if answer != winner]
        for votes in range(1, min(len(own), k) + 1):
            # ways[(drawn, tied)]: draws of the rest in which no other answer exceeds `votes` and `tied` reach it.
            ways = {(s, 0): comb(silent, s) for s in range(min(silent, k) + 1)}
            for size in others:
                longer: dict[tuple[int, int], int] = {}
                for (drawn, tied), count in ways.items():
                    for v in range(min(size, votes, k - drawn) + 1):
                        key = (drawn + v, tied + (v == votes))
                        longer[key] = longer.get(key, 0) + count * comb(size, v)
                ways = longer
            shares = sum((Fraction(n, t + 1) for (drawn, t), n in ways.items() if drawn == k - votes), Fraction(0))
            wins += Fraction(sum(own), len(own)) * comb(len(own), votes) * shares
    return float(wins / comb(samples, k))


def bootstrap_interval(per_problem: np.ndarray, *, resamples: int, seed: int, level: float = 0.95) -> Interval:
    """Mean over problems with its percentile bootstrap interval; one value per problem.

    Raises:
        ValueError: no problems, a value that is not finite, or ``resamples``/``level`` out of range.
    """
    return macro_interval([per_problem], resamples=resamples, seed=seed, level=level)


def paired_bootstrap(a: np.ndarray, b: np.ndarray, *, resamples: int, seed: int, level: float = 0.95) -> Interval:
    """Mean of ``a - b`` over matched problems, with its interval: the two are resampled together.

    Raises:
        ValueError: the two have different shapes, or as for ``bootstrap_interval``.
    """
    if np.shape(a) != np.shape(b):
        raise ValueError(f"paired bootstrap needs the same problems on both sides, got {np.shape(a)} and {np.shape(b)}")
    return bootstrap_interval(np.subtract(a, b, dtype=np.float64), resamples=resamples, seed=seed, level=level)


def macro_interval(by_set: Sequence[np.ndarray], *, resamples: int, seed: int, level: float = 0.95) -> Interval:
    """Unweighted mean of the set means with its interval; problems are resampled within their own set.

    Raises:
        ValueError: an empty set, a value that is not finite, or ``resamples``/``level`` out of range.
    """
    sets = [np.asarray(values, dtype=np.float64) for values in by_set]
    if not sets or any(values.ndim != 1 or values.size == 0 for values in sets):
        raise ValueError("a bootstrap interval needs one-dimensional sets of at least one problem each")
    if not all(np.isfinite(values).all() for values in sets):
        raise ValueError("a bootstrap interval needs finite values")
    if resamples < 1 or not 0 < level < 1:
        raise ValueError(f"resamples must be at least 1 and level in (0, 1), got {resamples} and {level}")
    rng = np.random.default_rng(seed)
    draws = np.zeros(resamples)
    for values in sets:  # one resample at a time: a [resamples, problems] index would not fit for large sets
        draws += [values[rng.integers(values.size, size=values.size)].mean() for _ in range(resamples)]
    low, high = np.quantile(draws / len(sets), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(np.mean([values.mean() for values in sets])), float(low), float(high))
