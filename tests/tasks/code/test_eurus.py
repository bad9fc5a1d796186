import json

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tandemrl.data.loading import load_rows
from tandemrl.data.rows import DataError
from tandemrl.tasks.code.rows import build_eurus

TESTS = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})


def row(ability, truth, *, index, text="Do it.", source="numina_olympiads"):
    return {
        "data_source": source,
        "prompt": [{"content": "[ASSESS] [ADVANCE]", "role": "system"}, {"content": text, "role": "user"}],
        "ability": ability,
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {"index": index, "split": "dummy"},
    }


TRAIN = [
    row("math", "4", index=0),
    row("math", "", index=1),
    row("math", None, index=2),
    row("math", "3 m/s", index=3),
    row("math", "40 mph", index=4),
    row("math", r"\boxed{4}", index=5),
    row("math", r"\frac{1}{2}", index=6, text="word " * 40),
    row("code", TESTS, index=7, source="apps"),
    row("code", '{"inputs": [], "outputs": []}', index=8, source="apps"),
    row("code", '{"inputs": ["1"]}', index=9, source="apps"),
    row("code", "[1", index=10, source="taco"),
    row("code", "3", index=11, source="taco"),
    row("code", '{"inputs": ["1", "2"], "outputs": ["1"]}', index=13, source="taco"),
    row("code", '{"inputs": ["oops"], "outputs": ["1"], "fn_name": "f"}', index=14, source="taco"),
    row("poetry", "x", index=12),
]
VALIDATION = [row("math", "5", index=0), row("code", TESTS, index=1, source="codecontests", text="Add one.")]
COUNTS = {"train/math": 7, "train/code": 7, "test/math": 1, "test/code": 1}


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "eurus"
    folder.mkdir()
    for name, records in (("train", TRAIN), ("validation", VALIDATION)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / f"{name}.parquet")
    return folder


@pytest.fixture
def tokenizer(tmp_path):
    """One token per word, split at white space; no special tokens."""
    raw = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    raw.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_rows_that_cannot_be_graded_are_left_out_and_counted(source, tokenizer, tmp_path):
    out = tmp_path / "out"
    manifest = build_eurus(source, out, tokenizer=tokenizer, max_tokens=20, expect_rows=COUNTS)
    assert {key: count for key, count in manifest["dropped"].items() if count} == {
        "train: maths without an answer": 2,
        "train: maths with a unit of speed": 2,
        "train: maths with a boxed ground truth": 1,
        "train: code without tests": 3,
        "train: code without valid JSON": 1,
        "train: code with unusable tests": 2,
        "train: other ability": 1,
        "train: too long": 1,
    }
    train, test = (load_rows([str(out / f"{split}.parquet")]) for split in ("train", "test"))
    assert [(r.data_source, r.ground_truth, r.extra_info["index"]) for r in train] == [
        ("numina_olympiads", "4", 0),
        ("apps", TESTS, 7),
    ]
    assert [r.example_id for r in test] == ["numina_olympiads/test/0", "codecontests/test/1"]
    assert test[1].messages == ({"content": "Add one.", "role": "user"},)
    abilities = pyarrow.parquet.read_table(out / "test.parquet")["ability"].to_pylist()
    assert abilities == ["math", "code"]
    assert manifest["shared_prompts"] == {"train/test": 1}  # "Do it."
    assert (manifest["tokenizer"], manifest["max_tokens"]) == (tokenizer, 20)


def test_the_length_is_that_of_the_python_text_of_the_messages(source, tokenizer, tmp_path):
    # [{'content': 'Add one.', 'role': 'user'}] is 5 words
    kept = build_eurus(source, tmp_path / "a", tokenizer=tokenizer, max_tokens=5, expect_rows=0)
    assert kept["splits"]["test"]["rows"] == 2
    with pytest.raises(DataError, match="no rows are left"):
        build_eurus(source, tmp_path / "b", tokenizer=tokenizer, max_tokens=4, expect_rows=0)
    assert not (tmp_path / "b").exists()
