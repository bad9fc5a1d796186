"""Log-probs, entropies and every gradient on meshes of 2 and of 4 processes are those of a single process."""

import logging
from collections.abc import Callable
from functools import cache
from logging.handlers import BufferingHandler
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from helpers import _build, _common, with_head_bias
from processes import gradients_of, run
from tandemrl.config import ParallelConfig
from tandemrl.data.rows import Prompt, Row
from tandemrl.models.attention import ModelError
from tandemrl.models.batching import pack
from tandemrl.models.forward import token_scores
from tandemrl.models.head import PLAIN, ForwardOptions
from tandemrl.models.loading import prepare
from tandemrl.models.sampling import Truncation
from tandemrl.models.sharding import clip_gradients, full_parameters, shard
from tandemrl.processes.world import World, init_world
from tandemrl.training.gates import self_difference
from tandemrl.types import Batch, Rollout

SHAPE = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=8
)


def qwen3(tied: bool, vocabulary: int = 72, **shape: int) -> PreTrainedModel:
    return _build(Qwen3ForCausalLM, Qwen3Config(**SHAPE | shape, **_common(vocabulary, 256, tied)), 0)


def llama() -> PreTrainedModel:
    config = LlamaConfig(**SHAPE, attention_bias=True, **_common(72, 256, tied=False))
    return with_head_bias(_build(LlamaForCausalLM, config, 1))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3 tied": lambda: qwen3(True),
    "qwen3 untied": lambda: qwen3(False),
    "llama with biases": llama,
    "qwen3 of odd vocabulary": lambda: qwen3(False, 71),
    "qwen3 of two key heads": lambda: qwen3(True, num_key_value_heads=2),
    "qwen3 of three key heads": lambda: qwen3(True, num_attention_heads=6, num_key_value_heads=3),
}


class Pass(NamedTuple):
    """How one forward and backward is made. empty: every other data rank has nothing selected."""

    options: ForwardOptions = ForwardOptions(temperature=0.7)
    checkpointing: bool = False
    empty: bool = False
    entropy: bool = True


PASSES = {
    "plain": Pass(),
    "no entropy": Pass(PLAIN, entropy=False),
    "truncated": Pass(ForwardOptions(temperature=1.5, truncation=Truncation(20, 0.9, 0.0), vocabulary=61)),
    "checkpointed": Pass(ForwardOptions(temperature=0.7, activation_offload=True), checkpointing=True),
    "empty": Pass(empty=True),
}
MESHES = {
    2: {
        "fsdp 2": ParallelConfig(),
        "replicate 2": ParallelConfig(dp_replicate=2),
        "tp 2": ParallelConfig(tp=2),
        "sp 2": ParallelConfig(sp=2),
    },
    4: {
        "fsdp 2 x tp 2": ParallelConfig(tp=2),
        "sp 2 x tp 2": ParallelConfig(sp=2, tp=2),
        "fsdp 2 x sp 2": ParallelConfig(sp=2),
        "replicate 2 x fsdp 2": ParallelConfig(dp_replicate=2),
    },
}
WORLDS = {mesh: size for size, meshes in MESHES.items() for mesh in meshes}


def cases(mesh: str) -> list[tuple[str, str]]:
    """Every pass and every model; fewer of them where four processes run."""
    some = [("qwen3 tied", "plain"), ("qwen3 tied", "checkpointed"), ("qwen3 tied", "empty")]
    some += [("llama with biases", "plain"), ("llama with biases", "truncated")]
    if WORLDS[mesh] == 2:
        some += [("qwen3 tied", "no entropy"), ("qwen3 tied", "truncated"), ("qwen3 untied", "plain")]
    odd = [("qwen3 of odd vocabulary", "plain"), ("qwen3 of odd vocabulary", "truncated")] if mesh == "tp 2" else []
    repeated = {"sp 2": [("qwen3 of three key heads", "plain")], "sp 2 x tp 2": [("qwen3 of two key heads", "plain")]}
    return [*some, *odd, *repeated.get(mesh, [])]


