"""A published sentence encoder (all-MiniLM-L6-v2) as a retriever: from its folder, and from a cache of the hub."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import artefacts
from tandemrl.config import RetrievalConfig
from tandemrl.data.rows import Row
from tandemrl.rollout.envs.retrieval import make_retriever
from tandemrl.rollout.envs.semantic import Reading, make_relevance, reading_of

pytestmark = pytest.mark.slow

ASKED = {
    "Which physician discovered a cure?": "Alexander Fleming was a Scottish doctor whose research led to penicillin.",
    "car makers": "Toyota builds automobiles in Japan.",
    "How hot is our star?": "The surface of the Sun has a temperature of 5,500 °C.",
    "famous painters": "Leonardo created the Mona Lisa, a portrait in the Louvre.",
    "feline pets": "Cats sleep sixteen hours every day.",
    "Where do people ski?": "Chamonix is a resort for winter sports below Mont Blanc.",
    "cash machine": "An ATM dispenses banknotes to customers of a bank.",
    "ocean mammals that sing": "Humpback whales produce long songs under water.",
}
"""Queries, and the documents that answer them; they share no word."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return artefacts.minilm()


def hits(config: RetrievalConfig) -> int:
    """How many queries find their document first."""
    documents = [{"id": number, "text": text} for number, text in enumerate(ASKED.values())]
    row = Row("q", (), "musique", "", {"docs": documents[::-1]})
    found = [make_retriever(config)(row, query, 1)[0].id for query in ASKED]
    return sum(each == str(number) for number, each in enumerate(found))


def test_scores_are_cosines_of_mean_pooled_states(folder: Path) -> None:
    """Each text is read alone, without padding."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    long = "A text of more than 256 tokens. " * 60

    def embedded(text: str) -> np.ndarray:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.no_grad():
            vector = model(**ids).last_hidden_state[0].mean(dim=0).numpy()
        return vector / np.linalg.norm(vector)

    texts = (*ASKED.values(), long)
    assert reading_of(str(folder)) == Reading("mean", 256, ())
    relevance = make_relevance(RetrievalConfig(retriever="semantic", model=str(folder), device="cpu"))
    for query in [*ASKED][:3]:
        expected = [float(embedded(text) @ embedded(query)) for text in texts]
        assert relevance(query, texts) == pytest.approx(expected, abs=1e-5)


def test_it_finds_what_words_do_not(folder: Path) -> None:
    pytest.importorskip("bm25s", reason="needs the retrieval extra")
    by_words = hits(RetrievalConfig())
    by_meaning = hits(RetrievalConfig(retriever="semantic", model=str(folder), device="cpu"))
    print(f"of {len(ASKED)} queries: {by_words} by words, {by_meaning} by meaning")
    assert by_words <= 1
    assert by_meaning >= 7


SCORES = """
import sys
from tandemrl.config import RetrievalConfig
from tandemrl.rollout.envs.semantic import make_relevance, reading_of
name = sys.argv[1]
reading = reading_of(name, download=False)
relevance = make_relevance(RetrievalConfig(retriever="semantic", model=name, device="cpu"))
print(reading.words(), *relevance("car makers", TEXTS), sep="|")
"""


def test_a_cache_of_the_hub_reads_as_the_folder(folder: Path, tmp_path: Path) -> None:
    """Without a network, in a process that has read no other settings of the hub."""
    name, commit = "sentence-transformers/all-MiniLM-L6-v2", "c9745ed1d9f207416be6d2e6f8de32d1f16199bf"
    repository = tmp_path / f"models--{name.replace('/', '--')}"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "snapshots" / commit).symlink_to(folder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    texts = (*ASKED.values(),)
    command = [sys.executable, "-c", SCORES.replace("TEXTS", repr(texts)), name]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    reading, *scores = said.strip().split("|")
    relevance = make_relevance(RetrievalConfig(retriever="semantic", model=str(folder), device="cpu"))
    assert reading == "mean pooling, 256 tokens of a text"
    assert [*map(float, scores)] == pytest.approx(relevance("car makers", texts).tolist(), abs=1e-5)
