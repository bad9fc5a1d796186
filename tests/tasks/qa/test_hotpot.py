"""HotpotQA and 2WikiMultiHopQA as published: the same rows of each form, graded as MuSiQue's."""

import json
from pathlib import Path

import pytest

from tandemrl.config import RewardConfig
from tandemrl.data.documents import documents_of, hops, supporting_ids
from tandemrl.data.loading import load_rows
from tandemrl.data.rows import DataError
from tandemrl.rewards.routing import terms_of
from tandemrl.tasks.qa.rows import SETS, build_hotpot

CONTEXT = [["Ann", ["Ann was born", " in Paris."]], ["Bob", ["Bob is tall."]], ["Paris", ["It is in France. "]]]
FACTS = [["Ann", 0], ["Ann", 1], ["Paris", 0]]
ROW = {"question": "Where was Ann born?", "answer": "France", "type": "bridge"}
TITLES, TEXTS = ["Ann", "Bob", "Paris"], [sentences for _, sentences in CONTEXT]
LISTS = {"title": ["Ann", "Ann", "Paris"], "sent_id": [0, 1, 0]}
FORMS = {
    "authors": {"_id": "a", "context": CONTEXT, "supporting_facts": FACTS},
    "text": {"_id": "a", "context": json.dumps(CONTEXT), "supporting_facts": json.dumps(FACTS)},
    "sentences": {"id": "a", "context": {"title": TITLES, "sentences": TEXTS}, "supporting_facts": LISTS},
    "content": {"_id": "a", "context": {"title": TITLES, "content": TEXTS}, "supporting_facts": LISTS},
}


def put(folder: Path, name: str, form: str, **changes: object) -> Path:
    folder.mkdir()
    if form == "authors":
        for file in SETS[name].files:
            (folder / file).write_text(json.dumps([ROW | FORMS[form] | changes]))
    else:
        for split in ("train", "validation"):
            (folder / f"{split}.jsonl").write_text(json.dumps(ROW | FORMS[form] | changes) + "\n")
    return folder


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SETS)
def test_rows_are_those_of_musique(name: str, form: str, tmp_path: Path) -> None:
    manifest = build_hotpot(name, put(tmp_path / "copy", name, form), tmp_path / "out", expect_rows=0)
    assert {split: entry["rows"] for split, entry in manifest["splits"].items()} == {"train": 1, "validation": 1}
    [row] = load_rows([str(tmp_path / "out" / "validation.parquet")])
    assert row.data_source == name
    assert json.loads(row.ground_truth) == ["France"]
    texts = ["# Ann\nAnn was born in Paris.", "# Bob\nBob is tall.", "# Paris\nIt is in France."]
    assert [each.text for each in documents_of(row)] == texts
    assert supporting_ids(row) == ["0", "2"]
    assert (hops(row), row.extra_info["id"], row.extra_info["type"]) == (2, "a", "bridge")
    assert [term.name for term in terms_of(row, RewardConfig())] == ["musique"]


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("context", {"title": "Ann", "sentences": TEXTS}),
        ("context", {"title": TITLES, "sentences": TEXTS[:2]}),
        ("context", [["Ann", "born in Paris"]]),
        ("context", "[[1"),
        ("supporting_facts", [[0, "Ann"]]),
        ("supporting_facts", []),
    ],
)
def test_what_are_no_pairs_is_refused(field: str, found: object, tmp_path: Path) -> None:
    copy = put(tmp_path / "copy", "hotpotqa", "text", **{field: found})
    with pytest.raises(DataError, match=rf"train.jsonl, line 1, field '{field}': expected \[title, \w+\] pairs"):
        build_hotpot("hotpotqa", copy, tmp_path / "out", expect_rows=0)
