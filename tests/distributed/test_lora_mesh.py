"""Adapters of a sharded model: log-probs, gradients and merged weights are those of a single process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from helpers import prepared, prompts, qwen3, tokenizer
from processes import run
from tandemrl.config import LoraConfig, ParallelConfig
from tandemrl.models.batching import pack_tokens
from tandemrl.models.forward import token_logprobs
from tandemrl.models.lora import adapter_free, attach, merged_parameters
from tandemrl.models.sharding import shard
from tandemrl.processes.world import World, init_world
from tandemrl.training.checkpoint.export import export_hf

MESHES = [ParallelConfig(dp_shard=2), ParallelConfig(dp_replicate=2), ParallelConfig(sp=2), ParallelConfig(tp=2)]


def one_pass(
    world: World, folder: Path | None = None
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Log-probs of this data rank's sequences without and with adapters, merged weights, and everybody's gradients."""
    model = attach(prepared(qwen3()), LoraConfig(rank=3, alpha=6.0), seed=7)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    shard(model, world, dtype=torch.float32)
    if folder is not None:
        export_hf(model, tokenizer(), folder, world=world, adapters_of="base")
    batch = pack_tokens(prompts(4, lengths=(9, 5, 12, 3))[world.data_rank :: world.data_size])

    def logprobs() -> Tensor:
        return token_logprobs(model, batch, select=batch.positions > 0, shards=world.shards)[0]

    with torch.no_grad(), adapter_free(model):  # the first forward of all: it must not decide what has gradients
        free = logprobs()
    adapted = logprobs()
    merged = dict(merged_parameters(model))
    (adapted * torch.cos(batch.tokens.float())).sum().backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    lengths = batch.lengths.tolist()
    return list(free.split(lengths)), list(adapted.detach().split(lengths)), merged, gradients


def on_every_mesh(exports: Path) -> list[Any]:
    results = []
    for axes in MESHES:
        world = init_world(axes, torch.device("cpu"))
        folder = exports / "split" if axes.tp > 1 else None
        results.append(((world.data_rank, world.data_size), one_pass(world, folder)))
    return results


def test_any_mesh_of_two_gives_what_one_process_gives(tmp_path: Path) -> None:
    free, adapted, merged, gradients = one_pass(World(), tmp_path / "whole")
    assert all(".lora_" in name for name in gradients)
    assert len(gradients) == 2 * 14  # two layers of seven matrices
    for meshes in run(on_every_mesh, 2, tmp_path):
        for axes, ((rank, size), results) in zip(MESHES, meshes, strict=True):
            for mine, expected in zip(
                [*results[0], *results[1]], [*free[rank::size], *adapted[rank::size]], strict=True
            ):
                torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5, msg=str(axes))
            assert list(results[2]) == list(merged)
            for name, expected in merged.items():
                difference = (results[2][name] - expected).abs().max().item()
                assert difference == 0, f"{axes} {name} {difference}"
            assert results[3].keys() == gradients.keys()
            for name, expected in gradients.items():
                torch.testing.assert_close(results[3][name], expected, rtol=1e-4, atol=1e-4, msg=f"{axes} {name}")
    exported = [file.relative_to(tmp_path / "whole") for file in (tmp_path / "whole").rglob("*") if file.is_file()]
    assert {Path("model.safetensors"), Path("adapter/adapter_model.safetensors")} <= set(exported)
    for file in exported:  # with tp, the same bytes
        assert (tmp_path / "split" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file
