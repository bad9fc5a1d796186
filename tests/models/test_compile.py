"""Compiled layers and decoding steps against uncompiled ones: the same numbers, few graphs; Liger's kernels.

Where graphs begin and end, and for which shapes, does not depend on what they are compiled to: mostly ``aot_eager``
does, which takes a tenth of the time.
"""

import copy
import shutil

import jaxtyping
import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from helpers import VOCABULARY, llama, prepared, prompts, qwen3, requests, small_qwen3, tokenizer
from tandemrl.models.attention import ModelError
from tandemrl.models.batching import pack_tokens
from tandemrl.models.compile import compile_layers, use_liger
from tandemrl.models.forward import token_scores
from tandemrl.models.trainable import checkpoint_gradients
from tandemrl.rollout.engine import Sampling
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
    logprobs, *_ = token_scores(model, batch, select=torch.ones_like(batch.tokens, dtype=torch.bool))
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


def test_decoding_leaves_compiled_layers_alone():
    senior, junior = prepared(qwen3()), prepared(small_qwen3())
    batch = requests(prompts(6), Sampling(max_tokens=12), alternating())
    wanted = TorchEngine(senior, junior, tokenizer()).generate(batch)
    before = graphs()
    found = TorchEngine(compile_layers(senior), junior, tokenizer()).generate(batch)
    assert graphs() == before
    for one, other in zip(found, wanted, strict=True):
        assert [c.tokens.tolist() for c in one] == [c.tokens.tolist() for c in other]


# ---------------------------------------------------------------------------------------------------------------- Liger


def test_liger_kernels_are_refused_on_other_devices():
    with pytest.raises(ModelError, match=r"need a CUDA device, the model is on cpu; set model\.liger=false"):
        use_liger(prepared(qwen3()))
