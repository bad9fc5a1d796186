"""How well documents answer a query, as judged by a cross-encoder, an embedding model or a service."""

import json
import math
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tandemrl.config import RetrievalConfig
from tandemrl.processes.http import Client, PermanentError, Response, RetryableError, Service, excerpt
from tandemrl.rollout.envs.environment import BrokenEnvironmentError

Relevance = Callable[[str, tuple[str, ...]], np.ndarray]
"""A function of (query, texts) that returns a score per text, which is greater the better the text answers the query.
It is called again and again with the texts of the same question, as one tuple."""

KEPT = 256
"""For how many questions the embeddings of the texts are kept."""
BATCH = 32
"""How many texts a model reads at once."""

_POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
}


class NotLookedUpError(BrokenEnvironmentError):
    """Whether a model of the hub has a file is not known on this machine, and the hub was not or cannot be asked."""


class Reading(NamedTuple):
    """How an embedding model reads a text.

    pooling: what of the hidden states is the embedding, ``mean``, ``cls`` or ``lasttoken``. max_tokens: how many tokens
    of a text it reads; None means as many as the model and its tokenizer take. missing: the files that a
    sentence-transformers model has and this one has not, so that the pooling is the default, ``mean``.
    """

    pooling: str
    max_tokens: int | None
    missing: tuple[str, ...]

    def warn(self, path: str) -> None:
        """Warn if the model at ``path`` is read by default."""
        if self.missing:
            warnings.warn(f"retrieval.model={path}: {self.words()}; is it an embedding model?", stacklevel=3)

    def words(self) -> str:
        """The reading in a few words."""
        why = "".join(f", by default: there is no {name}" for name in self.missing)
        return f"{self.pooling} pooling{why}" + (f", {self.max_tokens} tokens of a text" if self.max_tokens else "")


