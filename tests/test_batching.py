import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrl.batching import micro_batches, pack, unpack
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
def test_pack_then_unpack_is_the_identity(made):
    advantages = torch.arange(1.0, len(made) + 1)
    batch = pack(made, advantages)
    assert batch.lengths.tolist() == [len(rollout.tokens) for rollout in made]
    for name in ("tokens", "author", "behaviour_logprobs"):
        for part, rollout in zip(unpack(getattr(batch, name), batch.lengths), made, strict=True):
            np.testing.assert_array_equal(part.numpy(), getattr(rollout, name))
    for part, rollout in zip(unpack(batch.positions, batch.lengths), made, strict=True):
        assert part.tolist() == list(range(len(rollout.tokens)))
    for i, part in enumerate(unpack(batch.sequence_ids, batch.lengths)):
        assert set(part.tolist()) == {i}
    for i, (part, rollout) in enumerate(zip(unpack(batch.advantages, batch.lengths), made, strict=True)):
        assert part.tolist() == [i + 1.0 if who >= 0 else 0.0 for who in rollout.author]


def test_infinite_advantage_on_another_sequence_does_not_leak_into_context():
    made = [Rollout("e", 0, i, 0, np.array([1, 2]), np.array([-1, 1]), np.zeros(2), reward=0.0) for i in range(2)]
    assert pack(made, torch.tensor([float("inf"), 1.0])).advantages.tolist() == [0.0, float("inf"), 0.0, 1.0]


def test_pack_and_unpack_refuse_what_does_not_fit():
    one = Rollout("e", 0, 0, 0, np.array([1]), np.array([1]), np.zeros(1), reward=0.0)
    empty = Rollout("culprit", 0, 4, 0, np.array([]), np.array([]), np.array([]), reward=0.0)
    with pytest.raises(ValueError, match="at least one rollout"):
        pack([], torch.zeros(0))
    with pytest.raises(ValueError, match="one advantage each"):
        pack([one], torch.zeros(2))
    with pytest.raises(ValueError, match="culprit/4"):
        pack([empty], torch.zeros(1))
    with pytest.raises(ValueError, match="add up to 3"):
        unpack(torch.zeros(4), torch.tensor([1, 2]))


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_budget_is_never_exceeded_and_every_sequence_is_used_once(lengths, budget):
    bins = micro_batches(lengths, budget)
    assert sorted(i for bin_ in bins for i in bin_) == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in bin_) for bin_ in bins]
    assert all(0 < total <= budget for total in totals)
    assert len(bins) <= 2 * -(-sum(lengths) // budget)  # any two first-fit bins exceed the budget together
    assert bins == micro_batches(lengths, budget)


def test_bins_are_few_and_balanced():
    assert micro_batches([], 10) == []
    assert micro_batches([4, 4, 4, 4], 8) == [[0, 2], [1, 3]]
    lengths = [100] * 30 + [10] * 30
    totals = [sum(lengths[i] for i in bin_) for bin_ in micro_batches(lengths, 1200)]
    assert sorted(totals) == [1100, 1100, 1100]


def test_balancing_gives_way_to_the_budget():
    # First fit: {6,4}, {5,5}, {4,3,3}; the emptiest-first deal would need 11 in one bin.
    lengths = [6, 5, 5, 4, 4, 3, 3]
    bins = micro_batches(lengths, 10)
    assert len(bins) == 3
    assert [sum(lengths[i] for i in bin_) for bin_ in bins] == [10, 10, 10]


def test_a_sequence_above_the_budget_is_named_with_the_fix():
    with pytest.raises(ValueError, match=r"sequence 1 has 11 tokens.*train\.tokens_per_micro_batch to 11"):
        micro_batches([3, 11, 4], 10)
