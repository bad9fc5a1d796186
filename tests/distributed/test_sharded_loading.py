"""Models that are loaded in parts: each process has to the last bit what it would have of the whole, and no more."""

import ctypes
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from helpers import _build, _common, prompts, qwen3
from processes import run, status
from tandemrl.config import LoraConfig, ParallelConfig
from tandemrl.models.attention import ModelError
from tandemrl.models.batching import pack_tokens
from tandemrl.models.critic import load_critic, packed_values, token_values
from tandemrl.models.forward import token_scores
from tandemrl.models.loading import load_model
from tandemrl.models.lora import attach
from tandemrl.models.sharded_loading import Adapters, load_sharded
from tandemrl.models.sharding import shard
from tandemrl.processes.world import World, init_world

PLAIN = dict(compute=torch.float32)
ADAPTERS = Adapters(LoraConfig(rank=3, alpha=6.0), 5)
MESHES = {
    2: [ParallelConfig(), ParallelConfig(dp_replicate=2), ParallelConfig(tp=2), ParallelConfig(sp=2)],
    4: [ParallelConfig(tp=2), ParallelConfig(dp_replicate=2)],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tied: one matrix twice. untied: biases, an odd vocabulary, several files. other: the files have both of two
    matrices that should be tied, and they differ."""
    home = tmp_path_factory.mktemp("models")
    qwen3().save_pretrained(home / "tied")
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        **_common(71, 256, tied=False),
    )
    _build(LlamaForCausalLM, config, 1).save_pretrained(home / "untied", max_shard_size="20KB")
    assert len(list((home / "untied").glob("*.safetensors"))) > 2
    critic = load_critic(home / "untied")
    for parameter in critic.score.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(3))
    critic.save_pretrained(home / "critic")
    qwen3().save_pretrained(home / "other")
    weights = load_file(file := home / "other" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, file, metadata={"format": "pt"})
    return home


def difference(model: PreTrainedModel, expected: PreTrainedModel, world: World) -> str:
    """What is not the same in two sharded models; empty if nothing is."""
    mine, theirs = (dict(each.named_parameters(remove_duplicate=False)) for each in (model, expected))
    if list(mine) != list(theirs):
        return f"names: {mine.keys() ^ theirs.keys()}"
    for name, parameter in mine.items():
        other = theirs[name]
        assert isinstance(parameter, DTensor)
        assert isinstance(other, DTensor)
        facts = [(p.dtype, p.shape, p.requires_grad, p.placements, p.device_mesh) for p in (parameter, other)]
        if facts[0] != facts[1] or not torch.equal(parameter.to_local(), other.to_local()):
            return name
    if len({id(p) for p in mine.values()}) != len({id(p) for p in theirs.values()}):
        return "ties"
    buffers, others = (dict(each.named_buffers()) for each in (model, expected))
    if buffers.keys() != others.keys():
        return f"buffers: {buffers.keys() ^ others.keys()}"
    for name, buffer in buffers.items():
        if buffer.dtype != others[name].dtype or not torch.equal(buffer, others[name]):
            return name
    if model.config.to_dict() != expected.config.to_dict() or model.training != expected.training:
        return "config"
    generation = [getattr(each, "generation_config", None) for each in (model, expected)]
    if generation[0] is not None and generation[0].to_dict() != generation[1].to_dict():
        return "generation config"
    batch = pack_tokens(prompts(4, lengths=(9, 5, 12, 3)))
    score: Any = token_values if hasattr(model, "packed_values") else token_scores
    results = [score(each, batch, select=batch.positions > 0, shards=world.shards) for each in (model, expected)]
    numbers = [each if isinstance(each, torch.Tensor) else each[0] for each in results]
    return "" if torch.equal(*numbers) else "numbers"


def by_mesh(size: int, home: Path) -> dict[tuple[str, str], str]:
    """In every process: what differs, by mesh and case."""
    warnings.filterwarnings("error", message=".*every process loads the whole")
    seen = {}
    for axes in MESHES[size]:
        world = init_world(axes, torch.device("cpu"))
        for name in ("tied", "untied"):
            expected = shard(load_model(home / name), world, dtype=torch.float32)
            seen[str(axes), name] = difference(load_sharded(home / name, world, **PLAIN), expected, world)
        low = load_model(home / "untied", dtype="bfloat16").requires_grad_(False)
        model = load_sharded(home / "untied", world, compute=torch.bfloat16, dtype="bfloat16", frozen=True)
        seen[str(axes), "frozen"] = difference(model, shard(low, world, dtype=torch.bfloat16), world)
        if axes.tp == 1:
            adapted = shard(attach(load_model(home / "tied"), *ADAPTERS), world, dtype=torch.float32)
            model = load_sharded(home / "tied", world, **PLAIN, adapters=ADAPTERS)
            seen[str(axes), "adapters"] = difference(model, adapted, world)
        for name in ("critic", "tied"):
            critic = shard(load_critic(home / name), world, dtype=torch.float32, forward=packed_values)
            model = load_sharded(home / name, world, **PLAIN, critic=True)
            seen[str(axes), f"critic of {name}"] = difference(model, critic, world)
    return seen


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_are_those_of_the_whole(size: int, folders: Path) -> None:
    pytest.importorskip("peft", reason="needs the lora extra")
    for seen in run(by_mesh, size, size, folders):
        assert len(seen) >= 5 * len(MESHES[size])
        assert {case: what for case, what in seen.items() if what} == {}


def told(home: Path) -> list[str]:
    """In every process: the warnings of models that are loaded whole after all."""
    world = init_world(ParallelConfig(), torch.device("cpu"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load_sharded(home / "other", world, **PLAIN)
        expected = shard(load_model(home / "other"), world, dtype=torch.float32)
    assert difference(model, expected, world) == ""
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    with pytest.raises(ModelError, match=r"model\.safetensors: no whole safetensors file"):
        load_sharded(home / "torn", world, **PLAIN)
    return [str(warning.message) for warning in caught if "whole model" in str(warning.message)]


def test_what_cannot_be_read_in_parts_is_loaded_whole_and_said_once(folders: Path) -> None:
    qwen3().save_pretrained(folders / "torn")
    file = folders / "torn" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    first, second = run(told, 2, folders)
    assert len(first) == 1
    assert "lm_head.weight is tied to another parameter, and its files have both" in first[0]
    assert second == []


def peak(home: Path, parts: bool) -> tuple[int, int]:
    """In every process: bytes of memory beyond those of before, at most, and of the part that it keeps."""
    world = init_world(ParallelConfig(), torch.device("cpu"))
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: freed tensors are given back, gaps are not counted
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    model = load_sharded(home, world, **PLAIN) if parts else shard(load_model(home), world, dtype=torch.float32)
    kept = sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))
    return status("VmHWM") - before, kept


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of memory")
def test_no_process_ever_holds_the_whole_model(tmp_path: Path) -> None:
    """190 million parameters on four processes."""
    config = LlamaConfig(
        hidden_size=640,
        intermediate_size=2560,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=2048,
        initializer_range=0.02,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())
    del model
    for used, kept in run(peak, 4, tmp_path, True, timeout=500):
        assert whole / 4 <= kept < 1.01 * whole / 4
        assert used < 0.9 * whole  # its part, what the probe gathers, and the pages of the file that were read
    assert all(used > whole for used, _ in run(peak, 4, tmp_path, False, timeout=500))  # so this would have been seen
