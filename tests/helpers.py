"""Tiny random models, a tokenizer of 72 tokens, and slow, obvious computations that the library must agree with."""

import copy
import math
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tandemrl.losses import sequence_sum, totals
from tandemrl.models.loading import prepare
from tandemrl.rollout.engine import Completion, Request, Sampling
from tandemrl.selection import Strategy, alternating, bernoulli, boundaries, chunk, sentence, solo, word, word_aligned
from tandemrl.selection.draws import request_key
from tandemrl.types import Totals

EOS, PAD = "<eos>", "<pad>"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SURFACES = [EOS, PAD, *LETTERS, *(f"Ġ{c}" for c in LETTERS), "Ġ", "Ċ", "ĊĊ", ".", "!", ".Ċ", "Ã", "©", *"0123456789"]
VOCABULARY = len(SURFACES)
IDS = {surface: index for index, surface in enumerate(SURFACES)}

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Letters with and without a leading space, newlines, and "é" as two byte tokens; no merges."""
    bpe = byte_level(IDS)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS, pad_token=PAD, chat_template=CHAT_TEMPLATE)


def byte_level(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]] = (), split: str = "") -> Tokenizer:
    """``split``: a pattern of what is merged apart."""
    bpe = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=list(merges)))
    to_bytes = bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if split:
        words = pre_tokenizers.Split(Regex(split), behavior="isolated")
        bpe.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    bpe.decoder = decoders.ByteLevel()
    return bpe


AGENT_TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ '!' if m.role == 'assistant' else '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token if m.role == 'assistant' else '.' }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
)


def agent_tokenizer(calls: Sequence[str]) -> PreTrainedTokenizerFast:
    """``tokenizer`` with a token for each of the calls, and a chat template that knows tools and several turns."""
    agent = copy.deepcopy(tokenizer())
    agent.add_tokens([AddedToken(call, normalized=False) for call in calls])
    agent.chat_template = AGENT_TEMPLATE
    return agent


def text(tokens: Sequence[int] | np.ndarray) -> str:
    return tokenizer().decode(list(tokens), skip_special_tokens=False)


# --------------------------------------------------------------------------------------------------------------- models


def save_speaker(folder: Path, words: Any, ids: Sequence[int]) -> Path:
    """Save a model with the tokenizer ``words`` that generates the ids after the first one: each decides the next."""
    assert len(set(ids)) == len(ids) <= 32
    size: dict[str, Any] = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1)
    size |= dict(num_key_value_heads=1, head_dim=32, tie_word_embeddings=False, max_position_embeddings=640)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(words), eos_token_id=words.eos_token_id, **size))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight[list(ids)] = torch.eye(32)[: len(ids)]
        model.lm_head.weight[list(ids[1:])] = torch.eye(32)[: len(ids) - 1]
    model.generation_config = GenerationConfig(eos_token_id=words.eos_token_id)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def _build(kind: type, config: PretrainedConfig, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config)
    for parameter in model.parameters():  # biases and norms start as constants: make every one of them matter
        if parameter.ndim == 1:
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
            parameter.data += 0.2 * noise
    model.generation_config = GenerationConfig(eos_token_id=IDS[EOS], pad_token_id=IDS[PAD])
    return model.eval()


def _common(vocabulary: int, context: int, tied: bool) -> dict:
    return dict(
        vocab_size=vocabulary,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=IDS[EOS],
        pad_token_id=IDS[PAD],
        attn_implementation="eager",
    )


def qwen3(
    seed: int = 0, *, vocabulary: int = VOCABULARY, context: int = 256, tied: bool = True, head_dim: int = 8
) -> Qwen3ForCausalLM:
    """Four heads that share two key heads; untouched, eager attention. vLLM on a CPU needs a ``head_dim`` of 32."""
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        **_common(vocabulary, context, tied),
    )
    return _build(Qwen3ForCausalLM, config, seed)


def small_qwen3(seed: int = 1, *, vocabulary: int = VOCABULARY) -> Qwen3ForCausalLM:
    """One layer, another width and another number of heads than ``qwen3``."""
    config = Qwen3Config(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        **_common(vocabulary, 256, tied=True),
    )
    return _build(Qwen3ForCausalLM, config, seed)


def llama(seed: int = 2, *, vocabulary: int = VOCABULARY, context: int = 256, tied: bool = False) -> LlamaForCausalLM:
    """Three heads that share one key head, and biased projections."""
    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        attention_bias=True,
        **_common(vocabulary, context, tied),
    )
    return _build(LlamaForCausalLM, config, seed)


def gpt2(seed: int = 3, *, context: int = 256) -> GPT2LMHeadModel:
    """Learned positions: a position outside of the context is an error."""
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=context, **_common(VOCABULARY, context, tied=True))
    return _build(GPT2LMHeadModel, config, seed)


def with_head_bias(model: PreTrainedModel, seed: int = 5) -> PreTrainedModel:
    """An untied model whose LM head has a bias."""
    old = model.lm_head
    head = torch.nn.Linear(old.in_features, old.out_features, bias=True, dtype=old.weight.dtype)
    generator = torch.Generator().manual_seed(seed)
    head.weight.data.copy_(old.weight.data)
    head.bias.data.copy_(torch.randn(old.out_features, generator=generator))
    model.lm_head = head
    return model


def noisy(model: PreTrainedModel, scale: float) -> PreTrainedModel:
    """Another model that mostly writes the same."""
    other, noise = copy.deepcopy(model), torch.Generator().manual_seed(3)
    for parameter in other.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=noise)
    return other


def trained_adapters(model: PreTrainedModel, seed: int, scale: float) -> PreTrainedModel:
    """``model`` with other adapters, as if they had learnt something."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def prepared(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of ``model`` wired to the library; ``model`` stays untouched and serves as the reference."""
    return prepare(copy.deepcopy(model))


