"""Drafting through handovers: the tokens are those of lazy mode and of the reference engine, in fewer passes."""

import itertools
from typing import Any

import pytest
from pairs import (
    LENGTHS,
    TIGHT,
    UNPENALISED,
    VLLM,
    assert_equal_completions,
    assert_sound,
    changed,
    flat,
    logprob_errors,
    mixed,
    mixture,
    models,
    planner_of,
    reference,
    tokens,
    with_strategy,
)

from helpers import prompts
from tandemrl.rollout.drafting import DraftLength
from tandemrl.rollout.engine import Completion, Request, Sampling
from tandemrl.selection import solo

pytestmark = VLLM

NEAR = "near junior"
SETTINGS = [
    *UNPENALISED,
    Sampling(max_tokens=30, repetition_penalty=1.3, ignore_eos=True),
    Sampling(max_tokens=30, temperature=0.0, presence_penalty=0.8, frequency_penalty=0.5, ignore_eos=True),
    Sampling(
        max_tokens=30, temperature=0.9, top_p=0.95, top_k=30, min_p=0.01, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=0.3,
    ),
    Sampling(max_tokens=40, stop=("st", "a"), stop_token_ids=(7,)),
]  # fmt: skip
BY_TOKENS: dict[int, dict[str, Any]] = {1: dict(max_batched_tokens=64, max_rows=48), 4: TIGHT, 8: {}}
"""Options of an engine by the tokens it drafts: chunked prefill; tight; plenty of everything."""


def drafted(engines, pair: str = NEAR, k: int = 8, **options: Any) -> Any:
    """An engine that drafts."""
    return engines(pair, mode="draft", draft_tokens=k, **options)


def in_mode(engine: Any, mode: str, batch: list[Request]) -> list[Completion]:
    engine.call_workers("tandem_mode", mode)
    try:
        return flat(engine.generate(batch))
    finally:
        engine.call_workers("tandem_mode", "draft")


@pytest.fixture(scope="module")
def engine(engines) -> Any:
    return drafted(engines)


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[Completion]]:
    """By pair: what the reference engine writes."""
    batch = mixture(28, SETTINGS, seed=1)
    return {pair: flat(reference(pair).generate(batch)) for pair in (NEAR, "Llama junior")}


@pytest.mark.parametrize(
    ("pair", "k"), [(NEAR, 1), pytest.param(NEAR, 4, marks=pytest.mark.slow), (NEAR, 8), ("Llama junior", 4)]
)
def test_drafting_changes_no_token(engines, scheduled, wanted, pair, k):
    """Against the reference engine, whatever the strategy and the sampling; a near-tie may fall either way."""
    batch, engine = mixture(28, SETTINGS, seed=1), drafted(engines, pair, k, **BY_TOKENS[k])
    found = flat(engine.generate(batch))
    assert_sound(batch, [[c] for c in found])
    assert k != 4 or scheduled.preemptions > 0
    drafts = engine.passes
    assert drafts.tokens == sum(len(c.tokens) for c in found)
    assert_equal_completions(found, wanted[pair])
    if pair == NEAR:
        assert 0.4 < drafts.acceptance < 1
        in_mode(engine, "lazy", batch)
        assert drafts.senior < {1: 0.8, 4: 0.6, 8: 0.5}[k] * engine.passes.senior


def test_limits_and_stops_inside_a_draft(engine):
    """Texts of one token to twenty, and stop strings of which one begins within another."""
    short = [changed(SETTINGS[i % 3], max_tokens=1 + i % 20) for i in range(40)]
    stops = [Sampling(max_tokens=30, stop=stop) for stop in (("a",), ("ab", "a", "b"), ("in ", "n"), ("th", "t"))]
    drawn = mixed(prompts(80, seed=2, lengths=LENGTHS), SETTINGS[0], seed=2)
    batch = [Request(r.prompt, r.keys, s, r.strategy) for r, s in zip(drawn, [*short, *stops * 10], strict=True)]
    lazy, found = in_mode(engine, "lazy", batch), flat(engine.generate(batch))
    assert_equal_completions(found, lazy)
    assert {c.stop_reason for c in found[40:]} >= {"stop", "length"}


class Changing(DraftLength):
    """Another choice in every other step."""

    calls = itertools.count()

    def __call__(self, *load: Any, **more: Any) -> int:
        return (4, 0, 2, 0, 3, 1)[next(self.calls) // 2 % 6]


def test_another_length_may_be_chosen_at_any_time(engines, scheduled, monkeypatch):
    """With chunked prefill, preemption, and catch-ups longer than the budget."""
    engine = drafted(engines, NEAR, 4, **TIGHT)
    long = mixed(prompts(12, seed=9, lengths=(129, 33, 64)), Sampling(max_tokens=40, ignore_eos=True), seed=9)
    batch = [*mixture(9, SETTINGS, seed=8), *long]
    lazy, before = in_mode(engine, "lazy", batch), scheduled.preemptions
    planner = planner_of(engine)
    monkeypatch.setattr(planner, "draft_length", Changing(**vars(planner.draft_length)))
    found = flat(engine.generate(batch))
    assert_sound(batch, [[c] for c in found])
    assert_equal_completions(found, lazy)
    assert scheduled.preemptions > before
    assert engine.passes.drafted > 0


def test_a_prefix_cache_holds_what_was_settled(engines, scheduled):
    """Second prompts are first ones with what was written, by either author, upon drafts that were thrown away."""
    engine = drafted(engines, "Llama junior", 4, **(TIGHT | dict(kv_blocks=200)))
    first = mixed(prompts(12, seed=4, lengths=LENGTHS), Sampling(max_tokens=60, ignore_eos=True), seed=4)
    texts = tokens(flat(engine.generate(first)))
    before = scheduled.cached_tokens
    longer = [[*r.prompt, *text, 9] for r, text in zip(first, texts, strict=True)][::-1]
    for strategy in (None, solo("senior"), solo("junior")):
        second = mixed(longer, Sampling(max_tokens=16), seed=5)
        second = second if strategy is None else with_strategy(second, strategy)
        written = engine.generate(second)
        assert_sound(second, written)
        assert logprob_errors(models("Llama junior"), second, written).max() < 1e-4
    assert scheduled.cached_tokens - before > 1000
