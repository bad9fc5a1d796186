"""Lines where there is no bar."""

import threading
from pathlib import Path

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
