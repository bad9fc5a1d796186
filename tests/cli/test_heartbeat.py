"""Lines where there is no bar."""

import json
import threading
from pathlib import Path

import pytest

from tandemrl.cli.heartbeat import heartbeat, last_written


def test_lines_come_while_the_body_runs_and_end_with_it() -> None:
    lines: list[str] = []
    second = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if len(lines) == 2:
            second.set()

    before = threading.active_count()
    with heartbeat(say, lambda: f"at {len(lines)}", every_s=0.001):
        assert second.wait(60)
    assert lines[:2] == ["0 s: at 0", "0 s: at 1"]
    assert threading.active_count() == before


def test_the_newest_file_says_where_an_experiment_is(tmp_path: Path) -> None:
    import os

    assert last_written(tmp_path) == "building the models"
    for age, (name, text, step) in enumerate(
        [
            ("plain/seed-0/grpo/metrics.jsonl", '{"step": 3}\n{"step": 4}\n', ", step 4"),
            ("plain/seed-0/eval/base/pass-at-k.json", "{}", ""),
            ("plain/seed-1/grpo/metrics.jsonl", '{"step": 3}\n{"st', ", step 3"),
            ("plain/seed-2/grpo/metrics.jsonl", '{"st', ""),
        ]
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
        os.utime(file, (age, age))
        assert last_written(tmp_path) == f"last written: {name}{step}"


@pytest.mark.parametrize(
    ("times", "left"),
    [
        ([100.0, 10.0, 10.0, 11.0, 10.0, 10.0], "step 6 of 40, about 6 min left"),
        ([1.0] * 4 + [300.0] * 3, "step 7 of 40, about 2.8 h left"),
        ([1.0] * 40, "step 40 of 40"),
    ],
)
def test_the_time_left_follows_the_recent_steps(times: list[float], left: str, tmp_path: Path) -> None:
    run = tmp_path / "word_problems" / "seed-0" / "weak"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("train:\n  steps: 40\n")
    lines = [json.dumps({"step": step, "time/step": seconds}) for step, seconds in enumerate(times, 1)]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 99, "ti']))
    assert last_written(tmp_path) == f"last written: word_problems/seed-0/weak/metrics.jsonl, {left}"


def test_a_warm_start_says_how_far_it_is(tmp_path: Path) -> None:
    from tandemrl.apps.experiments.experiment import Job, _note

    file, job = tmp_path / "jargon" / "seed-3" / "pair.progress.json", Job("jargon", 3)
    _note(job, file, 1, 100, 5.0)
    assert last_written(tmp_path) == "building the jargon pair of seed 3: step 1 of 100, loss 5.000"
    _note(job, file, 100, 100, 1.0)
    assert last_written(tmp_path).endswith("step 100 of 100, loss 1.000, measuring what it can do")
    file.unlink()
    assert last_written(tmp_path) == "building the models"
