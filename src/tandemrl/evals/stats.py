"""Estimators of the evaluation: pass@k, maj@k, bootstrap intervals over problems, and intervals over training seeds.

Problems are the unit of resampling, never samples, since the samples of one problem are not independent of each other.
A bootstrap interval is conditional on the checkpoint. For what another training seed would give, use
``seed_interval``.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from math import comb
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit


class Interval(NamedTuple):
    """An estimate and its two-sided interval."""

    mean: float
    low: float
    high: float


@cache
def pass_at_k(correct: int, samples: int, k: int) -> float:
    """The probability that at least one of ``k`` samples is correct, estimated without bias from ``samples`` of them.

    ``1 - C(samples - correct, k) / C(samples, k)``, in exact integers; arXiv 2107.03374, equation 1.

    Raises:
        ValueError: ``k`` is out of range.

    Examples:
        >>> pass_at_k(correct=1, samples=4, k=2)
        0.5
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= samples, got {samples} samples")
    return float(1 - Fraction(comb(samples - correct, k), comb(samples, k)))


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """The exact probability that the majority answer of ``k`` samples, drawn without replacement, is correct.

    Samples without an answer (None) are drawn but do not vote; without any vote, the result counts as wrong. Tied
    answers win with equal probability, which equals "first seen" on average over the order of the samples. An answer
    that was graded both ways counts with the fraction of its samples that were correct.

    Raises:
        ValueError: the lengths differ, or ``k`` is out of range.

    Examples:
        >>> maj_at_k(["7", "7", "5"], [True, True, False], k=3)
        1.0
    """
    samples = len(answers)
    if not 1 <= k <= samples:
        raise ValueError(f"maj@{k} needs 1 <= k <= samples, got {samples} samples")
    grades: dict[str, list[bool]] = {}
    for answer, grade in zip(answers, correct, strict=True):
        if answer is not None:
            grades.setdefault(answer, []).append(bool(grade))
    silent = samples - sum(len(g) for g in grades.values())
    return _majority(tuple(sorted((len(g), sum(g)) for g in grades.values())), silent, k)


@cache  # problems differ in their answers, but hardly in how often each was given
def _majority(answers: tuple[tuple[int, int], ...], silent: int, k: int) -> float:
    """``maj_at_k`` from the number of samples and of correct samples for each answer.

    Args:
        silent: the number of samples without an answer.
    """
    wins = Fraction(0)
    for i, (own, right) in enumerate(answers):
        if right == 0:
            continue
        others = [size for j, (size, _) in enumerate(answers) if j != i]
        for votes in range(1, min(own, k) + 1):
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
            wins += Fraction(right, own) * comb(own, votes) * shares
    return float(wins / comb(silent + sum(size for size, _ in answers), k))


