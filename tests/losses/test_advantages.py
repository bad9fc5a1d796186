import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from runpy import run_path
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrl.losses import (
    explained_variance,
    gae,
    group_centred,
    group_normalised,
    leave_one_out,
    whiten,
    zero_variance_groups,
)

ESTIMATORS = [group_normalised, group_centred, leave_one_out]
REFERENCE = run_path(str(Path(__file__).parents[1] / "golden" / "losses.py"))

# Rewards on a grid, so that a group is either constant or clearly not.
batches = st.lists(st.tuples(st.integers(0, 4), st.integers(-8, 8)), min_size=1, max_size=24).map(
    lambda rows: (
        torch.tensor([r / 4 for _, r in rows], dtype=torch.float64),
        torch.tensor([7 * g - 9 for g, _ in rows]),
    )
)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=40)
@given(batch=batches)
def test_groups_are_independent_and_order_free(estimator, batch):
    rewards, groups = batch
    together = estimator(rewards, groups)
    order = torch.arange(len(rewards) - 1, -1, -1)
    assert torch.allclose(estimator(rewards[order], groups[order]), together[order], atol=1e-12)
    for group in groups.unique():
        member = groups == group
        assert torch.allclose(estimator(rewards[member], groups[member]), together[member], atol=1e-12)
        assert abs(together[member].sum()) < 1e-9


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=40)
@given(batch=batches, shift=st.integers(-5, 5), scale=st.sampled_from([0.5, 3.0, 100.0]))
def test_shift_and_scale(estimator, batch, shift, scale):
    rewards, groups = batch
    base = estimator(rewards, groups)
    assert torch.allclose(estimator(rewards + shift, groups), base, atol=1e-9)
    scaled = estimator(rewards * scale, groups)
    if estimator is group_normalised:  # up to the epsilon beside the std
        assert torch.allclose(scaled, base, atol=1e-4)
    else:
        assert torch.allclose(scaled, scale * base, atol=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_group_of_one_and_constant_groups_are_exactly_zero(estimator):
    groups = torch.tensor([4, 1, 1, 1, 2, 2])
    rewards = torch.tensor([3.7, 0.1, 0.1, 0.1, 0.0, 1.0])
    advantages = estimator(rewards, groups)
    assert advantages[:4].tolist() == [0.0] * 4
    assert (advantages[4:] != 0).all()
    for size in range(2, 20):  # the mean of equal floats need not equal them: no gradient may come from that
        equal = torch.tensor([0.1, 0.3, 0.7]).repeat_interleave(size)
        assert (estimator(equal, torch.arange(3).repeat_interleave(size)) == 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nan_reward_stays_in_its_group(estimator):
    advantages = estimator(torch.tensor([math.nan, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    assert advantages.isnan().tolist() == [True, True, False, False]


@settings(max_examples=40)
@given(batch=batches)
def test_zero_variance_groups(batch):
    outcomes, groups = batch
    expected = [
        len({o for o, h in zip(outcomes.tolist(), groups.tolist(), strict=True) if h == g}) == 1 for g in groups
    ]
    assert zero_variance_groups(outcomes, groups).tolist() == expected


def test_whiten_gives_mean_zero_and_unbiased_variance_one():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.ones(50, dtype=torch.float64)
    weights[::3] = 0
    white = whiten(x, weights)
    assert (white[::3] == 0).all()
    kept = white[weights > 0]
    assert abs(kept.mean()) < 1e-12
    assert kept.var(unbiased=True).item() == pytest.approx(1, abs=1e-6)


def test_whiten_over_processes_is_whiten_of_all():
    x = torch.randn(30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weights = torch.rand(30, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * (x > -1)
    parts = [slice(0, 11), slice(11, 11), slice(11, 30)]
    sent, barrier = {}, Barrier(len(parts))

    def process(rank):
        def total(value):
            sent[rank] = value
            barrier.wait()
            result = sum(sent.values())
            barrier.wait()
            return result

        return whiten(x[parts[rank]], weights[parts[rank]], total=total)

    with ThreadPoolExecutor(len(parts)) as pool:
        whitened = torch.cat(list(pool.map(process, range(len(parts)))))
    torch.testing.assert_close(whitened, whiten(x, weights))


def test_explained_variance():
    returns, weights = torch.tensor([1.0, 3.0, -2.0, 5.0, 99.0]), torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    assert explained_variance(returns, returns, weights).item() == 1
    assert explained_variance(torch.full((5,), 7.0), returns, weights).item() == pytest.approx(0)
    values = torch.tensor([0.0, 2.0, -1.0, 6.0, math.nan])
    expected = 1 - np.var([1, 1, -1, -1], ddof=1) / np.var([1, 3, -2, 5], ddof=1)
    assert explained_variance(values, returns, weights).item() == pytest.approx(expected)
    assert explained_variance(values, torch.ones(5), weights).item() == 0


def test_whiten_weights_count_repetitions():
    x = torch.tensor([1.0, 4.0, -2.0], dtype=torch.float64)
    counts = torch.tensor([3, 1, 2])
    repeated = whiten(x.repeat_interleave(counts), torch.ones(6, dtype=torch.float64))
    assert torch.allclose(whiten(x, counts.double()).repeat_interleave(counts), repeated)


def _packed(seed, lengths):
    rng = np.random.default_rng(seed)
    rewards = [rng.normal(size=n) for n in lengths]
    values = [rng.normal(size=n) for n in lengths]
    trained = [rng.random(n) < 0.5 for n in lengths]
    pack = lambda rows: torch.from_numpy(np.concatenate(rows))  # noqa: E731
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return rewards, values, trained, (pack(rewards), pack(values), pack(trained), ids)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 11), min_size=1, max_size=6),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.8, 1.0]),
)
def test_gae_equals_a_loop_over_each_sequence(seed, lengths, gamma, lam):
    rewards, values, trained, packed = _packed(seed, lengths)
    advantages, returns = gae(*packed, gamma=gamma, lam=lam)
    rows = zip(rewards, values, trained, strict=True)
    expected = list(itertools.chain(*(REFERENCE["gae"](r, v, m, gamma, lam) for r, v, m in rows)))
    assert torch.allclose(advantages, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)
    assert torch.equal(returns, advantages + packed[1])
