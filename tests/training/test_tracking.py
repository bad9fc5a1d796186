"""The record of a run: complete, one line per step, readable without a terminal; and what the console shows."""

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from runs import lines
from tandemrl.config import load
from tandemrl.data.messages import Transcript
from tandemrl.training.authored import authored_text
from tandemrl.training.tracking import Tracker, TrackingError, summary_line
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


def test_authors_are_coloured_and_marked() -> None:
    text = authored_text(rollout(), WordTokenizer())
    assert text.plain == " w2 w3‹ w4› w5"
    assert [(text.plain[s.start : s.end], s.style) for s in text.spans] == [
        (" w2 w3", "cyan"),
        ("‹ w4›", "yellow"),
        (" w5", "cyan"),
    ]


def test_turns_are_lines_and_the_world_is_marked_and_cut(tmp_path: Path) -> None:
    author = np.array([-1, 1, 0, *[-1] * 100, 1])
    episode = Rollout(
        "set/1", 0, 0, 7, np.arange(len(author)), author, np.zeros(len(author)), 1.0,
        turns=2, transcript=Transcript(({"role": "assistant", "content": "w1"},), {"found": 1}, {"tool_calls": 1.0}),
    )  # fmt: skip
    world = "".join(f" w{i}" for i in range(3, 103))[:200]
    assert authored_text(episode, WordTokenizer()).plain == f" w1‹ w2›⟨{world}…⟩ w103"
    target, shown = console()
    with Tracker(tmp_path, load(), console=target) as tracker:
        tracker.samples(1, [episode], WordTokenizer())
    assert "senior, ‹junior›, ⟨observation⟩" in shown.getvalue()
    [line] = lines(tmp_path / "samples.jsonl")
    assert line["text"] == " w1 w2\n w103"
    assert line["transcript"]["state"] == {"found": 1}
    read = Rollout.from_json(line)
    assert read.transcript == episode.transcript
    assert (read.turns, read.context_tokens, read.response_tokens) == (2, 1, 3)


def test_markup_in_a_completion_is_text(tmp_path: Path) -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return "[red]x[/nope]"

    screen, text = console()
    with Tracker(tmp_path, load(), console=screen) as tracker:
        tracker.samples(1, [rollout()], Tokenizer())
    assert "[red]x[/nope]" in text.getvalue()


def test_without_a_terminal_there_are_plain_lines_and_no_bars(tmp_path: Path) -> None:
    screen, text = console()
    with Tracker(tmp_path, load(overrides=["train.steps=2"]), console=screen) as tracker:
        tracker.rollout_progress(1, 8)(100)
        tracker.samples(1, [rollout()], WordTokenizer())
        tracker.step(1, {"reward/mean": 0.5, "eval/pass@1": 0.25})
        tracker.step(2, {"reward/mean": 0.75})
    shown = text.getvalue()
    assert "\x1b" not in shown
    assert "w2 w3‹ w4› w5" in shown
    assert "step 1/2 | reward 0.500 | ETA 0m00s\n  held-out pass@1 0.250\nstep 2/2 | reward 0.750 | ETA 0m00s" in shown


def test_a_terminal_gets_bars_for_steps_and_rollout_tokens(tmp_path: Path) -> None:
    screen, text = console(terminal=True)
    with Tracker(tmp_path, load(overrides=["train.steps=4", "rollout.max_tokens=50"]), console=screen) as tracker:
        advance = tracker.rollout_progress(1, 8)
        advance(30)
        advance(70)
        tracker.step(1, {})
        tracker.rollout_progress(2, 8)
    shown = text.getvalue()
    assert "tokens of 8 rollouts" in shown
    assert "400" in shown  # 8 rows x 50 tokens
    assert "ETA" in shown


def test_the_end_of_a_step_leaves_the_bar_of_the_next_one(tmp_path: Path) -> None:
    """With train.async_steps a thread generates the next step's rollouts meanwhile."""
    screen, _ = console(terminal=True)
    with Tracker(tmp_path, load(overrides=["rollout.max_tokens=50"]), console=screen) as tracker:
        tracker.rollout_progress(1, 8)(30)
        later = tracker.rollout_progress(2, 8)
        tracker.step(1, {})
        later(70)
        assert tracker._progress is not None
        assert [(bar.completed, bar.total) for bar in tracker._progress.tasks[1:]] == [(70, 400)]
        tracker.step(2, {})
        assert len(tracker._progress.tasks) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log"])
def test_a_full_disk_is_what_the_run_ends_with(name: str, tmp_path: Path) -> None:
    """The lines that could not be written are still in the buffer, and would be written again by close()."""
    (tmp_path / name).symlink_to("/dev/full")
    with (
        pytest.raises(TrackingError, match=rf"{re.escape(name)}: No space left on device; free the disk and resume"),
        Tracker(tmp_path, load(overrides=["train.log=true"]), quiet=True) as tracker,
    ):
        tracker.step(1, {"loss": 1.0})
    assert json.loads((tmp_path / "stopped.json").read_text())["reason"].startswith("TrackingError: ")
    assert tracker._samples is not None
    assert tracker._samples.closed


