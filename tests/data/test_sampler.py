import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrl.data.rows import DataError
from tandemrl.data.sampler import Sampler


@given(st.integers(1, 20), st.lists(st.integers(0, 30), max_size=12), st.integers(0, 5))
def test_every_epoch_is_a_permutation_and_nothing_is_dropped(count, requests, seed):
    sampler = Sampler(count, seed=seed)
    drawn = [i for k in requests for i in sampler.next(k)]
    assert len(drawn) == sum(requests)
    for start in range(0, len(drawn) - count + 1, count):
        assert sorted(drawn[start : start + count]) == list(range(count))
    assert sampler.epoch == len(drawn) // count


@given(st.lists(st.integers(1, 3), min_size=1, max_size=20), st.lists(st.integers(0, 30)), st.integers(0, 60))
def test_resuming_is_as_if_never_stopped(levels, requests, later):
    uninterrupted, resumed = (Sampler(len(levels), seed=3, levels=levels) for _ in range(2))
    stopped = Sampler(len(levels), seed=3, levels=levels)
    for k in requests:
        uninterrupted.next(k)
        stopped.next(k)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert resumed.next(later) == uninterrupted.next(later)
    assert resumed.state_dict() == uninterrupted.state_dict()


def test_foreign_state_and_empty_data_are_refused():
    with pytest.raises(DataError, match="no rows"):
        Sampler(0, seed=0)
    for other, name in ((Sampler(4, seed=0), "count"), (Sampler(5, seed=1), "seed")):
        with pytest.raises(DataError, match=name):
            Sampler(5, seed=0).load_state_dict(other.state_dict())


def test_by_levels_an_epoch_rises_and_each_level_is_shuffled():
    levels = [3, 2, 4, 2, 2, 3, 2, 2]
    sampler, shuffled = Sampler(8, seed=5, levels=levels), Sampler(8, seed=5)
    for _ in range(3):
        order, free = sampler.next(8), shuffled.next(8)
        assert [levels[row] for row in order] == sorted(levels)
        for level in {2, 3, 4}:  # among themselves as they come without levels
            assert [row for row in order if levels[row] == level] == [row for row in free if levels[row] == level]
