"""Search by words: BM25 from the package bm25s (Lucene's variant, k1 1.5, b 0.75) over Snowball stems without stop
words."""

import os
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tandemrl.config.hints import pip_install
from tandemrl.data.documents import Document, document
from tandemrl.data.loading import read_jsonl
from tandemrl.data.rows import DataError
from tandemrl.files import write_directory
from tandemrl.rollout.envs.environment import BrokenEnvironmentError

KEPT = 256
"""For how many questions an index is kept."""
_PARAMETERS, _DOCUMENTS = "params.index.json", "corpus.jsonl"
"""Two of the files of an index, all of which are those of bm25s."""


def word_scores() -> Callable[[str, tuple[str, ...]], np.ndarray]:
    """The BM25 score of each text, which is 0 where it shares no word with the query. The texts of a question are
    indexed once.

    Raises:
        BrokenEnvironmentError: bm25s or PyStemmer is not installed.
    """
    _packages()  # one that is missing is missed now
    index_of = lru_cache(KEPT)(indexed)

    def scores(query: str, texts: tuple[str, ...]) -> np.ndarray:
        words, index = tokenized([query])[0], index_of(texts)
        return index.get_scores(words) if index is not None and words else np.zeros(len(texts), np.float32)

    return scores


class Corpus:
    """Documents that `write_corpus` indexed. The index is memory-mapped, and a document is read when it is found.

    Raises:
        BrokenEnvironmentError: the folder has no index, or a package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        bm25s, _ = _packages()
        try:
            self._index = bm25s.BM25.load(folder, mmap=True, load_corpus=True, show_progress=False)
            if self._index.corpus is None:
                raise FileNotFoundError(_DOCUMENTS)
        except (OSError, ValueError, KeyError) as error:
            what = f"retrieval.index={folder}: no whole index of this version there ({type(error).__name__}: {error})"
            fix = f"write one: tandemrl data index CORPUS.jsonl --out {folder}"
            raise BrokenEnvironmentError(f"{what}; {fix}") from error
        self._documents, self._reading = self._index.corpus, threading.Lock()

    def search(self, query: str, count: int) -> list[Document]:
        """At most ``count`` documents that match a query best. Documents that share no word with it are left out."""
        words = tokenized([query])[0]
        if not words:
            return []
        scores = self._index.get_scores(words)
        matching = np.flatnonzero(scores > 0)
        with self._reading:  # from several threads, and the file has one position
            found = self._documents[matching[best(scores[matching], count)]]
        return [Document(each["id"], each["title"], each["text"]) for each in found]


def write_corpus(corpus: Path, out: Path) -> int:
    """Index the documents of a JSON Lines file for `Corpus`. The folder ``out`` appears when all of it is written.

    Each line is a document as in `data.documents.documents_of`, with an ``id`` that no other has.

    Returns:
        the number of documents.

    Raises:
        DataError: a line is not such a document, or ``out`` holds something else than an index.
        BrokenEnvironmentError: a package is not installed.
    """
    if os.path.lexists(out) and not (out / _PARAMETERS).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out} holds something else than an index, which would be replaced: choose another folder")
    documents: dict[str, Document] = {}
    for line, record in read_jsonl(corpus):
        each = document(record, f"{corpus}, line {line}")
        if each.id in documents:
            raise DataError(f"{corpus}, line {line}: two documents have the id {each.id!r}")
        documents[each.id] = each
    if (index := indexed([each.text for each in documents.values()])) is None:
        raise DataError(f"{corpus}: no document has a word")
    records = [{"id": each.id, "title": each.title, "text": each.text} for each in documents.values()]
    write_directory(out, lambda folder: index.save(folder, corpus=records, show_progress=False))
    return len(records)


def best(scores: np.ndarray, count: int) -> list[int]:
    """The indices of the ``count`` greatest scores, best first. Of equal scores, the first one comes first."""
    places = np.arange(len(scores))
    if count < len(scores):
        places = np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    return places[np.argsort(-scores[places], kind="stable")][:count].tolist()


def indexed(texts: Sequence[str]) -> Any | None:
    """The index that bm25s makes of texts, or None if they have no words at all."""
    words = tokenized(texts)
    if not any(words):
        return None
    index = _packages()[0].BM25(k1=1.5, b=0.75, method="lucene", backend="numpy")
    index.index(words, show_progress=False)
    return index


def tokenized(texts: Sequence[str]) -> list[list[str]]:
    """The stems of each text's words of two letters or more, without stop words."""
    bm25s, stemmer = _packages()
    return bm25s.tokenize(list(texts), stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)


def _packages() -> tuple[Any, Any]:
    """bm25s, and PyStemmer's stemmer."""
    try:
        import bm25s
        import Stemmer
    except ImportError:
        fix = f"{pip_install('retrieval')}, or retrieval.retriever=golden"
        raise BrokenEnvironmentError(f"searching by words needs bm25s and PyStemmer: {fix}") from None
    return bm25s, Stemmer.Stemmer("english")
