"""A record that is deleted, cut or replaced while the run writes it: the run stops, and nothing is lost silently."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from runs import assert_same_run, config
from tandemrl.training.checkpoint import DamagedError, latest
from tandemrl.training.gates import TrainError
from tandemrl.training.loop import train
from tandemrl.training.tracking import Tracker


def cut(file: Path) -> None:
    with open(file, "r+b") as content:
        content.truncate(file.stat().st_size // 2)


def replace(file: Path) -> None:
    """As an editor does it; the same content, so that the first step to be lost is the next one."""
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    other.replace(file)


@pytest.fixture(scope="module")
def whole(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(config(tiny_pair, tmp_path_factory.mktemp("whole")), quiet=True)


@pytest.mark.parametrize(
    ("name", "harm", "at", "stops", "said"),
    [
        pytest.param(
            "samples.jsonl",
            Path.unlink,
            1,
            2,
            "samples.jsonl is gone, with the .* bytes that the run has written",
            marks=pytest.mark.slow,
        ),
        ("samples.jsonl", cut, 1, 2, "samples.jsonl is of .* bytes, though the run has written .*: it was cut"),
        ("metrics.jsonl", replace, 1, 3, "metrics.jsonl is of .* bytes, though the run has written"),
        ("metrics.jsonl", Path.unlink, 3, 4, "metrics.jsonl is gone"),  # after the last step
        pytest.param(
            "metrics.jsonl",
            cut,
            3,
            4,
            "metrics.jsonl is of .* bytes, though the run has written .*: it was cut",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_stops_and_a_resume_says_what_is_missing(
    tiny_pair: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    harm: Callable[[Path], Any],
    at: int,
    stops: int,
    said: str,
) -> None:
    original, file, copy = Tracker.step, tmp_path / name, tmp_path / "copy"

    def step(self: Tracker, number: int, metrics: Any) -> None:
        original(self, number, metrics)
        if number == at:
            if harm is cut:
                copy.write_bytes(file.read_bytes())
            else:
                copy.hardlink_to(file)  # what the run goes on writing to
            harm(file)

    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "step", step)
        screen = io.StringIO()
        with pytest.raises(TrainError, match=said) as error:
            train(config(tiny_pair, tmp_path, "train.save_every=3"), console=Console(file=screen, width=200))
    saved = tmp_path / "checkpoints" / f"step_{stops - 1}"
    assert latest(tmp_path) == saved
    if stops <= 3:
        assert str(error.value).startswith(f"step {stops}, ")
        assert f"the state after step {stops - 1} is saved" in screen.getvalue()

    with pytest.raises(DamagedError, match=rf"{name}: .*line.* of step .*put {name} back from a copy"):
        train(config(tiny_pair, tmp_path), quiet=True)
    copy.replace(file)
    train(config(tiny_pair, tmp_path), quiet=True)
    assert_same_run(tmp_path, whole, 3)