# -------------------------------------------------------------------------------------------------- what an engine does


def strategies() -> dict[str, Strategy]:
    """Every strategy, with the handoffs close together."""
    return {
        "word": word(0.5, 4, boundaries.word_boundary_table(tokenizer())),
        "word_aligned": word_aligned(0.5, 3, boundaries.word_start_tables(tokenizer())),
        "bernoulli": bernoulli(0.5),
        "sentence": sentence("junior", boundaries.step_tables(tokenizer())),
        "chunk": chunk(3),
        "alternating": alternating("junior"),
        "solo senior": solo("senior"),
        "solo junior": solo("junior"),
    }


SAMPLINGS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.6),
    "hot": Sampling(temperature=1.7),
    "top_k": Sampling(top_k=5),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.1),
    "the paper's": Sampling(temperature=0.7, top_p=0.8, top_k=20),
    "all truncations": Sampling(temperature=1.3, top_p=0.9, top_k=12, min_p=0.02),
    "repetition": Sampling(repetition_penalty=1.3),
    "presence": Sampling(presence_penalty=0.8),
    "frequency": Sampling(frequency_penalty=0.5),
    "encouraged": Sampling(repetition_penalty=0.8, presence_penalty=-0.4),
    "everything": Sampling(
        temperature=0.9, top_p=0.95, top_k=30, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3,
    ),
}  # fmt: skip


def prompts(count: int, *, seed: int = 0, lengths: Sequence[int] = (1, 7, 2, 13, 4, 29)) -> list[list[int]]:
    """Random ids, no EOS; the lengths take turns."""
    generator = np.random.default_rng(seed)
    return [generator.integers(2, VOCABULARY, lengths[i % len(lengths)]).tolist() for i in range(count)]


def requests(
    given: Sequence[Sequence[int]], sampling: Sampling, strategy: Strategy, *, samples: int = 1, seed: int = 0
) -> list[Request]:
    return [
        Request(tuple(prompt), tuple(request_key(seed, 0, i, s) for s in range(samples)), sampling, strategy)
        for i, prompt in enumerate(given)
    ]


# -------------------------------------------------------------------------------------------------------------- oracles


