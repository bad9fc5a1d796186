"""Completions of several turns on vLLM: those of the reference engine, found again in the prefix cache."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from pairs import (
    LENGTHS,
    ROWS,
    VLLM,
    assert_equal_completions,
    assert_sound,
    changed,
    flat,
    mixed,
    reference,
    strategies,
    tokens,
)

from helpers import IDS, prompts, text
from scripted_world import ScriptedWorld, answer
from tandemrl.rollout.engine import Completion, EngineError, Reply, Request, Sampling, Turn, check_authors
from tandemrl.selection import Strategy, alternating_turns, turn
from tandemrl.selection.draws import request_key
from tandemrl.types import Transcript

pytestmark = VLLM

PAIR = "smaller junior"
KINDS = strategies() | {"turn": turn(0.5), "alternating_turns": alternating_turns("junior")}
SETTINGS = [
    Sampling(max_tokens=30),
    Sampling(max_tokens=30, temperature=0.7, top_p=0.9, top_k=30),
    Sampling(max_tokens=25, repetition_penalty=1.2),
    Sampling(max_tokens=30, presence_penalty=0.7, frequency_penalty=0.5),
    Sampling(max_tokens=30, temperature=0.0),
    Sampling(max_tokens=30, stop=("e",), stop_token_ids=(7,)),
]


def in_turns(count: int, *, seed: int = 0, lengths: Sequence[int] = LENGTHS, **options: Any) -> list[Request]:
    """Strategies and samplings take turns. Ten tokens a turn, unless told otherwise."""
    kinds = list(KINDS.values())
    return [
        Request(
            tuple(prompt),
            (request_key(seed, 0, i, 0),),
            SETTINGS[i % len(SETTINGS)],
            kinds[i % len(kinds)],
            **(dict(turn_tokens=10, observation_tokens=17, task=i) | options),
        )
        for i, prompt in enumerate(prompts(count, seed=seed, lengths=lengths))
    ]


def plain(count: int, *, strategy: Strategy | None = None, **options: Any) -> list[Request]:
    """Turns that end by their limit alone."""
    batch = in_turns(count, **(dict(observation_tokens=24) | options))
    sampling = Sampling(max_tokens=30, ignore_eos=True)
    return [dataclasses.replace(r, sampling=sampling, strategy=strategy or r.strategy) for r in batch]


def world(**options: Any) -> ScriptedWorld:
    """Never ends in half a character: vLLM would take the text of the prompt for that of the turn's first token."""
    return ScriptedWorld(say=lambda tokens, index: (*answer(tokens, index), IDS["!"]), **options)


