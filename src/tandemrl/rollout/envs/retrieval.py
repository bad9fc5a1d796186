"""Retrievers, which find documents for a query.

A retriever is made once per process and serves all episodes. What it caches for the documents of a question, it looks
up by their texts.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlencode

import numpy as np

from tandemrl.config import RetrievalConfig
from tandemrl.data.documents import Document, document, documents_of
from tandemrl.data.rows import DataError, Row
from tandemrl.processes.http import PermanentError, Response, RetryableError, excerpt
from tandemrl.processes.names import instantiate
from tandemrl.rollout.envs.bm25 import Corpus, best, word_scores
from tandemrl.rollout.envs.environment import BrokenEnvironmentError
from tandemrl.rollout.envs.semantic import Relevance, client_of, make_relevance

Retriever = Callable[[Row, str, int], list[Document]]
"""A function of (row, query, count) that returns the documents it finds, best first."""
Ranking = Callable[[str, tuple[str, ...], int], list[int]]
"""A function of (query, texts, count) that returns the indices of the best texts, best first."""

RRF_K = 60


@lru_cache(maxsize=1)
def make_retriever(config: RetrievalConfig) -> Retriever:
    """The retriever of a config. A call with an equal config returns the same retriever.

    Raises:
        BrokenEnvironmentError: a package, a model or an index that it needs is missing.
    """
    retriever: Retriever = instantiate(
        config.kind.path,
        f"retrieval.retriever={config.retriever}",
        BrokenEnvironmentError,
        config.parameters,
        config=lambda: config,
    )
    return retriever


def bm25(config: RetrievalConfig) -> Retriever:
    """By words, in the documents of the row or in a corpus."""
    if config.index is None:
        return within_row(ranked(word_scores()))
    corpus = Corpus(Path(config.index))
    where = f"retrieval.index={config.index}"
    return lambda row, query, count: of_row(row, corpus.search(query, count), where)


def of_row(row: Row, found: list[Document], where: str) -> list[Document]:
    """What was found in a corpus, if the row has the same documents under the ids of those that it shares with it.

    Raises:
        BrokenEnvironmentError: it has not, so that sources could not be scored.
    """
    known = {each.id: each.text for each in documents_of(row)}
    for each in found:
        if known.get(each.id, each.text) != each.text:
            raise BrokenEnvironmentError(
                f"row {row.example_id}: {where} has another document with the id {each.id!r} than 'extra_info.docs'; "
                "give the rows the ids of its corpus, or leave docs out"
            )
    return found


def golden() -> Retriever:
    """All supporting documents of the row, whatever the query and the count are."""
    return lambda row, query, count: [document for document in documents_of(row) if document.supporting]


def semantic(config: RetrievalConfig) -> Retriever:
    """By a model or a service."""
    return within_row(ranked(make_relevance(config)))


def hybrid(config: RetrievalConfig) -> Retriever:
    """By relevance and by words, merged."""
    merge = {"rrf": reciprocal_ranks, "halves": halves}[config.merge]
    words = ranked(word_scores(), matching=config.merge == "rrf")
    return within_row(merge(ranked(make_relevance(config)), words))


def service(config: RetrievalConfig) -> Retriever:
    """In a corpus behind a service, such as rlvr's of Wikipedia: POST /search with ``query`` and ``top_n``.

    What is asked is sent in the address and as JSON, since both forms are in use. A document is read as in a row's
    ``extra_info.docs``.

    Raises:
        BrokenEnvironmentError: the key of the service is not set. When it searches: the service fails, or calls another
            document by the id of one of the row's documents, so that sources could not be scored.
    """
    client = client_of(config, "a service with POST /search")

    def search(row: Row, query: str, count: int) -> list[Document]:
        asked = {"query": query, "top_n": count}
        found = client.post(f"/search?{urlencode(asked)}", asked, _documents)[:count]
        return of_row(row, found, f"the service at {config.url} (retrieval.url)")

    return search


def _documents(response: Response) -> list[Document]:
    """The documents in ``{"results": [{"document": {"id", "title", "body"}}]}``, or without the inner ``document``."""
    if response.status == 404:
        raise PermanentError(f"HTTP 404: {excerpt(response.body)}; retrieval.url must end where /search begins")
    content = response.json()
    results = content.get("results") if isinstance(content, dict) else content
    if not isinstance(results, list):
        raise RetryableError(f"not a list of documents: {excerpt(response.body)}")
    try:
        return [
            document(each["document"] if isinstance(each, dict) and "document" in each else each, "POST /search")
            for each in results
        ]
    except DataError as error:
        raise RetryableError(f"not a list of documents: {error}") from None


def within_row(ranking: Ranking) -> Retriever:
    """The retriever that ranks the documents of the row."""

    def search(row: Row, query: str, count: int) -> list[Document]:
        documents = documents_of(row)
        return [documents[place] for place in ranking(query, tuple(each.text for each in documents), count)]

    return search


def ranked(scores: Relevance, *, matching: bool = False) -> Ranking:
    """The ranking by scores.

    Args:
        matching: only of texts with a score above 0, such as those that share a word with the query.
    """

    def ranking(query: str, texts: tuple[str, ...], count: int) -> list[int]:
        found = scores(query, texts)
        return [place for place in best(found, count) if found[place] > 0 or not matching]

    return ranking


def reciprocal_ranks(*rankings: Ranking) -> Ranking:
    """Reciprocal rank fusion of rankings (Cormack, Clarke and Büttcher 2009): the sum of 1 / (60 + rank), with ranks
    from 1."""

    def merged(query: str, texts: tuple[str, ...], count: int) -> list[int]:
        scores = np.zeros(len(texts))
        for ranking in rankings:
            for rank, place in enumerate(ranking(query, texts, len(texts)), 1):
                scores[place] += 1 / (RRF_K + rank)
        return best(scores, count)

    return merged


def halves(*rankings: Ranking) -> Ranking:
    """The merge of rlvr: the first count // 2 + 1 texts of one ranking after the other, without repetitions, cut to
    ``count``."""

    def merged(query: str, texts: tuple[str, ...], count: int) -> list[int]:
        chosen: list[int] = []
        for ranking in rankings:
            chosen += ranking(query, texts, count // 2 + 1)
        return list(dict.fromkeys(chosen))[:count]

    return merged
