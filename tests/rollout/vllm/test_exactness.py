"""Token for token: the vLLM engine against stock vLLM, transformers and the reference engine."""

import numpy as np
import pytest
from pairs import (
    LENGTHS,
    ROWS,
    VLLM,
    assert_equal_completions,
    assert_sound,
    changed,
    flat,
    greedy_gaps,
    logprob_errors,
    mixed,
    model,
    models,
    qwen3,
    reference,
    strategies,
    tokens,
    with_strategy,
)

from helpers import SAMPLINGS, abort_after, prompts
from tandemrl.rollout.engine import Completion, Request, Sampling
from tandemrl.rollout.sync import fingerprint
from tandemrl.selection import alternating, chunk, solo
from tandemrl.selection.draws import request_key

pytestmark = VLLM

GREEDY = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
SAMPLED = Sampling(max_tokens=40)
TIGHT = dict(kv_blocks=22, block_size=32, max_batched_tokens=64, max_rows=48)  # chunked prefill and preemption
ALL_PROMPTS = prompts(ROWS, lengths=LENGTHS)


# ----------------------------------------------------------------------------------------------------- two equal models


def test_two_equal_models_write_what_stock_vllm_writes(engines, scheduled):
    batch = mixed(ALL_PROMPTS, GREEDY)
    written = engines("equal", **TIGHT).generate(batch)
    assert scheduled.preemptions >= 5
    assert tokens(flat(written)) == engines.stock(ALL_PROMPTS, GREEDY.max_tokens)
    assert all((c.behaviour_logprobs == 0).all() for c in flat(written))
    assert_sound(batch, written)


# ------------------------------------------------------------------------------------------------- two different models


def test_a_catch_up_longer_than_the_token_budget_takes_several_passes(engines):
    """The junior sleeps for 90 tokens, then has them to read with 64 tokens a step."""
    engine = engines("Llama junior", **TIGHT)
    given = prompts(2, seed=5, lengths=(3, 40))
    kinds = [chunk(90, "senior"), chunk(90, "junior")]
    batch = [
        Request(tuple(p), (request_key(5, 0, i, 0),), changed(GREEDY, max_tokens=200), kinds[i])
        for i, p in enumerate(given)
    ]
    written = engine.generate(batch)
    assert_sound(batch, written)
    assert greedy_gaps(models("Llama junior"), batch, written).max() < 1e-4


# ------------------------------------------------------------------------------------------------------- prefix caching


def test_two_turns_with_a_prefix_cache(engines, scheduled):
    """The second prompt is the first one, what was written, and new text; the strategies change between the turns."""
    engine = engines("Llama junior", block_size=32)
    first = mixed(prompts(ROWS, seed=10, lengths=LENGTHS), GREEDY, seed=10)
    texts = tokens(flat(engine.generate(first)))
    more = prompts(len(first), seed=11, lengths=(5, 20, 1))
    before = scheduled.cached_tokens
    second = mixed(
        [[*r.prompt, *text, *new] for r, text, new in zip(first, texts, more, strict=True)], SAMPLED, seed=12
    )[::-1]
    written = engine.generate(second)
    assert scheduled.cached_tokens - before > 1000
    assert_sound(second, written)
    assert logprob_errors(models("Llama junior"), second, written).max() < 1e-4
    again = with_strategy(second, solo("senior"))
    assert logprob_errors(models("Llama junior"), again, engine.generate(again)).max() < 1e-4


def test_requests_that_share_a_prefix(engines, scheduled):
    """Some let one model alone write, some both: what one model read is not what both read."""
    engine = engines("Llama junior", block_size=32)
    prefix = prompts(1, seed=20, lengths=(240,))[0]
    ends = prompts(24, seed=22, lengths=(1, 30, 3))
    kinds = [solo("senior"), alternating("junior"), solo("junior"), alternating("senior")]
    for turn in range(3):
        batch = [
            Request(
                (*prefix, *end), (request_key(20, turn, i, 0),), changed(GREEDY, max_tokens=20), kinds[(i + turn) % 4]
            )
            for i, end in enumerate(ends)
        ]
        written = [completions for part in (batch[:1], batch[1:]) for completions in engine.generate(part)]
        assert_sound(batch, written)
        assert greedy_gaps(models("Llama junior"), batch, written).max() < 1e-4
    assert scheduled.cached_tokens > 60 * 200


