"""Ten minutes of everything at once. TANDEMRL_SOAK_SECONDS=150 makes it three or four; it never ends before 2,000
requests. The bound on memory is then wider: a kernel is kept for every shape, and most are met in the first minutes."""

import ctypes
import gc
import os
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import psutil
import pytest
from pairs import CONTEXT, MODES, VLLM, assert_sound, logprob_errors, model, models, strategies

from helpers import VOCABULARY
from tandemrl.rollout.engine import Request, Sampling
from tandemrl.selection.draws import request_key

pytestmark = [*VLLM, pytest.mark.slow]

SECONDS = float(os.environ.get("TANDEMRL_SOAK_SECONDS", "600"))
REQUESTS, WAVE = 2000, 100
WAVES = ("draft", "draft", *MODES)
"""Modes of the waves, in turn."""
DRAFTS = {("Llama junior", 4), ("near junior", 1), ("near junior", 8)}
"""Pairs, and how many tokens their juniors draft."""


def wave(number: int, generator: np.random.Generator, prefixes: list[list[int]]) -> list[Request]:
    """Requests of random lengths, strategies and samplings; half of them share the beginning of a prompt. Half of the
    waves have penalties, with which drafts stay less on the device."""
    kinds, penalised = list(strategies().values()), generator.random() < 0.5
    batch = []
    for i in range(WAVE):
        own = generator.integers(2, VOCABULARY, int(np.exp(generator.uniform(0, np.log(300))))).tolist()
        prefix = prefixes[generator.integers(len(prefixes))] if generator.random() < 0.5 else []
        sampling = Sampling(
            max_tokens=int(np.exp(generator.uniform(0, np.log(200)))),
            temperature=float(generator.choice([0.7, 1.0, 1.5])),
            top_p=float(generator.choice([1.0, 0.9])),
            repetition_penalty=1.2 if penalised and generator.random() < 0.5 else 1.0,
            stop=("q", "zz") if generator.random() < 0.2 else (),
            ignore_eos=bool(generator.random() < 0.5),
        )
        keys = tuple(request_key(number, 0, i, s) for s in range(1 + int(generator.random() < 0.2)))
        batch.append(Request(tuple(prefix + own), keys, sampling, kinds[generator.integers(len(kinds))]))
    return batch


def generate_with_aborts(engine: Any, batch: list[Request], generator: np.random.Generator) -> list[Any]:
    """A tenth of the keys are aborted at random times from another thread; now and then everything is."""
    keys = [key for request in batch for key in request.keys]
    over = threading.Event()

    def abort() -> None:
        for key in generator.choice(keys, len(keys) // 10, replace=False).tolist():
            if over.wait(float(generator.exponential(0.2))):
                return
            engine.abort([key])
        if generator.random() < 0.1:
            engine.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        return engine.generate(batch)
    finally:
        over.set()
        thread.join()


def resident() -> float:
    """MiB in use: without garbage, and without what the allocator keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss / 2**20


def test_soak(engines, scheduled, capsys):
    tight: dict[str, Any] = dict(kv_blocks=48, block_size=32, max_batched_tokens=96, max_rows=64)
    running = [(pair, engines(pair, draft_tokens=length, **tight)) for pair, length in sorted(DRAFTS)]
    generator = np.random.default_rng(0)
    prefixes = [generator.integers(2, VOCABULARY, n).tolist() for n in (64, 100, 129)]
    start = time.monotonic()
    rss, reasons, tokens, number = [], [], 0, 0
    waves, drafted, accepted = Counter[str](), 0, 0
    while number * WAVE < REQUESTS or time.monotonic() - start < SECONDS:
        pair, engine = running[generator.integers(len(running))]
        mode = WAVES[number % len(WAVES)]
        engine.set_mode(mode)
        if number % 10 == 9:
            engine.load_weights(model("senior").named_parameters(), number)
        batch = wave(number, generator, prefixes)
        assert all(len(r.prompt) + r.sampling.max_tokens <= CONTEXT for r in batch)
        written = generate_with_aborts(engine, batch, generator)
        waves[mode] += 1
        drafted, accepted = drafted + engine.passes.drafted, accepted + engine.passes.accepted
        assert_sound(batch, written)
        some = generator.choice(WAVE, 8, replace=False)
        errors = logprob_errors(models(pair), [batch[i] for i in some], [written[i] for i in some])
        assert errors.max(initial=0) < 1e-3
        reasons += [c.stop_reason for group in written for c in group]
        tokens += sum(len(c.tokens) for group in written for c in group)
        number += 1
        rss.append(resident())
    for _, engine in running:
        engine.generate([Request((2,), (1,), Sampling(max_tokens=1), strategies()["chunk"])])
        assert engine.stats()["requests"] <= 1  # the last one: the workers hear of its end with the next
    assert waves.keys() == set(WAVES)
    assert 0 < accepted < drafted
    assert {"eos", "stop", "length", "abort"} <= set(reasons)
    assert scheduled.preemptions > number
    assert scheduled.cached_tokens > 0
    early, late = np.median(rss[len(rss) // 4 : len(rss) // 2]), np.median(rss[-len(rss) // 4 :])
    with capsys.disabled():
        counts = {reason: reasons.count(reason) for reason in set(reasons)}
        print(f"\nsoak: {number * WAVE} requests, {tokens} tokens, {time.monotonic() - start:.0f} s, {counts}, "
              f"{scheduled.preemptions} preemptions, waves {dict(waves)}, "
              f"{accepted} of {drafted} drafts accepted; RSS {early:.1f} -> {late:.1f} MiB")  # fmt: skip
    assert late - early < (5 if SECONDS >= 600 else 20)
