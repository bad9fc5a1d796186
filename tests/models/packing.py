"""What packed models are held against: small models, sequences, and plain forwards over full logits."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers import VOCABULARY, gpt2, llama, qwen3, with_head_bias
from tandemrl.models.batching import pack_tokens
from tandemrl.models.forward import token_scores
from tandemrl.types import Batch

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3 tied": lambda: qwen3(),
    "qwen3 untied": lambda: qwen3(tied=False),
    "llama tied": lambda: llama(tied=True),
    "llama untied": lambda: llama(),
    "llama with a head bias": lambda: with_head_bias(llama()),
    "gpt2": lambda: gpt2(),
}
LENGTHS = {
    "one": [9],
    "equal": [6, 6, 6],
    "similar": [9, 7, 8],
    "several buckets": [1, 5, 2, 17, 9, 17, 40, 3],
    "only first tokens": [1, 1],
}


def sequences(lengths: list[int], *, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCABULARY, length).tolist() for length in lengths]


def everything(batch: Batch) -> Tensor:
    return torch.ones_like(batch.tokens, dtype=torch.bool)


def dense(
    model: PreTrainedModel, given: list[list[int]], temperature: float, *, kept: Callable | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by one plain forward per sequence and a log-softmax over full logits."""
    logprobs, entropies = [], []
    for tokens in given:
        ids = torch.tensor(tokens)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature
        if kept is not None:
            logits = logits.masked_fill(~kept(logits, ids[1:]), -torch.inf)
        logp = logits.log_softmax(-1)
        zero = logp.new_zeros(1)
        logprobs += [zero, logp[torch.arange(len(tokens) - 1), ids[1:]]]
        finite = logp.masked_fill(logp == -torch.inf, 0.0)
        entropies += [zero, -(logp.exp() * finite).sum(-1)]
    return torch.cat(logprobs), torch.cat(entropies)


def weights_for(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(11))


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    if loss.requires_grad:
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 2e-5) -> None:
    assert ours.keys() == theirs.keys()
    assert ours
    for name, wanted in theirs.items():
        scale = max(float(wanted.abs().max()), 1e-3)
        torch.testing.assert_close(ours[name] / scale, wanted / scale, rtol=0, atol=tolerance, msg=name)


def spans(lengths: list[int]) -> list[np.ndarray]:
    """Sequences end to end."""
    return np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])


def scored(model: PreTrainedModel, given: list[list[int]]) -> Tensor:
    """The packed model's log-probs of all tokens."""
    batch = pack_tokens(given)
    with torch.no_grad():
        return token_scores(model, batch, select=everything(batch))[0]