def test_samples_that_start_together(engines, scheduled):
    """A request may find its prompt in blocks that another one is filling in the same step."""
    engine = engines("Llama junior", block_size=32)
    kinds = list(strategies().values())[2::3]
    batch = [
        Request(tuple(prompt), tuple(request_key(26, i, k, s) for s in range(2)), changed(SAMPLED, max_tokens=8), kind)
        for i, prompt in enumerate(prompts(2, seed=26, lengths=(257, 100)))
        for k, kind in enumerate(kinds)
    ]
    written = engine.generate(batch)
    assert_sound(batch, written)
    assert logprob_errors(models("Llama junior"), batch, written).max() < 1e-4
    assert scheduled.cached_tokens > 1000


def test_a_prefix_left_behind_by_an_aborted_request(engines):
    engine = engines("Llama junior", block_size=32)
    first = mixed(prompts(17, seed=30, lengths=(100, 40)), changed(GREEDY, max_tokens=200), seed=30)
    cut = abort_after(engine, first, 17 * 50, None)
    assert all(40 <= len(c.tokens) < 200 for c in cut)
    second = mixed([[*r.prompt, *c.tokens.tolist()] for r, c in zip(first, cut, strict=True)][::-1], GREEDY, seed=31)
    written = engine.generate(second)
    assert greedy_gaps(models("Llama junior"), second, written).max() < 1e-4


# ------------------------------------------------------------------------------------------------- the reference engine


@pytest.fixture(scope="module")
def reference_texts() -> tuple[list[Request], list[list[Completion]]]:
    """Requests of every sampling, and what the reference engine writes: once for all modes."""
    settings = [*SAMPLINGS.values(), GREEDY]
    batch = [
        Request(
            r.prompt, tuple(request_key(40, 0, i, s) for s in range(2)), changed(setting, max_tokens=24), r.strategy
        )
        for i, r in enumerate(mixed(prompts(4 * len(settings), seed=40, lengths=(1, 7, 33, 12, 2, 16, 257)), SAMPLED))
        for setting in [settings[i % len(settings)]]
    ]
    return batch, reference("Llama junior").generate(batch)


@pytest.mark.parametrize("mode", ["lazy", "lockstep"])
def test_the_reference_engine_writes_the_same(engines, scheduled, reference_texts, mode):
    """Both draw by the same keys, so tokens may differ only where a logit's rounding decides; each log-prob is that of
    its author's distribution, where there is little memory."""
    batch, wanted = reference_texts
    found = engines("Llama junior", mode=mode, **TIGHT).generate(batch)
    assert_sound(batch, found)
    sampled = [i for i, request in enumerate(batch) if request.sampling.temperature > 0]
    some = ([each[i] for i in sampled] for each in (batch, found))
    assert logprob_errors(models("Llama junior"), *some).max() < 1e-4
    assert scheduled.preemptions >= 5
    rounded = 0
    for one, other in zip(flat(found), flat(wanted), strict=True):
        same = np.array_equal(one.tokens, other.tokens)
        rounded += not same
        if same:
            assert one.author.tolist() == other.author.tolist()
            assert one.stop_reason == other.stop_reason
            assert np.abs(one.behaviour_logprobs - other.behaviour_logprobs).max() < 1e-4
    assert rounded <= 1


# ---------------------------------------------------------------------------------------------------- several processes


def test_two_tensor_parallel_ranks_write_what_one_writes(engines):
    batch = mixed(ALL_PROMPTS, Sampling(max_tokens=9), seed=60)  # ranks wait for each other: dear
    single = flat(engines("Llama junior", block_size=32).generate(batch))
    both = engines("Llama junior", tensor_parallel=2, draft_tokens=4)
    for mode in ("lazy", "draft"):
        both.call_workers("tandem_mode", mode)
        written = both.generate(batch)
        assert_equal_completions(flat(written), single)
        assert_sound(batch, written)
    for weights in (qwen3(11), model("senior")):
        both.load_weights(weights.named_parameters(), 1)
        assert both.fingerprint() == fingerprint(weights.named_parameters())
