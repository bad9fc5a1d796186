"""MuSiQue as rows: what becomes of questions, paragraphs and answers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tandemrl.data.documents import documents_of, hops, supporting_ids
from tandemrl.data.loading import load_rows
from tandemrl.tasks.math.tagged import targets
from tandemrl.tasks.qa.rows import build_musique


def question(number: int, supports: int = 2, **changes: Any) -> dict[str, Any]:
    texts = [
        {
            "idx": i,
            "title": f"T{i}",
            "paragraph_text": f"``quoted'' {i}",
            "is_supporting": i % 5 == 3 and i // 5 < supports,
        }
        for i in range(20)
    ]
    record = {"id": f"{supports}hop__{number}", "question": f"Who is {number}?", "answer": "two", "answerable": True}
    return record | {"answer_aliases": ["2", "a pair"], "paragraphs": texts} | changes


def write(folder: Path, names: Mapping[str, list[dict[str, Any]]]) -> Path:
    folder.mkdir()
    for name, records in names.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.mark.parametrize(
    "names", [("train.jsonl", "validation.jsonl"), ("musique_ans_v1.0_train.jsonl", "musique_ans_v1.0_dev.jsonl")]
)
def test_rows(tmp_path: Path, names: tuple[str, str]) -> None:
    train = [question(0, 4), question(1, 2), question(2, 3, answer_aliases=[])]
    source = write(tmp_path / "raw", dict(zip(names, (train, [question(3)]), strict=True)))
    manifest = build_musique(source, tmp_path / "out", expect_rows=0)
    assert {split: entry["rows"] for split, entry in manifest["splits"].items()} == {"train": 3, "validation": 1}
    rows = load_rows([str(tmp_path / "out" / "train.parquet")])
    assert [row.example_id for row in rows] == [f"musique/train/{i}" for i in range(3)]  # in the published order
    assert [hops(row) for row in rows] == [4, 2, 3]
    assert [targets(row) for row in rows] == [["two", "2", "a pair"]] * 2 + [["two"]]
    assert rows[0].messages == ({"role": "user", "content": "Who is 0?"},)
    assert rows[1].data_source == "musique"
    assert (rows[1].extra_info["id"], rows[1].extra_info["answerable"]) == ("2hop__1", True)
    assert supporting_ids(rows[0]) == ["3", "8", "13", "18"]
    assert documents_of(rows[0])[3] == ("3", "T3", '# T3\n"quoted" 3', True)
    assert len(documents_of(rows[0])) == 20


def test_noise_is_left_out_by_seed(tmp_path: Path) -> None:
    names = {"train.jsonl": [question(i) for i in range(100)], "validation.jsonl": [question(0)]}
    source = write(tmp_path / "raw", names)
    kept = {}
    for name, rate, seed in (("one", 0.25, 1), ("same", 0.25, 1), ("other", 0.25, 2), ("none", 0.0, 1)):
        manifest = build_musique(source, tmp_path / name, noise_rate=rate, seed=seed, expect_rows=0)
        rows = load_rows([str(tmp_path / name / "train.parquet")])
        assert all(supporting_ids(row) == ["3", "8"] for row in rows)
        kept[name] = [[document.id for document in documents_of(row)] for row in rows]
        left_out = sum(20 - len(documents_of(row)) for row in rows)
        [validation] = load_rows([str(tmp_path / name / "validation.parquet")])
        assert manifest["dropped"]["paragraphs"] == left_out + 20 - len(documents_of(validation))
    assert kept["one"] == kept["same"] != kept["other"]
    assert kept["none"] == [["3", "8"]] * 100
    noise = sum(len(ids) - 2 for ids in kept["one"])  # binomial(1800, 0.25): 450 with a deviation of 18
    assert 450 - 90 < noise < 450 + 90
