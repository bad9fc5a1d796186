"""Checkpoints of one mesh read by another: equal to the last bit; a process that fails makes all of them say so."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from helpers import qwen3, tokenizer
from processes import run
from tandemrl.config import Config, ParallelConfig
from tandemrl.models.sharding import full_parameters, parameter_groups, shard
from tandemrl.processes.world import World, destroy_world, init_world
from tandemrl.training.checkpoint import CheckpointError
from tandemrl.training.checkpoint import storage as checkpoint
from tandemrl.training.checkpoint.runs import export_hf
from tandemrl.training.state import Trained

FSDP, TP, BOTH = ParallelConfig(dp_shard=2), ParallelConfig(tp=2), ParallelConfig(dp_shard=2, tp=2)


def trained(seed: int, world: World, steps: int) -> Trained:
    """A tied model on a mesh, after some steps on gradients that depend on the parameters' names alone."""
    model = shard(qwen3(seed), world, dtype=torch.float32)
    policy = Trained(model, torch.optim.AdamW(parameter_groups(model.parameters()), lr=0.01))
    for step in range(steps):
        for number, parameter in enumerate(model.parameters()):
            draws = torch.Generator().manual_seed(100 * step + number)
            whole = torch.randn(parameter.shape, generator=draws)
            split = isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements) if split else whole
        policy.optimizer.step()
    return policy


def whole(policy: Trained) -> dict[str, Tensor]:
    """Weights and moments as one process has them."""
    checks = {name: value.clone() for name, value in full_parameters(policy.module)}
    for name, parameter in policy.module.named_parameters():
        for key, value in policy.optimizer.state[parameter].items():
            checks[f"{name} {key}"] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return checks


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class FullOnOne(FileSystemWriter):
    """The disk of process 1 is full."""

    def write_data(self, *arguments: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write_data(*arguments)


def two(output: Path, expected: dict[str, Tensor]) -> dict[str, Any]:
    """1 -> 2 (FSDP), 2 -> 2 (TP), a full disk, an export."""
    checks: dict[str, Any] = {}
    world = init_world(FSDP, torch.device("cpu"))
    policy = trained(5, world, steps=1)
    first = {"policy": policy}
    checkpoint.load_parts(output / "checkpoints" / "step_1", first, world)
    checks["1 -> fsdp 2"] = same(whole(policy), expected)
    checks["split"] = all(isinstance(p, DTensor) for p in policy.module.parameters())

    policy = trained(6, world, steps=2)
    parts = {"policy": policy}
    two_steps = whole(policy)
    checkpoint.save(output, 2, {"n": 2}, Config(), keep=9, parts=parts, world=world)
    checkpoint.save(output, 3, {"n": 3}, Config(), keep=9, parts=parts, world=world)
    export_hf(policy.module, tokenizer(), output / "hf" / "fsdp", "bfloat16", world=world)
    checks["exported"] = {name: value.bfloat16() for name, value in full_parameters(policy.module)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandemrl.training.checkpoint.storage.dcp.FileSystemWriter", FullOnOne)
        try:
            checkpoint.save(output, 4, {}, Config(), 1, parts=parts, world=world)
        except CheckpointError as error:
            checks["full"] = str(error)
        torch.distributed.barrier()
        checks["left"] = sorted(path.name for path in (output / "checkpoints").iterdir())
        torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="step_2 exists already"):
        checkpoint.save(output, 2, {}, Config(), 1, parts=parts, world=world)
    with pytest.raises(CheckpointError, match="does not fit the model: missing critic"):
        checkpoint.load_parts(output / "checkpoints" / "step_2", {"critic": policy}, world)

    damaged = output / "damaged"
    if world.main:
        shutil.copytree(output / "checkpoints" / "step_2", damaged)
        shard_of_one = damaged / "tensors" / "__1_0.distcp"
        shard_of_one.write_bytes(shard_of_one.read_bytes()[:-1] + b"x")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: .*not as it was written"):
        checkpoint.load_parts(damaged, parts, world)

    world = init_world(TP, torch.device("cpu"))
    policy = trained(7, world, steps=0)
    checkpoint.load_parts(output / "checkpoints" / "step_2", {"policy": policy}, world)
    checks["fsdp 2 -> tp 2"] = same(whole(policy), two_steps)
    checkpoint.save(output, 4, {"n": 4}, Config(), 2, parts={"policy": policy}, world=world)  # keeps 3 and 4
    export_hf(policy.module, tokenizer(), output / "hf" / "tp", world=world)
    destroy_world(60.0)
    return checks | {"two steps": two_steps}


def test_any_mesh_reads_what_another_wrote(tmp_path: Path) -> None:
    one = trained(0, World(), steps=2)
    expected = whole(one)
    checkpoint.save(tmp_path, 1, {"n": 1}, Config(), keep=9, parts={"policy": one})
    results = run(two, 2, tmp_path, expected)
    for checks in results:
        assert checks["1 -> fsdp 2"]
        assert checks["split"]
        assert checks["fsdp 2 -> tp 2"]
        assert "step_4: not written, process 1: OSError: " in checks["full"]
        assert "The disk is full" in checks["full"]
        assert checks["left"] == ["step_1", "step_2", "step_3"]
    two_steps, folder = results[0]["two steps"], tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_3", "step_4"]
    for step in (3, 4):
        policy = trained(9, World(), steps=1)
        assert checkpoint.load(folder / f"step_{step}") == {"n": step}
        checkpoint.load_parts(folder / f"step_{step}", {"policy": policy})
        assert same(whole(policy), two_steps)
        assert policy.module.lm_head.weight is policy.module.model.embed_tokens.weight
    files = {path.name for path in (folder / "step_3" / "tensors").iterdir()}
    assert files == {".metadata", "__0_0.distcp", "__1_0.distcp"}  # both wrote
    for step in (3, 4):
        hashes = json.loads((folder / f"step_{step}" / "meta.json").read_text())["files"]
        for name in files:
            content = (folder / f"step_{step}" / "tensors" / name).read_bytes()
            assert hashes[f"tensors/{name}"] == hashlib.sha256(content).hexdigest()
    weights = {name: value for name, value in two_steps.items() if " " not in name}
    for name, values in (("fsdp", results[0]["exported"]), ("tp", weights)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / name, dtype="auto")
        assert type(model).__name__ == "Qwen3ForCausalLM"
        assert same(dict(model.named_parameters()), values)


def four(output: Path) -> tuple[bool, dict[str, Tensor]]:
    world = init_world(BOTH, torch.device("cpu"))
    policy = trained(3, world, steps=1)
    before = whole(policy)
    checkpoint.save(output, 1, {}, Config(), keep=1, parts={"policy": policy}, world=world)
    other = trained(4, world, steps=0)
    checkpoint.load_parts(output / "checkpoints" / "step_1", {"policy": other}, world)
    equal = same(whole(other), before)
    destroy_world(60.0)
    return equal, before


def test_a_mesh_of_two_axes(tmp_path: Path) -> None:
    results = run(four, 4, tmp_path)
    assert all(equal for equal, _ in results)
    policy = trained(9, World(), steps=0)
    checkpoint.load_parts(tmp_path / "checkpoints" / "step_1", {"policy": policy})
    assert same(whole(policy), results[0][1])
