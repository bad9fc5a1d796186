"""Requests that join an open call, and leave it, write what they write alone."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from helpers import assert_same, flat, prepared, prompts, qwen3, requests, small_qwen3, tokenizer
from tandemrl.rollout.call import Finished, NewTokens
from tandemrl.rollout.engine import Completion, EngineError, Reply, Request, Sampling, Turn
from tandemrl.rollout.torch_engine import BatchCall, TorchEngine
from tandemrl.selection import Strategy, bernoulli, solo


def engine(**options: object) -> TorchEngine:
    return TorchEngine(prepared(qwen3()), prepared(small_qwen3()), tokenizer(), **options)


def ended(call: BatchCall, numbers: Sequence[int], left: set[int] | None = None) -> list[Completion]:
    """The completions of these sequences, once all have ended. ``left``: all that have not."""
    left = set(numbers) if left is None else left
    while left & set(numbers):
        left -= {event.number for event in call.step() if isinstance(event, Finished)}
    return call.take(numbers)


same = partial(assert_same, rtol=1e-5)

KINDS = {
    "plain": Sampling(max_tokens=20),
    "cold": Sampling(max_tokens=30, temperature=0.5),
    "greedy": Sampling(max_tokens=12, temperature=0.0),
    "truncated": Sampling(max_tokens=16, top_k=5, top_p=0.8, min_p=0.05),
    "penalised": Sampling(max_tokens=16, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.2),
    "stopped": Sampling(max_tokens=40, stop_token_ids=(7, 8), ignore_eos=True),
    "stopped by text": Sampling(max_tokens=40, stop=("a",)),
    "longer": Sampling(max_tokens=40, ignore_eos=True),
}


def asked(kind: str, strategy: Strategy, seed: int) -> Request:
    [prompt] = prompts(1, seed=seed)
    return Request(prompt, (10 * seed, 10 * seed + 1), KINDS[kind], strategy)


@cache
def by_themselves() -> tuple[list[Request], list[Completion]]:
    """Requests of all kinds, and what each writes in a call of its own, without drafts."""
    running, strategies = engine(), (solo("senior"), bernoulli(0.5), solo("junior"))
    batch = [asked(kind, strategies[i % 3], seed=i) for i, kind in enumerate(KINDS)]
    return batch, [each for request in batch for each in flat(running.generate([request]))]


@pytest.mark.parametrize("options", [{}, {"max_rows": 3, "draft_tokens": 3}], ids=["free", "full, drafts"])
def test_requests_of_any_kind_join_a_call_that_has_begun(options: dict[str, int]) -> None:
    """First the senior alone, whose call has no keys and values of the junior yet."""
    running, (batch, alone) = engine(**options), by_themselves()
    found, left = list[list[int]](), set[int]()
    with running.open() as call:
        for request in batch:
            found.append(call.submit([request]))
            left |= set(found[-1])
            for _ in range(5):
                left -= {event.number for event in call.step() if isinstance(event, Finished)}
        together = [each for numbers in found for each in ended(call, numbers, left)]
    same(together, alone)


def steps_until_told(call: BatchCall, request: Request) -> int:
    """How many steps it takes until all sequences of a new request have a token."""
    left, steps = set(call.submit([request])), 0
    while left:
        left -= {event.number for event in call.step() if isinstance(event, NewTokens)}
        steps += 1
    return steps


def test_a_first_token_comes_at_most_two_steps_later_than_alone() -> None:
    running = engine()
    with running.open() as call:
        alone = steps_until_told(call, asked("longer", bernoulli(0.5), 0))
    with running.open() as call:
        assert max(steps_until_told(call, asked("longer", bernoulli(0.5), seed)) for seed in range(20)) <= alone + 2
        assert sum(not row.over for row in call._rows.values()) == 40


def test_what_is_kept_of_sequences_does_not_grow_with_those_that_were_taken() -> None:
    running, strategy = engine(max_rows=4), bernoulli(0.5)
    batch = [replace(asked("plain", strategy, seed=i), sampling=Sampling(max_tokens=5)) for i in range(12)]
    with running.open() as call:
        for request in batch:
            ended(call, call.submit([request]))
        assert not call._rows
        assert len(call._batch._slots) < 12


@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_a_sequence_that_was_taken_may_still_have_its_place(draft_tokens: int) -> None:
    """A place is given up with others, and what a strategy knows of it may not go before."""
    running = engine(draft_tokens=draft_tokens)

    def request(key: int, tokens: int, strategy: Strategy) -> Request:
        return Request((2, 3), (key,), Sampling(max_tokens=tokens, ignore_eos=True), strategy)

    stays, goes, comes = bernoulli(0.5), bernoulli(0.25), bernoulli(0.75)
    first = [request(i, 4 if i < 4 else 30, stays) for i in range(19)]
    late, new = request(19, 9, goes), request(20, 20, comes)
    with running.open() as call:
        numbers, left = call.submit([*first, late]), set(range(20))
        found = ended(call, numbers[:4], left) + ended(call, numbers[-1:], left)
        assert numbers[-1] in [row.number for row in call._batch.rows]
        left |= set(again := call.submit([new]))
        found += ended(call, again, left) + ended(call, numbers[4:-1], left)
    same(found, flat(running.generate([*first[:4], late, new, *first[4:]])))


def test_a_model_that_joins_between_two_turns_reads_what_was_written() -> None:
    """The turn of the first row ends before the junior's first request."""
    running = engine()
    senior = Request((2, 3), (1,), Sampling(max_tokens=12), solo("senior"), turn_tokens=4, observation_tokens=9)
    both = Request((2, 4), (2,), Sampling(max_tokens=9), bernoulli(0.5), turn_tokens=9, observation_tokens=9)

    def play(*, joined: bool) -> list[int]:
        with running.open(turns=True) as call:
            [number], turns = call.submit([senior]), 0
            while True:
                for event in call.step():
                    if isinstance(event, Turn) and event.number == number:
                        turns += 1
                        if joined and turns == 1:
                            call.submit([both])
                        call.answer(Reply(number, (5, 6) if turns < 3 else ()))
                    elif isinstance(event, Turn):
                        call.answer(Reply(event.number))
                    elif isinstance(event, Finished) and event.number == number:
                        return call.take([number])[0].tokens.tolist()

    assert play(joined=True) == play(joined=False)