@torch.no_grad()
def reference_logits(model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]) -> np.ndarray:
    """Logits [completion, v] that predict each completion token: one full forward of an untouched model, no cache."""
    tokens = torch.tensor([[*prompt, *completion]])
    logits = model(input_ids=tokens, use_cache=False).logits[0].double().numpy()
    return logits[len(prompt) - 1 : -1]


def author_logits(
    senior: PreTrainedModel, junior: PreTrainedModel, prompt: Sequence[int], completion: Completion
) -> np.ndarray:
    """Logits [completion, v] of the model that the completion records as each token's author."""
    tokens = completion.tokens.tolist()
    by = {who: reference_logits(model, prompt, tokens) for who, model in ((1, senior), (0, junior))}
    width = min(logits.shape[1] for logits in by.values())
    return np.array([by[int(who)][i, :width] for i, who in enumerate(completion.author)]).reshape(-1, width)


def reference_distribution(
    logits: np.ndarray, sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """One token's sampling probabilities [v] in vLLM's order, token by token in float64.

    Penalties (repetition over prompt and output, frequency and presence over the output), temperature, min_p, top_k,
    top_p, renormalised.
    """
    z = logits.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        z[token] = z[token] / sampling.repetition_penalty if z[token] > 0 else z[token] * sampling.repetition_penalty
    for token in output:
        z[token] -= sampling.frequency_penalty
    for token in set(output):
        z[token] -= sampling.presence_penalty
    z = z / sampling.temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    p[p < sampling.min_p * p.max()] = 0.0
    if sampling.top_k:
        p[p < np.sort(p)[::-1][min(sampling.top_k, len(p)) - 1]] = 0.0
    p /= p.sum()
    if sampling.top_p < 1.0:
        kept, mass = [], 0.0
        for token in np.argsort(-p, kind="stable"):
            if mass >= sampling.top_p:
                break
            kept.append(token)
            mass += p[token]
        p[np.setdiff1d(np.arange(len(p)), kept)] = 0.0
    return p / p.sum()


def splitmix(seed: int, index: int) -> int:
    """Output number ``index`` of the published SplitMix64 generator, in plain Python."""
    m = 2**64
    x = (seed + 0x9E3779B97F4A7C15 * (index + 1)) % m
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % m
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % m
    return x ^ (x >> 31)


def sampling_key(key: int, index: int) -> int:
    """The key that decides token ``index`` of the completion of ``key``: that output of its stream 2."""
    return splitmix(splitmix(splitmix(key, 0) + 2, 0), index)


def race_lag(p: np.ndarray, token: int, token_key: int) -> float:
    """By how much ``token`` comes too late in the race that decides it, as a share of the winner's time; 0: it wins.

    Exponential times: numbers 0 to 63 of the key belong to the places in a block of 64 ids, the others to the blocks.
    """
    block, place = divmod(token, 64)
    between, within = race(p, token_key, block)
    return max(between[block] / min(between), within[place] / min(within)) - 1


def race(p: np.ndarray, token_key: int, block: int) -> tuple[list[float], list[float]]:
    """When each block arrives, and each id of one block."""

    def times(weights: Sequence[float], first: int) -> list[float]:
        return [
            -math.log((splitmix(token_key, first + i) >> 11) / 2**53) / weight if weight > 0 else math.inf
            for i, weight in enumerate(weights)
        ]

    masses = [float(p[i : i + 64].sum()) for i in range(0, len(p), 64)]
    return times(masses, 64), times(p[64 * block : 64 * block + 64].tolist(), 0)


def raced_token(p: np.ndarray, token_key: int) -> int:
    """The token that wins."""
    between, _ = race(p, token_key, 0)
    block = int(np.argmin(between))
    return 64 * block + int(np.argmin(race(p, token_key, block)[1]))


def assert_differ_by_a_tie(
    one: Completion, other: Completion, request: Request, models: tuple[PreTrainedModel, PreTrainedModel]
) -> None:
    """Two completions of a request differ first where two tokens arrive together; models: senior and junior."""
    shortest = min(len(one.tokens), len(other.tokens))
    first = int(np.flatnonzero(one.tokens[:shortest] != other.tokens[:shortest])[0])
    assert np.array_equal(one.author[: first + 1], other.author[: first + 1])
    written = one.tokens[:first].tolist()
    logits = reference_logits(models[0 if one.author[first] == 1 else 1], request.prompt, [*written, 0])[first]
    p = reference_distribution(logits, request.sampling, request.prompt, written)
    for each in (one, other):
        assert race_lag(p, int(each.tokens[first]), sampling_key(one.key, first)) < 1e-4


def chi_square_bound(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, float]:
    """Pearson's statistic with rare categories pooled, and a bound that chance passes about once in 30 000 times."""
    expected = probabilities * counts.sum()
    common = expected >= 8
    seen = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = len(seen) - 1
    # Wilson and Hilferty 1931: the cube root is nearly normal
    bound = freedom * (1 - 2 / (9 * freedom) + 4 * np.sqrt(2 / (9 * freedom))) ** 3
    return float(((seen - wanted) ** 2 / wanted).sum()), float(bound)


def flat(written: list[list[Completion]]) -> list[Completion]:
    return [completion for group in written for completion in group]


def assert_same(
    found: Sequence[Completion], wanted: Sequence[Completion], atol: float = 1e-5, rtol: float = 0.0
) -> None:
    """The same keys, tokens, authors and ends; log-probs but for rounding."""
    for one, other in zip(found, wanted, strict=True):
        assert (one.key, one.stop_reason) == (other.key, other.stop_reason)
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.author.tolist() == other.author.tolist()
        np.testing.assert_allclose(one.behaviour_logprobs, other.behaviour_logprobs, rtol=rtol, atol=atol)


def assert_same_but_for_ties(
    batch: Sequence[Request],
    found: Sequence[Completion],
    wanted: Sequence[Completion],
    models: tuple[PreTrainedModel, PreTrainedModel],
    *,
    most: float,
    atol: float = 1e-4,
) -> None:
    """A difference must be a shown near-tie of the draw; at most this share of the completions has one."""
    asked, ties = [request for request in batch for _ in request.keys], 0
    for request, one, other in zip(asked, found, wanted, strict=True):
        if one.tokens.tolist() == other.tokens.tolist():
            assert_same([one], [other], atol)
        else:
            assert_differ_by_a_tie(one, other, request, models)
            ties += 1
    assert ties <= most * len(asked)


def abort_after(running: Any, batch: Sequence[Request], count: int, numbers: Sequence[int] | None) -> list[Completion]:
    """Abort rows from another thread once ``count`` tokens were written in all, and wait until that thread is done."""
    seen = 0

    def progress(more: int) -> None:
        nonlocal seen
        seen, before = seen + more, seen
        if before < count <= seen:
            thread = threading.Thread(target=running._call.abort, args=(numbers,))
            thread.start()
            thread.join()

    return flat(running.generate(batch, progress=progress))


def writing(words: list[str]) -> PreTrainedModel:
    """A GPT-2 that writes the given tokens in turn: its position decides, its attention and layers do nothing."""
    model = gpt2(context=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.ln_f.weight.fill_(1.0)
        head = torch.nn.Linear(16, VOCABULARY, bias=False)
        head.weight.zero_()
        codes = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0]
        codes = codes - codes.mean(1, keepdim=True)  # what the final norm leaves alone
        for position in range(16):
            model.transformer.wpe.weight[position] = codes[position]
        for i, word in enumerate(words):
            head.weight[IDS[word]] += 20 * codes[i]  # the prompt is one token, at position 0
    model.lm_head = head
    return model


def totals_of(weights: torch.Tensor, author: torch.Tensor, sequence_ids: torch.Tensor, *, num_sequences: int) -> Totals:
    """The totals of packed tokens."""
    sums = [sequence_sum(x.double(), sequence_ids, num_sequences=num_sequences) for x in (weights, author >= 0)]
    return totals(*sums)


@contextmanager
def background(command: Sequence[str], log: Path) -> Iterator[None]:
    """A context in which a command runs, with all that it starts."""
    with open(log, "wb") as output:
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, **quiet, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