def make_relevance(config: RetrievalConfig) -> Relevance:
    """The relevance by the service at ``retrieval.url``, or by ``retrieval.model``, which is loaded into this process.

    A model whose architecture is a sequence classifier is used as a cross-encoder, any other model as an embedding
    model; see `reading_of`.

    Raises:
        BrokenEnvironmentError: the model cannot be loaded, or the key of the service is not set.
    """
    if config.url is not None:
        return _service(config)
    assert config.model is not None  # `config.compatibility`
    return _model(config.model, config.device)


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
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

    from tandemrl.models.loading import ModelError, load_tokenizer, no_progress_bars, resolve_device

    try:
        tokenizer = load_tokenizer(path)
        crossing = is_cross_encoder(AutoConfig.from_pretrained(path))
        loader = AutoModelForSequenceClassification if crossing else AutoModel
        with no_progress_bars():
            model = loader.from_pretrained(path, trust_remote_code=False).to(resolve_device(device)).eval()
    except (ModelError, OSError, ValueError, RuntimeError) as error:
        raise BrokenEnvironmentError(f"retrieval.model: {error}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.eos_token_id
    return _cross_encoder(model, tokenizer) if crossing else _embedder(model, tokenizer, reading_of(path))


def is_cross_encoder(config: Any) -> bool:
    """Whether the model of a transformers configuration is used as a cross-encoder, and not as an embedding model."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def _cross_encoder(model: Any, tokenizer: Any) -> Relevance:
    """The relevance by a cross-encoder: the logit of each (query, text) pair.

    With two labels, it is the logit of the second label minus that of the first.
    """

    def relevance(query: str, texts: tuple[str, ...]) -> np.ndarray:
        logits = _in_batches(model, tokenizer, texts, lambda output, _: output.logits, query=query)
        return logits[:, -1] - (logits[:, 0] if logits.shape[1] == 2 else 0.0)

    return relevance


def _embedder(model: Any, tokenizer: Any, reading: Reading) -> Relevance:
    """The relevance by an embedding model: the cosine between the embeddings of the query and of each text.

    The embeddings of a question's texts are computed once.
    """

    def embedded(texts: tuple[str, ...]) -> np.ndarray:
        vectors = _in_batches(
            model,
            tokenizer,
            texts,
            lambda output, mask: _pooled(output.last_hidden_state, mask, reading.pooling),
            most=reading.max_tokens,
        )
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    documents = lru_cache(KEPT)(embedded)
    return lambda query, texts: documents(texts) @ embedded((query,))[0] if texts else np.zeros(0)


def _in_batches(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    read: Callable[[Any, Any], Any],
    *,
    query: str | None = None,
    most: int | None = None,
) -> np.ndarray:
    """Run the model over texts in batches.

    Args:
        read: makes the result of a batch from the model's output and the attention mask.
        query: if given, the model reads pairs of the query and a text.
        most: how many tokens of a text are read. None means as many as the model and its tokenizer take.

    Returns:
        One result per text [texts, …].
    """
    import torch

    parts = []
    with torch.inference_mode():
        for begin in range(0, len(texts), BATCH):
            batch = list(texts[begin : begin + BATCH])
            pairs = (batch,) if query is None else ([query] * len(batch), batch)
            longest = min(tokenizer.model_max_length, model.config.max_position_embeddings, most or math.inf)
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


def reading_of(path: str, *, download: bool = True) -> Reading:
    """How an embedding model reads texts, as its sentence-transformers files say, in a folder or on the hub.

    Args:
        path: model folder or hub id.
        download: download the files from the hub if they are not on this machine.

    Raises:
        NotLookedUpError: it is not known whether the model has such a file.
        BrokenEnvironmentError: a file cannot be read, or asks for another pooling or further layers.
    """
    modules = _said(path, "modules.json", list, download) or []
    kinds = [(str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))) for module in modules]
    if others := [kind for kind, _ in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise BrokenEnvironmentError(f"{path}, modules.json: it has a layer {others[0]}; use another model")
    named = dict(kinds)
    pooling_file = f"{named.get('Pooling') or '1_Pooling'}/config.json"
    text_file = "/".join(filter(None, (named.get("Transformer"), "sentence_bert_config.json")))
    pooling, text = (_said(path, name, dict, download) for name in (pooling_file, text_file))
    chosen = ["mean"] if pooling is None else [name for key, name in _POOLINGS.items() if pooling.get(key)]
    if len(chosen) != 1:
        names = ", ".join(_POOLINGS.values())
        raise BrokenEnvironmentError(f"{path}, {pooling_file}: its pooling is none of {names}; use another model")
    most = (text or {}).get("max_seq_length")
    if not (most is None or (isinstance(most, int) and most > 0)):
        raise BrokenEnvironmentError(f"{path}, {text_file}: max_seq_length={most!r} is no length")
    missing = () if pooling is not None else (pooling_file,)
    return Reading(chosen[0], most, missing)


def _said(path: str, name: str, kind: type, download: bool) -> Any:
    """What a file of a model says, a value of ``kind`` (list or dict), or None if the model has no such file."""
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    from tandemrl.models.loading import is_local

    try:
        file = Path(path, name) if is_local(path) else Path(hf_hub_download(path, name, local_files_only=not download))
        content = json.loads(file.read_text(encoding="utf-8"))
    except LocalEntryNotFoundError:  # one of the errors below, though the model may well have the file
        if try_to_load_from_cache(path, name) is _CACHED_NO_EXIST:
            return None
        raise NotLookedUpError(
            f"retrieval.model: {path}, {name} cannot be looked up; connect to the hub once, or name a folder"
        ) from None
    except (EntryNotFoundError, FileNotFoundError):
        return None
    except (OSError, ValueError) as error:
        raise BrokenEnvironmentError(f"retrieval.model: {path}, {name}: {error}") from error
    if not isinstance(content, kind):
        raise BrokenEnvironmentError(f"retrieval.model: {path}, {name}: expected a JSON {kind.__name__}")
    return content
