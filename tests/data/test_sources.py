import json
import math
import sys
import types

import pytest

import runs
from tandemrl.data.rows import DataError
from tandemrl.data.sources import Origin, Record, read

TRAIN, TEST = Origin("owner/Set", "train"), Origin("owner/Set", "test")


def put(path, *values):
    """Records ``{"a": value}`` in the format that the name says."""
    records = [{"a": value} for value in values]
    if path.suffix != ".json":
        return runs.put(path, *records)
    path.write_text(json.dumps(records))
    return path


def values(origin, source, **options):
    return [record.fields["a"] for record in read(origin, source, **options)]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_a_file_is_the_copy_whatever_its_name(tmp_path, suffix):
    file = put(tmp_path / f"mine{suffix}", 1, 2, 3)
    assert values(TRAIN, file) == [1, 2, 3]
    assert values(TRAIN, tmp_path) == [1, 2, 3]
    assert next(read(TRAIN, file)).where == f"{file}, {'line' if suffix == '.jsonl' else 'row'} 1"


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (["train.jsonl"], ["test.jsonl"]),
        ([f"data/train-0000{i}-of-00002.parquet" for i in (0, 1)], ["data/test-00000-of-00001.parquet"]),
        (["default/train/0000.parquet", "default/train/0001.parquet"], ["default/test/0000.parquet"]),
    ],
)
def test_a_folder_is_read_as_the_hub_lays_it_out(tmp_path, train, test):
    for number, name in enumerate(train):
        put(tmp_path / name, 10 * number, 10 * number + 1)
    for name in test:
        put(tmp_path / name, -1)
    put(tmp_path / ".cache" / "huggingface" / "train.jsonl", 99)
    (tmp_path / "README.md").write_text("about")
    assert values(TRAIN, tmp_path) == [0, 1, 10, 11][: 2 * len(train)]
    assert values(TEST, tmp_path) == [-1]


def test_another_split_is_never_taken_for_the_one_asked_for(tmp_path):
    put(tmp_path / "train.parquet", 1)
    with pytest.raises(DataError, match=r"expected the test split of owner/Set .*files found: none"):
        values(TEST, tmp_path)
    put(tmp_path / "training_extra.parquet", 2)  # not "train" either
    assert values(TRAIN, tmp_path) == [1]
    put(tmp_path / "test" / "train.jsonl", 1)  # its own name goes before that of its folder
    with pytest.raises(DataError, match="files found: none"):
        values(TEST, tmp_path / "test")
    put(tmp_path / "test" / "test.jsonl", 2)
    assert (values(TRAIN, tmp_path / "test"), values(TEST, tmp_path / "test")) == ([1], [2])


def test_a_missing_shard_is_noticed(tmp_path):
    put(tmp_path / "train-00000-of-00003.parquet", 1)
    put(tmp_path / "train-00002-of-00003.parquet", 2)
    with pytest.raises(DataError, match="2 of 3 files of the split are there"):
        values(TRAIN, tmp_path)


def test_years_are_not_shards(tmp_path):
    put(tmp_path / "aime_2025.jsonl", 1)
    put(tmp_path / "aime_2026.jsonl", 2)
    with pytest.raises(DataError, match=r"files found: aime_2025\.jsonl, aime_2026\.jsonl"):
        values(Origin("MathArena/other"), tmp_path)
    assert values(Origin("MathArena/aime_2026"), tmp_path) == [2]


def test_a_copy_among_others_has_the_name_of_its_repository(tmp_path):
    put(tmp_path / "Set" / "train.jsonl", 1)
    put(tmp_path / "Other.jsonl", 2)
    put(tmp_path / "owner" / "Third" / "data" / "whatever-00000-of-00001.parquet", 3)
    assert values(TRAIN, tmp_path, alone=False) == [1]
    assert values(Origin("owner/Other", "train"), tmp_path, alone=False) == [2]
    assert values(Origin("owner/Third"), tmp_path, alone=False) == [3]
    with pytest.raises(DataError, match=r"no copy of owner/Fourth; expected a folder Fourth/ or a file Fourth\{"):
        values(Origin("owner/Fourth", "train"), tmp_path, alone=False)
    with pytest.raises(DataError, match="no such folder"):
        values(TRAIN, tmp_path / "Other.jsonl", alone=False)


def test_a_field_is_text_or_a_number():
    record = Record("f, row 3", {"a": "x", "b": 142.0, "c": 7, "d": "", "e": None, "f": True, "g": [1], "h": math.nan})
    assert [record.text(field) for field in "abc"] == ["x", "142.0", "7"]
    for field in "defghi":
        with pytest.raises(DataError, match=f"f, row 3, field '{field}': expected a string"):
            record.text(field)


def test_the_hub_is_asked_for_the_split_or_gives_its_first(monkeypatch):
    def load_dataset(repo, config, *, split):
        assert (repo, config) == ("owner/Set", None)
        return {"only": [{"a": 1}], "more": [{"a": 2}]} if split is None else [{"a": split}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert values(TEST, None) == ["test"]
    assert values(Origin("owner/Set"), None) == [1]
    assert next(read(TEST, None)).where == "hf:owner/Set:test, row 1"
