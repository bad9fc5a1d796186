from collections.abc import Callable
from typing import Any

import pytest
import selection_oracle as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandemrl.selection import (
    Strategy,
    Who,
    alternating,
    alternating_turns,
    annealed,
    before_word,
    bernoulli,
    chunk,
    first_step,
    linear,
    per_group,
    replay,
    resumed,
    sentence,
    solo,
    try_strategy,
    turn,
    word,
    word_aligned,
)
from tandemrl.selection.boundaries import StepTables, WordTables
from tandemrl.selection.draws import completion_keys, request_key, uniforms
from tandemrl.selection.strategies import DrawnState

TEXTS = ["a", " b", "c ", "\n", "\n\n", "d\n", "\ne", ".", ".\n\n", " \n \n", "\n\nf", ")"]
V = len(TEXTS)
BOUNDARY = [text.startswith(" ") for text in TEXTS]
START = torch.tensor(BOUNDARY)
SPACE = [text[-1].isspace() for text in TEXTS]
OUTSIDE = [text[-1].isspace() or text[-1] == ")" for text in TEXTS]
STEPS = StepTables(
    contains=torch.tensor(["\n\n" in text for text in TEXTS]),
    ends_newline=torch.tensor([text[-1] == "\n" for text in TEXTS]),
    starts_newline=torch.tensor([text[0] == "\n" for text in TEXTS]),
)
WORDS = WordTables(torch.tensor(SPACE), torch.tensor(OUTSIDE))

Case = tuple[Strategy, Callable[[int, list[int]], oracle.Told]]
KEYS = st.integers(-(2**63), 2**63 - 1)
ROWS = st.lists(st.tuples(KEYS, st.lists(st.integers(0, V - 1), max_size=40)), min_size=1, max_size=5)
P = st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0])
GAP = st.integers(1, 9)
WHOS: list[Who] = ["senior", "junior"]
WHO = st.sampled_from(WHOS)


def _word(p: float, gap: int) -> Case:
    strategy = word(p, gap, torch.tensor(BOUNDARY))
    return strategy, lambda key, tokens: oracle.word(key, tokens, p, gap, BOUNDARY)


def _word_aligned(p: float, gap: int) -> Case:
    strategy = word_aligned(p, gap, WORDS)
    return strategy, lambda key, tokens: oracle.word_aligned(key, tokens, p, gap, SPACE, OUTSIDE)


def _chunk(size: int, first: Who) -> Case:
    return chunk(size, first), lambda key, tokens: oracle.chunk(tokens, size, first)


CASES = st.one_of(
    st.builds(_word, P, GAP),
    st.builds(_word_aligned, P, GAP),
    st.builds(_chunk, GAP, WHO),
    P.map(lambda p: (bernoulli(p), lambda key, tokens: oracle.bernoulli(key, tokens, p))),
    WHO.map(lambda who: (sentence(who, STEPS), lambda key, tokens: oracle.sentence(tokens, who, TEXTS))),
    WHO.map(lambda who: (first_step(who, STEPS), lambda key, tokens: oracle.first_step(tokens, who, TEXTS))),
    WHO.map(lambda who: (alternating(who), lambda key, tokens: oracle.chunk(tokens, 1, who))),
    WHO.map(lambda who: (solo(who), lambda key, tokens: oracle.chunk(tokens, 10**4, who))),
)
ALL: dict[str, Strategy] = {
    "word": word(0.5, 4, torch.tensor(BOUNDARY)),
    "word_aligned": word_aligned(0.5, 4, WORDS),
    "bernoulli": bernoulli(0.5),
    "sentence": sentence("senior", STEPS),
    "first_step": first_step("junior", STEPS),
    "chunk": chunk(3, "junior"),
    "alternating": alternating("senior"),
    "solo": solo("junior"),
    "turn": turn(0.5),
}
every_strategy = pytest.mark.parametrize("strategy", ALL.values(), ids=ALL.keys())


