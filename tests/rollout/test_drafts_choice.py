"""What is chosen from round to round: lazily decoded tokens, or drafts of which length."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tandemrl.rollout.drafting import CPU, VLLM_CPU, VLLM_CUDA, DraftLength, Size, count_accepted
from tandemrl.rollout.engine import Passes

PAIRS = {
    "ten to one": DraftLength(None, Size(8, 54_000_000, 10_240), Size(4, 4_300_000, 1_536), VLLM_CPU, lazy=True),
    "tiny": DraftLength(None, Size(2, 280_000, 512), Size(2, 280_000, 512), VLLM_CPU, lazy=True),
    "4B and .6B": DraftLength(
        None, Size(36, 4_000_000_000, 73_728), Size(28, 600_000_000, 57_344), VLLM_CUDA, lazy=True
    ),
    "torch": DraftLength(None, Size(12, 57_000_000), Size(4, 5_000_000), CPU),
}


def seen(acceptance: float) -> Passes:
    return Passes(drafted=10_000, accepted=round(10_000 * acceptance))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_who_agrees_more_often_is_never_drafted_less(pair, share) -> None:
    for rows in (1, 8, 32, 128, 256):
        for context in (32, 1500, 8000):
            by_acceptance = [PAIRS[pair](rows, seen(a / 20), share=share, context=context) for a in range(21)]
            assert by_acceptance == sorted(by_acceptance)


def test_what_is_chosen_where() -> None:
    """The first ones as they were measured; the others by what is known of such a GPU."""
    small, tiny, large = PAIRS["ten to one"], PAIRS["tiny"], PAIRS["4B and .6B"]
    assert all(small(rows, seen(0.9), context=c) >= 4 for rows in (1, 8, 32) for c in (32, 1500, 4000))
    assert small(1, seen(0.9), share=1.0) > 0 == small(1, seen(0.05), share=1.0)
    assert small(32, Passes(), context=1500) > 0 == small(32, seen(0.5), context=1500)  # who knows nothing tries
    assert tiny(1, seen(0.95), context=64) == 0 < tiny(8, seen(0.95), context=64)
    assert large(8, seen(0.7), context=1000) > 0 == large(128, seen(0.7), context=8000)  # long contexts of many rows
    assert replace(small, tokens=5)(256, seen(0.0)) == 5


def test_acceptance_is_a_matter_of_what_the_senior_can_refuse() -> None:
    """Three guesses, of which it draws two; what it would have said of the junior's own tokens does not matter."""
    guesses = np.array([[True, True, False], [True, False, False]])
    right = np.array([[True, False, True], [True, True, False]])
    assert count_accepted(guesses, right) == Passes(drafted=3, accepted=2)
    counted = count_accepted(torch.from_numpy(guesses), torch.from_numpy(right))
    assert (counted.drafted, counted.accepted, counted.tokens) == (3, 2, 0)
    assert count_accepted(guesses[:0], right[:0]).acceptance is None
