"""The junior's loop writes, and leaves behind, what passes of its runner do at every depth."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from helpers import prompts
from tandemrl.models import sampling
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
    """answers: of ``stays_on_device``, by depth. after: what the workers knew after every step."""

    written: list[Completion]
    passes: Passes
    answers: list[tuple[int, bool]]
    after: list[Any]


Write = Callable[..., Outcome]


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch) -> Write:
    """Generate with the loop or without it, and look on."""
    from tandemrl.rollout.vllm import runner as module

    stays_on_device, sample_tokens = module.stays_on_device, module.TandemModelRunner.sample_tokens

    def write(engine: Any, batch: list[Request], *, loop: bool) -> Outcome:
        answers: list[tuple[int, bool]] = []
        after: list[Any] = []

        def answer(runner, step, depth, forward):
            answers.append((depth, loop and stays_on_device(runner, step, depth, forward)))
            return answers[-1][1]

        def sample(self, *args, **kwargs):
            ids = self._ids
            output = sample_tokens(self, *args, **kwargs)
            after.append(state(self, ids))
            return output

        monkeypatch.setattr(module, "stays_on_device", answer)
        monkeypatch.setattr(module.TandemModelRunner, "sample_tokens", sample)
        assert engine.backend.llm.reset_prefix_cache()
        written = flat(engine.generate(batch))
        return Outcome(written, engine.passes, answers, after)

    return write


def state(tandem: Any, ids: list[str]) -> list[Any]:
    """What the next step builds upon, by request: its counts, the filled blocks, the runners' tokens."""
    planner = tandem.planner
    state, slots = planner.state, [planner.slots[id] for id in ids]
    known = [state.length, state.author, *state.computed, *state.sent, *state.known, *state.changed]
    of_requests: list[Any] = [[int(part[slot]) for part in known] for slot in slots]
    for own, id, slot in zip(of_requests, ids, slots, strict=True):
        own += state.filled[:, state.blocks[slot]].tolist()
        for runner in tandem.runners.values():
            assert runner.execute_model_state is None
            request, batch = runner.requests.get(id), runner.input_batch
            own.append(None if request is None else list(request.output_token_ids))
            index = batch.req_id_to_index.get(id)
            if index is not None:
                tokens = [*request.prompt_token_ids, *request.output_token_ids]
                assert batch.num_tokens_no_spec[index] == len(tokens)
                assert batch.token_ids_cpu[index, : len(tokens)].tolist() == tokens
    return of_requests


@pytest.mark.parametrize(
    ("k", "options", "pair"),
    [pytest.param(8, {}, "near junior", marks=pytest.mark.slow), (4, TIGHT, "Llama junior")],
)
def test_the_loop_changes_no_token_and_no_account(engines, scheduled, write, k, options, pair):
    engine, batch = engines(pair, mode="draft", draft_tokens=k, **options), mixture(30, SETTINGS, seed=21)
    loop, single = (write(engine, batch, loop=loop) for loop in (True, False))
    preemptions = scheduled.preemptions
    assert_sound(batch, [[c] for c in loop.written])
    assert_equal_completions(loop.written, single.written)
    assert loop.passes == single.passes
    assert loop.after == single.after
    assert sum(answer for _, answer in loop.answers) > 10
    assert preemptions > 0 or not options
    engine.set_mode("lazy")
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
    engine.set_mode("lazy")
    assert_equal_completions(outcome.written, write(engine, batch, loop=False).written)


class NoWaiting(TorchDispatchMode):
    """Refuses what would have the host wait for a device: reading a value, a size that depends on values."""

    forbidden = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.forbidden
        assert name != "index" or all(i is None or i.dtype != torch.bool for i in args[1])
        return func(*args, **(kwargs or {}))


class NoScalars(NoWaiting):
    """Refuses scalars that become tensors, too: on a device they are copied."""

    forbidden = NoWaiting.forbidden | {"lift_fresh"}


@pytest.mark.parametrize("options", [{}, TIGHT], ids=["plain", "under pressure"])
def test_a_pass_waits_for_nothing_and_a_row_without_a_slot_writes_nowhere(engines, write, monkeypatch, options):
    from tandemrl.rollout.vllm.junior_loop import JuniorLoop

    forward, draw, race_times, without = JuniorLoop._forward, JuniorLoop._draw, sampling.race_times, []

    def looked_at(self):
        with NoWaiting():
            logits = forward(self)
        number, runner = len(self._drawn), self._runner
        table = runner.input_batch.block_table[0]
        position = self._positions[number].numpy()
        block = table.block_table.np[np.arange(len(position)), position // table.block_size]
        expected = np.where(self._going[number], block * table.block_size + position % table.block_size, -1)
        assert table.slot_mapping.np[: len(position)].tolist() == expected.tolist()
        assert (block > 0).all()  # block 0 is nobody's
        without.append(int((~self._going[number]).sum()))
        return logits

    def drawn(self, logits):
        with NoScalars():
            draw(self, logits)

    def by_numpy(*args):
        with _disable_current_modes():  # random numbers, which NumPy hashes on a CPU alone
            return race_times(*args)

    monkeypatch.setattr(sampling, "race_times", by_numpy)
    monkeypatch.setattr(JuniorLoop, "_forward", looked_at)
    monkeypatch.setattr(JuniorLoop, "_draw", drawn)
    write(engines("near junior", mode="draft", draft_tokens=4, **options), mixture(18, SETTINGS, seed=23), loop=True)
    assert len(without) > 10
    assert any(without)
    assert not all(without)
