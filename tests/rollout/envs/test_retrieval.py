"""Retrievers: what a query finds, by words, by models and by services."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tempers import DOCS
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast

from fake_judge import FakeJudge, Reply
from runs import put
from tandemrl.config import Config, ConfigError, RetrievalConfig, RolloutConfig
from tandemrl.config.compatibility import check
from tandemrl.data.rows import DataError, Row
from tandemrl.rollout.envs.environment import BrokenEnvironmentError
from tandemrl.rollout.envs.multihop import MultihopEnvironment
from tandemrl.rollout.envs.retrieval import (
    Corpus,
    halves,
    is_cross_encoder,
    make_relevance,
    make_retriever,
    ranked,
    reciprocal_ranks,
    word_scores,
    write_corpus,
)

BM25, LEXICAL = RetrievalConfig(), RetrievalConfig(retriever="lexical")
TEXTS = ("ann lives in paris", "bob", "paris is in france on the seine", "the fox of bob is in lyon with ann")


def row(docs: Sequence[dict[str, object]] = DOCS, asks: str = "?") -> Row:
    return Row("q", ({"role": "user", "content": asks},), "musique", "France", {"docs": docs})


def found(config: RetrievalConfig, query: str, count: int = 2, docs: Sequence[dict[str, object]] = DOCS) -> list[str]:
    return [document.id for document in make_retriever(config)(row(docs), query, count)]


@pytest.fixture
def words() -> None:
    """What searches by words."""
    pytest.importorskip("bm25s", reason="needs the retrieval extra")
    pytest.importorskip("Stemmer", reason="needs the retrieval extra")


@pytest.fixture
def sentence_models() -> None:
    """What ranks by a model."""
    pytest.importorskip("sentence_transformers", reason="needs the retrieval extra")


def test_search_by_words(words: None) -> None:
    assert found(BM25, "Who runs with a FOX?") == ["3", "1"]  # stems: foxes, running
    assert found(LEXICAL, "Ann", 1) == ["0"]
    assert found(BM25, "the of", 3) == ["0", "1", "2"]  # nothing but stop words: all are equal
    assert found(BM25, "fox", 100) == ["3", "1", "0", "2"]
    assert found(BM25, "fox", docs=[{"id": "a", "text": "the"}, {"id": "b", "text": ""}]) == ["a", "b"]
    assert found(BM25, "fox", docs=[]) == []


def test_scores_are_those_of_bm25(words: None) -> None:
    """Lucene's formula, written out: idf ln(1 + (N - n + .5) / (n + .5)), tf / (tf + k1 (1 - b + b l / mean))."""
    draw = np.random.default_rng(0)
    words = ["fox", "dog", "bird", "tree", "lake"]
    texts = [" ".join(draw.choice(words, size=draw.integers(1, 9))) for _ in range(30)]
    counts = [[text.split().count(word) for word in words] for text in texts]
    lengths = [sum(each) for each in counts]
    mean = sum(lengths) / len(lengths)
    for chosen in ([0], [1, 3], [0, 2, 4]):
        expected = []
        for each, length in zip(counts, lengths, strict=True):
            score = 0.0
            for place in chosen:
                holding = sum(other[place] > 0 for other in counts)
                idf = np.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
                score += idf * each[place] / (each[place] + 1.5 * (0.25 + 0.75 * length / mean))
            expected.append(score)
        query = " ".join(words[place] for place in chosen)
        assert word_scores()(query, tuple(texts)) == pytest.approx(expected, rel=1e-5)


def numbered(count: int) -> list[dict[str, object]]:
    return [{"id": f"d{i}", "title": f"T{i}", "body": f"w{i} w{i % 7} common words"} for i in range(count)]


