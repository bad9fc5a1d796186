"""Checkpoints: whole or not there at any moment, plain data only, and a resume that cannot become another run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandemrl import checkpoint
from tandemrl.checkpoint import CheckpointError
from tandemrl.config import Config, load


def state(step: int) -> dict[str, Any]:
    """Every kind of value that a trainer keeps; the tensor tells a torn or mixed checkpoint."""
    return {
        "step": step,
        "weights": {"a": torch.full((64,), float(step)), "half": torch.ones(2, dtype=torch.bfloat16) * step},
        "optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]).state_dict(),
        "rng": checkpoint.rng_state(),
        "best": None,
        "order": [1, (2, "x"), True, 0.5],
    }


def is_whole(path: Path) -> bool:
    found = checkpoint.load(path)
    step = checkpoint.step_of(path)
    return found["step"] == step and bool((found["weights"]["a"] == step).all()) and (path / "meta.json").is_file()


class Part:
    """Stands for a model or a tokenizer."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text

    def save_pretrained(self, folder: Path) -> None:
        (folder / self.name).write_text(self.text)


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
    assert meta["versions"]["torch"] == torch.__version__


def test_only_the_newest_are_kept_and_steps_are_numbers_not_text(tmp_path: Path) -> None:
    for step in (8, 9, 10, 100):
        checkpoint.save(tmp_path, step, {"step": step}, Config(), keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_100"]
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoints" / "step_100"


def test_latest_ignores_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    folder = tmp_path / "checkpoints"
    for name in (".new-step_9", ".old-step_8", "step_x", "step_7.bak"):
        (folder / name).mkdir(parents=True)
    (folder / "step_6").write_text("a file")
    assert checkpoint.latest(tmp_path) is None


def test_a_saved_step_is_never_overwritten(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, state(1), Config(), keep=1)
    with pytest.raises(CheckpointError, match=r"step_1 exists already"):
        checkpoint.save(tmp_path, 1, state(1), Config(), keep=1)


def test_what_cannot_be_loaded_safely_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\['a'\]\[1\] is a ndarray"):
        checkpoint.save(tmp_path, 1, {"a": [0, np.zeros(2)]}, Config(), keep=1)
    assert checkpoint.latest(tmp_path) is None


def test_loading_names_the_file_and_runs_no_code(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: no checkpoint there"):
        checkpoint.load(tmp_path / "nowhere")
    torch.save({"bad": Path("x")}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"state\.pt: not readable"):
        checkpoint.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.yaml is missing"):
        checkpoint.load_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected …/checkpoints/step_N"):
        checkpoint.step_of(tmp_path)


def test_a_crash_at_any_call_of_save_leaves_a_whole_newest_checkpoint(
    tmp_path: Path, crash_at: Callable[[int | None], None]
) -> None:
    checkpoint.save(tmp_path, 1, state(1), Config(), keep=1)
    seen = set()
    for _ in crashes(crash_at, lambda: checkpoint.save(tmp_path, 2, state(2), Config(), keep=1)):
        newest = checkpoint.latest(tmp_path)
        assert newest is not None
        assert is_whole(newest)
        seen.add(newest.name)
        checkpoint.discard_after(tmp_path, 1)  # the next attempt starts from step 1 …
        if checkpoint.latest(tmp_path) is None:  # … unless it was pruned already
            checkpoint.save(tmp_path, 1, state(1), Config(), keep=1)
    assert seen == {"step_1", "step_2"}
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_2"]


def test_a_crash_at_any_call_of_export_leaves_the_old_folder_or_the_new(
    tmp_path: Path, crash_at: Callable[[int | None], None]
) -> None:
    best = tmp_path / "hf" / "best"

    def export(text: str) -> None:
        checkpoint.export_hf(Part("model", text), Part("tokenizer", text), best)

    export("old")
    seen = set()
    for _ in crashes(crash_at, lambda: export("new")):
        checkpoint.recover(best.parent)  # as the next write there does
        found = [path.read_text() for path in best.iterdir()]
        assert len(found) == 2
        assert len(set(found)) == 1
        seen |= set(found)
        export("old")
    assert seen == {"old", "new"}
    assert {path.read_text() for path in best.iterdir()} == {"new"}
    assert [path.name for path in best.parent.iterdir()] == ["best"]


def test_a_crash_at_any_call_of_write_text_leaves_the_old_text_or_the_new(
    tmp_path: Path, crash_at: Callable[[int | None], None]
) -> None:
    file = tmp_path / "deep" / "config.yaml"
    checkpoint.write_text(file, "old")
    for _ in crashes(crash_at, lambda: checkpoint.write_text(file, "new")):
        assert file.read_text() in {"old", "new"}
    assert file.read_text() == "new"


def test_kill_9_while_saving_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    script = (
        "import sys, torch\n"
        "from tandemrl import checkpoint\n"
        "from tandemrl.config import Config\n"
        "for step in range(1, 100_000):\n"
        "    state = {'step': step, 'weights': {'a': torch.full((200_000,), float(step))}}\n"
        "    checkpoint.save(sys.argv[1], step, state, Config(), keep=2)\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(3):
        reported = int(process.stdout.readline())
    time.sleep(random.Random(os.getpid()).uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split()
    process.wait()
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert checkpoint.step_of(newest) >= int(rest[-1] if rest else reported)
    assert is_whole(newest)
    following = checkpoint.step_of(newest) + 1
    checkpoint.save(tmp_path, following, state(following), Config(), keep=2)
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {f"step_{following - 1}", f"step_{following}"}


@pytest.mark.parametrize(
    "allowed",
    [
        "train.steps=60",
        "output_dir=runs/x",
        "train.save_every=7",
        "train.eval_every=7",
        "train.keep_checkpoints=9",
        "train.wandb=offline",
        "train.wandb_project=p",
        "train.log_samples=0",
    ],
)
def test_a_resume_may_change_what_does_not_change_the_run(allowed: str) -> None:
    checkpoint.check_resume(load(), load(overrides=[allowed]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.lr=2e-6"], r"train\.lr \(checkpoint 1e-06, now 2e-06\)"),
        (["train.steps=40"], r"train\.steps \(checkpoint 50, now 40\)"),
        (["train.steps=60", "train.schedule=cosine"], r"train\.steps .*train\.schedule"),
        (["selection.prob_senior=0.4", "train.seed=1"], r"selection\.prob_senior .*train\.seed"),
    ],
)
def test_a_resume_under_another_config_is_refused_by_key(overrides: list[str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        checkpoint.check_resume(load(), load(overrides=overrides))


def test_growing_a_cosine_run_is_refused() -> None:
    cosine = ["train.schedule=cosine"]
    with pytest.raises(CheckpointError, match=r"train\.steps"):
        checkpoint.check_resume(load(overrides=cosine), load(overrides=[*cosine, "train.steps=60"]))


def test_discard_after_removes_the_abandoned_future(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {}, Config(), keep=3)
    checkpoint.discard_after(tmp_path, 1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_1"]


def test_random_state_goes_through_a_file(tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002

    before = checkpoint.rng_state()
    try:
        torch.save(before, tmp_path / "rng.pt")
        expected = draw()
        assert draw() != expected
        checkpoint.restore_rng(torch.load(tmp_path / "rng.pt", weights_only=True))
        assert draw() == expected
    finally:
        checkpoint.restore_rng(before)


def test_truncate_drops_later_steps_and_a_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert checkpoint.truncate_jsonl(file, 3) == 0
    kept = '{"step": 1, "x": null}\n{"step": 2}\n{"step": 2}\n'
    file.write_text(kept + '{"step": 3}\n{"step": 4, "lo')
    assert checkpoint.truncate_jsonl(file, 2) == 2
    assert file.read_text() == kept
    file.write_text('{"step": 1}')  # whole, but killed before the line break
    assert checkpoint.truncate_jsonl(file, 2) == 0
    assert file.read_text() == '{"step": 1}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncate_refuses_a_record_broken_in_the_middle(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    text = '{"step": 1}\nnonsense\n{"step": 2}\n'
    file.write_text(text)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: line 2 is not"):
        checkpoint.truncate_jsonl(file, 5)
    assert file.read_text() == text


def test_versions_name_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checkpoint.versions()
    assert set(found) == {"python", "torch", "transformers", "tandemrl", "git_revision", "git_dirty"}
    assert found["tandemrl"]
    code = tmp_path / "checkpoint.py"
    code.write_text("1")
    monkeypatch.setattr(checkpoint, "__file__", str(code))
    outside = checkpoint.versions()
    assert (outside["git_revision"], outside["git_dirty"]) == (None, None)

    def git(*arguments: str) -> None:
        who = ["-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *who, *arguments], check=True, capture_output=True)

    git("init")
    assert checkpoint.versions()["git_revision"] is None  # a repository that the code is not part of
    git("add", "checkpoint.py")
    git("commit", "-m", "a")
    clean = checkpoint.versions()
    assert len(str(clean["git_revision"])) == 40
    assert clean["git_dirty"] is False
    code.write_text("2")
    assert checkpoint.versions()["git_dirty"] is True
