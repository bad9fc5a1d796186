"""The record of a run: complete, one line per step, readable without a terminal; and what the console shows."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from runs import lines
from tandemrl.config import Config, load
from tandemrl.training.tracking import Tracker, TrackingError
from tandemrl.types import Rollout


def settings(folder: Path, *overrides: str) -> Config:
    return load(overrides=[f"output_dir={folder}", *overrides])


class WordTokenizer:
    def decode(self, ids: list[int]) -> str:
        return "".join(f" w{i}" for i in ids)


def rollout(index: int = 0) -> Rollout:
    author = np.array([-1, -1, 1, 1, 0, 1])
    logprobs = np.array([0.0, 0.0, -0.5, -0.25, -1.0, -0.125])
    return Rollout("set/1", 0, index, 7, np.arange(6), author, logprobs, 1.0, {"correct": 1.0})


def console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=100, highlight=False), text


def test_metrics_are_one_line_per_step_on_disk_before_the_step_returns(tmp_path: Path) -> None:
    with Tracker(settings(tmp_path), quiet=True) as tracker:
        tracker.step(1, {"reward/mean": 0.5, "loss": float("nan")})
        assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5, "loss": None}]
        tracker.step(2, {"reward/mean": np.float32(0.25)})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_every_rollout_is_recorded_whatever_is_shown(tmp_path: Path) -> None:
    with Tracker(settings(tmp_path, "train.log_samples=0"), quiet=True) as tracker:
        tracker.samples(5, [rollout(0), rollout(1)], WordTokenizer())
    records = lines(tmp_path / "samples.jsonl")
    assert [(record["step"], record["index"], record["text"]) for record in records] == [
        (5, 0, " w2 w3 w4 w5"),
        (5, 1, " w2 w3 w4 w5"),
    ]
    again = Rollout.from_json(records[1])
    np.testing.assert_array_equal(again.author, rollout().author)
    np.testing.assert_array_equal(again.behaviour_logprobs, rollout().behaviour_logprobs)


def test_markup_in_a_completion_is_text(tmp_path: Path) -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "[red]x[/nope]"

    screen, text = console()
    with Tracker(settings(tmp_path), console=screen) as tracker:
        tracker.samples(1, [rollout()], Tokenizer())
    assert "[red]x[/nope]" in text.getvalue()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_what_the_run_ends_with(tmp_path: Path) -> None:
    """The lines that could not be written are still in the buffer, and would be written again by close()."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with (
        pytest.raises(TrackingError, match=r"metrics\.jsonl: No space left on device; free the disk and resume"),
        Tracker(settings(tmp_path), quiet=True) as tracker,
    ):
        tracker.step(1, {"loss": 1.0})
    assert json.loads((tmp_path / "stopped.json").read_text())["reason"].startswith("TrackingError: ")
    assert tracker._samples is not None
    assert tracker._samples.closed


def test_wandb_shows_the_steps_of_metrics_jsonl_after_a_resume(tmp_path: Path) -> None:
    wandb, group = pytest.importorskip("wandb", reason="needs the wandb extra"), f"{tmp_path.name}"
    offline = settings(tmp_path, "train.wandb=offline")
    runs = []
    for step in (1, 2):
        with Tracker(offline, quiet=True) as tracker:
            assert wandb.run is not None
            assert wandb.run.group == group
            runs.append(wandb.run.id)
            assert wandb.run.step == (0 if step == 1 else 1)  # the kept step is there before a new one
            tracker.step(step, {"loss": 1.0})
    assert len(set(runs)) == 2
    for run in runs:
        assert len(list(tmp_path.glob(f"wandb/offline-run-*-{run}/run-{run}.wandb"))) == 1


def test_wandb_online_without_a_key_names_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs the wandb extra")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(TrackingError, match=r"train\.wandb=online: .*; train\.wandb=offline needs no key"):
        Tracker(settings(tmp_path / "run", "train.wandb=online"), quiet=True)


def test_a_run_that_fails_leaves_the_reason_until_it_goes_on(tmp_path: Path) -> None:
    tracker = Tracker(settings(tmp_path), quiet=True)
    tracker.step(1, {"loss": 0.0})
    with pytest.raises(ValueError, match="no"), tracker:
        raise ValueError("no\nmore")
    assert json.loads((tmp_path / "stopped.json").read_text()) == {"step": 1, "reason": "ValueError: no more"}
    with Tracker(settings(tmp_path), quiet=True, record=False):
        assert (tmp_path / "stopped.json").exists()
    with Tracker(settings(tmp_path), quiet=True):
        assert not (tmp_path / "stopped.json").exists()
    assert not (tmp_path / "stopped.json").exists()
