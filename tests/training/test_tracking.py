"""The record of a run: complete, one line per step, readable without a terminal; and what the console shows."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from runs import lines
from tandemrl.config import load
from tandemrl.training.tracking import Tracker, TrackingError
from tandemrl.types import Rollout


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
    with Tracker(tmp_path, load(), quiet=True) as tracker:
        tracker.step(1, {"reward/mean": 0.5, "loss": float("nan")})
        assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5, "loss": None}]
        tracker.step(2, {"reward/mean": np.float32(0.25)})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]


def test_no_step_is_recorded_twice_not_even_by_a_second_process(tmp_path: Path) -> None:
    with Tracker(tmp_path, load(), quiet=True) as tracker:
        tracker.step(3, {})
        with pytest.raises(ValueError, match="already has step 3"):
            tracker.step(3, {})
    with Tracker(tmp_path, load(), quiet=True) as resumed:
        with pytest.raises(ValueError, match="already has step 3"):
            resumed.step(2, {})
        resumed.step(4, {})
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [3, 4]


def test_a_torn_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    with pytest.raises(TrackingError, match="torn"):
        Tracker(tmp_path, load(), quiet=True)


def test_every_rollout_is_recorded_whatever_is_shown(tmp_path: Path) -> None:
    with Tracker(tmp_path, load(overrides=["train.log_samples=0"]), quiet=True) as tracker:
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
    with Tracker(tmp_path, load(), console=screen) as tracker:
        tracker.samples(1, [rollout()], Tokenizer())
    assert "[red]x[/nope]" in text.getvalue()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_what_the_run_ends_with(tmp_path: Path) -> None:
    """The lines that could not be written are still in the buffer, and would be written again by close()."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with (
        pytest.raises(TrackingError, match=r"metrics\.jsonl: No space left on device; free the disk and resume"),
        Tracker(tmp_path, load(), quiet=True) as tracker,
    ):
        tracker.step(1, {"loss": 1.0})
    assert json.loads((tmp_path / "stopped.json").read_text())["reason"].startswith("TrackingError: ")
    assert tracker._samples is not None
    assert tracker._samples.closed


class WandbServer:
    """A stand-in for wandb with its rules: a step below the current one is dropped; an online run goes on at the step
    after its last; an offline one knows of no earlier part, and its upload replaces the lines of its steps."""

    Settings = dict

    def __init__(self) -> None:
        self.runs: dict[str, dict[int, dict[str, float]]] = {}
        self.options: dict[str, object] = {}

    def init(self, **options: object) -> "WandbServer":
        self.options, rows = options, self.runs.setdefault(str(options["id"]), {})
        self.step = max(rows, default=-1) + 1 if options["resume"] else 0
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        if step >= self.step:
            self.step = step
            self.runs[str(self.options["id"])].setdefault(step, {}).update(values)

    def finish(self, exit_code: int) -> None:
        pass


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_wandb_shows_the_steps_of_metrics_jsonl_whatever_a_resume_discards(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, metrics = WandbServer(), tmp_path / "metrics.jsonl"
    monkeypatch.setitem(sys.modules, "wandb", server)
    monkeypatch.setenv("WANDB_API_KEY", "x")
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    screen, said = console()
    chance = iter(range(1000))

    def run(first: int, last: int, *, kept: int, mode: str = mode) -> str:
        """Keep so many lines and record the steps from ``first`` to ``last``; the id at W&B."""
        if metrics.is_file():
            metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:kept]))
        with Tracker(tmp_path, load(overrides=[f"train.wandb={mode}"]), console=screen) as tracker:
            for step in range(first, last + 1):
                tracker.step(step, {"loss": next(chance)})
        own = server.runs[str(server.options["id"])]
        if mode != "disabled":
            assert own == {line.pop("step"): line for line in lines(metrics)}
        return str(server.options["id"])

    start = run(0, 4, kept=0)
    assert run(5, 8, kept=5) == start  # nothing was discarded
    assert server.options["notes"] is None
    second = run(7, 9, kept=7)  # steps 7 and 8 were
    assert second == f"{start}-2"
    assert f"run {second} replaces run {start}, whose steps after step 6 were discarded" in " ".join(
        said.getvalue().split()
    )
    assert (server.options["group"], server.options["name"]) == (start, f"{tmp_path.name} (resume 1)")
    assert run(10, 10, kept=10) == second
    run(9, 12, kept=9, mode="disabled")  # discards steps 9 and 10 while nobody looks
    assert run(13, 13, kept=13) == f"{start}-3"
    assert run(0, 1, kept=0) == f"{start}-4"
    metrics.write_text(metrics.read_text() + '{"step": 2, "loss": 7}\n')  # killed between the record and W&B
    assert run(3, 3, kept=3) == f"{start}-4"


def test_wandb_online_without_a_key_records_offline_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs the wandb extra")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    screen, text = console()
    with Tracker(tmp_path / "run", load(overrides=["train.wandb=online"]), console=screen) as tracker:
        tracker.step(1, {"loss": 1.0})
    assert "no API key" in text.getvalue()
    assert "recording offline" in text.getvalue()
    identity = (tmp_path / "run" / "wandb" / "run_id").read_text()
    assert len(list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))) == 1


def test_a_run_that_fails_leaves_the_reason_until_it_goes_on(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, load(), quiet=True)
    tracker.step(1, {"loss": 0.0})
    with pytest.raises(ValueError, match="no"), tracker:
        raise ValueError("no\nmore")
    assert json.loads((tmp_path / "stopped.json").read_text()) == {"step": 1, "reason": "ValueError: no more"}
    with Tracker(tmp_path, load(), quiet=True, record=False):
        assert (tmp_path / "stopped.json").exists()
    with Tracker(tmp_path, load(), quiet=True):
        assert not (tmp_path / "stopped.json").exists()
    assert not (tmp_path / "stopped.json").exists()
