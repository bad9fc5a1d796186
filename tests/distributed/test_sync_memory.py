"""What a sync holds beside the weights that stay: no process ever has all gathered ones."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from helpers import tokenizer
from processes import run, status
from tandemrl.config import ParallelConfig
from tandemrl.models.loading import prepare
from tandemrl.models.sharding import shard
from tandemrl.processes.world import init_world
from tandemrl.rollout.sync import sync_weights
from tandemrl.rollout.torch_engine import TorchEngine

BUCKET = 256 * 2**20


def model() -> Any:
    """A random model of 300 million parameters; its greatest tensor has 131 MB."""
    config = Qwen3Config(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=19,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        made = Qwen3ForCausalLM(config)
    made.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    return made


def synced(syncs: int) -> list[int]:
    """Bytes of the peak above what is resident before each sync."""
    world = init_world(ParallelConfig(dp_shard=2), torch.device("cpu"))
    policy, engine = prepare(model()), TorchEngine(prepare(model()), None, tokenizer())
    assert sum(parameter.numel() for parameter in policy.parameters()) > 280e6
    shard(policy, world, dtype=torch.float32)
    above = []
    for version in range(1, syncs + 1):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.01)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before = status("VmRSS")
        sync_weights(policy, engine, version)
        above.append(status("VmHWM") - before)
    return above


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="this kernel resets no peak")
def test_a_sync_of_two_processes_holds_at_most_three_buckets() -> None:
    found = run(synced, 2, 2, timeout=900.0)
    print("peak above steady, MB:", [[round(each / 2**20) for each in of_rank] for of_rank in found])
    assert all(0 < each <= 3 * BUCKET for of_rank in found for each in of_rank)
