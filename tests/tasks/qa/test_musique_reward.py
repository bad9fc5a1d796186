"""The reward of an episode about documents: what counts as an answer, a citation, a retrieved document."""

import json
from typing import Any

import pytest

from tandemrl.config import RewardConfig
from tandemrl.data.messages import Message, Response, Transcript
from tandemrl.data.rows import DataError, Row
from tandemrl.rewards.protocol import GraderError, Item
from tandemrl.rewards.routing import terms_of
from tandemrl.tasks.qa.grader import ERAS, musique


def question(hops: int = 2, answers: tuple[str, ...] = ("Second",), source: str = "musique") -> Row:
    """Documents 0 … 4, of which the first ``hops`` are supporting."""
    docs = [{"id": str(i), "title": f"T{i}", "text": f"text {i}", "is_supporting": i < hops} for i in range(5)]
    return Row("q", ({"role": "user", "content": "?"},), source, json.dumps(answers), {"docs": docs, "n_hops": hops})


def called(name: str, arguments: Any) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def shown(*ids: str) -> Message:
    return {"role": "tool", "content": "\n\n".join(f"Document ID: {each}\ntext {each}" for each in ids)}


def parts(*messages: Message, row: Row | None = None, era: str = "head") -> dict[str, float]:
    score = musique(row or question(), "", RewardConfig(musique=era), Transcript(messages))  # type: ignore[arg-type]
    return score.parts | {"value": score.value}


RESULT = {"reasoning": "so", "final_answer": "the 2nd", "cited_doc_ids": ["0", "3"]}


def test_the_components_of_an_episode() -> None:
    """0 and 1 support the answer: 0 was shown and cited, like 2 and 3, which do not. The answer is right in figures."""
    assert parts(
        called("retrieve_documents", {"query": "x"}), shown("0", "2"), shown("3", "0"), called("complete", RESULT)
    ) == {
        "value": pytest.approx((0.9 + 1 + 0.5 + 0.4 / 3 + 0.6 * 0.5 + 0.1) / 4),
        "acc": 1,
        "answer_present": 1,
        "em": 1,
        "f1": 1,
        "em_official": 0,
        "f1_official": 0,
        "recall": 0.5,
        "precision": pytest.approx(1 / 3),
        "citation": 0.5,
        "support_f1": 0.5,
        "format": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (json.dumps(RESULT), {"em": 1, "citation": 0.5, "format": 1}),
        (RESULT | {"cited_doc_ids": "0, 1"}, {"citation": 1}),
        (RESULT | {"cited_doc_ids": [0, 1]}, {"citation": 1}),
        (RESULT | {"cited_doc_ids": None}, {"citation": 0, "format": 2 / 3}),
        (RESULT | {"cited_doc_ids": {"0": "1"}}, {"citation": 0, "format": 2 / 3}),
        (RESULT | {"final_answer": 2}, {"em": 0, "f1": 0, "answer_present": 1}),
        (RESULT | {"final_answer": ["the 2nd"]}, {"em": 0, "answer_present": 0, "format": 2 / 3}),
        ({"final_answer": "Second"}, {"em": 1, "em_official": 1, "format": 1 / 3}),
        ('{"final_answer": "Second"', {"em": 0, "answer_present": 0, "format": 0}),
        ("[" * 100_000, {"format": 0}),
        ('["Second"]', {"em": 0, "format": 0}),
        (None, {"em": 0, "citation": 0, "format": 0}),
    ],
)
def test_arguments_of_complete(arguments: Any, expected: dict[str, float]) -> None:
    found = parts(called("complete", arguments))
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_the_last_complete_counts_wherever_it_stands() -> None:
    first, last = called("complete", {"final_answer": "First"}), called("complete", {"final_answer": "Second"})
    assert parts(first, last, shown("0"), called("retrieve_documents", {"query": "x"}))["em"] == 1
    assert parts(last, first)["em"] == 0
    assert parts({"role": "assistant", "content": "Second", "tool_calls": None})["em"] == 0


@pytest.mark.parametrize(
    ("message", "recall"),
    [
        (shown("0", "1"), 1),
        ({"role": "tool", "content": "Document with ID 'x\nDocument ID: 0' not found."}, 0),
        ({"role": "tool", "content": "Error: no tool 'x\nDocument ID: 0\n'"}, 0),
        ({"role": "user", "content": "Document ID: 0"}, 0),
        ({"role": "assistant", "content": "Document ID: 0"}, 0),
        ({"role": "tool", "content": "Document ID: 00\nsee Document ID: 0"}, 0),
        ({"role": "tool", "content": None}, 0),
    ],
)
def test_only_what_a_tool_showed_is_retrieved(message: Message, recall: float) -> None:
    assert parts(message)["recall"] == recall


def test_rewards_by_era() -> None:
    """Every component has a value of its own, so that no two weights can be swapped; the sums are by hand."""
    documents = [
        shown("0", "1", "2", "3"),
        called("complete", {"final_answer": "second of all", "cited_doc_ids": ["0"]}),
    ]
    found = parts(*documents, row=question(3))
    assert [found[name] for name in ("em", "f1", "recall", "precision", "citation", "format")] == pytest.approx(
        [0, 0.5, 1, 3 / 4, 1 / 3, 2 / 3]
    )
    expected = {
        "head": 1.5 * (0.5 + 1 + 0.4 * 0.75 + 0.6 / 3 + 0.1 * 2 / 3) / 4,
        "scaled": 1.5 * (0.45 + 1 + 0.4 * 0.75 + 0.6 / 3 + 0.1 * 2 / 3) / 4,
        "mean": (0.9 * 0.5 / 3 + 0.6 / 3 + 0.4 + 0.1 * 2 / 3) / 3,
        "bonus": 0.25 / 3 + 0.3 + 0.2 / 3,
        "readme": 0.25 + 0.5,
        "agents": 0.5 + 0.7 / 3 + 0.5 * 2 / 3,
    }
    assert expected.keys() == ERAS.keys()
    for era, value in expected.items():
        assert parts(*documents, row=question(3), era=era)["value"] == pytest.approx(value), era


def test_what_cannot_be_scored_is_refused() -> None:
    [term] = terms_of(question(), RewardConfig())
    with pytest.raises(GraderError, match=r"row q: .*set rollout.environment"):
        term.begin([Item(question(), Response.of("Second"))], RewardConfig(), None)
    row = question()
    row.extra_info["docs"].append({"id": "0", "title": "", "text": "twice"})  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="two documents have the id '0'"):
        parts(row=row)
    with pytest.raises(DataError, match=r"extra_info.docs\[0\]': its 'id' must be a string without whitespace"):
        parts(row=Row("q", (), "musique", "x", {"docs": [{"id": "a b", "text": ""}]}))
    with pytest.raises(DataError, match=r"n_hops': expected a whole number, found 'two'"):
        parts(row=Row("q", (), "musique", "x", {"n_hops": "two"}))
