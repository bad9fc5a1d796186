"""The reference engine against transformers itself: who writes, what they write, with which probability, and when."""

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from helpers import (
    EOS,
    IDS,
    SAMPLINGS,
    VOCABULARY,
    assert_same_but_for_ties,
    author_logits,
    chi_square_bound,
    flat,
    gpt2,
    llama,
    prepared,
    prompts,
    qwen3,
    race_lag,
    reference_distribution,
    reference_logits,
    requests,
    sampling_key,
    small_qwen3,
    strategies,
    tokenizer,
    writing,
)
from tandemrl.rollout.call import Finished, NewTokens
from tandemrl.rollout.engine import (
    Completion,
    EngineError,
    Request,
    Sampling,
    check_answers,
    check_authors,
)
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, alternating, bernoulli, chunk, solo
from tandemrl.selection.draws import request_key

GREEDY = Sampling(max_tokens=24, temperature=0.0)
WRITERS = {"solo senior": {1}, "solo junior": {0}, "sentence": {0}}  # these texts have no blank line

PAIRS: dict[str, Callable[[], tuple[PreTrainedModel, PreTrainedModel]]] = {
    "same family": lambda: (qwen3(0), qwen3(7)),
    "smaller junior": lambda: (qwen3(0), small_qwen3()),
    "larger junior vocabulary": lambda: (qwen3(0), llama(vocabulary=VOCABULARY + 24)),
    "Llama senior, GPT-2 junior": lambda: (llama(tied=True), gpt2()),
}


@cache
def pair(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    return PAIRS[name]()


def engine(name: str = "smaller junior", *, max_rows: int = 256) -> TorchEngine:
    senior, junior = pair(name)
    return TorchEngine(prepared(senior), prepared(junior), tokenizer(), max_rows=max_rows)


def channels(completion: Completion) -> tuple[list, list, list, str]:
    return (
        completion.tokens.tolist(),
        completion.author.tolist(),
        completion.behaviour_logprobs.tolist(),
        completion.stop_reason,
    )


def assert_sound(completions: list[Completion], strategy: Strategy) -> None:
    check_authors(completions, strategy)
    for completion in completions:
        assert completion.tokens.dtype == np.int64
        assert completion.author.dtype == np.int8
        assert completion.behaviour_logprobs.dtype == np.float32
        assert (completion.behaviour_logprobs <= 0).all()
        assert completion.authorship_mask is completion.author


# -------------------------------------------------------------------------------------------------- greedy: which model


def by_strategy(engine: TorchEngine, given: list[list[int]]) -> dict[str, list[Completion]]:
    """What is written with each strategy, greedily, in one call."""
    asked = [request for strategy in strategies().values() for request in requests(given, GREEDY, strategy)]
    written = iter(flat(engine.generate(asked)))
    found = {name: list(islice(written, len(given))) for name in strategies()}
    for name, completions in found.items():
        assert_sound(completions, strategies()[name])
    return found


def test_two_equal_models_write_what_transformers_generates():
    given, senior = prompts(6), pair("same family")[0]
    wanted = []
    for prompt in given:  # by transformers' own ``generate``
        ids, limit = torch.tensor([prompt]), GREEDY.max_tokens
        whole = senior.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit)
        wanted.append(whole[0, len(prompt) :].tolist())
    for name, completions in by_strategy(TorchEngine(prepared(senior), prepared(senior), tokenizer()), given).items():
        assert [c.tokens.tolist() for c in completions] == wanted
        assert {who for c in completions for who in c.author} == WRITERS.get(name, {0, 1})
        assert all((c.behaviour_logprobs == 0).all() for c in completions)


@pytest.mark.parametrize("pair_name", ["larger junior vocabulary", "Llama senior, GPT-2 junior"])
def test_every_greedy_token_is_the_best_of_its_authors_model(pair_name):
    senior, junior = pair(pair_name)
    given = prompts(3)
    disagreements = 0
    for name, completions in by_strategy(engine(pair_name), given).items():
        for prompt, completion in zip(given, completions, strict=True):
            logits = author_logits(senior, junior, prompt, completion)
            chosen = logits[np.arange(len(logits)), completion.tokens]
            assert (chosen >= logits.max(1) - 1e-4).all(), name
            other = reference_logits(junior, prompt, completion.tokens.tolist())[:, : logits.shape[1]]
            disagreements += int((other.argmax(1) != completion.tokens)[completion.author == 1].sum())
    assert disagreements > 50  # the two models are told apart


# ----------------------------------------------------------------------------------------------- sampling: how probable


