"""Turns in the reference engine, with a scripted world: held against a slow loop, and against rows that wait."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from helpers import (
    IDS,
    VOCABULARY,
    assert_same,
    flat,
    gpt2,
    llama,
    prepared,
    prompts,
    qwen3,
    requests,
    small_qwen3,
    strategies,
    text,
    tokenizer,
    writing,
)
from scripted_world import ScriptedWorld, played, repeating
from tandemrl.rollout import kv_cache
from tandemrl.rollout.engine import Completion, EngineError, Reply, Request, Sampling, Turn, check_authors
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, alternating_turns, before_word, bernoulli, solo, turn
from tandemrl.selection.boundaries import start_table

STOPS = (5, 6, 7, 8)
PLAIN = Sampling(max_tokens=17, stop_token_ids=STOPS, ignore_eos=True)
LIMITS = {"turn_tokens": 7, "observation_tokens": 30}


@cache
def pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    return qwen3(0), small_qwen3()


def engine(*, max_rows: int = 64) -> TorchEngine:
    return TorchEngine(*map(prepared, pair()), tokenizer(), max_rows=max_rows)


def known() -> dict[str, Strategy]:
    return strategies() | {"turn": turn(0.5), "alternating_turns": alternating_turns("junior")}


def episodes(
    strategy: Strategy, *, count: int = 4, samples: int = 2, sampling: Sampling = PLAIN, **limits: object
) -> list[Request]:
    asked = requests(prompts(count), sampling, strategy, samples=samples)
    return [replace(request, **(LIMITS | limits)) for request in asked]


def by_loop(batch: Sequence[Request]) -> list[Completion]:
    return [played(request, key, *pair()) for request in batch for key in request.keys]


# -------------------------------------------------------------------------------------------- the same as a slow loop


def test_three_turns_are_what_a_loop_without_a_cache_writes():
    batch = episodes(known()["word"])
    world = ScriptedWorld()
    completions = flat(engine().generate(batch, responder=world))
    assert_same(completions, by_loop(batch), 1e-4)
    check_authors(completions, known()["word"])
    assert {len(c.turns) for c in completions} == {3}
    assert {c.stop_reason for c in completions} == {"turns"}
    for number, completion in enumerate(completions):
        told = [told for told in world.told if told.number == number]
        assert [t.tokens.tolist() for t in told] == [own.tolist() for own in completion.turns]
        assert [t.index for t in told] == [0, 1, 2]
        assert all((t.stop_reason == "stop") == (t.tokens[-1] in STOPS) for t in told)
        assert completion.transcript == world.transcript(number)


SAMPLING = Sampling(
    max_tokens=17, temperature=0.9, top_k=30, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3,
    stop_token_ids=STOPS, ignore_eos=True,
)  # fmt: skip


def test_one_call_mixes_strategies_limits_and_lone_turns():
    each = zip(requests(prompts(10), PLAIN, solo(), samples=2), known().values(), strict=True)
    batch = [
        replace(
            request,
            strategy=strategy,
            sampling=SAMPLING if i % 2 else PLAIN,
            turn_tokens=(None, 4, 7)[i % 3],
            observation_tokens=(0, 9, 40)[i // 2 % 3],
        )
        for i, (request, strategy) in enumerate(each)
    ]
    completions = flat(engine(max_rows=5).generate(batch, responder=ScriptedWorld()))
    assert_same(completions, by_loop(batch), 1e-4)
    assert {len(c.turns) for c in completions} == {1, 2, 3}
    assert {c.stop_reason for c in completions} == {"length", "turns"}


def test_slow_answers_in_any_order_change_nothing():
    batch = episodes(known()["word"], count=6)
    at_once = flat(engine().generate(batch, responder=ScriptedWorld()))
    late = ScriptedWorld(delay_s=0.03)
    assert_same(flat(engine(max_rows=7).generate(batch, responder=late)), at_once)
    order = [t.number for t in late.told if t.index == 2]
    assert order != sorted(order)  # they did come in another order


def test_requests_with_a_history_write_what_a_responder_gets():
    """Penalties and stop ids, too: to a further turn everything before it is its prompt."""
    starts = start_table(tokenizer())
    starts[list(STOPS)] = True
    strategies = known()["word"], known()["turn"], before_word(0.5, starts)
    batch = [each for strategy in strategies for each in episodes(strategy, count=3, sampling=SAMPLING)]
    whole = flat(engine().generate(batch, responder=ScriptedWorld()))
    pairs = [(request, key) for request in batch for key in request.keys]
    continued, ends = [], []
    for (request, key), completion in zip(pairs, whole, strict=True):
        own = completion.author >= 0
        begins = [i for i in range(len(own)) if own[i] and (i == 0 or not own[i - 1])]
        for number, begin in enumerate(begins):
            history = tuple(tuple(map(int, tokens)) for tokens in completion.turns[:number])
            left = request.sampling.max_tokens - sum(map(len, history))
            prompt = (*request.prompt, *completion.tokens[:begin].tolist())
            sampling = replace(request.sampling, max_tokens=min(7, left))
            continued.append(Request(prompt, (key,), sampling, request.strategy, history=history))
            ends.append((completion, begin))
    assert len(continued) == 3 * len(whole)
    alone = flat(engine().generate(continued))
    for one, request in zip(alone, continued, strict=True):
        check_authors([one], request.strategy, [request.history])
    for one, (completion, begin) in zip(alone, ends, strict=True):
        part = slice(begin, begin + len(one.tokens))
        assert one.tokens.tolist() == completion.tokens[part].tolist()
        assert one.author.tolist() == completion.author[part].tolist()
        np.testing.assert_allclose(one.behaviour_logprobs, completion.behaviour_logprobs[part], atol=1e-5)
        if one.handover_logprobs is not None:
            np.testing.assert_allclose(one.handover_logprobs, completion.handover_logprobs[part], atol=1e-5)
        assert part.stop == len(completion.tokens) or completion.author[part.stop] == -1


# ----------------------------------------------------------------------------------------------- each token once


def count_tokens(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Model -> tokens that went through it, padding included."""
    counted: Counter = Counter()
    original = kv_cache.hidden_states

    def counting(model: PreTrainedModel, tokens: torch.Tensor, *rest: object) -> torch.Tensor:
        counted[id(model)] += tokens.numel()
        return original(model, tokens, *rest)

    monkeypatch.setattr(kv_cache, "hidden_states", counting)
    return counted