def test_a_corpus_finds_what_its_documents_in_memory_would(words: None, tmp_path: Path) -> None:
    documents = [*numbered(50), {"id": "é", "text": "w3 ünïcode\nand a second line"}]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n\n" for each in documents))
    assert write_corpus(corpus, tmp_path / "index") == 51
    config = RetrievalConfig(index=str(tmp_path / "index"))
    for query, matching in (("w3", 3), ("w5 w6", 3), ("ünïcode lines", 1), ("common", 3)):  # others are not found
        assert found(config, query, 3) == found(BM25, query, 3, documents)[:matching]
    [last] = Corpus(tmp_path / "index").search("ünïcode", 3)
    assert last == ("é", "", "w3 ünïcode\nand a second line", False)
    assert found(config, "the of") == found(config, "nowhere") == []
    assert isinstance(Corpus(tmp_path / "index")._index.scores["data"], np.memmap)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"id": "a", "text": "x"}, {"id": "a", "text": "y"}], r"line 2: two documents have the id 'a'"),
        ([{"id": "a"}], r"line 1: expected a string 'text', or strings 'title' and 'body', found \['id'\]"),
        (["text"], r"line 1: expected an object"),
        ([{"id": "a", "text": "the"}], r"corpus\.jsonl: no document has a word"),
    ],
)
def test_a_corpus_that_cannot_be_indexed(words: None, tmp_path: Path, lines: list[Any], message: str) -> None:
    corpus = put(tmp_path / "corpus.jsonl", *lines)
    with pytest.raises(DataError, match=message):
        write_corpus(corpus, tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_an_index_replaces_an_index_and_nothing_else(words: None, tmp_path: Path) -> None:
    corpus, other = tmp_path / "data" / "corpus.jsonl", tmp_path / ".new-of-another-process"
    corpus.parent.mkdir()
    corpus.write_text('{"id": "1", "title": "", "text": "a fox"}\n')
    other.mkdir()
    with pytest.raises(DataError, match="data holds something else than an index, which would be replaced"):
        write_corpus(corpus, corpus.parent)
    for _ in range(2):
        assert write_corpus(corpus, tmp_path / "index") == 1
    assert corpus.is_file()
    assert other.is_dir()
    (tmp_path / "index" / "corpus.jsonl").unlink()
    with pytest.raises(BrokenEnvironmentError, match=r"no whole index.*corpus.*; write one: tandemrl data"):
        Corpus(tmp_path / "index")


# ---- merging -------------------------------------------------------------------------------------------------------


def test_a_text_without_a_word_of_the_query_has_no_rank_by_words(words: None) -> None:
    texts = ("a fox", "a dog", "a cat")
    by_words = ranked(word_scores(), matching=True)
    assert by_words("cats and nothing", texts, 3) == [2]
    assert by_words("Katze", texts, 3) == []
    merged = reciprocal_ranks(lambda query, texts, count: [2, 1, 0][:count], by_words)
    assert merged("Katze", texts, 3) == [2, 1, 0]


def test_reciprocal_ranks_and_halves_by_hand() -> None:
    one = lambda query, texts, count: [0, 1, 2, 3, 4][:count]  # noqa: E731
    other = lambda query, texts, count: [4, 3, 0, 2, 1][:count]  # noqa: E731
    merged = reciprocal_ranks(one, other)
    # 0: 1/61 + 1/63, 4: 1/65 + 1/61, 1: 1/62 + 1/65, 3: 1/64 + 1/62, 2: 1/63 + 1/64
    assert merged("", tuple("abcde"), 5) == [0, 4, 3, 1, 2]
    assert merged("", tuple("abcde"), 2) == [0, 4]
    assert [halves(one, other)("", tuple("abcde"), n) for n in (1, 2, 3, 5)] == [
        [0],
        [0, 1],
        [0, 1, 4],
        [0, 1, 2, 4, 3],
    ]


# ---- models --------------------------------------------------------------------------------------------------------


def save_model(folder: Path, kind: type[BertModel] | type[BertForSequenceClassification], labels: int = 1) -> str:
    vocabulary = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *sorted({word for text in TEXTS for word in text.split()})]
    ids = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=16, **special).save_pretrained(folder)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=len(ids), max_position_embeddings=16, num_labels=labels, pad_token_id=0, **size)
    with torch.random.fork_rng():
        torch.manual_seed(labels)
        model = kind(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("labels", [1, 2])
def test_a_cross_encoder_reads_pairs(sentence_models: None, tmp_path: Path, labels: int) -> None:
    """Each pair alone, without padding, is the reference."""
    path = save_model(tmp_path, BertForSequenceClassification, labels)
    model = BertForSequenceClassification.from_pretrained(path).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            logits = model(**tokenizer("fox of france", text, return_tensors="pt")).logits[0].tolist()
        expected.append(logits[0] if labels == 1 else logits[1] - logits[0])
    config = RetrievalConfig(retriever="semantic", model=path)
    assert make_relevance(config)("fox of france", TEXTS) == pytest.approx(expected, abs=1e-5)
    documents = [{"id": str(i), "text": text} for i, text in enumerate(TEXTS)]
    assert found(config, "fox of france", 4, documents) == [str(i) for i in np.argsort(expected)[::-1]]
    assert found(config, "fox of france", 4, []) == []


def test_a_classifier_without_one_score_is_refused() -> None:
    kind = ["BertForSequenceClassification"]
    assert is_cross_encoder(BertConfig(architectures=kind, num_labels=2))
    with pytest.raises(BrokenEnvironmentError, match=r"3 labels .* set retrieval\.model to"):
        is_cross_encoder(BertConfig(architectures=kind, num_labels=3))


def test_an_embedding_model(sentence_models: None, tmp_path: Path) -> None:
    """Cosines of mean embeddings that are computed one text at a time."""
    path = save_model(tmp_path, BertModel)
    model, tokenizer = BertModel.from_pretrained(path).eval(), PreTrainedTokenizerFast.from_pretrained(path)

    def embedded(text: str) -> np.ndarray:
        with torch.no_grad():
            vector = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy().mean(axis=0)
        return vector / np.sqrt((vector**2).sum())

    relevance = make_relevance(RetrievalConfig(retriever="semantic", model=path))
    for query in ("fox", "paris in france"):
        expected = [float(embedded(text) @ embedded(query)) for text in TEXTS]
        assert relevance(query, TEXTS) == pytest.approx(expected, abs=1e-5)


# ---- a service -----------------------------------------------------------------------------------------------------


@contextmanager
def service(answer: Callable[[dict[str, Any]], tuple[int, Any]], path: str = "/rerank") -> Iterator[str]:
    """A server whose POST to ``path`` answers with (status, JSON); its address."""

    def reply(body: Any, _: int) -> Reply:
        status, value = answer(body)
        return Reply(status, json.dumps(value).encode())

    with FakeJudge(reply, path=f"/v1{path}") as server:
        yield server.url


def remote(url: str, **changes: Any) -> RetrievalConfig:
    return RetrievalConfig(retriever="semantic", url=url, backoff_s=0.0, **changes)


@pytest.mark.parametrize("api", ["cohere", "tei"])
def test_a_service_ranks(api: str) -> None:
    bodies: list[dict[str, Any]] = []

    def shortest_first(body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append(body)
        texts = body["documents"] if api == "cohere" else body["texts"]
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        if api == "tei":
            return 200, [{"index": place, "score": -len(texts[place])} for place in order]
        return 200, {"results": [{"index": place, "relevance_score": -len(texts[place])} for place in order]}

    with service(shortest_first) as url:
        assert found(remote(url, api=api, model="m"), "fox", 3) == ["0", "1", "2"]
    texts = [
        "# Ann\nAnn was born in Paris.",
        "# Bob\nBob breeds running foxes.",
        "The capital of France, on the Seine.",
    ]
    texts.append("# Lyon\nThe fox runs in Lyon: foxes, foxes.")
    cohere = {"query": "fox", "documents": texts, "top_n": 4, "return_documents": False, "model": "m"}
    assert bodies == [cohere if api == "cohere" else {"query": "fox", "texts": texts, "truncate": True}]


@pytest.mark.parametrize(
    ("status", "value", "message", "asked"),
    [
        (503, "loading", r"failed 3 time\(s\), at last with: HTTP 503.*text-embeddings-router", 3),
        (200, {"results": [{"index": 0, "relevance_score": 1}]}, "not a ranking of 4 documents", 3),
        (422, "no field texts", "HTTP 422", 1),
        (404, "", r"retrieval\.url must end where /rerank begins", 1),
    ],
)
def test_a_service_that_is_broken_stops_the_run(status: int, value: Any, message: str, asked: int) -> None:
    requests = []
    with service(lambda body: requests.append(body) or (status, value)) as url:
        with pytest.raises(BrokenEnvironmentError, match=message):
            found(remote(url), "fox")
        assert len(requests) == asked


WIKI = [{"rank": i + 1, "score": 9.0 - i, "document": {"id": f"w{i}", "title": "T", "body": f"B{i}"}} for i in range(3)]


@pytest.mark.parametrize("shape", [{"results": WIKI, "metadata": {}}, [each["document"] for each in WIKI]])
def test_a_service_searches_in_its_own_corpus(shape: Any) -> None:
    bodies: list[dict[str, Any]] = []
    asked = "/search?query=who+%26+where&top_n=2"  # as rlvr's reads it; others read the body
    with service(lambda body: bodies.append(body) or (200, shape), asked) as url:
        config = RetrievalConfig(retriever="search", url=url, backoff_s=0.0)
        check(Config(retrieval=config))
        assert [each.id for each in make_retriever(config)(row([]), "who & where", 2)] == ["w0", "w1"]
        assert make_retriever(config)(row(), "who & where", 2)[0].text == "# T\nB0"
        assert MultihopEnvironment(config).start(row([], asks="?")).messages[-1]["content"] == "?"
    assert bodies == [{"query": "who & where", "top_n": 2}] * 2


@pytest.mark.parametrize(
    ("status", "value", "message"),
    [
        (200, [{"id": "1", "text": "another Bob"}], r"another document with the id '1' than 'extra_info\.docs'"),
        (200, [{"id": "1"}], "not a list of documents: POST /search: expected a string"),
        (404, "", r"retrieval\.url must end where /search begins"),
    ],
)
def test_a_search_that_cannot_be_scored_or_read_stops_the_run(status: int, value: Any, message: str) -> None:
    with (
        service(lambda body: (status, value), "/search?query=bob&top_n=2") as url,
        pytest.raises(BrokenEnvironmentError, match=message),
    ):
        found(RetrievalConfig(retriever="search", url=url, backoff_s=0.0), "bob")


# ---- config --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retrieval", "message"),
    [
        ({"retriever": "semantic"}, r"retrieval\.model=None: must be a model's folder with semantic"),
        ({"retriever": "search"}, r"retrieval\.url=None: must be the address of a service with POST /search"),
        ({"retriever": "search", "url": "http://x", "index": "x"}, r"retrieval\.index=x: must be null with search"),
        ({"api_key_env": "KEY"}, r"retrieval\.api_key_env=KEY: must be null without retrieval\.url"),
        ({"url": "http://x", "timeout_s": 10.0}, r"rollout\.tool_timeout_s=30\.0: must be above 31\.5"),
    ],
)
def test_rules(retrieval: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(Config(retrieval=RetrievalConfig(**retrieval)))
    check(Config(retrieval=RetrievalConfig(retriever="hybrid", url="http://x", model="m"), rollout=RolloutConfig()))