def random_tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def some_keys(rows: int) -> Tensor:
    return torch.tensor([request_key(0, 0, row // 8, row % 8) for row in range(rows)], dtype=torch.int64)


@settings(max_examples=80)
@given(CASES, ROWS, st.integers(-(2**40), 2**40))
def test_replay_is_the_naive_single_row_computation(case: Case, rows: list[tuple[int, list[int]]], pad: int) -> None:
    strategy, naive = case
    longest = max(len(tokens) for _, tokens in rows)
    padded = torch.tensor([tokens + [pad] * (longest - len(tokens)) for _, tokens in rows], dtype=torch.int64)
    lengths = torch.tensor([len(tokens) for _, tokens in rows])
    got = replay(strategy, torch.tensor([key for key, _ in rows]), padded.reshape(len(rows), longest), lengths)
    assert got.author.dtype == torch.int8
    for i, (key, tokens) in enumerate(rows):
        want = naive(key, tokens)
        assert got.author[i].tolist() == want.authors + [-1] * (longest - len(tokens))
        if tokens:
            assert (got.draws[i].item(), got.senior_draws[i].item()) == (want.draws, want.senior_draws)
        else:
            assert (got.draws[i].item(), got.senior_draws[i].item()) == (0, 0)


@every_strategy
def test_every_strategy_passes_its_trial(strategy: Strategy) -> None:
    """No input is changed; authors depend on the row alone."""
    try_strategy(strategy, V)


ALL_OF_P: dict[str, Callable[[float], Strategy]] = {
    "word": lambda p: word(p, 4, torch.tensor(BOUNDARY)),
    "aligned": lambda p: word_aligned(p, 4, WORDS),
    "before_word": lambda p: before_word(p, START),
    "bernoulli": bernoulli,
}


def test_the_smallest_uniform_is_not_below_probability_zero() -> None:
    key, none = torch.tensor([2**64 - 0x9E3779B97F4A7C15]), torch.tensor([0])
    assert uniforms(key, none).item() == 0.0
    assert not bernoulli(0.0).step(DrawnState(key, none > 0, none, none, none), none)[0].item()


@pytest.mark.parametrize("name", ALL_OF_P)
def test_prob_senior_changes_neither_when_nor_which_numbers_are_drawn(name: str) -> None:
    """The same uniforms are compared with p: raising it can only turn junior tokens into senior ones."""
    keys, tokens, lengths = some_keys(64), random_tokens(64, 60), torch.full((64,), 60)
    low, high = (replay(ALL_OF_P[name](p), keys, tokens, lengths) for p in (0.3, 0.6))
    assert torch.equal(low.draws, high.draws)
    assert (low.author <= high.author).all()
    assert (low.author < high.author).any()


def test_golden_authors_never_change() -> None:
    """Stored runs are replayed with these numbers; they were computed with the plain-Python oracle."""
    key = request_key(1, 2, 3, 4)
    got = replay(bernoulli(0.5), torch.tensor([key]), torch.zeros(1, 16, dtype=torch.int64), torch.tensor([16]))
    assert key == 3705391937491829246
    assert "".join(map(str, got.author[0].tolist())) == "1100110010100111"


@pytest.mark.parametrize("name", ["bernoulli", "word", "turn"])
def test_completions_of_a_group_share_their_author_draws(name: str) -> None:
    """Read off a text that is the same in the whole group: the authors are too, and other groups have others."""
    shared, groups = per_group(ALL[name]), [completion_keys(1, 2, example, 6, 5, shared=True) for example in range(40)]
    keys = torch.tensor([key for group in groups for key in group])
    assert len(set(keys.tolist())) == 200
    text = random_tokens(1, 60).expand(200, 60)
    found = replay(shared, keys, text, torch.full((200,), 60))
    by_group = found.author.reshape(40, 5, 60)
    assert bool((by_group == by_group[:, :1]).all())
    assert len({tuple(row) for row in by_group[:, 0].tolist()}) == (2 if name == "turn" else 40)
    assert shared.shared_draws
    apart = replay(ALL[name], keys, text, torch.full((200,), 60)).author.reshape(40, 5, 60)
    assert not bool((apart == apart[:, :1]).all())


def test_a_group_that_cannot_share_its_draws_is_refused() -> None:
    with pytest.raises(ValueError, match="65537 completions: at most 65536 can share"):
        completion_keys(0, 0, 0, 0, 65_537, shared=True)


def test_annealed_follows_the_schedule() -> None:
    schedule = linear(1.0, 0.0, steps=4)
    assert [schedule(step) for step in (0, 1, 2, 4, 9)] == [1.0, 0.75, 0.5, 0.0, 0.0]
    at = annealed(bernoulli, schedule)
    keys, tokens, lengths = some_keys(200), random_tokens(200, 50), torch.full((200,), 50)
    shares = [replay(at(step), keys, tokens, lengths).author.float().mean().item() for step in range(5)]
    assert shares[0] == 1.0
    assert shares[4] == 0.0
    assert all(abs(share - schedule(step)) < 0.03 for step, share in enumerate(shares))


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (lambda: word(1.1, 4, torch.tensor(BOUNDARY)), "prob_senior"),
        (lambda: word(0.5, 0, torch.tensor(BOUNDARY)), "max_gap_tokens"),
        (lambda: bernoulli(float("nan")), "prob_senior"),
        (lambda: before_word(2.0, START), "prob_senior"),
        (lambda: chunk(0), "chunk_size"),
        (lambda: linear(0.0, 1.0, 0), "steps"),
    ],
)
def test_bad_values_are_named(make: Callable[[], object], culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        make()


def test_an_unknown_author_is_named() -> None:
    nobody: Any = "editor"
    for make, name in ((lambda: sentence(nobody, STEPS), "first"), (lambda: solo(nobody), "who")):
        with pytest.raises((ValueError, TypeError), match=name):  # TypeError where annotations are checked
            make()


# ---------------------------------------------------------------------------------------------------------------- turns

TURNS = st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=12), min_size=1, max_size=4)
Episode = tuple[int, list[list[int]]]


