"""`tandemrl regrade`: the same texts under another grader, as a new evaluation."""

import json

import pytest

from runs import cli, put
from tandemrl.config import load, to_yaml
from tandemrl.evals import EvalError, EvalResult, Sample, graded, read_result, read_samples, summarise
from tandemrl.evals.compare import CompareError, compare
from tandemrl.evals.files import digests, write_result
from tandemrl.evals.regrade import regrade
from tandemrl.evals.session import grader_settings

TEXTS = [r"so \boxed{7}", "so the answer is 7", r"\boxed{8}", r"\boxed{8.0}"]
"""Two samples of each of two problems, whose ground truths are 7 and 8."""


@pytest.fixture(autouse=True)
def grader(tmp_path, without_math, monkeypatch):
    """A custom grader, ``graders:anywhere``, as verl has them: right if the text has the ground truth anywhere."""
    head = "def anywhere(data_source, solution_str, ground_truth, extra_info=None):"
    (tmp_path / "graders.py").write_text(f"{head}\n    return float(ground_truth in solution_str)\n")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def rows(tmp_path):
    lines = [{"data_source": "math500", "prompt": "?", "ground_truth": truth} for truth in "78"]
    return put(tmp_path / "rows.jsonl", *lines)


def evaluation(folder, rows, correct=(True, False, True, True), phase="pass-at-k", **changes):
    samples = [
        Sample(
            i // 2, f"math500/{i // 2 + 1}", "math500", "solo", i % 2, 0, text, [7], 1, "S1", 1, 1.0, "eos",
            float(right), right, "7" if right else None, cross_entropy=0.5,
        )
        for i, (text, right) in enumerate(zip(TEXTS, correct, strict=True))
    ]  # fmt: skip
    config = {
        "model": "gone", "data": [str(rows)], "digests": digests([str(rows)]), **grader_settings(load()),
        "eval": {"profile": "tiny", "samples": 2, "k": [1, 2], "seed": 17, "bootstrap": 10},
    }  # fmt: skip
    metrics = summarise(samples, lambda problem: graded(problem, k=(1, 2)), bootstrap=10, seed=0)
    metrics["macro"]["prompts_dropped"] = 3
    write_result(folder / f"{phase}.json", phase, config | changes, EvalResult(metrics, samples), seeds={})
    return folder


def test_another_grader_makes_a_new_evaluation_beside_the_old(tmp_path, rows):
    old = evaluation(tmp_path / "eval", rows)
    evaluation(old, rows, phase="junior")
    before = {file.name: file.read_bytes() for file in old.iterdir()}
    done = regrade(old, grader="graders:anywhere")
    assert {file.name: file.read_bytes() for file in old.iterdir()} == before
    new = tmp_path / "eval-anywhere"
    assert [(each.file, each.samples, each.rescored) for each in done] == [
        (new / "pass-at-k.json", 4, 0),
        (new / "junior.json", 4, 0),
    ]
    [(was, now)] = done[0].changed
    assert (was.text, was.correct, now.correct) == (TEXTS[1], False, True)
    assert (done[0].before["pass@1"], done[0].metrics["macro"]["pass@1"]) == (0.75, 1.0)
    result, samples = read_result(new / "pass-at-k.json"), read_samples(new / "pass-at-k.samples.jsonl")
    assert result["config"]["reward"]["scorers"] == {"*": "graders:anywhere"}
    assert result["regraded"] == {"from": str(old / "pass-at-k.json"), "changed": 1, "rescored": 0}
    assert result["metrics"]["macro"]["prompts_dropped"] == 3
    assert [one.text for one in samples] == TEXTS
    assert read_samples(new / "junior.samples.jsonl")[0].cross_entropy == 0.5  # what else is known of a text stays
    assert "cross_entropy" in read_result(new / "junior.json")["metrics"]["macro"]
    lines = [json.loads(line) for line in (new / "changed.jsonl").read_text().splitlines()]
    assert [(line["phase"], line["before"]["correct"], line["after"]["correct"]) for line in lines] == [
        ("pass-at-k", False, True),
        ("junior", False, True),
    ]
    with pytest.raises(EvalError, match="eval-anywhere is there already, and nothing is overwritten"):
        regrade(old, grader="graders:anywhere")
    other = evaluation(tmp_path / "other", rows, (False, False, True, False))
    regrade(other, grader="graders:anywhere")
    [pass1] = [each for each in compare(new, tmp_path / "other-anywhere") if each.metric == "pass@1"]
    assert pass1.difference.mean == 0  # the same texts under the same grader
    with pytest.raises(CompareError, match=r"reward\.scorers"):
        compare(old, new)


def test_a_run_is_graded_with_the_settings_of_its_config(tmp_path, rows):
    """Here the column of the ground truths, which no result file has."""
    rows.write_text(rows.read_text().replace("ground_truth", "truth"))
    run = tmp_path / "run"
    evaluation(run / "eval", rows)
    (run / "config.yaml").write_text(to_yaml(load(overrides=["data.columns.ground_truth=truth"])))
    [done] = regrade(run, grader="boxed")
    assert (done.file, done.changed) == (run / "eval-boxed" / "pass-at-k.json", [])
    out = cli("regrade", str(run), "--grader", "graders:anywhere", "--out", str(tmp_path / "new"))
    assert "1 (25.0%)" in out
    assert "pass-at-k, math500/1, sample 1: wrong -> right; None -> None; …so the answer is 7" in out
    assert (tmp_path / "new" / "pass-at-k.json").exists()


def test_what_cannot_be_graded_again_says_why(tmp_path, rows):
    old = evaluation(tmp_path / "eval", rows)
    missing = "row math500/2 of math500 is not in"
    for arguments, said in (
        ([], "nothing to change: give a grader"),
        (["train.lr=1"], "'train.lr=1' has no effect here"),
        (["--grader", "boxd"], "'boxd' is neither module:function nor one of the library's scorers"),
        (["reward.scorers.mine=boxed"], "no row matches it first"),
    ):
        assert said in cli("regrade", str(old), *arguments, fails=2)
    evaluation(tmp_path / "read", rows, phase="legibility")
    with pytest.raises(EvalError, match="no phase with grades"):
        regrade(tmp_path / "read", grader="boxed")
    assert not [*tmp_path.glob("*-boxed")]
    rows.write_text(rows.read_text().splitlines()[0] + "\n")
    with pytest.raises(EvalError, match="it changed since"):
        regrade(old, grader="boxed")
    with pytest.raises(EvalError, match=missing):
        regrade(evaluation(tmp_path / "again", rows), grader="boxed")


def test_branches_that_no_file_holds_are_not_graded_again(rows, tmp_path):
    evaluation(tmp_path / "eval", rows, phase="handover-effect")
    with pytest.raises(EvalError, match="no phase with grades"):
        regrade(tmp_path / "eval", grader="graders:anywhere")
