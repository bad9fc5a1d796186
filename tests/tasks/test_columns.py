"""Every builder takes the columns of each published form of its source, and makes the same rows of them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from runs import put
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import Row
from tandemrl.tasks.countdown.rows import build_countdown
from tandemrl.tasks.gsm8k.rows import build_gsm8k
from tandemrl.tasks.math.rows import BOXED_SUFFIX, build_benchmark, build_deepscaler
from tandemrl.tasks.math.verifier import load_pairs
from tandemrl.tasks.qa.rows import build_musique

VERLS = {"ability": "math", "data_source": "theirs"}


def verl(content: str, truth: Any, **extra: Any) -> dict[str, Any]:
    """A row as verl's preprocessing writes it."""
    reward = {"style": "rule", "ground_truth": truth}
    return {**VERLS, "prompt": [{"role": "user", "content": content}], "reward_model": reward, "extra_info": extra}


def rows(*files: Path) -> list[Row]:
    return load_rows([str(file) for file in files])


BENCHMARKS = ("aime24", "aime25", "aime26", "math500", "minerva", "olympiad")
OLDER = " Let's think step by step and output the final answer within \\boxed{}."
PUBLISHED = {
    "hub": {"problem": "How many?", "answer": "12"},
    "question": {"id": 1, "question": "How many?", "answer": 12},
    "capitals": {"ID": "2024-I-1", "Problem": "How many?", "Answer": 12},
    "OlympiadBench": {"question": "How many?", "final_answer": "12"},
    "verl": verl(f"How many?{BOXED_SUFFIX}", "12", index=0),
    "TinyV": verl(f"How many?{OLDER}", "12", index=0, question="How many?"),
    "older suffix": verl(f"How many?{OLDER}", "12", index=0),
}


@pytest.mark.parametrize(
    ("name", "form"), [*((name, "hub") for name in BENCHMARKS), *(("aime24", form) for form in PUBLISHED)]
)
def test_evaluation_sets(name: str, form: str, tmp_path: Path) -> None:
    build_benchmark(name, put(tmp_path / "test.jsonl", PUBLISHED[form]), tmp_path, expect_rows=0)
    [row] = rows(tmp_path / name / "test.parquet")
    assert (row.messages[0]["content"], row.ground_truth) == (f"How many?{BOXED_SUFFIX}", "12")
    assert (row.data_source, row.extra_info["index"]) == (name, 0)


def test_amc_from_the_one_published_file(tmp_path: Path) -> None:
    parts = [("amc23", "27.0"), ("amc24_12B", "3"), ("amc25", "5")]
    records = [verl(f"{subset}?{BOXED_SUFFIX}", answer, index=9, subset=subset) for subset, answer in parts]
    build_benchmark("amc23_25", put(tmp_path / "test.parquet", *records), tmp_path, expect_rows=0)
    built = rows(tmp_path / "amc23_25" / "test.parquet")
    assert [(row.extra_info["subset"], row.ground_truth) for row in built] == parts
    assert [row.extra_info["index"] for row in built] == [0, 1, 2]


@pytest.mark.parametrize("form", PUBLISHED)
def test_deepscaler(form: str, tmp_path: Path) -> None:
    other = {"problem": "Held out?", "answer": "1", "solution": "…"}
    build_deepscaler(put(tmp_path / "a.jsonl", PUBLISHED[form], other), tmp_path, expect_rows=0)
    found = {row.extra_info["index"]: row for row in rows(tmp_path / "train.parquet", tmp_path / "heldout.parquet")}
    assert (found[0].messages[0]["content"], found[0].ground_truth) == (f"How many?{BOXED_SUFFIX}", "12")


ASKED = 'Ann has 3? Let\'s think step by step and output the final answer after "####".'
GSM8K: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "hub": lambda split: {"question": "Ann has 3?", "answer": "so\n#### 1,003"},
    "verl": lambda split: verl(ASKED, "1003", index=0, split=split) | {"data_source": "openai/gsm8k"},
}


