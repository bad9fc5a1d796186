"""Adapters of a sharded model: log-probs, gradients and merged weights are those of a single process."""

from pathlib import Path

import torch
from torch import Tensor

from helpers import prepared, prompts, qwen3, tokenizer, trained_adapters
from processes import MESHES_OF_TWO, gradients_of, on_every_mesh, run
from tandemrl.config import LoraConfig
from tandemrl.models.batching import pack_tokens
from tandemrl.models.forward import token_scores
from tandemrl.models.lora import adapter_free, attach, merged_parameters
from tandemrl.models.sharding import shard
from tandemrl.processes.world import World
from tandemrl.training.checkpoint.runs import export_hf


def one_pass(world: World, exports: Path) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Log-probs of this data rank's sequences without and with adapters, merged weights, and everybody's gradients."""
    model = trained_adapters(attach(prepared(qwen3()), LoraConfig(rank=3, alpha=6.0), seed=7), 1, 0.3)
    shard(model, world, dtype=torch.float32)
    if world.size == 1 or world.shards.tensor is not None:
        export_hf(
            model, tokenizer(), exports / ("whole" if world.size == 1 else "split"), world=world, adapters_of="base"
        )
    batch = pack_tokens(prompts(4, lengths=(9, 5, 12, 3))[world.data_rank :: world.data_size])

    def logprobs() -> Tensor:
        return token_scores(model, batch, select=batch.positions > 0, shards=world.shards)[0]

    with torch.no_grad(), adapter_free(model):  # the first forward of all: it must not decide what has gradients
        free = logprobs()
    adapted = logprobs()
    merged = dict(merged_parameters(model))
    (adapted * torch.cos(batch.tokens.float())).sum().backward()
    lengths = batch.lengths.tolist()
    return list(free.split(lengths)), list(adapted.detach().split(lengths)), merged, gradients_of(model)


def test_any_mesh_of_two_gives_what_one_process_gives(tmp_path: Path) -> None:
    free, adapted, merged, gradients = one_pass(World(), tmp_path)
    assert all(".lora_" in name for name in gradients)
    assert len(gradients) == 2 * 14  # two layers of seven matrices
    for meshes in run(on_every_mesh, 2, one_pass, tmp_path):
        for axes, ((rank, size), results) in zip(MESHES_OF_TWO, meshes, strict=True):
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
