"""Checkpoints: whole or not there at any moment, plain data only, and a resume that cannot become another run."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from helpers import qwen3, tokenizer
from tandemrl.config import Config, load
from tandemrl.files import recover, write_text
from tandemrl.training.checkpoint import CheckpointError, DamagedError, runs
from tandemrl.training.checkpoint import storage as checkpoint
from tandemrl.training.checkpoint.runs import check_same_config, export_hf
from tandemrl.training.state import Trained


def state(step: int) -> dict[str, Any]:
    """Every kind of value that a trainer keeps; the tensor tells a torn or mixed checkpoint."""
    return {
        "step": step,
        "weights": {"a": torch.full((64,), float(step)), "half": torch.ones(2, dtype=torch.bfloat16) * step},
        "optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]).state_dict(),
        "best": None,
        "order": [1, (2, "x"), True, 0.5],
    }


def is_whole(path: Path) -> bool:
    found = checkpoint.load(path)
    step = checkpoint.step_of(path)
    return found["step"] == step and bool((found["weights"]["a"] == step).all()) and (path / "meta.json").is_file()


class Part(nn.Module):
    """Stands for a model or a tokenizer."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__()
        self.name, self.text = name, text
        self.config = SimpleNamespace(dtype=None, save_pretrained=lambda folder: None)

    def save_pretrained(self, folder: Path, state_dict: object = None) -> None:
        (folder / self.name).write_text(self.text)