def test_each_token_is_computed_once_per_model(monkeypatch):
    counted = count_tokens(monkeypatch)
    batch = episodes(known()["word"], samples=1)
    both = engine(max_rows=1)  # nothing is padded
    completions = flat(both.generate(batch, responder=ScriptedWorld()))
    # The last token of a text predicts nothing.
    read = sum(len(r.prompt) + len(c.tokens) - 1 for r, c in zip(batch, completions, strict=True))
    padding = sum(len(request.prompt) == 1 for request in batch)  # its prefill is an empty row
    assert len(counted) == 2
    assert set(counted.values()) == {read + padding}


@pytest.mark.parametrize("together", [16384, 12])
def test_resumed_rows_stay_within_the_context_of_the_model(together, monkeypatch):
    """They are computed together, padded; GPT-2 has no embedding for a position past its end."""
    monkeypatch.setattr(kv_cache, "PREFILL_TOKENS", together)
    models = llama(context=40), gpt2(context=40)
    said = (9, 1, 4, 2)  # after every turn of each request
    batch = [
        replace(request, prompt=(*request.prompt, *[2] * 40)[: 40 - 9 - 2 * count], observation_tokens=2 * count)
        for request, count in zip(
            episodes(bernoulli(0.5), samples=3, sampling=Sampling(max_tokens=9, ignore_eos=True), turn_tokens=3),
            said,
            strict=True,
        )
    ]

    class World(ScriptedWorld):
        def submit(self, turn: Turn) -> None:
            self.say = repeating(said[turn.number // 3])
            super().submit(turn)

    completions = flat(TorchEngine(*map(prepared, models), tokenizer()).generate(batch, responder=World()))
    assert [len(c.tokens) for c in completions] == [9 + 2 * count for count in said for _ in range(3)]
    expected = [
        played(request, key, *models, say=repeating(count))
        for request, count in zip(batch, said, strict=True)
        for key in request.keys
    ]
    assert_same(completions, expected, 1e-4)


def test_uninitialised_memory_never_reaches_a_logit():
    """Torch fills fresh memory with NaN in this mode."""
    batch = episodes(bernoulli(0.5))
    normal = engine(max_rows=5).generate(batch, responder=ScriptedWorld())
    torch.use_deterministic_algorithms(True)
    try:
        poisoned = engine(max_rows=5).generate(batch, responder=ScriptedWorld())
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(flat(poisoned), flat(normal), 0.0)


# ----------------------------------------------------------------------------------------------------------- the limits


def one(world: ScriptedWorld, **changes: object) -> Completion:
    sampling = replace(PLAIN, max_tokens=12, stop_token_ids=())
    request = replace(episodes(bernoulli(0.5), count=1, samples=1, sampling=sampling)[0], **changes)
    return flat(engine().generate([request], responder=world))[0]


def test_own_tokens_are_limited_by_turn_and_in_all():
    assert [len(t) for t in one(ScriptedWorld(), turn_tokens=5).turns] == [5, 5, 2]
    assert [len(t) for t in one(ScriptedWorld(2), turn_tokens=5).turns] == [5, 5]
    assert [len(t) for t in one(ScriptedWorld(), turn_tokens=None).turns] == [12]
    world = ScriptedWorld(9)
    ended = one(world, turn_tokens=4)
    assert [len(t) for t in ended.turns] == [4, 4, 4]
    assert ended.stop_reason == "length"  # the world would have gone on
    assert [t.index for t in world.told] == [0, 1, 2]  # and heard the last turn


@pytest.mark.parametrize(("observation_tokens", "turns"), [(10, 3), (9, 2), (5, 2), (4, 1), (0, 1)])
def test_what_the_world_says_fits_or_the_completion_ends_without_it(observation_tokens, turns):
    ended = one(ScriptedWorld(say=repeating(5)), turn_tokens=4, observation_tokens=observation_tokens)
    assert len(ended.turns) == turns
    assert (ended.author == -1).sum() == 5 * (turns - 1)
    assert ended.author[-1] >= 0
    assert ended.stop_reason == ("turns" if turns == 3 else "length")


def test_a_reply_may_say_why_a_completion_is_over():
    class Silent(ScriptedWorld):
        def submit(self, turn: Turn) -> None:
            self._ready.put(Reply(turn.number))

    assert one(ScriptedWorld(1)).stop_reason == "turns"
    assert one(Silent(), turn_tokens=3).stop_reason == "length"
    stop = int(one(Silent()).tokens[4])
    stopped = one(Silent(), sampling=replace(PLAIN, stop_token_ids=(stop,)))
    assert (stopped.stop_reason, int(stopped.tokens[-1])) == ("stop", stop)


def test_stop_strings_are_sought_in_the_turn_alone():
    """What the world said before, or the turn before that, does not complete one."""
    speaker = writing(["Ġa", "x", "b", "a", "c", "Ġa", "b", "d"])
    both = TorchEngine(prepared(speaker), prepared(speaker), tokenizer())
    sampling = Sampling(max_tokens=6, temperature=0.0, stop=("ab",))
    world = ScriptedWorld(2, say=lambda tokens, index: (IDS["a"],))
    request = Request((2,), (0,), sampling, alternating_turns(), turn_tokens=1, observation_tokens=1)
    written = flat(both.generate([request, replace(request, keys=(1,), turn_tokens=4)], responder=world))
    assert [text(c.tokens) for c in written] == [" aab", " axbaa ab"]
    told = sorted(world.told, key=lambda turn: (turn.number, turn.index))
    assert [t.stop_reason for t in told] == ["length", "length", "length", "stop"]


# -------------------------------------------------------------------------------------------------- nobody waits


class Held(ScriptedWorld):
    """The first turns of the completions ``held`` are answered as soon as ``release`` says so of what was told."""

    def __init__(self, held: Sequence[int], release: Callable[[list[Turn]], bool]) -> None:
        super().__init__()
        self._release = release
        self._numbers, self._waiting = held, list[Turn]()

    def submit(self, turn: Turn) -> None:
        if turn.index == 0 and turn.number in self._numbers:
            self._waiting.append(turn)
        else:
            super().submit(turn)
        if self._waiting and self._release([*self.told, *self._waiting]):
            for waiting in self._waiting:
                super().submit(waiting)
            self._waiting.clear()

    def replies(self, *, wait: bool) -> list[Reply]:
        assert not wait or not self._ready.empty(), "the engine waits for an answer that waits for other rows"
        return super().replies(wait=wait)


def test_no_row_waits_for_the_answer_to_another():
    batch = episodes(bernoulli(0.5), count=3)
    world = Held([0], lambda told: sum(t.index == 2 for t in told) == 5)
    assert_same(
        flat(engine().generate(batch, responder=world)), flat(engine().generate(batch, responder=ScriptedWorld()))
    )


# --------------------------------------------------------------------------------------------------- aborts and faults


def test_an_abort_reaches_a_row_that_awaits_its_answer():
    batch = episodes(bernoulli(0.5), count=3)
    whole = flat(engine().generate(batch, responder=ScriptedWorld()))
    running = engine()

    class Aborting(Held):
        """Completion 0 is aborted while it waits, and answered too late."""

        def submit(self, turn: Turn) -> None:
            super().submit(turn)
            if turn.number == 0:
                running._call.abort([0])

    for release in (lambda told: False, lambda told: sum(t.index == 1 for t in told) == 3):
        aborted, *others = flat(running.generate(batch, responder=Aborting([0], release)))
        assert aborted.stop_reason == "abort"
        assert aborted.tokens.tolist() == whole[0].turns[0].tolist()
        assert_same(others, whole[1:])


def test_an_abort_of_everything_ends_rows_in_every_state():
    running = engine(max_rows=4)
    world = Held([1], lambda told: False)
    told: list[int] = []

    def progress(count: int) -> None:
        told.append(count)
        if len(told) == 11:
            running.abort()

    completions = flat(running.generate(episodes(bernoulli(0.5), count=6), responder=world, progress=progress))
    assert {c.stop_reason for c in completions} == {"abort"}
    assert len(completions[1].turns) == 1
    assert len(completions[0].turns) == 2
    assert len(completions[-1].tokens) == 0
    assert sum(told) == sum((c.author >= 0).sum() for c in completions)


class Broken(ScriptedWorld):
    """Its second answer is not one."""

    fault: object = EngineError("the index is gone")

    def replies(self, *, wait: bool) -> list[Reply]:
        if len(self.told) < 2:
            return super().replies(wait=wait)
        if isinstance(self.fault, EngineError):
            raise self.fault
        return [self.fault]


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (EngineError("the index is gone"), "the index is gone"),
        (Reply(99, (3,)), "a reply to completion 99, of which no turn waits for one"),
        (Reply(1, (3, VOCABULARY)), f"completion 1: a reply has a token outside the vocabulary of {VOCABULARY}"),
    ],
)
def test_a_broken_world_ends_the_call_and_leaves_the_engine_usable(fault, match):
    batch, running = episodes(bernoulli(0.5)), engine()
    world = Broken()
    world.fault = fault
    with pytest.raises(EngineError, match=match):
        running.generate(batch, responder=world)
    again = running.generate(batch, responder=ScriptedWorld())
    assert_same(flat(again), flat(engine().generate(batch, responder=ScriptedWorld())))
