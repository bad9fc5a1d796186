"""`tandemrl score`: responses find their rows, scores keep their order, and nothing is written of what failed."""

import json
import warnings
from pathlib import Path

import pytest

from runs import cli, put
from tandemrl.apps.score import means, score_file
from tandemrl.config import load
from tandemrl.data.rows import DataError, Row

ROWS = [
    Row(
        "openai/gsm8k/test/0",
        ({"role": "user", "content": "9+9?"},),
        "openai/gsm8k",
        "18",
        {"split": "test", "index": 0},
    ),
    Row("math500/1", ({"role": "user", "content": "half?"},), "math500", r"\frac{1}{2}", {"index": 1}),
    Row("math500/2", ({"role": "user", "content": "x?"},), "math500", "8", {"index": 2}),
]
TEXTS = ["#### 18", r"\boxed{0.5}", r"\boxed{\int_0^4 t\,dt}"]


@pytest.fixture
def data(tmp_path: Path) -> str:
    records = [
        {
            "prompt": list(row.messages),
            "data_source": row.data_source,
            "reward_model": {"style": "rule", "ground_truth": row.ground_truth},
            "extra_info": {"index": row.extra_info["index"], "split": row.extra_info.get("split")},
        }
        for row in ROWS
    ]
    return str(put(tmp_path / "rows.jsonl", *records))


def responses(folder: Path, *lines: object) -> Path:
    return put(folder / "responses.jsonl", *lines)


def read(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_responses_in_the_order_of_the_rows(data: str, tmp_path: Path) -> None:
    out = tmp_path / "new" / "scores.jsonl"
    file = responses(tmp_path, {"response": TEXTS[0]}, *({"text": text} for text in TEXTS[1:]))
    summary = score_file(load(None, ["reward.workers=1"]), [data], file, out=out, batch=2)
    parts = {"acc": 1.0, "answer_present": 1.0}
    answers = ("18", "0.5", r"\int_0^4 t\,dt")
    wanted = [
        {"example_id": row.example_id, "score": 1.0, "parts": parts, "answer": answer}
        for row, answer in zip(ROWS, answers, strict=True)
    ]
    wanted[0]["parts"] = parts | {"has_guillemets": 0.0}
    assert read(out) == wanted
    assert summary.responses == 3
    assert summary.by_set["math500"] == {"responses": 2.0, "score": 1.0, "acc": 1.0, "answer_present": 1.0}


def test_responses_that_a_judge_did_not_score_are_no_part_of_the_means() -> None:
    parts = [
        {"score": 1.0, "acc": 1.0, "own": 3.0},
        {"score": 0.0, "acc": 0.0, "unscored": 1.0},
        {"score": 0.0, "own/none": 1.0},
    ]
    found = means(parts)
    assert found.pop("unscored") == pytest.approx(1 / 3)
    assert found == {"responses": 3.0, "score": 0.5, "acc": 0.5, "own": 3.0, "own/none": 0.5}


def test_responses_name_their_rows(data: str, tmp_path: Path) -> None:
    out = tmp_path / "scores.jsonl"
    lines = [
        {"example_id": "math500/1", "response": r"\boxed{0.25}", "step": 7},
        {"index": 0, "response": "#### 20"},
        {"example_id": "math500/1", "response": r"\boxed{\frac12}"},
    ]
    summary = score_file(
        load(overrides=["reward.gsm8k=tandem", "reward.workers=1"]), [data], responses(tmp_path, *lines), out=out
    )
    assert [line["score"] for line in read(out)] == [0.0, 0.1, 1.0]
    assert summary.by_set["math500"]["score"] == 0.5


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"response": "5"}], "1 responses without example_id or index, for 3 rows"),
        ([{"example_id": "math500/9", "response": "5"}], "no row 'math500/9'; name one by example_id, as in 'openai"),
        ([{"index": 3, "response": "5"}], "line 1: no row 3; name one"),
        ([{"index": 0, "response": "5"}, {"response": "5"}], r"line 2: either every line has an example_id or index"),
        ([{"index": 0, "answer": "5"}], r"line 1: expected the response as a string in one of: response, text"),
        (["5"], "line 1: expected an object, found str"),
        ([], "no responses"),
    ],
)
def test_bad_responses_are_named_and_leave_no_result(data, tmp_path, lines, message):
    out = tmp_path / "scores.jsonl"
    with pytest.raises(DataError, match=message):
        score_file(load(), [data], responses(tmp_path, *lines), out=out)
    assert not out.exists()