def assert_follows(
    completion: Completion, prompt: list[int], sampling: Sampling, models: tuple[PreTrainedModel, PreTrainedModel]
) -> None:
    """Each token wins the race of its key in its author's distribution, and its log-prob is that one's."""
    logits = author_logits(*models, prompt, completion)
    output = completion.tokens.tolist()
    for i, token in enumerate(output):
        p = reference_distribution(logits[i], sampling, prompt, output[:i])
        assert p[token] > 0
        assert np.log(p[token]) == pytest.approx(completion.behaviour_logprobs[i], abs=1e-4)
        assert race_lag(p, token, sampling_key(completion.key, i)) < 1e-4


def test_behaviour_logprobs_are_those_of_the_authors_distribution():
    """Every request of a call keeps its own knobs, strategy and length; greedy and sampled rows share a batch."""
    kinds = list(strategies().values())
    settings = [*SAMPLINGS.values(), Sampling(temperature=0.0)]
    given = prompts(2 * len(settings), seed=2)
    batch = [
        Request(
            tuple(prompt),
            (request_key(3, 0, i, 0), request_key(3, 0, i, 1)),
            replace(settings[i % len(settings)], max_tokens=3 + 2 * (i % 9), ignore_eos=i % 2 == 0),
            kinds[i % len(kinds)],
        )
        for i, prompt in enumerate(given)
    ]
    written = engine("smaller junior", max_rows=11).generate(batch)
    assert [[c.key for c in group] for group in written] == [list(request.keys) for request in batch]
    for request, group in zip(batch, written, strict=True):
        assert_sound(group, request.strategy)
        for completion in group:
            if request.sampling.temperature > 0:
                assert_follows(completion, list(request.prompt), request.sampling, pair("smaller junior"))
            assert len(completion.tokens) == request.sampling.max_tokens or completion.stop_reason == "eos"
            assert completion.stop_reason == "length" or not request.sampling.ignore_eos


def test_first_tokens_have_their_authors_frequencies():
    """8000 draws at temperature 1: per author the exact softmax, and the author does not depend on the draw."""
    prompt = prompts(1, seed=5, lengths=(3,))
    both = engine(max_rows=4096)
    strategy = bernoulli(0.3)
    group = both.generate(requests(prompt, Sampling(max_tokens=1, ignore_eos=True), strategy, samples=8000))[0]
    tokens = np.concatenate([c.tokens for c in group])
    author = np.concatenate([c.author for c in group])
    assert abs(author.mean() - 0.3) < 4 * np.sqrt(0.3 * 0.7 / len(author))
    for who, model in enumerate(reversed(pair("smaller junior"))):
        p = reference_distribution(reference_logits(model, prompt[0], [0])[0], Sampling(), [], [])
        mine = np.bincount(tokens[author == who], minlength=VOCABULARY)
        statistic, bound = chi_square_bound(mine, p)
        assert statistic < bound
        others = np.bincount(tokens[author != who], minlength=VOCABULARY)
        statistic, bound = chi_square_bound(others, p)
        assert statistic > 10 * bound  # the test can tell the two models apart


# ------------------------------------------------------------------------------------------- the same text in any batch


def reproduction(samples: int = 8) -> list[Request]:
    """80 completions of 10 prompts, several strategies, lengths and truncations, with EOS ending some of them early."""
    kinds = list(strategies().values())[:6]
    settings = [Sampling(max_tokens=18), Sampling(max_tokens=9, temperature=0.8, top_k=20, top_p=0.9)]
    return [
        Request(tuple(p), tuple(request_key(9, 1, i, s) for s in range(samples)), settings[i % 2], kinds[i % 6])
        for i, p in enumerate(prompts(10, seed=7))
    ]


@pytest.fixture(scope="module")
def whole_batch() -> list[list[Completion]]:
    return engine().generate(reproduction())


def test_the_same_call_gives_the_same_bits(whole_batch):
    again = engine().generate(reproduction())
    assert [channels(c) for c in flat(again)] == [channels(c) for c in flat(whole_batch)]


@pytest.mark.parametrize("max_rows", [1, 32])
def test_batch_size_and_order_change_nothing_but_rounding(whole_batch, max_rows):
    batch = reproduction(samples=1 if max_rows == 1 else 8)  # ten rows by themselves, since they are eighty calls else
    found = engine(max_rows=max_rows).generate(batch[::-1])[::-1]
    for request, group in zip(batch, found, strict=True):
        assert_sound(group, request.strategy)
    wanted = [one for request, group in zip(batch, whole_batch, strict=True) for one in group[: len(request.keys)]]
    assert_same_but_for_ties(batch, flat(found), wanted, pair("smaller junior"), most=0.005, atol=2e-5)


# ---------------------------------------------------------------------------------------------- coming, going, stopping