def test_what_is_aborted_ends_and_the_others_go_on() -> None:
    """Though one of them has the same key."""
    running = engine()
    batch = requests(prompts(3), Sampling(max_tokens=25, ignore_eos=True), bernoulli(0.5))
    batch[2] = replace(batch[2], keys=batch[1].keys)
    with running.open() as call:
        numbers = call.submit(batch)
        call.step()
        call.abort([numbers[1]])
        found = ended(call, numbers)
    assert [c.stop_reason for c in found] == ["length", "abort", "length"]
    assert [len(c.tokens) for c in found] == [25, 1, 25]
    same([found[0], found[2]], [flat(running.generate(batch))[i] for i in (0, 2)])


def test_an_open_call_has_the_engine_for_itself() -> None:
    running = engine()
    weights = [*running.senior.named_parameters()]
    with running.open():
        for use in (lambda: running.generate([]), lambda: running.load_weights(weights, 1), running.open):
            with pytest.raises(EngineError, match="a call of this engine is open in this thread; end it first"):
                use()
    running.load_weights(weights, 1)
    assert running.generate([]) == []


# ------------------------------------------------------------------------------------------------------------ sessions


def turns_of(running: TorchEngine, session: str | None, strategies: Sequence[Strategy], seed: int = 3) -> Any:
    """The requests and completions of turns that go on with each other, each after three further tokens."""
    [prompt] = prompts(1, seed=seed)
    turn = Request(prompt, (seed,), KINDS["plain"], strategies[0], session=session)
    for i, strategy in enumerate(strategies):
        [[completion]] = running.generate([replace(turn, strategy=strategy)])
        yield turn, completion
        own = tuple(completion.tokens.tolist())
        further = (*turn.prompt, *own, 3 + i, 4, 5)
        turn = replace(turn, prompt=further, history=(*turn.history, own), sampling=KINDS["cold"])


@pytest.mark.parametrize("options", [{}, {"draft_tokens": 3}, {"host_every": 4}], ids=["steps", "drafts", "alone"])
def test_a_session_computes_its_new_tokens_alone(options: dict[str, int], computed: list[int]) -> None:
    """Two models, at each turn 3 further tokens and the last one before them; other requests keep nothing."""
    running, both = engine(**options), [bernoulli(0.5)] * 3
    cold = [completion for _, completion in turns_of(running, None, both)]
    whole = sum(computed)
    computed.clear()
    same([completion for _, completion in turns_of(running, "s", both)], cold)
    [prompt] = prompts(1, seed=3)
    assert sum(computed) == 2 * (len(prompt) - 1 + 3 + 3) < whole


def test_a_model_that_joins_a_session_reads_all_of_it() -> None:
    running, kinds = engine(), [solo("senior"), bernoulli(0.5), solo("junior"), bernoulli(0.5)]
    cold = [completion for _, completion in turns_of(running, None, kinds)]
    same([completion for _, completion in turns_of(running, "s", kinds)], cold)


def test_new_weights_end_what_sessions_keep(computed: list[int]) -> None:
    running = engine()
    turns = turns_of(running, "s", [bernoulli(0.5)] * 2)
    next(turns)
    running.load_weights(qwen3(seed=11).named_parameters(), 1)
    (request, found), fresh = next(turns), engine()
    fresh.load_weights(qwen3(seed=11).named_parameters(), 1)
    same([found], fresh.generate([request])[0])
    assert computed[-1] == len(request.prompt) - 1


def test_the_sessions_used_last_are_kept_and_another_text_is_computed(computed: list[int]) -> None:
    running = engine(max_rows=2)
    first, second, third = (turns_of(running, name, [bernoulli(0.5)] * 3, seed) for seed, name in enumerate("abc"))
    next(first), next(second), next(first), next(third)  # the second one is the oldest
    computed.clear()
    next(first)
    assert sum(computed) == 2 * 3
    computed.clear()
    request, _ = next(second)
    assert sum(computed) == 2 * (len(request.prompt) - 1)
    computed.clear()
    other = replace(request, prompt=(*request.prompt[:-4], 9, 9, 9, 9), session="a")
    alone = engine().generate([replace(other, session=None)])[0]
    computed.clear()
    same(running.generate([other])[0], alone)
    assert sum(computed) == 2 * (len(other.prompt) - 1)