def assert_same_turns(found: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    assert_equal_completions(found, wanted)
    assert [c.transcript for c in found] == [c.transcript for c in wanted]


@pytest.fixture(scope="module")
def engine(engines) -> Any:
    return engines(PAIR)


# ------------------------------------------------------------------------------------------------- the reference engine


@pytest.fixture(scope="module")
def wanted() -> list[Completion]:
    return flat(reference("Llama junior").generate(in_turns(ROWS, seed=1), responder=world()))


@pytest.mark.parametrize("mode", ["lazy", "draft"])
def test_the_reference_engine_writes_the_same_turns(engines, wanted, mode):
    """Answers come at once and in any order."""
    drafts = {"draft_tokens": 4} if mode == "draft" else {}
    batch, engine, played = in_turns(ROWS, seed=1), engines("Llama junior", mode=mode, block_size=32, **drafts), world()
    found = flat(engine.generate(batch, responder=played))
    assert_same_turns(found, wanted)
    assert {len(c.turns) for c in found} == {2, 3}
    assert {c.stop_reason for c in found} == {"turns", "length"}
    assert {turn.stop_reason for turn in played.told} == {"eos", "stop", "length"}
    for request, completion in zip(batch, found, strict=True):
        check_authors([completion], request.strategy)
    assert [turn.task for turn in played.told] == [turn.number for turn in played.told]  # one key each


# ---------------------------------------------------------------------------------------------------- the prefix cache


@pytest.mark.parametrize("kind", ["word 0.5", "solo senior"])
def test_a_further_turn_computes_what_is_new(engines, kind):
    """Each model, whatever it had computed in the turn before: at most a block again for every turn of a row."""
    engine, rows, strategy = engines(PAIR, block_size=32), 12, KINDS[kind]
    batch = plain(rows, seed=5, lengths=(200, 150), strategy=strategy)
    written = flat(engine.generate(batch, responder=world()))
    computed = engine.stats()["computed"]
    assert [len(c.turns) for c in written] == [3] * rows
    texts = sum(len(r.prompt) + len(c.tokens) for r, c in zip(batch, written, strict=True))
    assert computed[1] <= texts + 2 * rows * 32
    assert computed[0] <= (0 if strategy.writers == "senior" else texts + 2 * rows * 32)
    assert texts + 2 * rows * 32 < 0.6 * sum(
        3 * len(r.prompt) + 2 * 10 + len(c.tokens) for r, c in zip(batch, written, strict=True)
    )


# ------------------------------------------------------------------------------------------------- limits and the ends


class Script:
    """Says ``replies[number][index]`` after a turn. ``late``: of these rows not before nobody writes any more."""

    def __init__(self, replies: Sequence[Sequence[Reply]], late: Sequence[int] = ()) -> None:
        self.replied, self.late, self.told = replies, late, list[Turn]()
        self.ready: list[Reply] = []
        self.held: list[Reply] = []

    def submit(self, turn: Turn) -> None:
        self.told.append(turn)
        reply = self.replied[turn.number][turn.index]
        (self.held if turn.number in self.late else self.ready).append(reply)

    def replies(self, *, wait: bool) -> list[Reply]:
        if wait and not self.ready:
            self.ready, self.held = self.held, []
        found, self.ready = self.ready, []
        return found

    def transcript(self, number: int) -> Transcript:
        return Transcript(())


def test_a_stop_string_belongs_to_one_turn(engine):
    """What the world said, or half of it and half of the turn before, ends no turn."""
    [request] = plain(1, seed=9)
    said = tuple(prompts(1, seed=9, lengths=(6,))[0])
    free = flat(engine.generate([request], responder=Script([[Reply(0, said), Reply(0)]])))[0]
    around = text(free.turns[0][-2:]) + text(said)
    sampling = changed(request.sampling, stop=(text(said), around[:3]))
    stopping = dataclasses.replace(request, sampling=sampling)
    again = flat(engine.generate([stopping], responder=Script([[Reply(0, said), Reply(0)]])))[0]
    assert again.tokens.tolist() == free.tokens.tolist()


# ------------------------------------------------------------------------------------------------ aborts and breakages


def test_aborts_reach_rows_that_await_an_answer(engine):
    """Row 0 awaits one, row 1 is writing; the answer to row 0 comes too late."""
    batch = plain(4, seed=11)
    script = Script([[Reply(i, (2, 3)), Reply(i, (4,)), Reply(i)] for i in range(4)], late=[0])
    written = 0

    def progress(more: int) -> None:
        nonlocal written
        written += more
        if written > 4 * 10 + 3 * 5:
            engine._call.abort([0, 1])

    found = flat(engine.generate(batch, progress=progress, responder=script))
    assert [c.stop_reason for c in found] == ["abort", "abort", "length", "length"]
    assert [len(t) for t in found[0].turns] == [10]
    assert 1 < len(found[1].turns) <= 2
    assert found[1].author[-1] >= 0
    for request, completion in zip(batch, found, strict=True):
        check_authors([completion], request.strategy)


def test_a_broken_world_ends_the_call_and_nothing_else(engine):
    batch = plain(6, seed=13, lengths=(40, 70))

    class Broken(Script):
        def replies(self, *, wait: bool) -> list[Reply]:
            if self.told:
                raise EngineError("the index is gone")
            return []

    wanted = flat(engine.generate(batch, responder=world()))
    uneven = [dataclasses.replace(r, turn_tokens=10 + 2 * i) for i, r in enumerate(batch)]
    with pytest.raises(EngineError, match="the index is gone"):
        engine.generate(uneven, responder=Broken([[Reply(i, (2,))] for i in range(6)], late=range(6)))
    assert_same_turns(flat(engine.generate(batch, responder=world())), wanted)
    short = mixed(prompts(1, seed=14), Sampling(max_tokens=4))
    assert_sound(short, engine.generate(short))
    assert engine.stats()["requests"] <= 1
    assert tokens(flat(engine.generate(short))) == tokens(flat(engine.generate(short)))
