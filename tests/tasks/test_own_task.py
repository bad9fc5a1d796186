"""A task is one folder and one line: built, shown and scored by its names alone."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runs import cli
from tandemrl.cli.main import app
from tandemrl.config.catalogue import TASKS, Task

ROWS = """
from tandemrl.data.parquet import write_splits
from tandemrl.data.rows import Row, record_of

ASKED = [{"role": "user", "content": "Say it backwards: abc"}]

def build(out, *, seed=0, counts={"train": 3}):
    made = {split: [record_of("echo", ASKED, "", "cba", {"index": i}) for i in range(n)] for split, n in counts.items()}
    return write_splits(out, "echo", made, {"seed": seed})

def rows(source, parts):
    return iter([Row(f"echo/{i}", tuple(ASKED), "echo", "cba", {}) for i in range(int(parts[0]))])
"""
GRADER = """
from tandemrl.rewards.protocol import Score

def grade(row, text, options):
    right = float(row.ground_truth in text)
    return Score(right, {"acc": right}, text)
"""
BUILT = "built/train.parquet"


def scored(*arguments: str) -> list[float]:
    assert "3 responses" in cli("score", "--data", BUILT, "--responses", "said.jsonl", "--out", "s.jsonl", *arguments)
    return [json.loads(line)["score"] for line in Path("s.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, without_math: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "echo_task").mkdir()
    (tmp_path / "echo_task" / "rows.py").write_text(ROWS)
    (tmp_path / "echo_task" / "grader.py").write_text(GRADER)
    (tmp_path / "said.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("cba", "no", "cba!")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_a_folder_and_a_line_are_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"build": "echo_task.rows:build", "rows": "echo_task.rows:rows", "grader": "echo_task.grader:grade"}
    monkeypatch.setitem(TASKS, "echo", Task("", graded=("echo",), **names))
    assert "train: 3 rows" in cli("data", "build", "echo", "--out", "built", "--seed", "1")
    assert "2 of 2 rows\necho: graded by echo" in cli("data", "show", "echo:2")
    assert scored() == [1.0, 0.0, 1.0]


def test_without_a_line_it_has_module_and_function() -> None:
    cli("data", "build", "echo_task.rows:build", "--out", "built", "--train", "3")
    mine = "reward.scorers.echo=echo_task.grader:grade"
    assert "echo: grade gives 1 for the ground truth of echo/0, as 'cba'" in cli("data", "show", BUILT, mine)
    assert scored(mine) == [1.0, 0.0, 1.0]
    refused = CliRunner().invoke(app, ["data", "build", "echo_task.rows:none", "--out", "built"])
    assert "data build echo_task.rows:none: cannot be imported" in f"{refused.exception} {refused.output}"


COLUMNS = ("data.columns.prompt=ask", "data.columns.ground_truth=gold")


@pytest.mark.parametrize(
    ("gold", "scorer", "said"),
    [
        ("4", "gsm8k", "own: gsm8k gives 1 for the ground truth of own/1, as '#### 4'\n"),
        ("four", "gsm8k", "gives 0 for the ground truth of own/1, as '#### four': can a correct response"),
        ("4", None, "own: row own/1: no scorer for data_source 'own'"),
    ],
)
def test_show_tries_the_grader_on_the_ground_truth(folder: Path, gold: str, scorer: str | None, said: str) -> None:
    (folder / "own.jsonl").write_text(json.dumps({"ask": "How many?", "gold": gold}) + "\n")
    named = [f"reward.scorers.own={scorer}"] if scorer else []
    shown = cli("data", "show", "own.jsonl", *COLUMNS, *named)
    assert f"own/1  [own]  ground truth: {gold}" in shown
    assert said in shown