def test_the_table_of_samples_is_shown_on_the_first_step_and_on_evaluation_steps(tmp_path: Path) -> None:
    screen, text = console()
    with Tracker(tmp_path, load(overrides=["train.eval_every=3"]), console=screen) as tracker:
        for step in range(1, 7):
            tracker.samples(step, [rollout()], WordTokenizer())
            tracker.step(step, {})
    assert [s for s in range(1, 7) if f"samples of step {s}:" in text.getvalue()] == [1, 3, 6]


def test_quiet_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Tracker(tmp_path, load(), quiet=True) as tracker:
        tracker.rollout_progress(1, 8)(5)
        tracker.samples(1, [rollout()], WordTokenizer())
        tracker.step(1, {"loss": 1.0})
        tracker.say("hello")
    assert capfd.readouterr() == ("", "")


def test_summary_line_counts_hours() -> None:
    assert summary_line(1, 101, {}, 90.0) == "step 1/101 | ETA 2h30m"


def test_an_evaluation_shows_how_many_texts_were_cut_off_beside_the_rollouts() -> None:
    metrics = {"eval/pass@1": 0.5, "eval/truncation_rate": 0.25, "response/truncated_at_eval": 0.0}
    metrics |= {"monitor/pass@1": 0.5, "monitor/truncation_rate": 0.125}
    held, watched = summary_line(1, 1, metrics, 1.0).split("\n")[1:]
    assert held == "  held-out pass@1 0.500 cut off 0.250 (rollouts 0.000)"
    assert watched == "  monitored pass@1 0.500 cut off 0.125"


@pytest.mark.parametrize("scale", [1, -1000])
@pytest.mark.parametrize(("step", "steps"), [(9, 50), (999, 999), (123456, 1234567)])
def test_the_lines_of_a_step_fit_80_columns_and_no_value_stands_apart_from_its_name(
    step: int, steps: int, scale: int
) -> None:
    names = ["reward/mean", "loss", "grad_norm", "tandem/senior_frac", "time/step", "mismatch/mean_abs"]
    metrics = {name: scale * 12.345 for name in [*names, *(f"eval/pass@{2**k}" for k in range(9))]}
    metrics |= {f"monitor/{name}": scale * 12.345 for name in ("pass@1000", "pass@2000", "aime/pass@1")}
    lines = summary_line(step, steps, metrics, 30.0).split("\n")
    assert max(map(len, lines)) <= 80
    assert all(re.search(r"[\dsm]( \|)?$", line) for line in lines)
    shown = " ".join(" ".join(lines).split())
    for part in (
        "reward ",
        "loss ",
        "grad ",
        "senior ",
        "ETA ",
        *(f"pass@{2**k} " for k in range(9)),
        "monitored pass@1000",
    ):
        assert shown.count(f" {part}") == 1


def test_the_log_has_what_the_console_shows_even_if_it_is_quiet(tmp_path: Path) -> None:
    screen, shown = console(terminal=True)
    on = load(overrides=["train.log=true", "train.eval_every=1"])
    for quiet in (False, True):
        with Tracker(tmp_path, on, console=screen, quiet=quiet) as tracker:
            tracker.say(f"quiet: {quiet}")
            tracker.samples(1, [rollout()], WordTokenizer())
    written = (tmp_path / "train.log").read_text()
    assert "\x1b" in shown.getvalue()
    assert "\x1b" not in written
    assert [f"quiet: {quiet}\n" in written for quiet in (False, True)] == [True, True]
    assert written.count("samples of step 1: senior, ‹junior›") == 2
    Tracker(tmp_path / "other", load(), quiet=True).close()
    assert not (tmp_path / "other" / "train.log").exists()


@pytest.mark.parametrize(
    ("keys", "name", "tags"),
    [([], "my-run", []), (["train.wandb_name=first", "train.wandb_tags=[tandem, 3b]"], "first", ["tandem", "3b"])],
)
def test_a_wandb_run_has_a_name_and_tags(
    keys: list[str], name: str, tags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    class FakeWandb:
        Settings = dict

        @staticmethod
        def init(**options: object) -> "FakeWandb":
            asked.update(options)
            return FakeWandb()

        def finish(self, exit_code: int) -> None:
            pass

    monkeypatch.setitem(sys.modules, "wandb", FakeWandb)
    Tracker(tmp_path / "my-run", load(overrides=["train.wandb=offline", *keys]), quiet=True).close()
    assert (asked["name"], asked["tags"]) == (name, tags)


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


def test_wandb_missing_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrackingError, match=r"needs Weights & Biases: pip install .*wandb\]'"):
        Tracker(tmp_path, load(overrides=["train.wandb=offline"]), quiet=True)


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