def batches(empty: bool) -> list[tuple[Batch, Tensor, Tensor]]:
    """Four micro-batches (batch, selected, weights) of groups that share prompts: (prompt, responses) lengths."""
    out = []
    two = [[(5, [7, 1, 12]), (3, [4])], [(9, [2, 3]), (1, [11, 5])]]
    for seed, groups in enumerate([*two, [(4, [6])], [(2, [8, 3])]]):
        generator = np.random.default_rng(seed)
        rollouts = []
        for number, (context, lengths) in enumerate(groups):
            prompt = generator.integers(0, 60, context)
            for length in lengths:
                tokens = np.concatenate([prompt, generator.integers(0, 60, length)])
                author = np.repeat([-1, 1], [context, length]).astype(np.int8)
                rollouts.append(Rollout("", number, 0, 0, tokens, author, np.zeros(len(tokens)), 0.0))
        batch = pack(rollouts)
        select = (batch.author >= 0) & torch.from_numpy(generator.random(len(batch.tokens)) < 0.8)
        weights = torch.from_numpy(generator.normal(size=len(batch.tokens))).float()
        out.append((batch, select & ~torch.tensor(empty and seed % 2 == 1), weights))
    return out


class Outcome(NamedTuple):
    """loss, gradients and their norm over all micro-batches; log-probs and entropies of those of this process."""

    logprobs: dict[int, Tensor]
    entropy: dict[int, Tensor]
    loss: float
    norm: float
    gradients: dict[str, Tensor]
    sharded: bool


def outcome(model: PreTrainedModel, how: Pass, world: World) -> Outcome:
    """Forward and backward of this process's share of the micro-batches."""
    logprobs, entropies, loss = {}, {}, torch.zeros(())
    if how.checkpointing:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    packed = batches(how.empty)
    for number in range(world.data_rank, len(packed), world.data_size):
        batch, select, weights = packed[number]
        with torch.no_grad():
            resident = how.options._replace(activation_offload=False)
            before, *_ = token_scores(model, batch, select=select, options=resident, shards=world.shards)
        logp, entropy, *_ = token_scores(model, batch, select=select, options=how.options, shards=world.shards)
        assert torch.equal(before, logp)
        part = (weights * logp).sum() + (weights.flip(0) * entropy).sum() * how.entropy
        part.backward()
        loss = loss + part.detach()
        logprobs[number], entropies[number] = logp.detach(), entropy.detach()
    gradients = gradients_of(model)
    norm = clip_gradients(list(model.parameters()), 1e9)
    with torch.no_grad():
        token_scores(model, packed[0][0], select=packed[0][1], shards=world.shards)
    sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return Outcome(logprobs, entropies, float(world.data_sum(loss)), norm, gradients, sharded)


@cache
def single(model: str, how: str) -> Outcome:
    return outcome(prepare(MODELS[model]()), PASSES[how], World())


def gathered(world: World) -> dict[str, list[str]]:
    """whole: the parameters that come back as they were. warned: what torch said about it."""
    model = prepare(MODELS["llama with biases"]())
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    shard(model, world, dtype=torch.float32)
    logger, handler = logging.getLogger("torch.distributed.tensor"), BufferingHandler(1000)
    logger.addHandler(handler)  # torch says each thing once: before anything else is gathered on this mesh
    whole = [name for name, p in full_parameters(model) if torch.equal(p, parameters[name])]
    logger.removeHandler(handler)
    return dict(whole=whole, warned=[record.getMessage() for record in handler.buffer])


def own_difference(model: PreTrainedModel, world: World, options: ForwardOptions = PLAIN) -> float:
    rows = np.random.default_rng(0).integers(0, 60, (6, 12)).tolist()
    prompts = [Prompt(row=Row("", (), "", "", {}), tokens=tuple(r)) for r in rows]
    low = torch.bfloat16
    return self_difference(model, prompts, options=options, dtype=low, world=world, device=torch.device("cpu"))