class Small(nn.Module):
    """Tied weights, a parameter that nothing trains yet, a frozen one, and buffers of which one is not saved."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
            self.unused = nn.Parameter(torch.randn(2))
            self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.head(self.embed(x)).square().mean()


def trained(seed: int, steps: int = 0, lr: float = 0.1) -> Trained:
    module = Small(seed)
    parts = Trained(module, torch.optim.AdamW(module.parameters(), lr=lr))
    train(parts, steps)
    return parts


def train(parts: Trained, steps: int, seed: int = 0) -> None:
    draws = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        parts.module(torch.randint(0, 5, (7,), generator=draws)).backward()
        parts.optimizer.step()
        parts.optimizer.zero_grad()


def everything(parts: Trained) -> dict[str, Tensor]:
    """All weights, buffers and moments."""
    found = {f"model {name}": tensor.clone() for name, tensor in parts.module.state_dict().items()}
    for i, state in parts.optimizer.state_dict()["state"].items():
        found |= {f"{i} {key}": value.clone() for key, value in state.items()}
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def names(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


class Crash(BaseException):
    """Stands for a killed process: nothing after the call runs, not even ``except Exception``."""


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """``crash_at(i)``: die right before the i-th system call that changes or syncs something; None: never."""
    calls = {"left": -1}

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if calls["left"] == 0:
                raise Crash
            calls["left"] -= 1
            return real(*arguments, **keywords)

        return call

    for name in ("rename", "replace", "fsync", "mkdir", "rmdir", "unlink"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    return lambda i: calls.update(left=-1 if i is None else i)


def crashes(crash_at: Callable[[int | None], None], act: Callable[[], Any]) -> Iterator[int]:
    """Run ``act`` again and again, dying one system call later each time, until it gets through."""
    for i in range(200):
        crash_at(i)
        try:
            act()
        except Crash:
            crash_at(None)
            yield i
        else:
            crash_at(None)
            return
    raise AssertionError("never got through")


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    config = load(overrides=["train.lr=3e-4"])
    path = checkpoint.save(tmp_path, 7, state(7), config, keep=2)
    assert path == tmp_path / "checkpoints" / "step_7" == checkpoint.latest(tmp_path)
    found = checkpoint.load(path)
    assert found["order"] == [1, (2, "x"), True, 0.5]
    assert found["best"] is None
    assert found["weights"]["half"].dtype == torch.bfloat16
    torch.testing.assert_close(found["weights"]["a"], torch.full((64,), 7.0))
    assert checkpoint.load_config(path) == config
    meta = json.loads((path / "meta.json").read_text())
    assert meta["step"] == 7
    assert meta["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


def test_only_the_newest_are_kept_and_steps_are_numbers_not_text(tmp_path: Path) -> None:
    for step in (8, 9, 10, 100):
        checkpoint.save(tmp_path, step, {"step": step}, Config(), keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_100"]
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoints" / "step_100"


def test_what_cannot_be_loaded_safely_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"its state holds numpy.*; only tensors"):
        checkpoint.save(tmp_path, 1, {"a": [0, np.zeros(2)]}, Config(), keep=1)
    assert checkpoint.latest(tmp_path) is None


def test_loading_names_the_file_and_runs_no_code(tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=r"nowhere/meta\.json: missing"):
        checkpoint.load(tmp_path / "nowhere")
    torch.save({"bad": Path("x")}, tmp_path / "state.pt")
    hashes_again(tmp_path)
    with pytest.raises(CheckpointError, match=r"not readable: .*weights_only"):
        checkpoint.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.yaml: missing"):
        checkpoint.load_config(tmp_path)


def test_a_crash_at_any_call_of_save_leaves_a_whole_newest_checkpoint(tmp_path, crash_at):
    checkpoint.save(tmp_path, 1, state(1), Config(), keep=1)
    seen = set()
    parts = {"policy": trained(0, steps=1)}
    for _ in crashes(crash_at, lambda: checkpoint.save(tmp_path, 2, state(2), Config(), keep=1, parts=parts)):
        newest = checkpoint.latest(tmp_path)
        assert newest is not None
        assert is_whole(newest)
        seen.add(newest.name)
        checkpoint.discard_after(tmp_path, 1)  # the next attempt starts from step 1 …
        if checkpoint.latest(tmp_path) is None:  # … unless it was pruned already
            checkpoint.save(tmp_path, 1, state(1), Config(), keep=1)
    assert seen == {"step_1", "step_2"}
    assert names(tmp_path) == ["step_2"]
    checkpoint.load_parts(tmp_path / "checkpoints" / "step_2", {"policy": trained(1)})


def test_a_crash_at_any_call_of_export_leaves_the_old_folder_or_the_new(tmp_path, crash_at):
    best = tmp_path / "hf" / "best"

    def export(text: str) -> None:
        export_hf(Part("model", text), Part("tokenizer", text), best)

    export("old")
    seen = set()
    for _ in crashes(crash_at, lambda: export("new")):
        recover(best.parent)  # as the next write there does
        found = [path.read_text() for path in best.iterdir()]
        assert len(found) == 2
        assert len(set(found)) == 1
        seen |= set(found)
        export("old")
    assert seen == {"old", "new"}
    assert {path.read_text() for path in best.iterdir()} == {"new"}
    assert [path.name for path in best.parent.iterdir()] == ["best"]


def test_a_crash_at_any_call_of_write_text_leaves_the_old_text_or_the_new(tmp_path, crash_at):
    file = tmp_path / "deep" / "config.yaml"
    write_text(file, "old")
    for _ in crashes(crash_at, lambda: write_text(file, "new")):
        assert file.read_text() in {"old", "new"}
    assert file.read_text() == "new"


# ------------------------------------------------------------------------------------------------ models and optimisers


def test_training_goes_on_bitwise_from_a_checkpoint(tmp_path: Path) -> None:
    policy, critic = trained(0, steps=3), trained(1, steps=2, lr=0.01)
    parts = {"policy": policy, "critic": critic}
    path = checkpoint.save(tmp_path, 3, {"step": 3}, Config(), keep=1, parts=parts)
    resumed = {"policy": trained(7, steps=1), "critic": trained(8, lr=0.01)}
    resumed["policy"].module.frozen.data.copy_(policy.module.frozen)  # as loaded from the base model
    resumed["critic"].module.frozen.data.copy_(critic.module.frozen)
    checkpoint.load_parts(path, resumed)
    assert checkpoint.load(path) == {"step": 3}
    for name, part in parts.items():
        assert same(everything(part), everything(resumed[name]))
        for one in (part, resumed[name]):
            train(one, 3, seed=1)
        assert same(everything(part), everything(resumed[name]))
        assert len(part.optimizer.state) == 2  # embedding and bias: neither the unused nor the frozen parameter
    assert resumed["policy"].module.head.weight is resumed["policy"].module.embed.weight


def test_a_moved_run_keeps_the_lines_that_were_copied_along(tmp_path: Path) -> None:
    state, checkpoint = {"written": {"metrics.jsonl": 4, "samples.jsonl": 3}}, tmp_path / "a" / "checkpoints" / "step_2"
    (tmp_path / "b").mkdir()
    assert runs.written_before(checkpoint, state, tmp_path / "b") == {}
    (tmp_path / "b" / "metrics.jsonl").write_text("abc\ndef\n")
    (tmp_path / "b" / "samples.jsonl").write_text("ab\n")
    assert runs.written_before(checkpoint, state, tmp_path / "b") == state["written"]
    (tmp_path / "b" / "samples.jsonl").write_text("abcdef\n")
    with pytest.raises(CheckpointError, match=r"samples\.jsonl: cut, changed or gone"):
        runs.written_before(checkpoint, state, tmp_path / "b")


def test_moments_are_where_a_fused_optimiser_counts_its_steps() -> None:
    properties = TensorProperties(dtype=torch.float32)
    parameter = torch.empty(3, device="meta")
    for size in (torch.Size([]), torch.Size([3])):
        entry = TensorStorageMetadata(properties, size, chunks=[])
        assert checkpoint._like(parameter, entry).device == parameter.device


def test_an_optimiser_that_has_not_stepped_is_saved_and_restored_as_such(tmp_path: Path) -> None:
    fresh, untouched = trained(0), trained(0)
    path = checkpoint.save(tmp_path, 1, {}, Config(), keep=1, parts={"policy": fresh})
    assert not fresh.optimizer.state
    resumed = trained(5, steps=4)
    resumed.module.frozen.data.copy_(fresh.module.frozen)
    checkpoint.load_parts(path, {"policy": resumed})
    assert not resumed.optimizer.state
    for part in (untouched, fresh, resumed):
        train(part, 2)
    assert same(everything(untouched), everything(fresh))
    assert same(everything(untouched), everything(resumed))


def test_tied_and_frozen_weights_take_no_extra_space(tmp_path: Path) -> None:

    path = checkpoint.save(tmp_path, 1, {}, Config(), keep=1, parts={"policy": trained(0, steps=1)})
    moments = [
        f"policy/optimizer/{p}/{m}" for p in ("embed.weight", "head.bias") for m in ("exp_avg", "exp_avg_sq", "step")
    ]
    model = [f"policy/model/{name}" for name in ("count", "embed.weight", "head.bias", "unused")]
    assert sorted(FileSystemReader(path / "tensors").read_metadata().state_dict_metadata) == model + moments
    resumed = trained(4)
    frozen = resumed.module.frozen.clone()
    checkpoint.load_parts(path, {"policy": resumed})
    assert torch.equal(resumed.module.frozen, frozen)


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, {}, Config(), keep=1, parts={"policy": trained(0, steps=1)})
    with pytest.raises(CheckpointError, match=r"step_1: does not fit the model: missing critic/model/count"):
        checkpoint.load_parts(path, {"critic": trained(0)})
    larger = Small()
    larger.register_parameter("more", nn.Parameter(torch.zeros(1)))
    larger.head.bias.requires_grad_(False)
    with pytest.raises(
        CheckpointError, match=r"missing policy/model/more; not in .* policy/model/head\.bias, policy/opt"
    ):
        checkpoint.load_parts(path, {"policy": Trained(larger, torch.optim.AdamW(larger.parameters()))})
    wider = Small()
    wider.unused = nn.Parameter(torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"torch.Size\(\[2\]\).*torch.Size\(\[3\]\).* policy/model/unused"):
        checkpoint.load_parts(path, {"policy": Trained(wider, torch.optim.AdamW(wider.parameters()))})
    assert names(tmp_path) == ["step_1"]


# -------------------------------------------------------------------------------------------------------------- damage


def files_of(path: Path) -> dict[str, str]:
    """SHA-256 of every file but meta.json, from the disk."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.rglob("*")
        if file.is_file() and file.name != "meta.json"
    }


