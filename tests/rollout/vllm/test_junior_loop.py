"""The junior's loop writes what passes of its runner do at every depth."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from pairs import (
    TIGHT,
    UNPENALISED,
    VLLM,
    assert_equal_completions,
    assert_sound,
    flat,
    mixed,
    mixture,
    planner_of,
    with_strategy,
)

from helpers import prompts
from tandemrl.rollout.drafting import DraftLength
from tandemrl.rollout.engine import Completion, Passes, Request, Sampling
from tandemrl.selection import chunk

pytestmark = VLLM

SETTINGS = [
    *UNPENALISED,
    Sampling(max_tokens=30, temperature=0.9, top_p=0.95, top_k=30, min_p=0.01),
    Sampling(max_tokens=40, stop=("st", "a"), stop_token_ids=(7, 11, 13)),
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


@pytest.mark.parametrize(
    ("k", "options", "pair"),
    [pytest.param(8, {}, "near junior", marks=pytest.mark.slow), (4, TIGHT, "Llama junior")],
)
def test_the_loop_changes_no_token(engines, scheduled, write, k, options, pair):
    engine, batch = engines(pair, mode="draft", draft_tokens=k, **options), mixture(30, SETTINGS, seed=21)
    loop, single = (write(engine, batch, loop=loop) for loop in (True, False))
    preemptions = scheduled.preemptions
    assert_sound(batch, [[c] for c in loop.written])
    assert_equal_completions(loop.written, single.written)
    assert loop.passes == single.passes
    assert sum(answer for _, answer in loop.answers) > 10
    assert preemptions > 0 or not options
    engine.call_workers("tandem_mode", "lazy")
    assert_equal_completions(loop.written, write(engine, batch, loop=False).written)


class NowAndThen(DraftLength):
    """A dozen steps without drafts, then some with them."""

    calls = itertools.count()

    def __call__(self, *load: Any, **more: Any) -> int:
        return 4 * (next(self.calls) % 16 >= 12)


def test_a_loop_begins_one_depth_later_where_the_junior_has_much_to_read(engines, write, monkeypatch):
    """While nothing is drafted the senior writes more than one pass of the junior can take."""
    engine = engines("near junior", mode="draft", draft_tokens=4, **TIGHT)
    planner = planner_of(engine)
    monkeypatch.setattr(planner, "draft_length", NowAndThen(**vars(planner.draft_length)))
    long = Sampling(max_tokens=50, ignore_eos=True)
    batch = with_strategy(mixed(prompts(8, seed=24, lengths=(3, 9)), long, seed=24), chunk(40, "senior"))
    outcome = write(engine, batch, loop=True)
    assert {depth for depth, answer in outcome.answers if answer} == {0, 1}
    assert_sound(batch, [[c] for c in outcome.written])
    engine.call_workers("tandem_mode", "lazy")
    assert_equal_completions(outcome.written, write(engine, batch, loop=False).written)
