"""Drafting through handovers: the tokens are those of lazy mode and of the reference engine, in fewer passes."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from pairs import (
    LENGTHS,
    ROWS,
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
from tandemrl.rollout.engine import Completion, Passes, Request, Sampling
from tandemrl.selection import chunk, solo

pytestmark = VLLM

NEAR = "near junior"
SETTINGS = [
    *UNPENALISED,
    Sampling(max_tokens=20, repetition_penalty=1.3, ignore_eos=True),
    Sampling(max_tokens=20, temperature=0.0, presence_penalty=0.8, frequency_penalty=0.5, ignore_eos=True),
    Sampling(
        max_tokens=20, temperature=0.9, top_p=0.95, top_k=30, min_p=0.01, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=0.3,
    ),
    Sampling(max_tokens=24, stop=("st", "a"), stop_token_ids=(7,)),
]  # fmt: skip


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


@pytest.mark.parametrize(("pair", "k", "options"), [(NEAR, 8, {}), ("Llama junior", 4, TIGHT)])
def test_drafting_changes_no_token(engines, scheduled, pair, k, options):
    """Against the reference engine, whatever the strategy and the sampling; a near-tie may fall either way."""
    batch, engine = mixture(ROWS, SETTINGS, seed=1), drafted(engines, pair, k, **options)
    found = flat(engine.generate(batch))
    assert_sound(batch, [[c] for c in found])
    assert not options or scheduled.preemptions > 0
    drafts = engine.passes
    assert drafts.tokens == sum(len(c.tokens) for c in found)
    assert_equal_completions(found, flat(reference(pair).generate(batch)))
    if pair == NEAR:
        assert 0.4 < drafts.acceptance < 1
        in_mode(engine, "lazy", batch)
        assert drafts.senior < 0.5 * engine.passes.senior


def test_limits_and_stops_inside_a_draft(engine):
    """Texts of one token to twenty, and stop strings of which one begins within another."""
    short = [changed(SETTINGS[i % 3], max_tokens=1 + i % 20) for i in range(20)]
    stops = [Sampling(max_tokens=24, stop=stop) for stop in (("a",), ("ab", "a", "b"), ("in ", "n"), ("th", "t"))]
    drawn = mixed(prompts(36, seed=2, lengths=LENGTHS), SETTINGS[0], seed=2)
    batch = [Request(r.prompt, r.keys, s, r.strategy) for r, s in zip(drawn, [*short, *stops * 4], strict=True)]
    lazy, found = in_mode(engine, "lazy", batch), flat(engine.generate(batch))
    assert_equal_completions(found, lazy)
    assert {c.stop_reason for c in found[20:]} >= {"stop", "length"}


class Changing(DraftLength):
    """Another choice in every other step."""

    calls = itertools.count()

    def __call__(self, *load: Any, **more: Any) -> int:
        return (4, 0, 2, 0, 3, 1)[next(self.calls) // 2 % 6]


def test_another_length_may_be_chosen_at_any_time(engines, scheduled, monkeypatch):
    """With chunked prefill, preemption, and catch-ups longer than the budget."""
    engine = drafted(engines, "Llama junior", 4, **TIGHT)
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
    engine = drafted(engines, "Llama junior", 4, block_size=32)
    first = mixed(prompts(12, seed=4, lengths=LENGTHS), Sampling(max_tokens=36, ignore_eos=True), seed=4)
    texts = tokens(flat(engine.generate(first)))
    before = scheduled.cached_tokens
    longer = [[*r.prompt, *text, 9] for r, text in zip(first, texts, strict=True)][::-1]
    for strategy in (None, solo("senior"), solo("junior")):
        second = mixed(longer, Sampling(max_tokens=8), seed=5)
        second = second if strategy is None else with_strategy(second, strategy)
        written = engine.generate(second)
        assert_sound(second, written)
        assert logprob_errors(models("Llama junior"), second, written).max() < 1e-4
    assert scheduled.cached_tokens - before > 1000


# -------------------------------------------------------------------------------------- the junior's loop on the device

LOOPED = [
    *UNPENALISED,
    Sampling(max_tokens=20, temperature=0.9, top_p=0.95, top_k=30, min_p=0.01),
    Sampling(max_tokens=24, stop=("st", "a"), stop_token_ids=(7, 11, 13)),
    Sampling(max_tokens=11, ignore_eos=True),
    Sampling(max_tokens=2),
]


class Outcome(NamedTuple):
    """answers: of ``stays_on_device``, by depth."""

    written: list[Completion]
    passes: Passes
    answers: list[tuple[int, bool]]


Write = Callable[..., Outcome]


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch) -> Write:
    """Generate with the loop or without it, and look on."""
    from tandemrl.rollout.vllm import runner as module

    stays_on_device = module.stays_on_device

    def write(engine: Any, batch: list[Request], *, loop: bool) -> Outcome:
        answers: list[tuple[int, bool]] = []

        def answer(runner, step, depth, forward):
            answers.append((depth, loop and stays_on_device(runner, step, depth, forward)))
            return answers[-1][1]

        monkeypatch.setattr(module, "stays_on_device", answer)
        assert engine.llm.reset_prefix_cache()
        written = flat(engine.generate(batch))
        return Outcome(written, engine.passes, answers)

    return write


def test_the_loop_changes_no_token(engines, scheduled, write):
    engine, batch = drafted(engines, "Llama junior", 4, **TIGHT), mixture(ROWS, LOOPED, seed=21)
    loop, single = (write(engine, batch, loop=loop) for loop in (True, False))
    preemptions = scheduled.preemptions
    assert_sound(batch, [[c] for c in loop.written])
    assert_equal_completions(loop.written, single.written)
    assert loop.passes == single.passes
    assert sum(answer for _, answer in loop.answers) > 10
    assert preemptions > 0


class NowAndThen(DraftLength):
    """A dozen steps without drafts, then some with them."""

    calls = itertools.count()

    def __call__(self, *load: Any, **more: Any) -> int:
        return 4 * (next(self.calls) % 16 >= 12)


def test_a_loop_begins_one_depth_later_where_the_junior_has_much_to_read(engines, write, monkeypatch):
    """While nothing is drafted the senior writes more than one pass of the junior can take."""
    engine = drafted(engines, "Llama junior", 4, **TIGHT)
    planner = planner_of(engine)
    monkeypatch.setattr(planner, "draft_length", NowAndThen(**vars(planner.draft_length)))
    long = Sampling(max_tokens=50, ignore_eos=True)
    batch = with_strategy(mixed(prompts(8, seed=24, lengths=(3, 9)), long, seed=24), chunk(40, "senior"))
    outcome = write(engine, batch, loop=True)
    assert {depth for depth, answer in outcome.answers if answer} == {0, 1}
    assert_sound(batch, [[c] for c in outcome.written])
    engine.call_workers("tandem_mode", "lazy")
    assert_equal_completions(outcome.written, write(engine, batch, loop=False).written)