def hashes_again(path: Path) -> None:
    """What somebody who means harm would do after a change."""
    (path / "meta.json").write_text(json.dumps({"files": files_of(path)}))


def read_all(path: Path) -> None:
    checkpoint.load_config(path)
    checkpoint.load(path)
    checkpoint.load_parts(path, {"policy": trained(1)})


SHARD = "tensors/__0_0.distcp"


@pytest.mark.parametrize("name", ["state.pt", "config.yaml", "tensors/.metadata", SHARD])
def test_a_changed_file_is_found_before_it_is_used(tmp_path: Path, name: str) -> None:
    """Bits are flipped all over each file: also where no reader would stumble, as in the middle of a weight."""
    path = checkpoint.save(tmp_path, 1, state(1), Config(), keep=1, parts={"policy": trained(0, steps=1)})
    whole = (path / name).read_bytes()
    for place in (0, len(whole) // 3, len(whole) // 2, len(whole) - 1):
        (path / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DamagedError, match=rf"step_1/{name}: .*not as it was written"):
            read_all(path)
        policy = trained(1, steps=1)
        before = everything(policy)
        if name == SHARD:
            with pytest.raises(DamagedError):
                checkpoint.load_parts(path, {"policy": policy})
        assert same(everything(policy), before)
    (path / name).write_bytes(whole)
    read_all(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / SHARD).unlink(), r"__0_0\.distcp: missing, but"),
        (lambda path: shutil.copy(path / SHARD, path / "tensors/__1_0.distcp"), r"__1_0\.distcp: added, or not"),
        (lambda path: shutil.rmtree(path / "tensors"), r"(__0_0\.distcp|metadata): missing, but"),
        (lambda path: (path / "state.pt").unlink(), r"state\.pt: missing, but"),
        (lambda path: (path / "meta.json").unlink(), r"meta\.json: missing, or without the hashes"),
        (lambda path: (path / "meta.json").write_text("{}"), r"meta\.json: missing, or without the hashes"),
        (lambda path: (path / "meta.json").write_text('{"files": {"st'), r"meta\.json: missing, or without the hashes"),
    ],
    ids=["missing", "added", "no tensors", "no state", "no meta.json", "no hashes", "torn meta.json"],
)
def test_a_missing_added_or_renamed_file_is_found(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    path = checkpoint.save(tmp_path, 1, {}, Config(), keep=1, parts={"policy": trained(0)})
    damage(path)
    assert checkpoint.latest(tmp_path) == path  # not passed over in silence
    with pytest.raises(DamagedError, match=message):
        read_all(path)


def test_what_is_no_checkpoint_is_in_nobody_s_way(tmp_path: Path) -> None:
    """Neither newest, nor counted among those kept, nor removed; an empty folder may be written over."""
    folder, exports = tmp_path / "checkpoints", tmp_path / "hf"
    checkpoint.save(tmp_path, 1, {}, Config(), keep=1)
    (folder / "step_4").mkdir()
    (folder / "step_999").mkdir()
    (folder / "step_1000").mkdir()
    (folder / "step_1000" / "notes.txt").write_text("mine")
    for name in ("step_3", "step_5", "step_final", "step_5.bak", "step_", "mine"):
        (exports / name).mkdir(parents=True)
    (exports / "step_6").write_text("a file")
    (exports / ".new-step_5" / "half").mkdir(parents=True)  # a killed export that was to replace step_5
    assert checkpoint.latest(tmp_path) == folder / "step_1"
    checkpoint.save(tmp_path, 2, {}, Config(), keep=1)
    assert checkpoint.latest(tmp_path) == folder / "step_2"
    checkpoint.save(tmp_path, 3, {}, Config(), keep=2)
    checkpoint.discard_after(tmp_path, 3)
    assert names(tmp_path) == ["step_1000", "step_2", "step_3", "step_4", "step_999"]
    assert sorted(path.name for path in exports.iterdir()) == sorted(
        ["step_3", "step_final", "step_5.bak", "step_", "mine", "step_6"]
    )
    checkpoint.save(tmp_path, 4, {"n": 4}, Config(), keep=2)
    assert checkpoint.load(folder / "step_4") == {"n": 4}
    with pytest.raises(CheckpointError, match=r"step_1000 exists already: .* move it elsewhere"):
        checkpoint.save(tmp_path, 1000, {}, Config(), keep=2)
    assert (folder / "step_1000" / "notes.txt").read_text() == "mine"


class Full(FileSystemWriter):
    """A disk that fills up while the tensors are written."""

    def write_data(self, *arguments: Any) -> Any:
        super().write_data(*arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_reported_and_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"policy": trained(0, steps=1)}
    checkpoint.save(tmp_path, 1, state(1), Config(), keep=1, parts=parts)
    with monkeypatch.context() as patch:
        patch.setattr("tandemrl.training.checkpoint.storage.dcp.FileSystemWriter", Full)
        with pytest.raises(CheckpointError, match=r"step_2: not written, .*No space.* The disk is full: "):
            checkpoint.save(tmp_path, 2, state(2), Config(), keep=1, parts=parts)
    assert names(tmp_path) == ["step_1"]
    checkpoint.save(tmp_path, 3, state(3), Config(), keep=1, parts=parts)
    assert names(tmp_path) == ["step_3"]


# -------------------------------------------------------------------------------------------------------------- exports


@pytest.mark.parametrize(("tied", "dtype"), [(True, "bfloat16"), (True, None), (False, "bfloat16"), (False, None)])
def test_an_export_holds_every_weight_once_in_its_dtype(tmp_path: Path, tied: bool, dtype: str | None) -> None:
    from transformers import AutoModelForCausalLM

    model = qwen3(tied=tied)
    export_hf(model, tokenizer(), tmp_path / "hf", dtype)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(stored) == {name for name, _ in model.named_parameters()}
    assert ("lm_head.weight" in stored) is not tied
    wanted = torch.float32 if dtype is None else torch.bfloat16
    assert {tensor.dtype for tensor in stored.values()} == {wanted}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert loaded.dtype == wanted
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(wanted))


def test_a_resume_may_change_what_does_not_change_the_run() -> None:
    allowed = ["train.steps=60", "output_dir=runs/x", "train.save_every=7", "train.eval_every=7", "train.wandb=offline"]
    check_same_config(load(), load(overrides=allowed))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.lr=2e-6"], r"train\.lr \(checkpoint 1e-06, now 2e-06\)"),
        (["train.steps=40"], r"train\.steps \(checkpoint 50, now 40\)"),
        (["train.steps=60", "train.schedule=cosine"], r"train\.steps .*train\.schedule"),
        (["selection.prob_senior=0.4", "train.seed=1"], r"selection\.prob_senior .*train\.seed"),
        (["data.template_arguments={enable_thinking: true}"], r"data\.template_arguments\.enable_thinking \(ch.*False"),
    ],
)
def test_a_resume_under_another_config_is_refused_by_key(overrides: list[str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_same_config(load(), load(overrides=overrides))
