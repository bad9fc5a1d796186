"""The sets of the rubric reward model: problems with criteria, and answers with the score to give them."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from fake_judge import says
from runs import cli
from tandemrl.config import JudgeConfig, load
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import Row
from tandemrl.rewards.protocol import Score
from tandemrl.tasks.rubric.judge import JudgePool, grade_score, other_words, template_of
from tandemrl.tasks.rubric.rows import fill

SYSTEM = {
    "role": "system",
    "content": "\nPlease reason step by step, and put your final answer within \\boxed{}.\n\n\n",
}
RAW = {"problem": "1 + 1?", "answer": "2", "criteria": "2 points: adds", "difficulty": 3.0, "query_id": "q7"}
PUBLISHED = RAW | {
    "data_source": "polaris_tinyv",
    "prompt": [SYSTEM, {"role": "user", "content": "1 + 1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0, "answer": "2", "question": "1 + 1?", "criteria": "2 points: adds"},
}


WRONG = Score(0.0, {"acc": 0.0}, "4")


def built(tmp_path: Path, command: str, *records: dict[str, Any], options: tuple[str, ...] = ()) -> list[Row]:
    """The rows that a command makes of published files, which lie among those of the other set."""
    for split in ("train", "test"):
        for name in ("polaris", "rrm"):
            table = pyarrow.Table.from_pylist(list(records) if name == command else [{"other": 1}])
            (tmp_path / "copy").mkdir(exist_ok=True)
            pyarrow.parquet.write_table(table, tmp_path / "copy" / f"{split}_{name}.parquet")
    arguments = ["data", "build", command, "--source", str(tmp_path / "copy"), "--out", str(tmp_path / "out"), *options]
    assert f"test: {len(records)} rows" in cli(*arguments)
    return load_rows([str(tmp_path / "out" / "test.parquet")])


@pytest.mark.parametrize("record", [RAW, PUBLISHED], ids=["raw", "published"])
def test_polaris_rows_can_be_judged(record: dict[str, Any], tmp_path: Path) -> None:
    [row] = built(tmp_path, "polaris", record)
    assert row.messages == (SYSTEM, {"role": "user", "content": "1 + 1?"})
    assert (row.data_source, row.ground_truth, row.extra_info["split"]) == ("polaris_tinyv", "2", "test")
    judge = says("Total Score: 7/10")
    [score] = JudgePool(judge, JudgeConfig(mode="tinyv_only"))([(row, "I add: 2", WRONG)])
    assert score.value == pytest.approx(0.7)
    [[prompt]] = judge.calls
    assert all(text in prompt for text in ("Question:\n1 + 1?", "Criteria:\n2 points: adds", "Answer:\nI add: 2"))


def test_rubric_rows_ask_what_a_judge_is_asked_and_are_scored(tmp_path: Path) -> None:
    raw = {"question": "1 + 1? {{CRITERIA}}", "criteria": "2 points: adds", "response": "I add: 2", "score": 8.5}
    [row] = built(tmp_path, "rrm", raw, options=("--full-marks", "10"))
    assert (row.data_source, row.ground_truth) == ("grade", "0.85")
    judge = says("Total Score: 7/10")
    policy = Row("p/0", (), "polaris_tinyv", "2", {"question": raw["question"], "criteria": raw["criteria"]})
    JudgePool(judge, JudgeConfig(prompt="rrm", mode="tinyv_only"))([(policy, raw["response"], WRONG)])
    assert row.messages == ({"role": "user", "content": judge.calls[0][0]},)
    assert grade_score(row, "Total Score: 7.5/10").value == pytest.approx(0.9**2)


def test_a_judge_is_asked_in_the_published_words() -> None:
    """Against the text in the published `tinyv.py`, by its checksum and its white space."""
    judge, row = says("Total Score: 7/10"), Row("p/0", (), "polaris_tinyv", "2", {"question": "Q", "criteria": "C"})
    JudgePool(judge, load("rrm_policy", ["train.steps=1"]).judge)([(row, "A", WRONG)])
    [[prompt]] = judge.calls
    start = "You are a grading teacher. Based on the following information, please evaluate the student's submitted"
    assert prompt.startswith(start)
    assert prompt.endswith("\n\n\nQuestion:\nQ\n\n\n\nScoring Criteria:\nC\n\n\n\nStudent's Answer:\nA\n\n")
    assert hashlib.sha256(prompt.encode()).hexdigest()[:16] == "be01000e85a1cbe0"


def test_other_words_than_those_a_judge_was_trained_on_are_noticed(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("Mark {{MODEL_ANSWER}} by {{CRITERIA}}!\n")
    template, url = template_of(JudgeConfig(prompt="rrm")).text, "http://localhost:1/v1"

    def graded(text: str) -> Row:
        return Row("g/0", ({"role": "user", "content": text},), "grade", "0.5", {})

    def warned(row: Row, **judge: Any) -> str:
        return other_words([row], JudgeConfig(**judge)) or ""

    published = graded(fill(template, lambda field: f"the {field}\n\n"))
    assert warned(published, prompt="rrm") == ""
    assert "other words than those of judge.prompt=rubric" in warned(published)
    assert "judge.template=" in warned(published, prompt="rrm", template=str(mine))
    assert warned(graded("Mark 7 by this!"), template=str(mine)) == ""
    polaris = Row("p/0", (), "polaris_tinyv", "2", {})
    assert "judge.prompt=reasoning asks in other words" in warned(polaris, prompt="reasoning", url=url)
    assert "judge.template=" in warned(polaris, template=str(mine), url=url)
    assert warned(polaris, prompt="rrm", url=url) == warned(polaris, prompt="rubric") == ""
    assert warned(replace(polaris, data_source="mine_tinyv"), url=url) == ""
