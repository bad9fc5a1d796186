"""What is chosen from round to round: lazily decoded tokens, or drafts of which length."""

import numpy as np
import pytest
import torch

from tandemrl.rollout.drafting import (
    LENGTHS,
    MARGIN,
    MIN_ROUNDS,
    VLLM_CPU,
    VLLM_CUDA,
    Choice,
    Costs,
    Drafts,
    Load,
    Pair,
    Size,
    count_accepted,
    kept,
    wrong,
)
from tandemrl.rollout.engine import Passes

PAIRS = {
    "ten to one": Pair(Size(8, 54_000_000, 10_240), Size(4, 4_300_000, 1_536), VLLM_CPU),
    "tiny": Pair(Size(2, 280_000, 512), Size(2, 280_000, 512), VLLM_CPU),
    "4B and .6B": Pair(Size(36, 4_000_000_000, 73_728), Size(28, 600_000_000, 57_344), VLLM_CUDA),
    "4B twice": Pair(Size(36, 4_000_000_000, 73_728), Size(36, 4_000_000_000, 73_728), VLLM_CUDA),
}
ROWS, CONTEXTS = (1, 8, 32, 128, 256), (32, 1500, 8000)


def seen(acceptance: float) -> Passes:
    return Passes(drafted=10_000, accepted=round(10_000 * acceptance))


def chosen(pair: str, load: Load, acceptance: float, tokens: int | None = None) -> int:
    return Drafts(tokens, PAIRS[pair]).choose(Choice(), load, seen(acceptance)).ahead


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_who_agrees_more_often_is_never_drafted_less(pair, share) -> None:
    for rows in ROWS:
        for context in CONTEXTS:
            by_acceptance = [chosen(pair, Load(rows, context, share), a / 20) for a in range(21)]
            assert by_acceptance == sorted(by_acceptance)


def test_what_is_chosen_where() -> None:
    """The first two as they were measured; the others by what is known of such a GPU."""
    assert all(chosen("ten to one", Load(rows, c), 0.9) >= 4 for rows in (1, 8, 32) for c in (32, 1500, 4000))
    assert chosen("tiny", Load(1, 64), 0.95) == 0 < chosen("tiny", Load(8, 64), 0.95)
    assert chosen("4B and .6B", Load(8, 1000), 0.7) > 0
    assert chosen("4B and .6B", Load(256, 8000), 0.7) == 0
    for pair in ("4B and .6B", "4B twice"):  # long contexts of many rows: reading them is what costs
        assert chosen(pair, Load(8, 1000), 0.9) > 0 == chosen(pair, Load(128, 8000), 0.7)
    assert chosen("ten to one", Load(1, 32, share=1.0), 0.9) > 0 == chosen("ten to one", Load(1, 32, share=1.0), 0.05)


def test_a_length_that_was_asked_for_is_the_only_one() -> None:
    assert {chosen("ten to one", Load(rows, 32), a, 5) for rows in ROWS for a in (0.0, 0.5, 0.9)} == {0, 5}
    assert Drafts(5).choose(Choice(), Load(256), Passes(), always=True).ahead == 5
    always = {
        Drafts(None, PAIRS["tiny"]).choose(Choice(), Load(rows, 32), seen(a), always=True).ahead
        for rows in ROWS
        for a in (0.0, 0.5, 0.99)
    }
    assert always <= set(LENGTHS)
    assert min(always) == 2 < max(always)


def test_another_choice_takes_time_and_a_margin() -> None:
    """Nothing changes before `MIN_ROUNDS` rounds, and what looks cheaper by less than `MARGIN` never does."""
    pair = PAIRS["tiny"]
    drafts, cheap, dear = Drafts(4, pair), Load(8, 64), Load(1, 64)
    cost = {a: pair.draft(4, cheap) / kept(5, wrong(seen(a / 1000), 0.5, Passes())) for a in range(0, 1001, 5)}
    single = pair.step(cheap)
    now = drafts.choose(Choice(), cheap, seen(0.95))
    assert now == Choice(4, 0)
    for rounds in range(1, MIN_ROUNDS + 1):
        now = drafts.choose(now, dear, seen(0.0))
        assert now == Choice(4, rounds)
    assert drafts.choose(now, dear, seen(0.0)) == Choice(0, 0)

    close = [a / 1000 for a, seconds in cost.items() if 1 / MARGIN < seconds / single < MARGIN]
    assert len(close) > 3
    for now in (Choice(0), Choice(4)):
        for round in range(5 * MIN_ROUNDS):
            now = drafts.choose(now, cheap, seen(close[round % len(close)]))
            assert now.rounds == MIN_ROUNDS + round + 1


def test_who_knows_nothing_tries() -> None:
    """The share of a call's drafts that is right is only known from drafts."""
    drafts, load = Drafts(None, PAIRS["ten to one"]), Load(32, 1500)
    assert drafts.choose(Choice(), load, Passes()).ahead > 0
    assert drafts.choose(Choice(), load, Passes(drafted=200, accepted=100)).ahead == 0


def test_a_step_costs_what_its_passes_cost() -> None:
    """By hand: one second for each thing that is counted."""
    one = Costs(layer=1, fetch=0, use=0, draw=0)
    pair = Pair(Size(3, 7, 5), Size(2, 4, 5), one)
    assert pair.step(Load(1, 10)) == 2.5  # one of the two
    assert pair.step(Load(2, 10)) == 0.75 * 5  # each is wanted by a row or the other
    assert pair.step(Load(1, 10, 1.0)) == 3
    assert pair.draft(4, Load(1, 10, 1.0)) == 4 * 2 + 3
    assert pair.draft(4, Load(1, 10, 0.0)) == 5 * 2
    tokens = pair._replace(costs=Costs(0, 0, use=1, draw=0))
    assert tokens.step(Load(6, 10)) == 6 * 7 + 6 * 4  # each reads every token, sooner or later
    assert tokens.draft(4, Load(6, 10, 1.0)) == 6 * (4 * 4 + 5 * 7)
    reads = pair._replace(costs=Costs(0, 0, 0, 0, fetch_cached=1))
    assert reads.step(Load(6, 10)) == 6 * 10 * 5  # only who writes
    assert reads.draft(4, Load(6, 10, 1.0)) == 6 * 10 * 5 * (4 + 1)
    assert kept(5, 0.0) == 5
    assert kept(3, 0.5) == 1 + 0.5 + 0.25
    assert wrong(Passes(drafted=80, accepted=60), 0.5, Passes(drafted=20, accepted=15)) == 0.125


def test_acceptance_is_a_matter_of_what_the_senior_can_refuse() -> None:
    """Three guesses, of which it draws two; what it would have said of the junior's own tokens does not matter."""
    guesses = np.array([[True, True, False], [True, False, False]])
    right = np.array([[True, False, True], [True, True, False]])
    assert count_accepted(guesses, right) == Passes(drafted=3, accepted=2)
    counted = count_accepted(torch.from_numpy(guesses), torch.from_numpy(right))
    assert (counted.drafted, counted.accepted, counted.tokens) == (3, 2, 0)
    assert count_accepted(guesses[:0], right[:0]).acceptance is None
