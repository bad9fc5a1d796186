"""`tandemrl eval --responses`: texts in a file, such as those of an earlier evaluation, under another grader."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandemrl.cli.main import app
from tandemrl.evals import read_result, read_samples
from tandemrl.evals.compare import CompareError, compare

TEXTS = [r"so \boxed{7}", "so the answer is 7 <end>", r"\boxed{8}", r"\boxed{8.0}"]
"""Two samples of each of two problems, whose ground truths are 7 and 8."""


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """Rows, texts, and a custom grader as verl has them: right if the text ends with the ground truth."""
    head = "def at_end(data_source, solution_str, ground_truth, extra_info=None):"
    (tmp_path / "graders.py").write_text(
        f"{head}\n    return float(solution_str.strip('}} ').endswith(ground_truth))\n"
    )
    rows = [{"data_source": "math500", "prompt": "?", "ground_truth": truth} for truth in "78"]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    texts = [{"index": i // 2, "text": text, "plain": text.replace("<end>", "")} for i, text in enumerate(TEXTS)]
    (tmp_path / "texts.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    monkeypatch.chdir(tmp_path)


def judged(out: str, *more: str, responses: str = "texts.jsonl") -> dict[str, float]:
    given = ["--model", "gone", "--responses", responses, "--data", "rows.jsonl", "--samples", "2", "--out", out]
    result = CliRunner().invoke(app, ["eval", "pass-at-k", *given, "--profile", "tiny", *more])
    assert result.exit_code == 0, result.output
    return read_result(Path(out, "pass-at-k.json"))["metrics"]["macro"]


def test_another_grader_over_the_texts_of_an_evaluation_is_a_new_one(tmp_path):
    boxed, ends = "reward.scorers={'*': boxed}", "reward.scorers={'*': 'graders:at_end'}"
    assert judged("old", boxed)["pass@1"] == 0.75
    verdicts = [sample.correct for sample in read_samples(tmp_path / "old" / "pass-at-k.samples.jsonl")]
    assert verdicts == [True, False, True, True]
    again = judged("new", ends, responses="old/pass-at-k.samples.jsonl")  # reads the texts without special tokens
    assert (again["pass@1"], again["pass@2"]) == (0.75, 1.0)
    with pytest.raises(CompareError, match=r"reward\.scorers"):
        compare(tmp_path / "old", tmp_path / "new")
    judged("same", ends)
    [pass1] = [each for each in compare(tmp_path / "new", tmp_path / "same") if each.metric == "pass@1"]
    assert pass1.difference == (0, 0, 0)  # the same texts under the same grader
