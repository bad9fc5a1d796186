"""How well documents answer a query, by a model: a cross-encoder or an embedding model from a folder, or a service."""

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tandemrl.config import RetrievalConfig
from tandemrl.http import Client, Passing, Refused, Response, Service, start
from tandemrl.rollout.envs.environment import BrokenEnvironmentError

Relevance = Callable[[str, tuple[str, ...]], np.ndarray]
"""A number per text: the greater, the better it answers the query. Texts of a question come as one tuple, again and
again."""

KEPT = 256
"""Questions whose embeddings are kept."""
BATCH = 32
"""Texts that a model reads at once."""


def make_relevance(config: RetrievalConfig) -> Relevance:
    """By ``retrieval.url``, or by ``retrieval.model`` in this process: a classifier of pairs is a cross-encoder, any
    other model embeds.

    Raises:
        BrokenEnvironmentError: the model cannot be loaded, or the key of the service is not set.
    """
    if config.url is not None:
        return _service(config)
    assert config.model is not None  # `config.rules`
    return _model(config.model, config.device)


# ---- a service -----------------------------------------------------------------------------------------------------


def _service(config: RetrievalConfig) -> Relevance:
    assert config.url is not None
    client = Client(
        Service(
            "retrieval",
            "text-embeddings-router --model-id MODEL",
            BrokenEnvironmentError,
            config.url,
            config.api_key_env,
            config.timeout_s,
            config.retries,
            config.backoff_s,
            concurrency=64,
        )
    )
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
    """The scores of a ranking: ``{"results": [{"index", "relevance_score"}]}``, or TEI's ``[{"index", "score"}]``."""
    if response.status == 404:
        raise Refused(f"HTTP 404: {start(response.body)}; retrieval.url must end where /rerank begins")
    ranking = response.json()
    scores: dict[int, float] = {}
    try:
        for each in ranking["results"] if isinstance(ranking, dict) else ranking:
            scores[int(each["index"])] = float(each["relevance_score" if "relevance_score" in each else "score"])
        return np.array([scores[place] for place in range(count)])
    except (KeyError, TypeError, ValueError):
        raise Passing(f"not a ranking of {count} documents: {start(response.body)}") from None


# ---- a model in this process ---------------------------------------------------------------------------------------


def _model(path: str, device: str) -> Relevance:
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    from tandemrl.models.loading import ModelError, load_tokenizer, no_progress_bars, resolve_device

    try:
        tokenizer = load_tokenizer(path)
        names = AutoConfig.from_pretrained(path).architectures or []
        crossing = any(name.endswith("ForSequenceClassification") for name in names)
        loader = AutoModelForSequenceClassification if crossing else AutoModel
        with no_progress_bars():
            model = loader.from_pretrained(path, trust_remote_code=False).to(resolve_device(device)).eval()
    except (ModelError, OSError, ValueError, RuntimeError) as error:
        raise BrokenEnvironmentError(f"retrieval.model: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.eos_token_id
    return _cross_encoder(model, tokenizer) if crossing else _embedder(model, tokenizer, _pooling(path))


def _cross_encoder(model: Any, tokenizer: Any) -> Relevance:
    """The logit of a (query, text) pair; of two labels that of the second one against the first."""

    def relevance(query: str, texts: tuple[str, ...]) -> np.ndarray:
        logits = _in_batches(model, tokenizer, texts, lambda output, _: output.logits, query=query)
        return logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0.0)

    return relevance


def _embedder(model: Any, tokenizer: Any, pooling: str) -> Relevance:
    """The cosine of the embeddings; those of a question's texts are computed once."""

    def embedded(texts: tuple[str, ...]) -> np.ndarray:
        vectors = _in_batches(
            model, tokenizer, texts, lambda output, mask: _pooled(output.last_hidden_state, mask, pooling)
        )
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    documents = lru_cache(KEPT)(embedded)
    return lambda query, texts: documents(texts) @ embedded((query,))[0] if texts else np.zeros(0)


def _in_batches(
    model: Any, tokenizer: Any, texts: Sequence[str], read: Callable[[Any, Any], Any], *, query: str | None = None
) -> np.ndarray:
    """What ``read`` makes of the model's output and the attention mask, for each text [texts, …]."""
    import torch

    parts = []
    with torch.inference_mode():
        for begin in range(0, len(texts), BATCH):
            batch = list(texts[begin : begin + BATCH])
            pairs = (batch,) if query is None else ([query] * len(batch), batch)
            longest = min(tokenizer.model_max_length, model.config.max_position_embeddings)
            inputs = tokenizer(*pairs, padding=True, truncation=True, max_length=longest, return_tensors="pt")
            inputs = inputs.to(model.device)
            parts.append(read(model(**inputs), inputs["attention_mask"]).float().cpu().numpy())
    return np.concatenate(parts) if parts else np.zeros((0, 1))


def _pooled(hidden: Any, mask: Any, pooling: str) -> Any:
    """One vector per text from those of its tokens [texts, tokens, size]."""
    import torch

    if pooling == "cls":
        return hidden[:, 0]
    places = torch.arange(mask.shape[1], device=mask.device)
    if pooling == "lasttoken":
        return hidden[torch.arange(len(mask), device=mask.device), (places * mask).argmax(dim=1)]
    return (hidden * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)


def _pooling(path: str) -> str:
    """``mean``, ``cls`` or ``lasttoken``, as a file of sentence-transformers says; mean where there is none."""
    said = Path(path) / "1_Pooling" / "config.json"
    modes = json.loads(said.read_text()) if said.is_file() else {"pooling_mode_mean_tokens": True}
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "lasttoken"}
    chosen = [name for key, name in names.items() if modes.get(key)]
    if len(chosen) != 1:
        raise BrokenEnvironmentError(f"{said}: its pooling is none of {', '.join(names.values())}; use another model")
    return chosen[0]