def on_meshes(size: int) -> dict[str, Any]:
    """Runs in every process: all cases of all meshes of this size."""
    outcomes: dict[str, Any] = {}
    for mesh, config in MESHES[size].items():
        world = init_world(config, torch.device("cpu"))
        outcomes[mesh] = dict(data_rank=world.data_rank) | gathered(world)
        for case in cases(mesh):
            model = shard(prepare(MODELS[case[0]]()), world, dtype=torch.float32)
            outcomes[mesh][case] = outcome(model, PASSES[case[1]], world)
        if size == 2:
            model = shard(prepare(MODELS["qwen3 tied"]()), world, dtype=torch.bfloat16)
            outcomes[mesh]["bfloat16"] = outcome(model, PASSES["plain"], world)
            outcomes[mesh]["self_difference"] = own_difference(model, world)
        if size == 4 and mesh == "sp 2 x tp 2":
            for name, heads in (("num_key_value_heads", 1), ("num_attention_heads", 6)):
                few = prepare(qwen3(True, **{"num_key_value_heads": 2} | {name: heads}))
                with pytest.raises(ModelError, match=rf"{name} is {heads}: parallel.tp=2"):
                    shard(few, world, dtype=torch.float32)
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> Callable[[int], list[dict[str, Any]]]:
    return cache(lambda size: run(on_meshes, size, size, timeout=300))


def of_mesh(mesh: str, *more: str) -> Any:
    """A case. Four processes are slow; in `make test` they train (test_mesh_training.py)."""
    return pytest.param(mesh, *more, marks=[pytest.mark.slow] if WORLDS[mesh] > 2 else [])


@pytest.mark.parametrize(("mesh", "model", "how"), [of_mesh(mesh, *case) for mesh in WORLDS for case in cases(mesh)])
def test_any_mesh_gives_the_numbers_of_one_process(mesh, model, how, outcomes):
    expected = single(model, how)
    seen = set()
    for answers in outcomes(WORLDS[mesh]):
        got: Outcome = answers[mesh][model, how]
        seen |= got.logprobs.keys()
        for number, logprobs in got.logprobs.items():
            torch.testing.assert_close(logprobs, expected.logprobs[number], rtol=0, atol=1e-5)
            torch.testing.assert_close(got.entropy[number], expected.entropy[number], rtol=0, atol=1e-5)
        assert got.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-5)
        assert got.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            scale = max(float(gradient.abs().max()), 1.0)
            torch.testing.assert_close(got.gradients[name] / scale, gradient / scale, rtol=0, atol=1e-5, msg=name)
        assert got.norm == pytest.approx(expected.norm, rel=1e-5)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("mesh", [of_mesh(mesh) for mesh in WORLDS])
def test_parameters_are_sharded_and_can_be_made_whole(mesh, outcomes):
    names = {name for name, _ in MODELS["llama with biases"]().named_parameters()}
    for answers in outcomes(WORLDS[mesh]):
        assert set(answers[mesh]["whole"]) == names
        assert answers[mesh]["warned"] == []
        assert answers[mesh]["qwen3 tied", "plain"].sharded  # also after a pass without gradients


@pytest.mark.parametrize("mesh", MESHES[2])
def test_bfloat16_computes_low_and_reduces_gradients_in_float32(mesh, outcomes):
    low = prepare(MODELS["qwen3 tied"]())
    frequencies = low.model.rotary_emb.inv_freq.clone()
    low.to(torch.bfloat16)
    low.model.rotary_emb.inv_freq = frequencies  # positions are computed in float32
    rounded, exact = outcome(low, PASSES["plain"], World()), single("qwen3 tied", "plain")
    for answers in outcomes(2):
        got: Outcome = answers[mesh]["bfloat16"]
        for number, logprobs in got.logprobs.items():
            assert 0 < (logprobs - exact.logprobs[number]).abs().mean() < 0.1
            if "tp" not in mesh:  # which adds up in another order
                torch.testing.assert_close(logprobs, rounded.logprobs[number], rtol=0, atol=1e-5)
        for name, gradient in exact.gradients.items():
            assert got.gradients[name].dtype == torch.float32
            assert torch.cosine_similarity(got.gradients[name].flatten(), gradient.flatten(), dim=0) > 0.97, name


@pytest.mark.parametrize("mesh", MESHES[2])
def test_all_processes_measure_the_same_self_difference_as_one(mesh, outcomes):
    """In a world of one the weights are float32 and the matrix products bfloat16; among several both are bfloat16."""
    model = prepare(MODELS["qwen3 tied"]())
    alone = own_difference(model, World(), ForwardOptions(autocast=torch.bfloat16))
    assert own_difference(model, World()) < 2 * alone  # float32: what the embeddings alone do
    first, second = (answers[mesh]["self_difference"] for answers in outcomes(2))
    assert first == second == pytest.approx(alone, rel=0.5)
