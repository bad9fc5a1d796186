"""Which documents a query finds. A retriever is made once per process and serves all episodes; what it keeps of a
question's documents it finds again by their texts.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from tandemrl.config import RetrievalConfig
from tandemrl.data import hops
from tandemrl.data.documents import Document, documents_of
from tandemrl.data.rows import Row
from tandemrl.rollout.envs.bm25 import Corpus, WordIndex, best
from tandemrl.rollout.envs.semantic import make_relevance

Retriever = Callable[[Row, str, int], list[Document]]
"""The documents that (row, query, count) finds, best first."""
Ranking = Callable[[str, tuple[str, ...], int], list[int]]
"""The places of the (query, texts, count) best texts, best first."""

KEPT = 256
"""Questions whose index is kept."""
RRF_K = 60


@lru_cache(maxsize=1)
def make_retriever(config: RetrievalConfig) -> Retriever:
    """The retriever of a config; the same one for equal configs.

    Raises:
        BrokenEnvironmentError: a package, a model or an index that it needs is not there.
    """
    if config.retriever == "golden":
        return golden
    if config.retriever == "hops":
        return generated
    if config.index is not None:
        corpus = open_corpus(config.index)
        return lambda row, query, count: corpus.search(query, count)
    if config.retriever == "semantic":
        return within_row(semantic(config))
    if config.retriever == "hybrid":
        merge = {"rrf": reciprocal_ranks, "halves": halves}[config.merge]
        return within_row(merge(semantic(config), lexical()))
    return within_row(lexical())


@lru_cache(maxsize=1)
def open_corpus(index: str) -> Corpus:
    """The corpus of ``retrieval.index``; a folder is opened once."""
    return Corpus(Path(index))


def golden(row: Row, query: str, count: int) -> list[Document]:
    """All supporting documents, whatever is asked."""
    return [document for document in documents_of(row) if document.supporting]


def generated(row: Row, query: str, count: int) -> list[Document]:
    """Search in a generated world (`data.hops`), in the language of the query."""
    return hops.search(documents_of(row), query, count)


def within_row(ranking: Ranking) -> Retriever:
    """Search in the documents of the row."""

    def search(row: Row, query: str, count: int) -> list[Document]:
        documents = documents_of(row)
        return [documents[place] for place in ranking(query, tuple(each.text for each in documents), count)]

    return search


def lexical() -> Ranking:
    """By words; texts are indexed once."""
    WordIndex(["a text"])  # a package that is missing is missed now
    index = lru_cache(KEPT)(WordIndex)
    return lambda query, texts, count: best(index(texts).scores(query), count)


def semantic(config: RetrievalConfig) -> Ranking:
    """By a model or a service."""
    relevance = make_relevance(config)
    return lambda query, texts, count: best(relevance(query, texts), count)


def reciprocal_ranks(*rankings: Ranking) -> Ranking:
    """Reciprocal rank fusion (Cormack, Clarke and Büttcher 2009): by the sum of 1 / (60 + rank), ranks from 1."""

    def merged(query: str, texts: tuple[str, ...], count: int) -> list[int]:
        scores = np.zeros(len(texts))
        for ranking in rankings:
            for rank, place in enumerate(ranking(query, texts, len(texts)), 1):
                scores[place] += 1 / (RRF_K + rank)
        return best(scores, count)

    return merged


def halves(*rankings: Ranking) -> Ranking:
    """As rlvr has it: the first count // 2 + 1 of each, one ranking after the other, each once, cut to count."""

    def merged(query: str, texts: tuple[str, ...], count: int) -> list[int]:
        chosen: list[int] = []
        for ranking in rankings:
            chosen += ranking(query, texts, count // 2 + 1)
        return list(dict.fromkeys(chosen))[:count]

    return merged