@pytest.mark.parametrize("form", GSM8K)
@pytest.mark.parametrize("name", ["{}.jsonl", "main/{}-00000-of-00001.parquet", "{}.parquet"])
def test_gsm8k(form: str, name: str, tmp_path: Path) -> None:
    for split in ("train", "test"):
        put(tmp_path / "copy" / name.format(split), GSM8K[form](split), GSM8K[form](split) | {"more": 1})
        put(tmp_path / "copy" / "socratic" / f"{split}.parquet", {"question": "another config", "answer": "#### 2"})
    if not name.startswith("main"):
        (tmp_path / "copy" / "socratic").rename(tmp_path / "elsewhere")
    build_gsm8k(tmp_path / "copy", tmp_path / "out", expect_rows=0)
    row = rows(tmp_path / "out" / "test.parquet")[0]
    assert (row.messages[0]["content"], row.ground_truth, row.data_source) == (ASKED, "1003", "openai/gsm8k")


@pytest.mark.parametrize(
    "record",
    [
        {"target": 9, "nums": [4, 5]},
        {"target": 9, "numbers": [4, 5]},
        verl("rendered", {"target": 9, "numbers": [4, 5]}, index=7),
        verl("rendered", {"target": 9, "numbers": [4, 5]}, index=7) | {"target": 9, "nums": [4, 5]},
    ],
    ids=["hub", "numbers", "verl", "TinyZero"],
)
def test_countdown(record: dict[str, Any], tmp_path: Path) -> None:
    source = put(tmp_path / "a.parquet", record, record)
    build_countdown(source, tmp_path / "out", template="base", counts={"train": 1, "test": 1})
    row = rows(tmp_path / "out" / "test.parquet")[0]
    assert json.loads(row.ground_truth) == {"target": 9, "numbers": [4, 5]}
    assert "Using the numbers [4, 5]" in row.messages[0]["content"]


PARAGRAPH = {"idx": 3, "title": "T", "paragraph_text": "``Two'' it is", "is_supporting": True}
DOC = {"id": "3", "title": "T", "body": '"Two" it is', "is_supporting": True, "text": '# T\n"Two" it is'}
MUSIQUE = {
    "hub": {"id": "2hop__1", "paragraphs": [PARAGRAPH], "answer_aliases": ["2"], "answerable": True},
    "rlvr": {"info": {"id": "2hop__1", "docs": [DOC], "answers": ["two", "2"], "n_hops": 1}},
}


@pytest.mark.parametrize("form", MUSIQUE)
def test_musique(form: str, tmp_path: Path) -> None:
    for split in ("train", "validation"):
        put(tmp_path / "copy" / f"{split}.jsonl", {"question": "How many?", "answer": "two", **MUSIQUE[form]})
    build_musique(tmp_path / "copy", tmp_path / "out", expect_rows=0)
    [row] = rows(tmp_path / "out" / "validation.parquet")
    assert json.loads(row.ground_truth) == ["two", "2"]
    assert (row.extra_info["id"], row.extra_info["n_hops"], row.extra_info["answerable"]) == ("2hop__1", 1, True)
    assert row.extra_info["docs"] == [{key: value for key, value in DOC.items() if key != "text"}]


def test_hard_verify(tmp_path: Path) -> None:
    raw = {"id": 4, "source": "Olympiad", "fn_output": "0.5", "tn_output": "0.25"}
    hub = put(tmp_path / "hub.jsonl", {**raw, "question": "Halve it.", "ground_truth": "1/2"})
    tinyv = verl(f"Halve it.{OLDER}", "1/2", index=4, question="Halve it.", fn_output="0.5", source="Olympiad")
    built = put(tmp_path / "test.parquet", tinyv | {"tn_output": "0.25"})  # what its `map` leaves of the columns
    assert load_pairs(str(built)) == load_pairs(str(hub))
    assert load_pairs(str(hub))[0].row.example_id == "HardVerify-Math/4"
