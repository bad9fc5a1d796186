import hashlib
import json
import os
from pathlib import Path

import pyarrow.parquet
import pytest

from runs import put
from tandemrl.config import RewardConfig
from tandemrl.data.loading import load_rows
from tandemrl.data.parquet import write_splits
from tandemrl.data.rows import DataError
from tandemrl.rewards.scoring import Scorer
from tandemrl.tasks.countdown.rows import build_countdown, generate_calculations, generate_countdown
from tandemrl.tasks.generated.rows import build_synthetic
from tandemrl.tasks.gsm8k.rows import build_gsm8k


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    for split, count in (("train", 3), ("test", 2)):
        lines = [json.dumps({"question": f"{split} {i}?", "answer": f"so\n#### {i},000"}) for i in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return folder


def test_gsm8k_files_hold_the_rows_of_the_raw_files(source, tmp_path):
    out = tmp_path / "out"
    manifest = build_gsm8k(source, out, expect_rows={"train": 3, "test": 2})
    built = {split: load_rows([str(out / f"{split}.parquet")]) for split in ("train", "heldout", "test")}
    assert built["test"] == load_rows([str(source / "test.jsonl")])
    together = sorted(built["train"] + built["heldout"], key=lambda row: row.example_id)
    assert together == load_rows([str(source / "train.jsonl")])
    for split in built:
        checksum = hashlib.sha256((out / f"{split}.parquet").read_bytes()).hexdigest()
        assert manifest["splits"][split]["sha256"] == checksum
    assert manifest["splits"]["train"]["rows"] == 2
    assert json.loads((out / "manifest.json").read_text()) == manifest
    assert {path.stem for path in out.iterdir()} == {"heldout", "manifest", "test", "train"}


def test_gsm8k_refuses_other_counts(source, tmp_path):
    with pytest.raises(DataError, match="3 rows, expected 7473"):
        build_gsm8k(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def folder(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("fails_at", [1, 2])
def test_an_interrupted_build_leaves_what_was_there(source, tmp_path, monkeypatch, fails_at):
    old, new = tmp_path / "old", tmp_path / "new"
    build_gsm8k(source, old, expect_rows=0)
    before, calls = folder(old), []

    def fail(self, table):
        calls.append(table)
        if len(calls) == fails_at:
            raise OSError("disk full")

    monkeypatch.setattr("pyarrow.parquet.ParquetWriter.write_table", fail)
    for out in (old, new):
        calls.clear()
        with pytest.raises(OSError, match="disk full"):
            build_gsm8k(source, out, expect_rows=0)
    assert folder(old) == before
    assert not new.exists()


def test_a_build_is_moved_within_its_folder_which_may_be_on_another_disk(source, tmp_path, monkeypatch):
    moved, replace = [], os.replace
    monkeypatch.setattr("os.replace", lambda a, b: (moved.append((Path(a), Path(b))), replace(a, b)))
    build_gsm8k(source, tmp_path / "out", expect_rows=0)
    assert all(tmp_path / "out" in a.parents for a, _ in moved)
    assert {*folder(tmp_path / "out")} == {"manifest.json", "train.parquet", "heldout.parquet", "test.parquet"}


def test_a_file_is_one_split_only(source, tmp_path):
    (source / "train.jsonl").rename(source / "gsm8k_train.jsonl")
    (source / "test.jsonl").rename(source / "gsm8k-test.jsonl")
    assert build_gsm8k(source, tmp_path / "named", expect_rows={"train": 3, "test": 2})["splits"]["test"]["rows"] == 2
    (source / "gsm8k-test.jsonl").unlink()
    with pytest.raises(DataError, match="expected the test split of openai/gsm8k"):
        build_gsm8k(source, tmp_path / "out", expect_rows=0)
    (source / "gsm8k_train.jsonl").rename(source / "gsm8k.jsonl")
    with pytest.raises(DataError, match=r"gsm8k\.jsonl would be more than one split of openai/gsm8k: name each"):
        build_gsm8k(source, tmp_path / "out", expect_rows=0)


def test_a_field_that_only_later_rows_have_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("tandemrl.data.parquet.CHUNK", 2)
    rows = [{"prompt": [{"content": str(i)}], "extra_info": {"index": i}} for i in range(5)]
    rows[4]["extra_info"] |= {"answer": "so", "docs": [{"id": "a"}]}
    write_splits(tmp_path / "out", "x", {"train": iter(rows)}, {})
    found = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["extra_info"]["answer"] for row in found] == [None] * 4 + ["so"]
    assert found[4] == rows[4]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "train.parquet"]
    rows[4]["extra_info"]["index"] = "four"
    with pytest.raises(DataError, match=r"rows 5 to 5: .*give a field values of one type in all rows"):
        write_splits(tmp_path / "other", "x", {"train": iter(rows)}, {})
    assert not (tmp_path / "other").exists()


def test_synthetic_is_reproducible_and_loads_back(tmp_path):
    counts = {"train": 6, "heldout": 4}
    first = build_synthetic(tmp_path / "a", counts=counts, seed=5)
    assert build_synthetic(tmp_path / "b", counts=counts, seed=5) == first
    assert build_synthetic(tmp_path / "c", counts=counts, seed=6)["splits"] != first["splits"]
    rows = load_rows([str(tmp_path / "a" / "train.parquet"), str(tmp_path / "a" / "heldout.parquet")])
    assert len({row.example_id for row in rows}) == len(rows) == 10
    assert {row.data_source for row in rows} == {"synthetic/plain"}


# ---- Countdown and calculations ------------------------------------------------------------------------------------


def test_countdown_takes_the_first_rows_for_training(tmp_path):
    rows = [{"target": 20 + i, "nums": [10, 5 + i, 5]} for i in range(6)]
    source = put(tmp_path / "train.jsonl", *rows)
    manifest = build_countdown(source, tmp_path / "out", template="instruct", counts={"train": 3, "test": 2})
    assert {name: split["rows"] for name, split in manifest["splits"].items()} == {"train": 3, "test": 2}
    assert manifest["template"] == "instruct"
    train, test = (load_rows([str(tmp_path / "out" / f"{split}.parquet")]) for split in ("train", "test"))
    assert [json.loads(row.ground_truth) for row in test] == [
        {"target": 23, "numbers": [10, 8, 5]},
        {"target": 24, "numbers": [10, 9, 5]},
    ]
    assert [row.example_id for row in train] == [f"countdown/train/{i}" for i in range(3)]
    assert [row.example_id for row in test] == ["countdown/test/0", "countdown/test/1"]
    assert train[0].messages[0]["content"].startswith("<|im_start|>system\nYou are a helpful assistant. You first")
    with Scorer(RewardConfig()) as scorer:
        scores = scorer.score([(train[0], "<answer> 10 + 5 + 5 </answer>"), (train[0], "<answer> 10 + 5 </answer>")])
    assert [score.value for score in scores] == [1.0, 0.1]


def test_countdown_with_messages_of_its_own(tmp_path):
    own = [{"role": "system", "content": "Count."}, {"role": "user", "content": "9 from 4, 5?"}]
    source = put(tmp_path / "a.jsonl", *[{"target": 9, "nums": [4, 5], "messages": own}] * 2)
    build_countdown(source, tmp_path, template="chat", counts={"train": 1, "test": 1})
    assert load_rows([str(tmp_path / "train.parquet")])[0].messages == tuple(own)
    source = put(tmp_path / "a.jsonl", {"target": 9, "nums": [4, 5], "messages": [{"role": "user"}]})
    with pytest.raises(DataError, match=r"a\.jsonl, line 1, field 'messages', field 'prompt\[0\]\.content': expected"):
        build_countdown(source, tmp_path, template="chat", counts={"train": 1, "test": 1})


def test_generated_countdown_is_solved_by_its_solution(tmp_path):
    counts = {"train": 60, "test": 20}
    first = generate_countdown(tmp_path / "a", template="base", counts=counts, seed=1)
    assert generate_countdown(tmp_path / "b", template="base", counts=counts, seed=1) == first
    more = generate_countdown(tmp_path / "c", template="base", counts=counts | {"train": 90}, seed=1)
    assert more["splits"]["test"] == first["splits"]["test"]
    assert generate_countdown(tmp_path / "d", template="base", counts=counts, seed=2)["splits"] != first["splits"]
    assert list(first["splits"]) == ["train", "test"]
    assert (first["shared_prompts"], first["generated"]) == ({}, True)
    rows = load_rows([str(tmp_path / "a" / f"{split}.parquet") for split in counts])
    with Scorer(RewardConfig()) as scorer:
        scores = scorer.score([(row, f"<answer> {row.extra_info['solution']} </answer>") for row in rows])
    assert {score.value for score in scores} == {1.0}


@pytest.mark.parametrize("name", ["multiply", "arithmetic"])
def test_generated_calculations_are_scored_by_their_answer(name, tmp_path):
    counts = {"train": 30, "test": 10}
    manifest = generate_calculations(tmp_path, data_source=name, template="base", digits=2, counts=counts)
    assert {key: split["rows"] for key, split in manifest["splits"].items()} == counts
    rows = load_rows([str(tmp_path / "train.parquet")])
    assert {row.data_source for row in rows} == {name}
    with Scorer(RewardConfig()) as scorer:
        scores = scorer.score([(row, f"<answer> {row.ground_truth} </answer>") for row in rows])
    assert {score.value for score in scores} == {1.0}
