import json
import re

import pytest

from tandemrl.data.documents import documents_of
from tandemrl.data.loading import load_rows
from tandemrl.tasks.generated.hops import ALIASES, NAMES, RELATIONS, search, split_of
from tandemrl.tasks.math.tagged import targets


def solve(question: str, texts: list[str]) -> tuple[str, list[str]]:
    """The answer and the documents it rests on, from the words alone: nothing of the generator's is used."""
    if of := re.fullmatch(r"Who is the (.+) of (\w+)\?", question):
        person, relations = of[2], of[1].split(" of the ")[::-1]
    else:
        person, *relations = re.fullmatch(r"Who is (.+)\?", question)[1].split("'s ")
    used = []
    for relation in relations:
        (line,) = [text for text in texts if text.startswith(f"{person}'s {relation} is ")]
        person = line.split(" is ")[1].rstrip(".")
        used.append(line)
    return person, used


@pytest.fixture(scope="module")
def rows():
    return load_rows(["synthetic:hops:train:300", "synthetic:hops:heldout:300"])


def test_every_answer_follows_from_the_supporting_documents(rows):
    for row in rows:
        documents = documents_of(row)
        answer, used = solve(row.messages[-1]["content"], [document.text for document in documents])
        assert row.ground_truth == answer
        assert row.extra_info["answers"] == [answer]
        assert {document.text for document in documents if document.supporting} == set(used)
        assert row.extra_info["n_hops"] == len(used)
        assert len(documents) == 9
        assert [document.id for document in documents] == [*"012345678"]


def test_questions_come_in_both_forms_with_two_or_three_hops(rows):
    forms = [" of " in row.messages[-1]["content"] for row in rows]
    three = [row.extra_info["n_hops"] == 3 for row in rows]
    assert {row.extra_info["n_hops"] for row in rows} == {2, 3}
    assert 0.4 < sum(forms) / len(forms) < 0.6
    assert 0.24 < sum(three) / len(three) < 0.36  # 0.3, within four standard errors or so


def test_splits_share_no_question_whatever_its_form(rows):
    """Not even one asked in the other form, or with other documents."""

    def asked(row):
        words = re.findall(r"\w+", row.messages[-1]["content"])
        return next(word for word in words if word in NAMES), tuple(word for word in words if word in RELATIONS)

    def canonical(row):
        subject, relations = asked(row)
        return subject, relations[::-1] if " of " in row.messages[-1]["content"] else relations

    train, heldout = (
        {canonical(row) for row in rows if row.extra_info["split"] == split} for split in ("train", "heldout")
    )
    assert train
    assert heldout
    assert not train & heldout
    assert {split_of(*question) for question in train} == {"train"}


def test_the_jargon_pair_has_the_same_worlds_and_accepts_either_name(rows):
    for plain, jargon in zip(rows, load_rows(["synthetic:hops_jargon:train:300"]), strict=False):
        assert jargon.messages == plain.messages
        assert jargon.extra_info["docs"] == plain.extra_info["docs"]
        assert targets(jargon) == [plain.ground_truth, ALIASES[plain.ground_truth]]
        assert json.loads(jargon.ground_truth) == jargon.extra_info["answers"]
        assert jargon.data_source == "synthetic/hops_jargon"


def test_the_query_for_a_hop_finds_its_document_first(rows):
    for row in rows[:200]:
        documents = documents_of(row)
        for document in documents:
            if not document.supporting:
                continue
            subject, relation, thing = re.findall(r"(\w+)'s (\w+) is (\w+)", document.text)[0]
            for name in (str, ALIASES.__getitem__):
                found = search(documents, f"{name(subject)}'s {name(relation)}", 1)
                assert found[0].text == f"{name(subject)}'s {name(relation)} is {name(thing)}."
                assert found[0].id == document.id
                assert found[0].supporting
