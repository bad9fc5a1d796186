"""How well documents answer a query, as judged by a cross-encoder, an embedding model or a service."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from tandemrl.config import RetrievalConfig
from tandemrl.config.hints import pip_install
from tandemrl.processes.http import Client, PermanentError, Response, RetryableError, Service, excerpt
from tandemrl.rollout.envs.environment import BrokenEnvironmentError

Relevance = Callable[[str, tuple[str, ...]], np.ndarray]
"""A function of (query, texts) that returns a score per text, which is greater the better the text answers the query.
It is called again and again with the texts of the same question, as one tuple."""

KEPT = 256
"""For how many questions the embeddings of the texts are kept."""


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
    patience = (config.timeout_s, config.retries, config.backoff_s, 64)
    key = config.api_key_env
    service = Service("retrieval", start, BrokenEnvironmentError, config.url, key, *patience, cap_retry_after=True)
    return Client(service)  # capped, since rollout.tool_timeout_s counts on retrieval.patience_s


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
    if response.status == 404:
        raise PermanentError(f"HTTP 404: {excerpt(response.body)}; retrieval.url must end where /rerank begins")
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
    from transformers import AutoConfig

    from tandemrl.models.loading import ModelError, no_progress_bars, resolve_device

    try:
        crossing = is_cross_encoder(AutoConfig.from_pretrained(path, trust_remote_code=False))
        with no_progress_bars():
            model = (CrossEncoder if crossing else SentenceTransformer)(path, device=str(resolve_device(device)))
    except (ModelError, OSError, ValueError, RuntimeError) as error:
        raise BrokenEnvironmentError(f"retrieval.model={path}: {error}") from error
    return _cross_encoder(model) if crossing else _embedder(model)


def is_cross_encoder(config: Any) -> bool:
    """Whether the model of a transformers configuration is used as a cross-encoder, and not as an embedding model.

    Raises:
        BrokenEnvironmentError: it is a classifier of more labels than have one score.
    """
    crossing = any(name.endswith("ForSequenceClassification") for name in config.architectures or [])
    if crossing and config.num_labels > 2:
        raise BrokenEnvironmentError(
            f"a sequence classifier with {config.num_labels} labels has no one score of a text; set retrieval.model to "
            "one with 1 or 2 labels, or to an embedding model"
        )
    return crossing


def _cross_encoder(model: Any) -> Relevance:
    """The relevance by a cross-encoder: the logit of each (query, text) pair.

    With two labels, it is the logit of the second label minus that of the first.
    """
    import torch

    def relevance(query: str, texts: tuple[str, ...]) -> np.ndarray:
        pairs = [(query, text) for text in texts]
        logits = model.predict(pairs, activation_fn=torch.nn.Identity()) if pairs else np.zeros(0)
        return logits if logits.ndim == 1 else logits[:, 1] - logits[:, 0]

    return relevance


def _embedder(model: Any) -> Relevance:
    """The relevance by an embedding model: the cosine between the embeddings of the query and of each text.

    The embeddings of a question's texts are computed once.
    """
    documents = lru_cache(KEPT)(lambda texts: model.encode_document([*texts], normalize_embeddings=True))

    def relevance(query: str, texts: tuple[str, ...]) -> np.ndarray:
        return documents(texts) @ model.encode_query(query, normalize_embeddings=True) if texts else np.zeros(0)

    return relevance
