"""How well documents answer a query, as judged by a cross-encoder, an embedding model or a service."""

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
"""A function of (query, texts) that returns a score per text, which is greater the better the text answers the query.
It is called again and again with the texts of the same question, as one tuple."""

KEPT = 256
"""For how many questions the embeddings of the texts are kept."""
BATCH = 32
"""How many texts a model reads at once."""


def make_relevance(config: RetrievalConfig) -> Relevance:
    """The relevance by the service at ``retrieval.url``, or by ``retrieval.model``, which is loaded into this process.

    A model whose architecture is a sequence classifier is used as a cross-encoder, any other model as an embedding
    model.

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
    """The scores in the answer of a rerank service: ``{"results": [{"index", "relevance_score"}]}``, or TEI's
    ``[{"index", "score"}]``."""
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
    """The relevance by a cross-encoder: the logit of each (query, text) pair.

    With two labels, it is the logit of the second label minus that of the first.
    """

    def relevance(query: str, texts: tuple[str, ...]) -> np.ndarray:
        logits = _in_batches(model, tokenizer, texts, lambda output, _: output.logits, query=query)
        return logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0.0)

    return relevance


def _embedder(model: Any, tokenizer: Any, pooling: str) -> Relevance:
    """The relevance by an embedding model: the cosine between the embeddings of the query and of each text.

    The embeddings of a question's texts are computed once.
    """

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
    """Run the model over texts in batches.

    Args:
        read: makes the result of a batch from the model's output and the attention mask.
        query: if given, the model reads pairs of the query and a text.

    Returns:
        One result per text [texts, …].
    """
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
    """One vector per text [texts, size], from the hidden states of its tokens [texts, tokens, size]."""
    import torch

    if pooling == "cls":
        return hidden[:, 0]
    places = torch.arange(mask.shape[1], device=mask.device)
    if pooling == "lasttoken":
        return hidden[torch.arange(len(mask), device=mask.device), (places * mask).argmax(dim=1)]
    return (hidden * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)


def _pooling(path: str) -> str:
    """The pooling of a model: ``mean``, ``cls`` or ``lasttoken``, as its sentence-transformers file says, or ``mean``
    if it has no such file."""
    said = Path(path) / "1_Pooling" / "config.json"
    modes = json.loads(said.read_text()) if said.is_file() else {"pooling_mode_mean_tokens": True}
    names = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "lasttoken"}
    chosen = [name for key, name in names.items() if modes.get(key)]
    if len(chosen) != 1:
        raise BrokenEnvironmentError(f"{said}: its pooling is none of {', '.join(names.values())}; use another model")
    return chosen[0]