def joined(turns: list[list[int]]) -> list[int]:
    return [token for tokens in turns for token in tokens]


def over_turns(case: Case) -> tuple[Strategy, Callable[[int, list[list[int]]], oracle.Told]]:
    """A strategy that no turn matters to reads all of them as one text."""
    strategy, naive = case
    return strategy, lambda key, turns: naive(key, joined(turns))


EPISODES = st.one_of(
    CASES.map(over_turns),
    P.map(lambda p: (before_word(p, START), lambda key, turns: oracle.before_word(key, turns, p, BOUNDARY))),
    P.map(lambda p: (turn(p), lambda key, turns: oracle.turn(key, turns, p))),
    WHO.map(lambda who: (alternating_turns(who), lambda key, turns: oracle.alternating_turns(turns, who))),
)


@settings(max_examples=60)
@given(EPISODES, st.lists(st.tuples(KEYS, TURNS), min_size=1, max_size=4), st.integers(0, 4))
def test_several_turns_are_the_naive_computation_also_when_resumed(case, rows, begun):
    strategy, naive = case
    keys = torch.tensor([key for key, _ in rows])
    lengths = [len(joined(turns)) for _, turns in rows]
    tokens = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    for i, (_, turns) in enumerate(rows):
        tokens[i, : lengths[i]] = torch.tensor(joined(turns))
        for number in range(1, len(turns)):
            starts[i, len(joined(turns[:number]))] = True
    got = replay(strategy, keys, tokens, torch.tensor(lengths), starts)
    for i, (key, turns) in enumerate(rows):
        want = naive(key, turns)
        assert got.author[i, : lengths[i]].tolist() == want.authors
        assert (got.draws[i].item(), got.senior_draws[i].item()) == (want.draws, want.senior_draws)

    # The turns before ``begun`` as a history; the others are written.
    histories = [turns[: min(begun, len(turns) - 1)] for _, turns in rows]
    senior, state = resumed(strategy, keys, histories)
    seniors = [senior]
    rest = [turns[len(history)] for (_, turns), history in zip(rows, histories, strict=True)]
    for i in range(max(map(len, rest))):
        senior, state = strategy.step(state, torch.tensor([own[min(i, len(own) - 1)] for own in rest]))
        seniors.append(senior)
    for i, ((key, turns), history, own) in enumerate(zip(rows, histories, rest, strict=True)):
        want = naive(key, turns[: len(history) + 1]).authors[len(joined(history)) :]
        told = seniors[1:] if strategy.starts is not None else seniors  # a step names the author of its own token
        assert [int(senior[i]) for senior in told[: len(own)]] == want


@every_strategy
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_authors_are_the_cpu_ones(strategy: Strategy) -> None:
    keys, tokens, lengths = some_keys(32), random_tokens(32, 60), torch.arange(29, 61)
    on_gpu = replay(strategy, keys.cuda(), tokens.cuda(), lengths.cuda())
    for one, other in zip(on_gpu, replay(strategy, keys, tokens, lengths), strict=True):
        assert torch.equal(one.cpu(), other)
