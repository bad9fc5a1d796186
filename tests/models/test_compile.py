"""Compiled layers and decoding steps against uncompiled ones: the same numbers, few graphs; Liger's kernels.

Where graphs begin and end, and for which shapes, does not depend on what they are compiled to: mostly ``aot_eager``
does, which takes a tenth of the time.
"""

import copy
import shutil
from functools import partial

import jaxtyping
import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from helpers import VOCABULARY, llama, prepared, prompts, qwen3, requests, small_qwen3, tokenizer
from tandemrl.config import LoraConfig
from tandemrl.models.attention import ModelError
from tandemrl.models.batching import pack_tokens
from tandemrl.models.compile import compile_layers, use_liger
from tandemrl.models.forward import token_logprobs
from tandemrl.models.lora import adapted_alias, adapted_layers
from tandemrl.models.trainable import checkpoint_gradients
from tandemrl.rollout.engine import Completion, Sampling
from tandemrl.rollout.torch_engine import TorchEngine
from tandemrl.selection import alternating

FAST = "aot_eager"
REAL = pytest.param(
    "inductor",
    marks=[pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler, g++")],
)


@pytest.fixture(autouse=True)
def _no_shape_checks():
    """A traced tensor has no sizes that could be checked."""
    checked = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", checked)


def numbers(model: PreTrainedModel, lengths: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of a packed batch, and gradients of a weighted sum of them."""
    random = np.random.default_rng(sum(lengths))
    batch = pack_tokens([random.integers(0, VOCABULARY, length).tolist() for length in lengths])
    logprobs, _ = token_logprobs(model, batch, select=torch.ones_like(batch.tokens, dtype=torch.bool))
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return logprobs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_numbers(compiled: PreTrainedModel, model: PreTrainedModel, lengths: list[int]) -> None:
    wanted, theirs = numbers(model, lengths)
    found, ours = numbers(compiled, lengths)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        scale = theirs[name].abs().max()
        torch.testing.assert_close(ours[name] / scale, theirs[name] / scale, rtol=0, atol=2e-5, msg=name)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", [FAST, REAL])
@pytest.mark.parametrize("kind", [pytest.param(qwen3, marks=pytest.mark.slow), llama])
def test_compiled_layers_give_the_same_for_any_lengths(kind, backend):
    model = prepared(kind())
    compiled = compile_layers(copy.deepcopy(model), backend=backend)
    before, made = graphs(), list[int]()
    for lengths in ([9, 7, 11], [1, 5, 2, 17, 9, 17, 40, 3], [30, 31], [64]):
        assert_same_numbers(compiled, model, lengths)
        made.append(graphs() - before)
    assert 0 < made[0] <= 8  # before and after attention, forward and backward: all layers share them
    assert made[1] == made[2] == made[3] == made[0]


def test_checkpointed_layers_can_be_compiled():
    model = prepared(qwen3(4))
    compiled = copy.deepcopy(model)
    checkpoint_gradients(compiled)
    assert_same_numbers(compile_layers(compiled, backend=FAST), model, [12, 20])


def adapted_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    """A junior, and adapters that do something on its own weights."""
    pytest.importorskip("peft", reason="needs the lora extra")
    junior = prepared(qwen3())
    senior = adapted_alias(junior, LoraConfig(rank=3), seed=0)
    for layer in adapted_layers(senior).values():
        layer.lora_B["default"].weight.data.fill_(0.01)
    return senior, junior


def plain_pair() -> tuple[PreTrainedModel, PreTrainedModel]:
    return prepared(qwen3()), prepared(small_qwen3())


@pytest.mark.parametrize(
    ("pair", "backend"),
    [
        pytest.param(plain_pair, FAST, marks=pytest.mark.slow),
        pytest.param(plain_pair, *REAL.values, marks=REAL.marks),
        (adapted_pair, FAST),
    ],
)
def test_a_compiled_decoding_step_writes_the_same(pair, backend, monkeypatch):
    """Rows come, go and grow, and a few graphs are enough. A lone row is decoded without any."""
    models = pair()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    eager, compiled = (TorchEngine(*models, tokenizer(), max_rows=12, compile=on) for on in (False, True))
    made = []
    for seed in range(3):
        before = graphs()
        batch = requests(prompts(20, seed=seed), Sampling(max_tokens=48, temperature=0.7), alternating(), seed=seed)
        pairs = list(zip(flat(compiled.generate(batch)), flat(eager.generate(batch)), strict=True))
        made.append(graphs() - before)
        assert sum(one.tokens.tolist() != other.tokens.tolist() for one, other in pairs) <= 1  # a rounded logit
        for one, other in pairs:
            if one.tokens.tolist() == other.tokens.tolist():
                assert one.author.tolist() == other.author.tolist()
                assert np.abs(one.behaviour_logprobs - other.behaviour_logprobs).max() < 1e-4
    assert 2 <= sum(made) <= 8
    assert made[2] == 0
    before = graphs()
    alone = requests(prompts(1), Sampling(max_tokens=8), alternating())
    assert flat(compiled.generate(alone))[0].tokens.tolist() == flat(eager.generate(alone))[0].tokens.tolist()
    assert graphs() == before


def flat(written: list[list[Completion]]) -> list[Completion]:
    return [completion for completions in written for completion in completions]


def test_decoding_leaves_compiled_layers_alone():
    senior, junior = prepared(qwen3()), prepared(small_qwen3())
    batch = requests(prompts(6), Sampling(max_tokens=12), alternating())
    wanted = TorchEngine(senior, junior, tokenizer()).generate(batch)
    before = graphs()
    found = TorchEngine(compile_layers(senior), junior, tokenizer()).generate(batch)
    assert graphs() == before
    for one, other in zip(found, wanted, strict=True):
        assert [c.tokens.tolist() for c in one] == [c.tokens.tolist() for c in other]


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ModelError, match=r"model\.compile=true needs .*no-such-compiler is not there"):
        compile_layers(prepared(qwen3()))
    with pytest.raises(ModelError, match=r"or set rollout\.compile=false"):
        TorchEngine(prepared(qwen3()), None, tokenizer(), compile=True)


# ---------------------------------------------------------------------------------------------------------------- Liger


def test_liger_kernels_are_refused_on_other_devices():
    with pytest.raises(ModelError, match=r"need a CUDA device, the model is on cpu; set model\.liger=false"):
        use_liger(prepared(qwen3()))
