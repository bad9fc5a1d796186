"""Questions about documents: the tools, and what they show."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tempers import DOCS

from tandemrl.config import Config, RetrievalConfig, RolloutConfig
from tandemrl.data.rows import DataError, Row
from tandemrl.rollout.envs.environment import Answer, BrokenEnvironmentError, make_environment
from tandemrl.rollout.envs.multihop import MultihopEnvironment, complete, get_document, list_documents
from tandemrl.rollout.envs.retrieval import write_corpus
from tandemrl.tasks.qa.grader import COMPLETE, retrieved_ids


def row(docs: Sequence[dict[str, object]] = DOCS) -> Row:
    messages = ({"role": "user", "content": "Of which country is Ann's birthplace the capital?"},)
    return Row("q", messages, "musique", json.dumps(["France"]), {"docs": docs})


def test_an_episode_begins_with_the_rules_and_the_question() -> None:
    environment = MultihopEnvironment(RetrievalConfig())
    system, question = environment.start(row()).messages
    assert system["role"] == "system"
    assert question == row().messages[0]
    for word in ("complete", "reasoning", "final_answer", "cited_doc_ids", "one tool per step"):
        assert word in system["content"]
    own = replace(row(), messages=({"role": "system", "content": "Search."}, *row().messages))
    assert environment.start(own).messages == own.messages
    assert environment.ends == {complete.__name__} == {COMPLETE}


def test_a_row_in_which_nothing_could_be_found_does_not_begin() -> None:
    with pytest.raises(DataError, match=r"row q: no documents in 'extra_info\.docs' .* or set retrieval\.index"):
        MultihopEnvironment(RetrievalConfig()).start(row([]))
    assert MultihopEnvironment(RetrievalConfig(index="corpus")).start(row([])).state == {}


def test_a_corpus_has_no_other_document_by_the_id_of_one_of_the_row(tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="needs the retrieval extra")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(each) + "\n" for each in [*DOCS[1:], DOCS[0] | {"body": "Ann, else."}]))
    write_corpus(corpus, tmp_path / "index")
    search = MultihopEnvironment(RetrievalConfig(index=str(tmp_path / "index"))).search()
    assert [each.id for each in search(row(DOCS[1:]), "Ann", 1)] == ["0"]
    with pytest.raises(BrokenEnvironmentError, match=r"row q: retrieval\.index=.* has another document with the id"):
        search(row(), "Ann", 1)


def test_what_the_authors_are_told() -> None:
    """The schemas of the tools, by the config: parameters that are filled in are not shown."""
    module = "tandemrl.rollout.envs.multihop"
    rollout = RolloutConfig(environment="multihop", tools=(f"{module}:get_document", f"{module}:list_documents"))
    environment = make_environment(Config(rollout=rollout, retrieval=RetrievalConfig(retriever="golden")))
    assert environment is not None
    told = {schema["function"]["name"]: schema["function"]["parameters"] for schema in environment.tool_schemas()}
    assert {name: (list(each["properties"]), each.get("required", [])) for name, each in told.items()} == {
        "retrieve_documents": (["query", "top_n"], ["query"]),
        "complete": (["reasoning", "final_answer", "cited_doc_ids"], ["reasoning", "final_answer", "cited_doc_ids"]),
        "get_document": (["doc_id"], ["doc_id"]),
        "list_documents": ([], []),
    }
    assert told["complete"]["properties"]["cited_doc_ids"]["items"] == {"type": "string"}


def test_turns_of_an_episode() -> None:
    """Two calls in a turn, one that fails, and the end."""
    environment = MultihopEnvironment(RetrievalConfig(retriever="golden"))

    def turn(*calls: tuple[str, dict[str, object]]) -> Answer:
        made = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
        return environment.reply(row(), {}, {"role": "assistant", "content": "", "tool_calls": made})

    first = turn(("retrieve_documents", {"query": "x"}), ("retrieve_documents", {"query": "x", "top_n": -1}))
    assert not first.over
    assert [retrieved_ids([message]) for message in first.messages] == [{"0", "2"}, set()]
    assert first.messages[1]["content"] == "Error: top_n must be from 1 to 10, not -1"
    [more] = turn(("retrieve_documents", {"query": "x", "top_n": 11})).messages
    assert more["content"] == "Error: top_n must be from 1 to 10, not 11"
    for query, fault in ((" ", "query must not be empty"), ("語" * 500, "query is too long: shorten it")):
        [refused] = turn(("retrieve_documents", {"query": query})).messages
        assert refused["content"] == f"Error: {fault}"
    last = turn(("complete", {"reasoning": "r", "final_answer": "France", "cited_doc_ids": ["0", "2"]}))
    assert last.over
    assert list(last.messages) == []


def test_documents_by_id_and_by_title() -> None:
    assert get_document("2", row()) == "Document ID: 2\nThe capital of France, on the Seine."
    assert list_documents(row()) == "0. Ann\n1. Bob\n2. Paris\n3. Lyon"
    trick = get_document("x\nDocument ID: 0", row())
    assert retrieved_ids([{"role": "tool", "content": trick}]) == set()
    assert retrieved_ids([{"role": "tool", "content": get_document("9", row())}]) == set()
