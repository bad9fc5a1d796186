"""Verifiers on rows of HardVerify-Math's form: what they accept and refuse, and what is said of bad rows."""

import json
from pathlib import Path

import pytest

from fake_judge import FakeJudge
from runs import cli, put
from tandemrl.config import ConfigError, load
from tandemrl.data.rows import DataError
from tandemrl.rewards.protocol import GraderError
from tandemrl.tasks.math.verifier import DEFAULTS, Verdicts, bench_verifier, load_pairs

ROWS = [
    ("Olympiad", "Find $f$.", "$f(x)=2 x$", "f(x)=2x", "f(x)=x"),
    ("Olympiad", "Solve $x^2 = 4$.", "$-2$,$2$", r"x \in \{-2, 2\}", "2"),
    ("Big-Math", "Halve it.", "1/2", "0.5", "0.25"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    fields = ("source", "question", "ground_truth", "fn_output", "tn_output")
    records = [{"id": i, "split": "benchmarks", **dict(zip(fields, row, strict=True))} for i, row in enumerate(ROWS)]
    path = tmp_path / "HardVerify-Math.json"
    path.write_text(json.dumps(records))
    return path


def says(prompt: str, _: int) -> str:
    """Right about the first, too strict with the second, too lenient with the third."""
    answer = prompt.partition("Student's answer:")[2].strip()
    assert f"Reference answer:\n{ROWS[0][2]}" in prompt or "f(x)" not in answer
    if answer == ROWS[2][4]:
        return "Perhaps."
    return str(answer in (ROWS[0][3], ROWS[2][3])) if answer != ROWS[1][4] else "True"


def test_a_judge_by_the_published_protocol(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "verifier.json"
    with FakeJudge(says) as judge:
        options = [f"judge.url={judge.url}", "judge.retries=0", "judge.max_failure_rate=0.5"]
        cli("eval", "verifier", "--data", file, "--out", out, *options)
        counts = bench_verifier(load(overrides=[*DEFAULTS, *options]), str(file), limit=2)
    assert len(judge.bodies) == 6 + 4
    assert counts["all"] == Verdicts(2, accepted=1, refused=1, false_negatives=1, false_positives=1, lost=0)
    stored = json.loads(out.read_text())
    assert stored["counts"]["all"] == Verdicts(3, 2, 1, 1, 1, 1)._asdict()
    assert stored["counts"]["Big-Math"] == Verdicts(1, 1, 0, 0, 0, 1)._asdict()
    assert [(row["right"]["accepted"], row["wrong"]["accepted"]) for row in stored["rows"]] == [
        (True, False),
        (False, True),
        (True, None),
    ]


def test_a_scorer_without_a_judge(file: Path) -> None:
    def scorer(text: str) -> dict[str, Verdicts]:
        return bench_verifier(load(overrides=[f"reward.scorers.HardVerify-Math={text}", "reward.workers=1"]), str(file))

    assert scorer("prime")["Big-Math"] == Verdicts(1, 1, 1, 0, 0, 0)
    assert scorer("exact_match")["all"].refused == 3
    with pytest.raises(GraderError, match=r"needs a judge; set judge\.url"):
        bench_verifier(load(overrides=list(DEFAULTS)), str(file))
    with pytest.raises(ConfigError, match=r"judge\.prompt=rubric: marks whole responses"):
        bench_verifier(load(overrides=["judge.url=http://127.0.0.1:9/v1"]), str(file))


def test_bad_rows_are_named(file: Path, tmp_path: Path) -> None:
    records = json.loads(file.read_text())
    assert load_pairs(str(file))[1].row.example_id == "HardVerify-Math/1"
    assert load_pairs(str(put(tmp_path / "rows.jsonl", *records))) == load_pairs(str(file))
    records[1]["tn_output"] = None
    file.write_text(json.dumps(records))
    with pytest.raises(DataError, match=r"HardVerify-Math\.json, row 2, field 'tn_output': expected a string"):
        load_pairs(str(file))
    file.write_text("{}")
    with pytest.raises(DataError, match="row 1, field 'source': expected a string"):
        load_pairs(str(file))
    with pytest.raises(DataError, match=r"benchmarks/HardVerify-Math\.json of https://github\.com/uw-nsl/TinyV"):
        load_pairs("no/such/set.json")
