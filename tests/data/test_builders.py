import hashlib
import json
import os
from pathlib import Path

import pytest

from tandemrl.data.builders import build_gsm8k, build_synthetic
from tandemrl.data.rows import DataError, load_rows

DATA = Path(os.environ.get("TANDEMRL_DATA", Path(__file__).parents[3] / "shared" / "data"))


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
    assert sorted(path.name for path in out.iterdir()) == [
        "heldout.parquet",
        "manifest.json",
        "test.parquet",
        "train.parquet",
    ]


def test_gsm8k_refuses_other_counts_and_missing_files(source, tmp_path):
    with pytest.raises(DataError, match="3 rows, expected 7473"):
        build_gsm8k(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    build_gsm8k(source, tmp_path / "out", expect_rows=0)
    (source / "test.jsonl").unlink()
    with pytest.raises(DataError, match=r"test\.jsonl: no such file"):
        build_gsm8k(source, tmp_path / "again", expect_rows=0)


def test_an_interrupted_build_leaves_no_half_file(source, tmp_path, monkeypatch):
    def fail(table, path):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("pyarrow.parquet.write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        build_gsm8k(source, tmp_path / "out", expect_rows=0)
    assert not (tmp_path / "out" / "train.parquet").exists()
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_synthetic_is_reproducible_and_loads_back(tmp_path):
    counts = {"train": 6, "heldout": 4}
    first = build_synthetic("plain", tmp_path / "a", counts, seed=5)
    assert build_synthetic("plain", tmp_path / "b", counts, seed=5) == first
    assert build_synthetic("plain", tmp_path / "c", counts, seed=6)["splits"] != first["splits"]
    rows = load_rows([str(tmp_path / "a" / "train.parquet"), str(tmp_path / "a" / "heldout.parquet")])
    assert len({row.example_id for row in rows}) == len(rows) == 10
    assert {row.data_source for row in rows} == {"synthetic/plain"}


def test_synthetic_refuses_an_unknown_split(tmp_path):
    with pytest.raises(DataError, match="'test'"):
        build_synthetic("plain", tmp_path, {"test": 3}, seed=0)


@pytest.mark.skipif(
    not (DATA / "gsm8k" / "train.jsonl").is_file(),
    reason="no GSM8K files; set TANDEMRL_DATA to the folder above gsm8k/",
)
def test_real_gsm8k_has_the_published_counts(tmp_path):
    splits = build_gsm8k(DATA / "gsm8k", tmp_path)["splits"]
    assert {name: split["rows"] for name, split in splits.items()} == {"train": 6973, "heldout": 500, "test": 1319}