def macro_interval(
    by_set: Sequence[np.ndarray],
    names: Sequence[Sequence[str]] | None = None,
    *,
    resamples: int,
    seed: int,
    level: float = 0.95,
    ends: tuple[float, float] | None = None,
) -> Interval:
    """The unweighted mean of the set means, with its percentile bootstrap interval.

    Problems are resampled within their own set; those that several sets have, together in all of these. Equal values
    have no variance to resample, but a share of the problems may be unlike them, although none of n was: it is drawn
    from Beta(1, n), and its values are at an end. For rates that are all 0 or all 1 in one set this is the interval of
    Clopper and Pearson (1934); without ``ends`` it has no width.

    Args:
        by_set: the values of each set, one per problem.
        names: the names of each set's problems, by which those of several sets are known.
        resamples: number of resamples.
        seed: seed of the resamples.
        level: confidence level of the interval.
        ends: the lowest and the highest value that there can be.

    Raises:
        ValueError: a set is empty, or a value is not finite.
    """
    sets = [np.asarray(values, dtype=np.float64) for values in by_set]
    if not sets or not all(values.size and np.isfinite(values).all() for values in sets):
        raise ValueError("a bootstrap interval needs sets of at least one problem each, with finite values")
    rng = np.random.default_rng(seed)
    draws = np.zeros(resamples)
    names = names or [[f"{i}/{j}" for j in range(values.size)] for i, values in enumerate(sets)]
    for values, weight in _strata(sets, names):
        draws += values[rng.integers(values.size, size=(resamples, values.size))].mean(axis=1)
        if ends is not None and np.ptp(values) < 1e-12:
            away = weight * np.array(ends) - values[0]
            away = away[np.abs(away) > 1e-12]
            unlike = 1 - ((rng.permutation(resamples) + 0.5) / resamples) ** (1 / values.size)
            draws += unlike * rng.choice(away, size=resamples)
    mean = float(np.mean([values.mean() for values in sets]))
    low, high = np.quantile(draws / len(sets), [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, min(mean, float(low)), max(mean, float(high)))


def _strata(sets: Sequence[np.ndarray], names: Sequence[Sequence[str]]) -> list[tuple[np.ndarray, float]]:
    """For the problems of each combination of sets, what each adds to the sum of the set means, times their number, and
    what a value of 1 in all of these sets would add."""
    homes: dict[str, dict[int, float]] = {}
    for i, (values, own) in enumerate(zip(sets, names, strict=True)):
        for name, value in zip(own, values, strict=True):
            homes.setdefault(name, {})[i] = value
    strata: dict[tuple[int, ...], list[dict[int, float]]] = {}
    for each in homes.values():
        strata.setdefault(tuple(each), []).append(each)
    return [
        (
            np.array([sum(value * (len(members) / sets[i].size) for i, value in each.items()) for each in members]),
            sum(len(members) / sets[i].size for i in which),
        )
        for which, members in strata.items()
    ]


def standard_error(interval: Interval, *, level: float = 0.95) -> float:
    """The standard error that an interval of a normal estimate would have."""
    return float((interval.high - interval.low) / 2 / ndtri((1 + level) / 2))


def seed_interval(values: Sequence[float], *, errors: Sequence[float] = (), level: float = 0.95) -> Interval:
    """The mean over training seeds with its Student t interval.

    The bootstrap does not work here: resamples of a handful of values are too similar, so its intervals are too narrow.

    The variance of the values is that between seeds and that within a seed together. A few values may lie closer to
    each other by luck than the latter allows; then it counts alone (random effects after DerSimonian and Laird
    with Student's t: the modified Knapp-Hartung interval of Röver, Knapp and Friede, 2015).

    Args:
        values: one value per seed, such as a mean or a difference of two means.
        errors: the standard error of each value within its seed, over problems, if they are known.
        level: confidence level of the interval.

    Raises:
        ValueError: there are fewer than two values, or a value is not finite.

    Examples:
        >>> interval = seed_interval([0.1, 0.2, 0.3])
        >>> [round(bound, 3) for bound in interval]
        [0.2, -0.048, 0.448]
    """
    seeds = np.asarray(values, dtype=np.float64)
    if seeds.size < 2 or not np.isfinite(seeds).all():
        raise ValueError(f"an interval over seeds needs at least two finite values, got {values}")
    mean = float(seeds.mean())
    spread = max(seeds.std(ddof=1), np.sqrt(np.mean(np.square(errors))) if len(errors) else 0.0)
    half = float(stdtrit(seeds.size - 1, (1 + level) / 2) * spread / np.sqrt(seeds.size))
    return Interval(mean, mean - half, mean + half)


def holm(values: Sequence[float]) -> list[float]:
    """The p values of a family of tests after Holm's correction (1979), in the given order.

    Examples:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order, adjusted, highest = np.argsort(values, kind="stable"), [0.0] * len(values), 0.0
    for rank, index in enumerate(order.tolist()):
        highest = max(highest, min(1.0, values[index] * (len(values) - rank)))
        adjusted[index] = highest
    return adjusted


def at_least(interval: Interval, bar: float) -> bool | None:
    """Whether an interval supports "at least ``bar``": True if all of it is, False if none of it is, else None.

    With an interval of a - b and ``bar`` = -margin this is the test of non-inferiority: a may be worse than b by at
    most the margin, and better by any amount. For a two-sided interval of level .95, "True" is wrong in 2.5 % of cases.

    Examples:
        >>> [at_least(Interval(0.04, low, high), -0.05) for low, high in ((0.02, 0.06), (-0.1, 0.18))]
        [True, None]
    """
    if interval.low >= bar:
        return True
    return False if interval.high < bar else None
