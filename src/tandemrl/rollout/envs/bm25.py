"""Search by words: BM25 from the package bm25s (Lucene's variant, k1 1.5, b 0.75) over Snowball stems without stop
words."""

import json
import os
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tandemrl.config.hints import pip_install
from tandemrl.data.documents import Document, document
from tandemrl.data.loading import read_jsonl
from tandemrl.data.rows import DataError
from tandemrl.files import write_directory
from tandemrl.rollout.envs.environment import BrokenEnvironmentError

_DOCUMENTS, _OFFSETS, _ORDER = "documents.jsonl", "documents.offsets.npy", "documents.order.npy"
"""Files beside those of bm25s: the documents, the offset of each line in that file, and their order by id."""


class WordIndex:
    """An index of texts that can be searched by words.

    Raises:
        BrokenEnvironmentError: bm25s or PyStemmer is not installed.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._count, self._index = len(texts), indexed(texts)

    def scores(self, query: str) -> np.ndarray:
        """The BM25 score of each text, which is 0 where it shares no word with the query."""
        words = tokenized([query])[0]
        if self._index is None or not words:
            return np.zeros(self._count, np.float32)
        return self._index.get_scores(words)


class Corpus:
    """Documents that `write_corpus` indexed. The index is memory-mapped, and a document is read when it is found.

    Raises:
        BrokenEnvironmentError: the folder has no index, or a package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        bm25s = _bm25s()
        write = f"write one: tandemrl data index CORPUS.jsonl --out {folder}"
        if not (folder / _OFFSETS).is_file():
            raise BrokenEnvironmentError(f"retrieval.index={folder}: no index there; {write}")
        try:
            self._index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
            self._offsets = np.load(folder / _OFFSETS, mmap_mode="r")
            self._order = np.load(folder / _ORDER, mmap_mode="r")
            self._documents = (folder / _DOCUMENTS).open("rb")
        except (OSError, ValueError, KeyError) as error:
            fault = f"{type(error).__name__}: {error}"
            raise BrokenEnvironmentError(
                f"retrieval.index={folder}: not a whole index of this version ({fault}); delete it and {write}"
            ) from error

    def search(self, query: str, count: int) -> list[Document]:
        """At most ``count`` documents that match a query best. Documents that share no word with it are left out."""
        words = tokenized([query])[0]
        if not words:
            return []
        scores = self._index.get_scores(words)
        matching = np.flatnonzero(scores > 0)
        return [self._document(int(matching[place])) for place in best(scores[matching], count)]

    def find(self, id: str) -> Document | None:
        """The document with this id, or None if there is none."""
        at = bisect_left(self._order, id, key=lambda place: self._document(int(place)).id)
        found = self._document(int(self._order[at])) if at < len(self._order) else None
        return found if found is not None and found.id == id else None

    def _document(self, place: int) -> Document:
        begin, end = self._offsets[place : place + 2].tolist()
        line = os.pread(self._documents.fileno(), end - begin, begin)
        return document(json.loads(line), f"{self._documents.name}, document {place + 1}")


def write_corpus(corpus: Path, out: Path) -> int:
    """Index the documents of a JSON Lines file for `Corpus`. The folder ``out`` appears when all of it is written.

    Each line is a document as in `data.documents.documents_of`, with an ``id`` that no other has.

    Returns:
        the number of documents.

    Raises:
        DataError: a line is not such a document, or ``out`` holds something else than an index.
        BrokenEnvironmentError: a package is not installed.
    """
    if os.path.lexists(out) and not (out / _OFFSETS).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"{out} holds something else than an index, which would be replaced: choose another folder")
    seen: dict[str, None] = {}
    texts: list[str] = []
    offsets = [0]

    def fill(folder: Path) -> None:
        with (folder / _DOCUMENTS).open("wb") as file:
            for line, record in read_jsonl(corpus):
                where = f"{corpus}, line {line}"
                each = document(record, where)
                if each.id in seen:
                    raise DataError(f"{where}: two documents have the id {each.id!r}")
                seen[each.id] = None
                texts.append(each.text)
                content = {"id": each.id, "title": each.title, "text": each.text}
                file.write(json.dumps(content, ensure_ascii=False).encode() + b"\n")
                offsets.append(file.tell())
        index = indexed(texts)
        if index is None:
            raise DataError(f"{corpus}: no document has a word")
        index.save(folder, show_progress=False)
        np.save(folder / _OFFSETS, np.array(offsets, np.int64))
        ids = [*seen]
        np.save(folder / _ORDER, np.array(sorted(range(len(ids)), key=ids.__getitem__), np.int64))

    write_directory(out, fill)
    return len(texts)


def best(scores: np.ndarray, count: int) -> list[int]:
    """The indices of the ``count`` greatest scores, best first. Of equal scores, the first one comes first."""
    if count < len(scores):
        least = np.partition(scores, len(scores) - count)[len(scores) - count]
        places = np.flatnonzero(scores >= least)
    else:
        places = np.arange(len(scores))
    return places[np.argsort(-scores[places], kind="stable")][:count].tolist()


def indexed(texts: Sequence[str]) -> Any | None:
    """The index that bm25s makes of texts, or None if they have no words at all."""
    words = tokenized(texts)
    if not any(words):
        return None
    index = _bm25s().BM25(k1=1.5, b=0.75, method="lucene", backend="numpy")
    index.index(words, show_progress=False)
    return index


def tokenized(texts: Sequence[str]) -> list[list[str]]:
    """The stems of each text's words of two letters or more, without stop words."""
    return _bm25s().tokenize(list(texts), stopwords="en", stemmer=_stemmer(), return_ids=False, show_progress=False)


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError:
        raise BrokenEnvironmentError(_MISSING.format("bm25s")) from None
    return bm25s


def _stemmer() -> Any:
    try:
        import Stemmer
    except ImportError:
        raise BrokenEnvironmentError(_MISSING.format("PyStemmer")) from None
    return Stemmer.Stemmer("english")


_MISSING = f"searching by words needs {{}}: {pip_install('retrieval')}, or retrieval.retriever=golden"
