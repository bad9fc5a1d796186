"""The engine contract on vLLM: when completions end, what is refused, and which weights write."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pairs import (
    CONTEXT,
    EOS,
    JUNIORS,
    LENGTHS,
    ROWS,
    VLLM,
    assert_equal_completions,
    assert_sound,
    changed,
    flat,
    greedy_gaps,
    mixed,
    model,
    models,
    qwen3,
    reference,
    save,
    start_engine,
    strategies,
    tokens,
    with_strategy,
)
from transformers import PreTrainedTokenizerFast

from helpers import VOCABULARY, abort_after, prompts, requests, text, tokenizer
from tandemrl.rollout.engine import EngineError, Request, Sampling, check_authors
from tandemrl.rollout.sync import fingerprint, sync_weights
from tandemrl.selection import alternating, bernoulli, chunk, solo
from tandemrl.selection.draws import request_key

pytestmark = VLLM

PAIR = "smaller junior"
GREEDY = Sampling(max_tokens=24, temperature=0.0)
LONG = Sampling(max_tokens=300, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(engines) -> Any:
    return engines(PAIR)


# ------------------------------------------------------------------------------------------------- how completions end


def stopping() -> list[Request]:
    """Requests that stop for every reason: pieces of what they would write without a stop, within and across tokens."""
    free = mixed(prompts(30, seed=1, lengths=(3, 9, 17)), changed(GREEDY, max_tokens=30, ignore_eos=True), seed=1)
    batch = [*free]
    for i, (request, written) in enumerate(zip(free, tokens(flat(reference(PAIR).generate(free))), strict=True)):
        place, width = 4 + i % 9, 1 + i % 4
        piece = text(written[place : place + width])
        kinds = [
            dict(stop=(piece,)),
            dict(stop=("never written", piece[-1])),
            dict(stop=(text(written[place + 12 : place + 14]), piece)),
            dict(stop_token_ids=(written[place], written[20])),
            dict(ignore_eos=False, max_tokens=300, temperature=1.5),
            dict(stop=("<eos>",), max_tokens=300, temperature=1.5),
            dict(stop_token_ids=(EOS,), max_tokens=300, temperature=1.5),
            dict(stop=(text(written[place : place + 1]),), max_tokens=place + 1),
            dict(stop_token_ids=(EOS, 5), ignore_eos=False, max_tokens=300, temperature=1.5),
            dict(max_tokens=1),
        ]
        change = kinds[i % len(kinds)]
        if "\ufffd" not in "".join(change.get("stop", ())):  # half a character is not text
            batch.append(Request(request.prompt, request.keys, changed(request.sampling, **change), request.strategy))
    return [Request(r.prompt, (request_key(2, 0, i, 0),), r.sampling, r.strategy) for i, r in enumerate(batch)]


def test_completions_end_where_and_why_the_reference_engines_do(engine):
    batch = stopping()
    written = engine.generate(batch)
    assert_sound(batch, written)
    found, wanted = flat(written), flat(reference(PAIR).generate(batch))
    assert [(c.stop_reason, c.tokens.tolist()) for c in found] == [(c.stop_reason, c.tokens.tolist()) for c in wanted]
    reasons = [c.stop_reason for c in found]
    assert all(reasons.count(reason) >= 4 for reason in ("eos", "stop", "length"))


# ------------------------------------------------------------------------------------------------------------- aborting


def test_abort_of_some_rows_leaves_the_others_alone(engines, engine):
    batch = requests(prompts(6, seed=9), changed(LONG, max_tokens=40), strategies()["word 0.5"], samples=2)
    aborted = {batch[0].keys[1], batch[5].keys[0]}
    whole = flat(engine.generate(batch))
    for running in (engine, engines(PAIR, max_rows=4)):  # the last one waits when it is aborted
        completions = abort_after(running, batch, 30, [1, 10, 123456789])
        check_authors(completions, batch[0].strategy)
        for completion, before in zip(completions, whole, strict=True):
            assert completion.tokens.tolist() == before.tokens.tolist()[: len(completion.tokens)]
            assert np.allclose(
                completion.behaviour_logprobs, before.behaviour_logprobs[: len(completion.tokens)], atol=1e-4
            )
            if completion.key in aborted:
                assert completion.stop_reason == "abort"
                assert len(completion.tokens) < 40
            else:
                assert completion.stop_reason == "length"


def test_an_abort_does_not_outlive_its_call_and_nothing_stays_in_the_planner(engine):
    batch = mixed(prompts(10, seed=12), changed(LONG, max_tokens=30), seed=12)
    abort_after(engine, batch, 8, None)
    assert [c.stop_reason for c in flat(engine.generate(batch[:4]))] == ["length"] * 4
    engine.generate(mixed(prompts(1, seed=14), GREEDY, seed=14))  # the workers hear of the end a step later
    assert engine.stats()["requests"] <= 1


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("match", "sampling"),
    [
        ("presence_penalty", dict(presence_penalty=3.0)),
        ("temperature", dict(temperature=3.0)),
        ("temperature 0.005 is too low", dict(temperature=0.005)),
    ],
)
def test_what_vllm_cannot_sample_is_refused_and_nothing_of_the_call_stays(engine, match, sampling):
    """The requests before it were in the engine already, under the numbers of the next call's."""
    batch = mixed(prompts(3, seed=24), GREEDY, seed=24)
    wanted = tokens(flat(engine.generate(batch)))
    fine = mixed(prompts(2, seed=25), LONG, seed=25)
    bad = Request((2, 3), (1,), Sampling(max_tokens=4, **sampling), bernoulli(0.5))
    with pytest.raises(EngineError, match=f"completion 2: .*{match}"):
        engine.generate([*fine, bad])
    assert tokens(flat(engine.generate(batch))) == wanted


