"""Drafts change nothing but the number of passes: held against the same engine without them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from helpers import (
    IDS,
    VOCABULARY,
    abort_after,
    assert_same_but_for_ties,
    flat,
    gpt2,
    llama,
    noisy,
    prepared,
    prompts,
    qwen3,
    reference_logits,
    requests,
    small_qwen3,
    strategies,
    tokenizer,
)
from scripted_world import ScriptedWorld
from tandemrl.rollout.drafting import CPU, VLLM_CPU, VLLM_CUDA, DraftLength, Size, count_accepted
from tandemrl.rollout.engine import Completion, Passes, Request, Sampling, check_authors
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import alternating_turns, bernoulli, solo, turn
from tandemrl.selection.draws import request_key

SAMPLINGS = [
    Sampling(max_tokens=24),
    Sampling(max_tokens=17, temperature=0.0),
    Sampling(max_tokens=24, temperature=1.5, ignore_eos=True),
    Sampling(max_tokens=21, temperature=0.8, top_k=20, top_p=0.9),
    Sampling(max_tokens=3, min_p=0.02),
    Sampling(max_tokens=24, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    Sampling(max_tokens=24, temperature=0.0, frequency_penalty=0.5, stop_token_ids=(IDS["a"], IDS["b"])),
    Sampling(max_tokens=24, stop=("a", "b c", "é")),
]


PAIRS = {
    "alike": lambda: (qwen3(0), noisy(qwen3(0), 0.003)),
    "smaller junior": lambda: (qwen3(0), small_qwen3()),
    "Llama senior, GPT-2 junior": lambda: (llama(tied=True), gpt2()),
}


@cache
def pair(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    return PAIRS[name]()


def engine(name: str, draft_tokens: int | str = 0, *, max_rows: int = 256) -> TorchEngine:
    return TorchEngine(*map(prepared, pair(name)), tokenizer(), max_rows=max_rows, draft_tokens=draft_tokens)


def everything(count: int) -> list[Request]:
    """Every sampling with every strategy, in turns."""
    known = list(strategies().values())
    return [
        Request(
            tuple(prompt),
            (request_key(5, 0, i, 0),),
            SAMPLINGS[i % len(SAMPLINGS)],
            known[(i // len(SAMPLINGS)) % len(known)],
        )
        for i, prompt in enumerate(prompts(count, seed=4))
    ]


def assert_same(batch: Sequence[Request], found: list[Completion], wanted: list[Completion], name: str) -> None:
    for one, asked in zip(found, [request for request in batch for _ in request.keys], strict=True):
        check_authors([one], asked.strategy)
    assert_same_but_for_ties(batch, found, wanted, pair(name), most=0.01)


@cache
def by_single_tokens(name: str) -> list[Completion]:
    return flat(engine(name).generate(everything(64)))


@pytest.mark.parametrize(("name", "ahead"), [*zip(PAIRS, (1, 4, 8), strict=True)])
def test_drafts_give_the_same_completions(name, ahead):
    running, batch = engine(name, ahead), everything(64)
    completions = flat(running.generate(batch))
    assert_same(batch, completions, by_single_tokens(name), name)
    passes = running.passes
    assert passes.tokens == sum(len(c.tokens) for c in completions)
    assert 0 < passes.accepted < passes.drafted
    # Drafts end at the limit of the row that may go furthest.
    assert passes.senior * (ahead - 1) < passes.junior <= passes.senior * ahead
    if name == "alike":
        assert passes.acceptance > 0.8


def test_rows_join_while_others_are_at_any_depth():
    batch = everything(24)
    wanted = by_single_tokens("alike")[:24]
    assert_same(batch, flat(engine("alike", 4, max_rows=7).generate(batch)), wanted, "alike")


def test_a_junior_that_is_the_senior_saves_all_passes_but_one_in_a_draft():
    senior = pair("alike")[0]
    running = TorchEngine(prepared(senior), prepared(senior), tokenizer(), draft_tokens=8)
    exactly = Sampling(max_tokens=24, ignore_eos=True)
    for strategy in (bernoulli(0.5), solo("senior")):
        completions = flat(running.generate(requests(prompts(4), exactly, strategy)))
        mine = sum(int((c.author == 1).sum()) for c in completions)
        assert running.passes == Passes(tokens=96, senior=12, junior=96, drafted=mine, accepted=mine)


def test_what_is_drafted_is_counted_up_to_the_first_token_that_differs():
    """Greedy, both models are asked for the next token after every prefix of what was written."""
    junior = pair("smaller junior")[1]
    batch = requests(prompts(6), Sampling(max_tokens=24, temperature=0.0, ignore_eos=True), solo("senior"))
    running = engine("smaller junior", 4)
    completions = flat(running.generate(batch))
    drafted = accepted = 0
    left: list[list[int]] = []  # tokens, of each row at the beginning of each of its rounds
    for request, completion in zip(batch, completions, strict=True):
        written = completion.tokens.tolist()
        agree = reference_logits(junior, request.prompt, written)[:, :VOCABULARY].argmax(1) == completion.tokens
        at = 0
        left.append([])
        while at < len(written):
            left[-1].append(len(written) - at)
            ahead = agree[at : at + 4]
            kept = len(ahead) if ahead.all() else int(ahead.argmin()) + 1
            drafted, accepted, at = drafted + kept, accepted + int(ahead[:kept].sum()), at + kept
    rounds = [[row[i] for row in left if i < len(row)] for i in range(max(map(len, left)))]
    # A round is as long as what is left of the row that may go furthest.
    junior = sum(len(rows) * min(4, max(rows)) for rows in rounds)
    assert running.passes == Passes(144, sum(map(len, rounds)), junior, drafted, accepted)


def test_turns_are_drafted_like_any_other():
    sampling = Sampling(max_tokens=17, stop_token_ids=(5, 6, 7, 8), ignore_eos=True, presence_penalty=0.3)
    batch = [
        replace(request, turn_tokens=7, observation_tokens=30)
        for strategy in (strategies()["word"], turn(0.5), alternating_turns("junior"), solo("senior"))
        for request in requests(prompts(3), sampling, strategy, samples=2)
    ]
    found = flat(engine("alike", 4).generate(batch, responder=ScriptedWorld()))
    wanted = flat(engine("alike").generate(batch, responder=ScriptedWorld()))
    assert_same(batch, found, wanted, "alike")
    assert [one.transcript for one in found] == [one.transcript for one in wanted]
    assert {len(c.turns) for c in found} == {3}


class LateWorld(ScriptedWorld):
    """Holds each reply back for a random number of polls, up to nine."""

    def __post_init__(self):
        super().__post_init__()
        self.held = []

    def replies(self, *, wait):
        while True:
            self.held = [(polls - 1, reply) for polls, reply in self.held]
            self.held += [(self._random.randint(0, 8), self._ready.get()) for _ in range(self._ready.qsize())]
            found = [reply for polls, reply in self.held if polls < 0]
            self.held = [each for each in self.held if each[0] >= 0]
            if found or not wait:
                return found


def test_a_row_that_comes_back_late_takes_the_place_that_it_left():
    """In another place it would be in the batch twice, and a rewound draft would take its authors from its double."""
    strategy = strategies()["word"]
    sampling = Sampling(max_tokens=160, stop_token_ids=(5,), ignore_eos=True)
    batch = [replace(each, observation_tokens=30) for each in requests(prompts(32), sampling, strategy, samples=2)]
    found = flat(
        TorchEngine(prepared(qwen3(0)), prepared(qwen3(0)), tokenizer(), draft_tokens=2).generate(
            batch, responder=LateWorld()
        )
    )
    check_authors(found, strategy)
    assert {len(completion.turns) for completion in found} == {1, 2, 3}


def test_a_draft_stays_within_the_context_of_the_model():
    """Learnt positions: one beyond the last would be an error."""
    name = "Llama senior, GPT-2 junior"
    running = engine(name, 8)
    batch = [
        *requests(prompts(1, lengths=(250,)), Sampling(max_tokens=6, ignore_eos=True), bernoulli(0.5)),
        *requests(prompts(2), Sampling(max_tokens=40, ignore_eos=True), bernoulli(0.5)),
    ]
    assert running.context == 256
    assert_same(batch, flat(running.generate(batch)), flat(engine(name).generate(batch)), name)


def test_an_abort_ends_rows_between_two_drafts():
    batch = requests(prompts(6), Sampling(max_tokens=60, ignore_eos=True), bernoulli(0.5), samples=2)
    aborted = {batch[0].keys[1], batch[5].keys[0]}
    whole = flat(engine("alike").generate(batch))
    for completion, before in zip(abort_after(engine("alike", 4), batch, 12 * 12, [1, 10]), whole, strict=True):
        length = len(completion.tokens)
        assert completion.tokens.tolist() == before.tokens.tolist()[:length]
        assert completion.author.tolist() == before.author.tolist()[:length]
        assert (completion.stop_reason == "abort") == (completion.key in aborted) == (length < 60)
        assert length >= 3


# ----------------------------------------------------------------------------------------------------- how far to draft

LARGE, SMALL = Size(12, 57_000_000), Size(4, 5_000_000)


def test_auto_gives_the_same_completions():
    running = engine("alike", "auto")
    running._draft_length = DraftLength(None, LARGE, SMALL, CPU)
    batch = everything(24)
    assert_same(batch, flat(running.generate(batch)), by_single_tokens("alike")[:24], "alike")
    assert running.passes.drafted > 0


# ------------------------------------------------------------------------------ what is chosen from round to round

KNOWN = {
    "ten to one": DraftLength(None, Size(8, 54_000_000, 10_240), Size(4, 4_300_000, 1_536), VLLM_CPU, lazy=True),
    "tiny": DraftLength(None, Size(2, 280_000, 512), Size(2, 280_000, 512), VLLM_CPU, lazy=True),
    "4B and .6B": DraftLength(
        None, Size(36, 4_000_000_000, 73_728), Size(28, 600_000_000, 57_344), VLLM_CUDA, lazy=True
    ),
    "torch": DraftLength(None, Size(12, 57_000_000), Size(4, 5_000_000), CPU),
}


def seen(acceptance: float) -> Passes:
    return Passes(drafted=10_000, accepted=round(10_000 * acceptance))


@pytest.mark.parametrize("pair", KNOWN)
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_who_agrees_more_often_is_never_drafted_less(pair, share) -> None:
    for rows in (1, 8, 32, 128, 256):
        for context in (32, 1500, 8000):
            by_acceptance = [KNOWN[pair](rows, seen(a / 20), share=share, context=context) for a in range(21)]
            assert by_acceptance == sorted(by_acceptance)


def test_what_is_chosen_where() -> None:
    """The first ones as they were measured; the others by what is known of such a GPU."""
    small, tiny, large = KNOWN["ten to one"], KNOWN["tiny"], KNOWN["4B and .6B"]
    assert all(small(rows, seen(0.9), context=c) >= 4 for rows in (1, 8, 32) for c in (32, 1500, 4000))
    assert small(1, seen(0.9), share=1.0) > 0 == small(1, seen(0.05), share=1.0)
    assert small(32, Passes(), context=1500) > 0 == small(32, seen(0.5), context=1500)  # who knows nothing tries
    assert tiny(1, seen(0.95), context=64) == 0 < tiny(8, seen(0.95), context=64)
    assert large(8, seen(0.7), context=1000) > 0 == large(128, seen(0.7), context=8000)  # long contexts of many rows
    assert replace(small, tokens=5)(256, seen(0.0)) == 5


def test_acceptance_is_a_matter_of_what_the_senior_can_refuse() -> None:
    """Three guesses, of which it draws two; what it would have said of the junior's own tokens does not matter."""
    guesses = np.array([[True, True, False], [True, False, False]])
    right = np.array([[True, False, True], [True, True, False]])
    assert count_accepted(guesses, right) == Passes(drafted=3, accepted=2)
    counted = count_accepted(torch.from_numpy(guesses), torch.from_numpy(right))
    assert (counted.drafted, counted.accepted, counted.tokens) == (3, 2, 0)
    assert count_accepted(guesses[:0], right[:0]).acceptance is None
