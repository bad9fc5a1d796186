"""Requests that join an open call of vLLM, and leave it, write what they write alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pairs import LENGTHS, VLLM, assert_equal_completions, by_programs, changed, flat, mixed, reference, strategies

from helpers import EOS, IDS, agent_tokenizer, prompts
from tandemrl.rollout.call import Finished, NewTokens
from tandemrl.rollout.engine import Completion, EngineError, Request, Sampling
from tandemrl.selection import boundaries, word

pytestmark = VLLM

PAIR = "Llama junior"
KINDS = [
    Sampling(max_tokens=20),
    Sampling(max_tokens=24, temperature=0.5),
    Sampling(max_tokens=12, temperature=0.0),
    Sampling(max_tokens=16, top_k=5, top_p=0.8, min_p=0.05),
    Sampling(max_tokens=16, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.2),
    Sampling(max_tokens=24, stop_token_ids=(7, 8), ignore_eos=True),
    Sampling(max_tokens=24, stop=("a",)),
]


def asked(count: int) -> list[Request]:
    kinds = [*strategies().values()]
    return [
        Request(tuple(prompt), (2 * i, 2 * i + 1), KINDS[i % len(KINDS)], kinds[i % len(kinds)])
        for i, prompt in enumerate(prompts(count, seed=9, lengths=LENGTHS))
    ]


def ended(call: Any, left: set[int], numbers: Sequence[int], told: dict[int, list[Any]]) -> list[Completion]:
    while left & set(numbers):
        step(call, left, told)
    return call.take(numbers)


def step(call: Any, left: set[int], told: dict[int, list[Any]]) -> None:
    for event in call.step():
        if isinstance(event, Finished):
            left.remove(event.number)
        elif isinstance(event, NewTokens):
            told.setdefault(event.number, []).append(event)


@pytest.mark.parametrize("mode", ["lazy", "draft"])
def test_requests_of_any_kind_join_a_call_that_has_begun(engines, mode):
    engine = engines(PAIR, mode=mode, block_size=32, **({"draft_tokens": 4} if mode == "draft" else {}))
    batch, found, left, told = asked(8), list[list[int]](), set[int](), dict[int, list[Any]]()
    with engine.open() as call:
        for request in batch:
            found.append(call.submit([request]))
            left |= set(found[-1])
            for _ in range(3):
                step(call, left, told)
        together = [each for numbers in found for each in ended(call, left, numbers, told)]
    assert_equal_completions(together, flat(reference(PAIR).generate(batch)))
    assert engine.passes.tokens == sum(len(c.tokens) for c in together)
    for number, completion in zip((n for numbers in found for n in numbers), together, strict=True):
        news = told[number]
        assert [token for each in news for token in each.tokens] == completion.tokens.tolist()
        logprobs = [value for each in news for value in each.logprobs]
        assert logprobs == pytest.approx(completion.behaviour_logprobs.tolist())
        assert len(news) > 1 or len(completion.tokens) < 6


def test_a_session_computes_a_block_twice_at_most(engines):
    """By the prefix cache: over three turns, neither model computes more than the text and a block for each turn."""
    engine, [prompt] = engines(PAIR, block_size=32), prompts(1, seed=8, lengths=(40,))
    computed, turn = np.zeros(2), Request(tuple(prompt), (8,), KINDS[0], strategies()["bernoulli 0.5"])
    for i in range(3):
        turn = replace(turn, sampling=changed(KINDS[0], max_tokens=30 + i, ignore_eos=True))
        found = flat(engine.generate([turn]))
        assert_equal_completions(found, flat(reference(PAIR).generate([turn])))
        own, computed = tuple(found[0].tokens.tolist()), computed + engine.stats()["computed"]
        turn = replace(turn, prompt=(*turn.prompt, *own, 3 + i, 4, 5), history=(*turn.history, own))
    assert max(computed) <= len(turn.prompt) + 2 * 32


def halfway() -> None:
    raise OSError("halfway")


@pytest.mark.parametrize("begun", [True, False])
def test_what_is_aborted_or_fails_ends_and_the_strategies_of_a_call_are_let_go(engines, begun, monkeypatch):
    engine = engines(PAIR, block_size=32)
    batch = mixed(prompts(9, seed=30), changed(KINDS[0], max_tokens=15, ignore_eos=True), seed=30)
    wanted, left, told = flat(engine.generate(batch)), set[int](), dict[int, list[Any]]()
    with engine.open() as call:
        first = call.submit(batch[:3])
        left |= set(first)
        if begun:
            step(call, left, told)
        call.abort([first[1]])
        done = ended(call, left, first, told)
        assert [c.stop_reason for c in done] == ["length", "abort", "length"]
        assert begun or len(done[1].tokens) <= 1
        assert_equal_completions([done[0], done[2]], [wanted[0], wanted[2]])
        for request, alone in zip(batch[3:], wanted[3:], strict=True):
            numbers = call.submit([request])
            left |= set(numbers)
            assert_equal_completions(ended(call, left, numbers, told), [alone])
            assert len(call._strategies) == 1
        with pytest.raises(EngineError, match="a call of this engine is open in this thread"):
            engine.load_weights([], 1)
        with pytest.raises(EngineError, match="request 1: a prompt token is outside"):
            call.submit([batch[0], Request((-1,), (1,), Sampling(), batch[0].strategy)])
        add, count = engine.llm.add_request, iter(range(9))
        monkeypatch.setattr(engine.llm, "add_request", lambda *g, **n: add(*g, **n) if next(count) < 2 else halfway())
        with pytest.raises(OSError, match="halfway"):
            call.submit(batch[:3])
        monkeypatch.undo()
        assert call.idle
        left |= set(numbers := call.submit([batch[0]]))
        assert_equal_completions(ended(call, left, numbers, told), [wanted[0]])
    assert engine.stats()["requests"] <= 1


def test_programs_that_ask_vllm_get_what_they_get_of_the_torch_engine(engines):
    """Two turns and a fork, of eight sessions at once over one open call."""
    words = agent_tokenizer(())
    strategy = word(0.5, 4, boundaries.word_boundary_table(words))
    found = [
        by_programs(engine, words, strategy, [IDS[EOS]]) for engine in (engines(PAIR, block_size=32), reference(PAIR))
    ]
    for one, other in zip(*found, strict=True):
        assert (one.key, one.prompt) == (other.key, other.prompt)
    assert_equal_completions(*found)