def test_a_junior_is_needed_only_where_it_writes(engines, engine):
    alone = engines(None)
    one = requests([[2, 3]], GREEDY, solo("senior"))
    assert tokens(flat(alone.generate(one))) == tokens(flat(engine.generate(one)))
    with pytest.raises(EngineError, match="request 0: its strategy needs a junior"):
        alone.generate(requests([[2, 3]], GREEDY, solo("junior")))
    with pytest.raises(EngineError, match="junior"):
        alone.fingerprint("junior")


@pytest.mark.parametrize("liar", [solo("junior"), chunk(3, "senior")])
def test_a_strategy_that_breaks_its_promise_is_refused(engine, liar):
    """``writers`` lets the engine leave a model out, so the author must never be the model that was left out."""
    promise = "senior" if liar.writers in ("junior", "both") else "junior"
    batch = [
        *requests(prompts(2, seed=15), Sampling(max_tokens=8, ignore_eos=True), liar._replace(writers=promise)),
        *requests(prompts(2, seed=16), Sampling(max_tokens=8, ignore_eos=True), bernoulli(0.5), seed=1),
    ]
    with pytest.raises(EngineError, match=r"Strategy\.writers"):
        engine.generate(batch)
    fine = mixed(prompts(6, seed=17), GREEDY, seed=17)
    written = engine.generate(fine)  # the engine goes on
    assert_sound(fine, written)
    assert greedy_gaps(models(PAIR), fine, written).max() < 1e-4


def test_blocks_of_a_step_that_failed_are_not_taken_for_filled(engines):
    """The failed step's prompt is hashed to blocks in which both models hold another text."""
    engine = engines(PAIR, block_size=32, kv_blocks=21, mode="lockstep")
    sampling = changed(GREEDY, max_tokens=8, ignore_eos=True)
    for seed in (1, 3):  # 320 computed tokens each: both together fill all 20 blocks
        engine.generate(requests(prompts(2, seed=seed, lengths=(313, 313)), sampling, alternating()))
    batch = requests(prompts(1, seed=2, lengths=(400,)), sampling, alternating())
    with pytest.raises(EngineError, match=r"Strategy\.writers"):
        engine.generate(with_strategy(batch, solo("junior")._replace(writers="senior")))
    assert greedy_gaps(models(PAIR), batch, engine.generate(batch)).max() < 1e-4


def test_an_engine_that_gets_too_little_memory_names_the_keys(tmp_path):
    senior, junior = (save(made, tmp_path / name) for name, made in zip("sj", models(PAIR), strict=True))
    for _ in range(2):  # nothing of a failed start is in the way of the next one
        with pytest.raises(EngineError, match=r"(?s)vLLM does not start: .*; raise rollout\.vllm\.kv_cache_gb"):
            start_engine(senior, junior, kv_cache_gb=1e-5)


def test_models_with_different_vocabularies_are_refused(engines, tmp_path):
    short = save(qwen3(3, vocab_size=VOCABULARY - 8), tmp_path / "short")
    with pytest.raises(EngineError, match=f"{VOCABULARY - 8} logits for the tokenizer's {VOCABULARY}"):
        start_engine(engines.folder("senior"), short)

    other = copy.deepcopy(tokenizer())
    other.add_tokens(["zebra"])
    foreign = save(qwen3(3, vocab_size=VOCABULARY + 1), tmp_path / "foreign")
    other.save_pretrained(foreign)
    assert isinstance(other, PreTrainedTokenizerFast)
    with pytest.raises((EngineError, ValueError), match="zebra"):
        start_engine(engines.folder("senior"), foreign)


