import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrl.models.batching import attention_cost, micro_batches, pack
from tandemrl.types import Rollout


@st.composite
def rollouts(draw):
    made = []
    for index in range(draw(st.integers(1, 5))):
        author = draw(st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=9))
        tokens = draw(st.lists(st.integers(0, 99), min_size=len(author), max_size=len(author)))
        logprobs = [-(token + 1) / 7 if who >= 0 else 0.0 for token, who in zip(tokens, author, strict=True)]
        made.append(Rollout("e", 0, index, 0, np.array(tokens), np.array(author), np.array(logprobs), reward=0.0))
    return made


@given(rollouts())
@settings(max_examples=60)
def test_a_packed_batch_splits_into_its_rollouts(made):
    batch = pack(made)
    lengths = [len(rollout.tokens) for rollout in made]
    assert batch.lengths.tolist() == lengths
    for name in ("tokens", "author", "behaviour_logprobs"):
        for part, rollout in zip(getattr(batch, name).split(lengths), made, strict=True):
            np.testing.assert_array_equal(part.numpy(), getattr(rollout, name))
    for i, (positions, ids) in enumerate(
        zip(batch.positions.split(lengths), batch.sequence_ids.split(lengths), strict=True)
    ):
        assert positions.tolist() == list(range(lengths[i]))
        assert set(ids.tolist()) == {i}
    assert not batch.advantages.any()


def test_pack_refuses_what_does_not_fit():
    empty = Rollout("culprit", 0, 4, 0, np.array([]), np.array([]), np.array([]), reward=0.0)
    with pytest.raises(ValueError, match="at least one rollout"):
        pack([])
    with pytest.raises(ValueError, match="culprit/4"):
        pack([empty])


def partitions(items, count):
    """Every way to put items into count bins, as loads."""
    for places in itertools.product(range(count), repeat=len(items)):
        yield [sum(item for item, place in zip(items, places, strict=True) if place == b) for b in range(count)]


def fits(lengths, rooms):
    """Whether some way to put all lengths into the rooms exists."""
    return not lengths or any(
        fits(lengths[1:], [*rooms[:i], room - lengths[0], *rooms[i + 1 :]])
        for i, room in enumerate(rooms)
        if room >= lengths[0]
    )


def copies(bins, groups):
    """In how many bins a group is, on average: how often its prompt is computed."""
    return sum(len({groups[i] for i in bin_}) for bin_ in bins) / len(set(groups))


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5)), max_size=40),
    st.integers(50, 120),
    st.integers(1, 5),
    st.booleans(),
)
def test_budget_parts_and_every_sequence_once(sequences, budget, parts, grouped):
    lengths, numbers = [length for length, _ in sequences], [group for _, group in sequences]
    groups = numbers if grouped else None
    bins = micro_batches(lengths, budget, parts=parts, groups=groups)
    assert sorted(i for bin_ in bins for i in bin_) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bin_) <= budget for bin_ in bins)
    assert len(bins) % parts == 0
    assert sum(not bin_ for bin_ in bins) == max(0, len(bins) - len(lengths))
    # Any two first-fit bins exceed the budget together; after that come at most parts - 1 more.
    assert len(bins) <= max(1, 2 * -(-sum(lengths) // budget)) + parts - 1
    costs = [sum(attention_cost(lengths[i]) for i in bin_) for bin_ in bins]
    assert costs == sorted(costs, reverse=True)
    assert bins == micro_batches(lengths, budget, parts=parts, groups=groups)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(12, 20))
@settings(max_examples=50)
def test_number_of_bins_against_brute_force(lengths, budget):
    fewest = next(n for n in itertools.count(1) if fits(lengths, [budget] * n))
    found = len(micro_batches(lengths, budget))
    assert fewest <= found <= (11 * fewest + 6) // 9  # the tight bound of first-fit decreasing (Dosa 2007)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=7), st.integers(2, 3))
@settings(max_examples=50)
def test_balance_against_brute_force(lengths, parts):
    costs = [attention_cost(length) for length in lengths]
    bins = micro_batches(lengths, sum(lengths), parts=parts)
    slowest = max(sum(costs[i] for i in bin_) for bin_ in bins)
    best = min(max(loads) for loads in partitions(costs, parts))
    assert best - 1e-9 <= slowest <= (4 / 3 - 1 / (3 * parts)) * best + 1e-9  # Graham 1969


def test_a_group_is_torn_only_where_it_has_to_be():
    assert micro_batches([2] * 8, 8, groups=[0, 1] * 4) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    groups = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for parts in (1, 3):  # 9 tokens fit a bin, but three groups of 6 tokens have to go into two bins or three
        assert copies(micro_batches([2] * 9, 9, parts=parts, groups=groups), groups) == 1
    torn = micro_batches([3] * 8, 15, groups=[0] * 8)  # the group alone exceeds the budget
    assert sorted(map(len, torn)) == [3, 5] or sorted(map(len, torn)) == [4, 4]


def test_more_processes_than_sequences_leave_empty_bins_last():
    assert micro_batches([3, 5], 8, parts=4) == [[1], [0], [], []]
    assert micro_batches([3, 5, 4, 4], 8, parts=4, groups=[0] * 4) == [[1], [2], [3], [0]]
    assert micro_batches([], 10, parts=4) == []


def test_balancing_gives_way_to_the_budget():
    lengths = [6, 5, 5, 4, 4, 3, 3]
    bins = micro_batches(lengths, 10)
    assert [sum(lengths[i] for i in bin_) for bin_ in bins] == [10, 10, 10]
    lengths = [3072] * 2 + [128] * 80  # bins of equal cost have unequal numbers of tokens, and there is no room for it
    assert [sum(lengths[i] for i in bin_) for bin_ in micro_batches(lengths, 8192, parts=2)] == [8192, 8192]


def test_a_sequence_above_the_budget_is_named_with_the_fix():
    with pytest.raises(ValueError, match=r"sequence 1 has 11 tokens.*train\.tokens_per_micro_batch to 11"):
        micro_batches([3, 11, 4], 10)