def test_the_command(data: str, tmp_path: Path) -> None:
    file, out = responses(tmp_path, *({"response": text} for text in TEXTS)), tmp_path / "scores.jsonl"
    command = ["score", "--data", data, "--responses", str(file), "--out", str(out), "reward.workers=1"]
    result = cli(*command)
    assert len(read(out)) == 3
    assert "3 responses in" in result
    assert "math500" in result
    broken = cli(*command, "reward.scorers.math500=no_such_module:score", fails=2)
    assert broken.startswith("error: reward.scorers: no_such_module:score: cannot be imported: ModuleNotFoundError")


def test_a_config_of_other_data_can_be_used_and_what_is_typed_has_to_match(data: str, tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("reward: {scorers: {theirs: no_such_module:score}, weights: {score: 2.0}}")
    file = responses(tmp_path, *({"response": text} for text in TEXTS))
    command = ["score", "--data", data, "--responses", str(file), "reward.workers=1"]
    with pytest.warns(UserWarning, match=r"reward\.scorers\.theirs"):
        cli(*command, "--config", run)
    for typed in (["reward.scorers.math=dapo"], ["--config", str(run), "reward.scorers.math=dapo"]):
        with warnings.catch_warnings(action="ignore"):
            refused = cli(*command, *typed, fails=2)
        assert "reward.scorers.math=dapo: no row matches" in refused
        assert "did you mean math500?" in refused


@pytest.mark.parametrize(("credit", "earned"), [("fraction", 0.5), ("all", 0.0)])
def test_a_program_earns_a_fraction_or_nothing(credit: str, earned: float, tmp_path: Path) -> None:
    tests = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "8\n"]})
    record = {"prompt": "Add.", "data_source": "codecontests", "reward_model": {"ground_truth": tests}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(record))
    program = "```python\nprint(sum(map(int, input().split())))\n```"
    config = load(overrides=[f"reward.code_credit={credit}"])
    file = responses(tmp_path, {"response": program, "index": 0})
    score_file(config, [str(tmp_path / "rows.jsonl")], file, out=tmp_path / "out")
    assert [line["score"] for line in read(tmp_path / "out")] == [earned]


COMPARES = """
def longest(completions, **columns):
    '''1 for the longest response to a prompt, which only who sees all of them can tell; the number of them in 0.1.'''
    most = max(map(len, completions))
    return [(len(text) == most) + len(completions) / 10 for text in completions]
"""


@pytest.mark.usefixtures("without_math")
@pytest.mark.parametrize("batch", [1, 4])
def test_a_batch_never_ends_within_the_responses_to_a_prompt(batch, data, tmp_path, monkeypatch):
    """Also where responses to several prompts alternate; of the last two, one is alone."""
    (tmp_path / "compares_all.py").write_text(COMPARES)
    monkeypatch.syspath_prepend(tmp_path)
    named = [("math500/1", "a"), ("math500/2", "abc"), ("math500/1", "abcd"), ("math500/2", "a")]
    named += [("math500/1", "ab"), ("openai/gsm8k/test/0", "x")]
    file = responses(tmp_path, *({"example_id": name, "text": text} for name, text in named))
    own = ["reward.scorers.math500=compares_all:longest", "reward.scorers.openai/gsm8k=compares_all:longest"]
    score_file(load(None, [*own, "reward.workers=1"]), [data], file, out=tmp_path / "scores.jsonl", batch=batch)
    assert [line["score"] for line in read(tmp_path / "scores.jsonl")] == [0.3, 1.2, 1.3, 0.2, 0.3, 1.1]
