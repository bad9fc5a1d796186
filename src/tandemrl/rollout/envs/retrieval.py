"""Retrievers, which find documents for a query.

A retriever is made once per process and serves all episodes. What it caches for the documents of a question, it looks
up by their texts.
"""

import os
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np

from tandemrl.config import RetrievalConfig
from tandemrl.config.hints import pip_install
from tandemrl.data.documents import Document, document, documents_of
from tandemrl.data.loading import read_jsonl
from tandemrl.data.rows import DataError, Row
from tandemrl.files import write_directory
from tandemrl.processes.http import Client, Response, RetryableError, Service, excerpt
from tandemrl.processes.names import instantiate
from tandemrl.rollout.envs.environment import BrokenEnvironmentError

Retriever = Callable[[Row, str, int], list[Document]]
"""A function of (row, query, count) that returns the documents it finds, best first."""
Relevance = Callable[[str, tuple[str, ...]], np.ndarray]
"""A function of (query, texts) that returns a score per text, which is greater the better the text answers the query.
It is called again and again with the texts of the same question, as one tuple."""
Ranking = Callable[[str, tuple[str, ...], int], list[int]]
"""A function of (query, texts, count) that returns the indices of the best texts, best first."""

RRF_K = 60
KEPT = 256
"""For how many questions an index is kept."""
_PARAMETERS, _DOCUMENTS = "params.index.json", "corpus.jsonl"
"""Two of the files of an index, all of which are those of bm25s."""


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
            what = f"row {row.example_id}: {where} has another document with the id {each.id!r} than 'extra_info.docs'"
            raise BrokenEnvironmentError(f"{what}; give the rows the ids of its corpus, or leave docs out")
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


# ---- how well documents answer a query -------------------------------------------------------------------------------


def make_relevance(config: RetrievalConfig) -> Relevance:
    """The relevance by the service at ``retrieval.url``, or by ``retrieval.model``, which is loaded into this process.

    A model whose architecture is a sequence classifier is used as a cross-encoder, any other model as an embedding
    model, which reads as its sentence-transformers files say.

    Raises:
        BrokenEnvironmentError: the model cannot be loaded, or the key of the service is not set.
    """
    return _model(str(config.model), config.device) if config.url is None else _service(config)


# ---- a service -----------------------------------------------------------------------------------------------------


def client_of(config: RetrievalConfig, start: str) -> Client:
    """The client of the service at ``retrieval.url``, which ``start`` would start."""
    assert config.url is not None  # a rule of the config
    # Capped, since rollout.tool_timeout_s counts on retrieval.patience_s.
    more = {"concurrency": 64, "cap_retry_after": True}
    return Client(Service.of(config, "retrieval", start, BrokenEnvironmentError, **more))


def _service(config: RetrievalConfig) -> Relevance:
    client = client_of(config, "text-embeddings-router --model-id MODEL")
    model = {} if config.model is None else {"model": config.model}

    def relevance(query: str, texts: tuple[str, ...]) -> np.ndarray:
        if not texts:
            return np.zeros(0)
        if config.api == "tei":
            body: dict[str, Any] = {"query": query, "texts": list(texts), "truncate": True}
        else:
            body = {"query": query, "documents": list(texts), "top_n": len(texts), "return_documents": False, **model}
        return client.post("/rerank", body, lambda response: _scores(response, len(texts)))

    return relevance


def _scores(response: Response, count: int) -> np.ndarray:
    """The scores in the answer of a rerank service: ``{"results": [{"index", "relevance_score"}]}``, or TEI's
    ``[{"index", "score"}]``."""
    ranking = response.json()
    scores: dict[int, float] = {}
    try:
        for each in ranking["results"] if isinstance(ranking, dict) else ranking:
            scores[int(each["index"])] = float(each["relevance_score" if "relevance_score" in each else "score"])
        return np.array([scores[place] for place in range(count)])
    except (KeyError, TypeError, ValueError):
        raise RetryableError(f"not a ranking of {count} documents: {excerpt(response.body)}") from None


# ---- a model in this process ---------------------------------------------------------------------------------------


def _model(path: str, device: str) -> Relevance:
    try:
        from sentence_transformers import CrossEncoder, SentenceTransformer
    except ImportError:
        missing = f"retrieval.model needs sentence-transformers: {pip_install('retrieval')}"
        raise BrokenEnvironmentError(f"{missing}, or retrieval.url, a service") from None
    import torch
    from transformers import AutoConfig

    from tandemrl.models.loading import ModelError, no_progress_bars, resolve_device

    try:
        crossing = is_cross_encoder(AutoConfig.from_pretrained(path, trust_remote_code=False))
        with no_progress_bars():
            model: Any = (CrossEncoder if crossing else SentenceTransformer)(path, device=str(resolve_device(device)))
    except (ModelError, OSError, ValueError, RuntimeError) as error:
        raise BrokenEnvironmentError(f"retrieval.model={path}: {error}") from error
    # Embeddings of the texts of a question are computed once.
    documents = lru_cache(KEPT)(lambda texts: model.encode_document([*texts], normalize_embeddings=True))

    def logits(query: str, texts: tuple[str, ...]) -> np.ndarray:
        """By a cross-encoder: the logit of each pair; of two labels, that of the second minus that of the first."""
        pairs = [(query, text) for text in texts]
        found = model.predict(pairs, activation_fn=torch.nn.Identity()) if pairs else np.zeros(0)
        return found if found.ndim == 1 else found[:, 1] - found[:, 0]

    def cosines(query: str, texts: tuple[str, ...]) -> np.ndarray:
        """By an embedding model: of the embeddings of the query and of each text."""
        return documents(texts) @ model.encode_query(query, normalize_embeddings=True) if texts else np.zeros(0)

    return logits if crossing else cosines


def is_cross_encoder(config: Any) -> bool:
    """Whether the model of a transformers configuration is used as a cross-encoder, and not as an embedding model.

    Raises:
        BrokenEnvironmentError: it is a classifier of more labels than have one score.
    """
    crossing = any(name.endswith("ForSequenceClassification") for name in config.architectures or [])
    if crossing and config.num_labels > 2:
        what = f"a sequence classifier with {config.num_labels} labels has no one score of a text"
        raise BrokenEnvironmentError(f"{what}; set retrieval.model to one with 1 or 2 labels, or an embedding model")
    return crossing


# ---- words: BM25 from the package bm25s (Lucene's variant, k1 1.5, b 0.75) over Snowball stems without stop words ----


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