def test_a_larger_juniors_further_logits_are_never_drawn(engines, tmp_path):
    """Models of one family pad their vocabularies differently."""
    padded = qwen3(3, vocab_size=VOCABULARY + 56)
    folders = engines.folder("senior"), save(padded, tmp_path / "padded")
    torch.manual_seed(5)
    threads, wanted = torch.get_num_threads(), torch.rand(3)
    torch.manual_seed(5)
    engine = engines.keep(start_engine(*folders, longest=CONTEXT, kv_blocks=64))
    batch = requests(prompts(6, seed=18), Sampling(max_tokens=40, temperature=1.5, ignore_eos=True), alternating())
    written = engine.generate(batch)
    assert torch.equal(torch.rand(3), wanted)  # the process keeps its random state and its threads
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    assert_sound(batch, written)
    assert max(c.tokens.max() for c in flat(written)) < VOCABULARY
    for completion, request in zip(flat(written), batch, strict=True):
        logits = padded(torch.tensor([[*request.prompt, *completion.tokens]])).logits[0, len(request.prompt) - 1 : -1]
        wanted = (logits[:, :VOCABULARY] / 1.5).log_softmax(-1).gather(1, torch.from_numpy(completion.tokens)[:, None])
        junior = completion.author == 0
        assert np.abs(wanted[:, 0].detach().numpy() - completion.behaviour_logprobs)[junior].max() < 1e-4


# -------------------------------------------------------------------------------------------------------------- weights


@pytest.fixture(scope="module")
def apart(engines) -> Any:
    return engines(PAIR, sleep=False, multiprocess=True, draft_tokens=4)


@pytest.fixture
def loading(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine whose weights may change; they are the folder's again afterwards."""
    engine = request.getfixturevalue(request.param)
    engine.policy_version = 3
    yield engine
    engine.load_weights(model("senior").named_parameters(), 3)


@pytest.mark.parametrize("loading", ["apart"], indirect=True)
def test_loaded_weights_write_and_the_junior_stays(loading):
    new = qwen3(11)
    batch = mixed(prompts(ROWS, seed=20, lengths=LENGTHS), GREEDY, seed=20)
    before, junior = loading.generate(batch), loading.fingerprint("junior")
    assert {c.policy_version for c in flat(before)} == {3}
    assert loading.fingerprint() == fingerprint(model("senior").named_parameters())
    assert junior == fingerprint(model(JUNIORS[PAIR]).named_parameters())

    assert sync_weights(new, loading, 4) == fingerprint(new.named_parameters())
    written = loading.generate(batch)
    assert_sound(batch, written)
    assert {c.policy_version for c in flat(written)} == {4}
    assert loading.fingerprint("junior") == junior
    assert greedy_gaps((new, model(JUNIORS[PAIR])), batch, written).max() < 1e-4
    solo_junior = with_strategy(batch, solo("junior"))
    assert greedy_gaps((new, model(JUNIORS[PAIR])), solo_junior, loading.generate(solo_junior)).max() < 1e-4


def test_an_engine_in_a_process_of_its_own_writes_the_same(engine, apart):
    batch = mixed(prompts(ROWS, seed=61, lengths=LENGTHS), Sampling(max_tokens=24), seed=61)
    wanted = flat(engine.generate(batch))
    assert not apart.in_process
    for mode in ("lazy", "draft"):
        apart.call_workers("tandem_mode", mode)
        written = apart.generate(batch)
        assert_equal_completions(flat(written), wanted)
        assert_sound(batch, written)


@pytest.mark.parametrize("loading", ["engine"], indirect=True)
def test_what_was_cached_under_the_old_weights_is_dropped(loading):
    """The same prompts before and after, and a second turn upon what the old weights wrote."""
    first = mixed(prompts(12, seed=21, lengths=(257, 130)), GREEDY, seed=21)
    texts = tokens(flat(loading.generate(first)))
    new = qwen3(12)
    loading.load_weights(new.named_parameters(), 5)
    second = mixed([[*r.prompt, *written, 7] for r, written in zip(first, texts, strict=True)], GREEDY, seed=22)
    for batch in (first, second):
        assert greedy_gaps((new, model(JUNIORS[PAIR])), batch, loading.generate(batch)).max() < 1e-4


# ---------------------------------------------------------------------------------------------------------- the engine


def test_both_models_know_the_layout_of_the_cache_before_there_is_one():
    """On CUDA, vLLM captures graphs with a small cache of each model, to see how much memory they take."""
    from vllm.config import CacheConfig
    from vllm.v1.worker.worker_base import WorkerBase

    from tandemrl.rollout.vllm.worker import TandemGPUWorker

    caches = {who: CacheConfig() for who in (0, 1)}
    runners = {who: SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache)) for who, cache in caches.items()}
    worker = SimpleNamespace(model_runner=SimpleNamespace(runners=runners))
    assert hasattr(WorkerBase, "set_kv_cache_layout")
    TandemGPUWorker.set_kv_cache_layout(worker, "LBHNC")
    assert [cache.kv_cache_layout for cache in caches.values()] == ["LBHNC"] * 2