def test_finished_rows_stay_within_the_context_of_the_model():
    """A finished row is kept until an eighth of the batch is; GPT-2 has no embedding for a position past its end."""
    models = (llama(context=40), gpt2(context=40))
    both = TorchEngine(prepared(models[0]), prepared(models[1]), tokenizer())
    batch = [
        Request(tuple(prompts(1, lengths=(36,))[0]), (0,), Sampling(max_tokens=4, ignore_eos=True), alternating()),
        *requests(prompts(20, lengths=(4,)), Sampling(max_tokens=36, ignore_eos=True), alternating()),
    ]
    completions = flat(both.generate(batch))
    assert [len(c.tokens) for c in completions] == [4] + [36] * 20
    for request, completion in zip(batch[:3], completions[:3], strict=True):
        assert_follows(completion, list(request.prompt), request.sampling, models)


def eos_first(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose LM head prefers EOS by a wide margin."""
    model = copy.deepcopy(model)
    head = torch.nn.Linear(model.config.hidden_size, VOCABULARY, bias=True)
    head.weight.data.copy_(model.lm_head.weight.data)
    head.bias.data.zero_()
    head.bias.data[IDS[EOS]] = 100.0
    model.lm_head = head
    return model


def test_eos_ends_a_completion_unless_ignored():
    senior, junior = pair("smaller junior")
    both = TorchEngine(prepared(eos_first(senior)), prepared(junior), tokenizer())
    strategy = chunk(3, first="junior")
    given = prompts(1, seed=12, lengths=(4,))
    ended, ignored = (
        flat(both.generate(requests(given, Sampling(max_tokens=8, temperature=0.0, ignore_eos=ignore), strategy)))[0]
        for ignore in (False, True)
    )
    assert ended.stop_reason == "eos"
    assert len(ended.tokens) == 4
    assert ended.tokens[3] == IDS[EOS]
    assert ended.author.tolist() == [0, 0, 0, 1]
    assert ignored.stop_reason == "length"
    assert ignored.tokens[3:6].tolist() == [IDS[EOS]] * 3
    stopping = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=(IDS[EOS],))
    as_stop = flat(both.generate(requests(given, stopping, strategy)))[0]
    assert (as_stop.stop_reason, len(as_stop.tokens)) == ("stop", 4)


SPOKEN = ["Ġa", "b", "Ġ", "Ã", "©", "c", "ĊĊ", "d", "e", "f", "Ġg", "!"]


STOPS = [
    (("b",), 2),  # inside one token
    (("ab",), 2),  # spans two tokens
    (("b é",), 5),  # a character of two tokens completes it
    (("\n",), 7),  # part of a token
    (("xyz", "f g", "ef"), 10),  # whichever comes first
    ((" ab éc\n\ndef g",), 11),
    (("x a", "zz"), 12),  # one that the prompt begins
]


def test_stop_strings_are_kept_and_may_span_tokens():
    speaker = writing(SPOKEN)
    both = TorchEngine(prepared(speaker), prepared(speaker), tokenizer())
    asked = [Sampling(max_tokens=12, temperature=0.0, stop=stop) for stop, _ in STOPS]
    written = flat(both.generate([Request((IDS["x"],), (0,), sampling, alternating()) for sampling in asked]))
    for completion, (_, count) in zip(written, STOPS, strict=True):
        assert completion.tokens.tolist() == [IDS[word] for word in SPOKEN[:count]]
        assert completion.stop_reason == ("stop" if count < 12 else "length")


@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_tokens_are_told_once_and_in_order(draft_tokens):
    """Rows come and go while others are written; with drafts, several tokens come at once."""
    senior, junior = pair("smaller junior")
    both = TorchEngine(prepared(senior), prepared(junior), tokenizer(), max_rows=7, draft_tokens=draft_tokens)
    told: dict[int, list[tuple[int, float]]] = {}
    calls: list[int] = []

    with both.open() as call:
        numbers = call.submit(reproduction(samples=2))
        left = set(numbers)
        while left:
            for event in call.step():
                if isinstance(event, NewTokens):
                    told.setdefault(event.number, []).extend(zip(event.tokens, event.logprobs, strict=True))
                    calls.append(len(event.tokens))
                elif isinstance(event, Finished):
                    left.remove(event.number)
        completions = call.take(numbers)
    assert told.keys() == {number for number, c in enumerate(completions) if len(c.tokens)}
    for number, completion in enumerate(completions):
        tokens, logprobs = zip(*told[number], strict=True)
        assert list(tokens) == completion.tokens.tolist()
        assert np.array(logprobs, np.float32).tolist() == completion.behaviour_logprobs.tolist()
    assert (max(calls) == 1) == (draft_tokens == 0)


# ------------------------------------------------------------------------------------------------------------- refusals


def refused(match: str, running: TorchEngine | None = None, **changes: object) -> None:
    good = dict(prompt=(2, 3), keys=(1,), sampling=Sampling(max_tokens=4), strategy=bernoulli(0.5))
    fine = Request(**good)
    with pytest.raises(EngineError, match=match):
        (running or engine()).generate([fine, Request(**(good | changes))])


def test_requests_that_cannot_be_served_are_refused():
    refused("request 1: empty prompt", prompt=())
    refused("request 1: 250 prompt tokens and max_tokens 7 exceed the context of 256", prompt=(2,) * 250,
            sampling=Sampling(max_tokens=7))  # fmt: skip
    refused(f"request 1: a prompt token is outside the vocabulary of {VOCABULARY}", prompt=(2, VOCABULARY))
    refused("request 1: a prompt token is outside the vocabulary", prompt=(2, -1))
    refused(rf"stop_token_ids \[{VOCABULARY}, -1\] are outside the vocabulary",
            sampling=Sampling(stop_token_ids=(3, VOCABULARY, -1)))  # fmt: skip
    refused("request 1: turn_tokens must be at least 1, got 0", turn_tokens=0)
    refused("request 1: a turn of its history has no tokens", history=((3, 4), ()))
    refused("request 1: a token of its history is outside the vocabulary of", history=((3,), (4, VOCABULARY)))
    refused(r"request 1: .* max_tokens 4 \+ 252 exceed the context of 256", observation_tokens=252)


def test_a_junior_is_needed_only_where_it_writes():
    alone = TorchEngine(prepared(pair("smaller junior")[0]), None, tokenizer())
    one = requests([[2, 3]], GREEDY, solo("senior"))
    assert [c.tokens.tolist() for c in flat(alone.generate(one))] == [
        c.tokens.tolist() for c in flat(engine().generate(one))
    ]
    with pytest.raises(EngineError, match="request 0: its strategy needs a junior"):
        alone.generate(requests([[2, 3]], GREEDY, bernoulli(1.0)))
    with pytest.raises(EngineError, match="request 0: its strategy needs a junior"):
        alone.generate(requests([[2, 3]], GREEDY, solo("junior")))
    with pytest.raises(EngineError, match="no junior"):
        alone.fingerprint("junior")


@pytest.mark.parametrize(("count", "host_every"), [(1, 1), (6, 1), (3, 8)])
def test_a_strategy_that_breaks_its_promise_is_refused(count, host_every):
    """``writers`` lets the engine leave a model out, so the author must never be the model that was left out."""
    liar = solo("junior")._replace(writers="senior")
    batch = requests(prompts(count), Sampling(max_tokens=3, ignore_eos=True), liar)
    batch += requests(prompts(count - 1), Sampling(max_tokens=3, ignore_eos=True), solo("senior"))
    with pytest.raises(EngineError, match=r"Strategy\.writers"):
        TorchEngine(*map(prepared, pair("smaller junior")), tokenizer(), host_every=host_every).generate(batch)


def test_a_strategy_may_say_by_numbers_who_writes():
    known = bernoulli(0.5)

    def step(state, tokens):
        senior, new = known.step(state, tokens)
        return senior.long(), new

    found, wanted = (
        flat(engine().generate(requests(prompts(3), Sampling(max_tokens=12), each)))
        for each in (known._replace(step=step), known)
    )
    assert [channels(c)[:2] for c in found] == [channels(c)[:2] for c in wanted]


def test_weights_that_do_not_fit_are_refused():
    running = engine()
    before = running.fingerprint()
    weights = dict(running.senior.named_parameters())
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(EngineError, match=f"1 names differ, e.g. {name}"):
        running.load_weights(((n, w) for n, w in weights.items() if n != name), 1)
    with pytest.raises(EngineError, match=r"1 names differ, e\.g\. extra"):
        running.load_weights([*weights.items(), ("extra", torch.zeros(1))], 1)
    with pytest.raises(EngineError, match=rf"weight {name}: shape \(3,\), expected \(48, 32\)"):
        running.load_weights((weights | {name: torch.zeros(3)}).items(), 1)
    assert running.fingerprint() == before
    assert running.policy_version == 0


# ------------------------------------------------------------------------------------- weights that come amid a rollout


def test_another_thread_loads_weights_after_the_call() -> None:
    running = engine()
    batch, strategy = requests(prompts(2), Sampling(max_tokens=40, ignore_eos=True), bernoulli(0.5)), bernoulli(0.5)
    newer, threads = qwen3(21), list[threading.Thread]()

    def progress(_: int) -> None:
        if not threads:
            threads.append(threading.Thread(target=running.load_weights, args=(newer.named_parameters(), 7)))
            threads[0].start()
        assert running.policy_version == 0

    first = flat(running.generate(batch, progress=progress))
    threads[0].join()
    assert running.policy_version == 7
    assert_sound(first, strategy)
    assert [c.policy_version for c in first] == [0, 0]
    check_answers(batch, [[c] for c in first], 0)
    with pytest.raises(EngineError, match="is from policy version 0, the engine is at 7"):
        check_answers(batch, [[c] for c in first], 7)
    assert running.fingerprint("junior") == engine().fingerprint("junior")
