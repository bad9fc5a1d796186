"""Packed forwards against untouched transformers models: log-probs, entropies, gradients, memory."""

import copy
import math

import numpy as np
import pytest
import torch
from packing import LENGTHS, MODELS, assert_equal_gradients, dense, everything, gradients, sequences, weights_for
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import VOCABULARY, llama, prepared, qwen3, reference_distribution
from tandemrl.models import attention, forward, head
from tandemrl.models.attention import PackedLayout
from tandemrl.models.batching import pack, pack_tokens
from tandemrl.models.forward import token_scores
from tandemrl.models.head import ForwardOptions
from tandemrl.models.loading import prepare
from tandemrl.models.sampling import Truncation
from tandemrl.rollout.engine import Sampling
from tandemrl.types import Batch, Rollout

# ---------------------------------------------------------------------------------------------------- packed = unpacked


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_packed_logprobs_and_gradients_are_those_of_separate_sequences(name, lengths):
    reference = MODELS[name]()
    packed = prepared(reference)
    given = sequences(lengths)
    batch = pack_tokens(given)
    temperature = 0.7
    wanted, wanted_entropy = dense(reference, given, temperature)
    logprobs, entropy, *_ = token_scores(
        packed, batch, select=everything(batch), options=ForwardOptions(temperature=temperature)
    )
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=5e-5)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=0, atol=5e-5)
    if max(lengths) > 1:
        w, u = weights_for(len(wanted)), weights_for(len(wanted)).flip(0)
        theirs = gradients(reference, (w * wanted + u * wanted_entropy).sum())
        assert_equal_gradients(gradients(packed, (w * logprobs + u * entropy).sum()), theirs)


def with_contexts(given: list[list[int]], contexts: list[int]) -> Batch:
    """The sequences packed, with so many leading tokens of each as context; two later ones too, as a tool's reply."""
    rollouts = []
    for tokens, context in zip(given, contexts, strict=True):
        author = np.ones(len(tokens), np.int8)
        author[:context] = -1
        author[context + 3 : context + 5] = -1
        author[context + 1 : context + 2] = 0
        rollouts.append(Rollout("", 0, 0, 0, np.array(tokens), author, np.zeros(len(tokens)), 0.0))
    return pack(rollouts)


def shared_prompts() -> tuple[list[list[int]], list[int]]:
    """Groups of one prompt, of different lengths; prompts that begin alike; no prompt at all; equal sequences."""
    a, b, *rest = sequences([8, 8, 5, 30, 1, 6, 12, 2, 7, 4, 9])
    short = a[:5]  # another prompt, though the longer one begins with it
    given = [
        *(a + end for end in rest[:4]),
        *(b + end for end in rest[4:6]),
        *(short + end for end in (rest[0], a[5:] + rest[1])),
        rest[6],
        rest[7],
        a + rest[0],
        a,
        b,
    ]
    return given, [8] * 4 + [8] * 2 + [5] * 2 + [0] * 2 + [8] * 3


@pytest.mark.parametrize("name", ["qwen3 tied", "llama with a head bias", "gpt2"])
def test_prompts_of_a_group_are_computed_once_and_change_nothing(name):
    reference = MODELS[name]()
    packed = prepared(reference)
    given, contexts = shared_prompts()
    batch = with_contexts(given, contexts)
    computed: list[int] = []
    hook = packed.get_input_embeddings().register_forward_hook(lambda _, ids, __: computed.append(ids[0].numel()))
    logprobs, entropy, *_ = token_scores(
        packed, batch, select=everything(batch), options=ForwardOptions(temperature=1.2)
    )
    hook.remove()
    total = sum(map(len, given))
    assert computed == [total - 5 * 8 - 8 - 8 - 5]  # five repeats of a, two of b, one of its beginning
    wanted, wanted_entropy = dense(reference, given, 1.2)
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=5e-5)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=0, atol=5e-5)
    w = weights_for(total)
    theirs = gradients(reference, (w * wanted + w.flip(0) * wanted_entropy).sum())
    assert_equal_gradients(gradients(packed, (w * logprobs + w.flip(0) * entropy).sum()), theirs)


# ---------------------------------------------------------------------------------------------- flash attention on CUDA


class FakeFlash:
    """``torch.nn.attention.varlen.varlen_attn`` by its documentation, one sequence at a time, on any device."""

    def __init__(self) -> None:
        self.queries: list[int] = []

    def __call__(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        assert window_size == (-1, 0)
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert (int(cu_seq_q[-1]), int(cu_seq_k[-1])) == (len(query), len(key)) == (len(query), len(value))
        assert (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max())) == (max_q, max_k)
        assert all(x.is_contiguous() for x in (query, key, value))
        assert enable_gqa == (query.shape[1] != key.shape[1])
        self.queries.append(len(query))
        out = []
        for q0, q1, k0, k1 in zip(cu_seq_q[:-1], cu_seq_q[1:], cu_seq_k[:-1], cu_seq_k[1:], strict=True):
            q, k, v = query[q0:q1], key[k0:k1], value[k0:k1]
            repeats = q.shape[1] // k.shape[1]
            scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(repeats, 1)) * scale
            later = torch.arange(len(k)) > torch.arange(len(q))[:, None] + len(k) - len(q)  # the last sees the last
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(repeats, 1)))
        return torch.cat(out)


class FakeFlashOfTorch211(FakeFlash):
    """Takes as many heads of keys as of queries, and no ``enable_gqa``."""

    def __call__(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
        given = (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
        return super().__call__(*given, scale=scale, window_size=window_size)


@pytest.mark.parametrize(
    ("name", "kernel", "shared"),
    [
        ("qwen3 tied", FakeFlash, True),
        ("qwen3 tied", FakeFlashOfTorch211, False),
        ("llama untied", FakeFlash, False),
        ("gpt2", FakeFlashOfTorch211, True),
    ],
)
def test_flash_attention_over_packed_sequences_gives_what_rectangles_give(name, shared, kernel, monkeypatch):
    packed = prepared(MODELS[name]())
    batch = with_contexts(*shared_prompts()) if shared else pack_tokens(sequences(LENGTHS["several buckets"]))
    w = weights_for(len(batch.tokens))
    flash = kernel()

    def run() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logprobs, entropy, *_ = token_scores(packed, batch, select=everything(batch))
        found = gradients(packed, (w * logprobs + w.flip(0) * entropy).sum())
        return logprobs.detach(), entropy.detach(), {name: gradient.clone() for name, gradient in found.items()}

    wanted = run()
    monkeypatch.setattr(attention, "HAS_GROUPS", kernel is FakeFlash)
    monkeypatch.setattr(attention, "varlen_attn", flash)
    monkeypatch.setattr(attention, "_has_flash", lambda *_: True)
    found = run()
    computed = len(batch.tokens) - (5 * 8 + 8 + 8 + 5) * shared  # as above: repeated prompts are no queries
    assert flash.queries == [computed] * packed.config.num_hidden_layers
    torch.testing.assert_close(found[0], wanted[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=1e-5)
    assert_equal_gradients(found[2], wanted[2])


def test_flash_attention_takes_sequences_in_any_order_and_sees_autocast(monkeypatch):
    """Tokens of the second sequence lie before those of the first; with autocast all reach the kernel in 16 bits."""
    layout = PackedLayout([np.array([3, 4, 5]), np.array([0, 1]), np.array([3, 4, 2])])
    q, k, v = (torch.randn(1, heads, 6, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    wanted = layout.attend(0, q, k, v, 0.3)
    flash = FakeFlash()
    monkeypatch.setattr(attention, "varlen_attn", flash)
    monkeypatch.setattr(attention, "_has_flash", lambda device, dtype, *_: dtype == torch.bfloat16)
    assert torch.equal(layout.attend(0, q, k, v, 0.3), wanted)
    monkeypatch.setattr(attention, "_has_flash", lambda *_: True)
    torch.testing.assert_close(layout.attend(0, q, k, v, 0.3), wanted, rtol=0, atol=1e-6)
    monkeypatch.setattr(attention, "_has_flash", lambda device, dtype, *_: dtype == torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layout.attend(0, q, k, v.bfloat16(), 0.3).dtype == torch.bfloat16
    assert flash.queries == [6, 6]


# -------------------------------------------------------------------------------------------- selection, chunks, memory


def test_tokens_that_are_not_selected_are_zero_and_change_no_gradient():
    reference = llama()
    packed = prepared(reference)
    given = sequences([7, 12])
    batch = pack_tokens(given)
    select = torch.zeros(19, dtype=torch.bool)
    select[[0, 3, 6, 7, 9]] = True  # 0 and 7 begin their sequences: there is nothing to score
    logprobs, entropy, *_ = token_scores(packed, batch, select=select)
    wanted, wanted_entropy = dense(reference, given, 1.0)
    scored = [3, 6, 9]
    for found, full in ((logprobs, wanted), (entropy, wanted_entropy)):
        assert found.nonzero().squeeze(1).tolist() == scored
        torch.testing.assert_close(found[scored], full[scored], rtol=0, atol=5e-5)
    w = weights_for(19)
    theirs = gradients(reference, (w * wanted)[scored].sum())
    assert_equal_gradients(gradients(packed, (w * logprobs).sum()), theirs)


@pytest.mark.parametrize("rows", [1, 3, 7])
@pytest.mark.parametrize("name", ["qwen3 tied", "llama with a head bias"])
def test_chunks_change_nothing(name, rows, monkeypatch):
    packed = prepared(MODELS[name]())
    batch = pack_tokens(sequences([5, 14, 3]))
    w = weights_for(22)

    def run() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logprobs, entropy, *_ = token_scores(
            packed, batch, select=everything(batch), options=ForwardOptions(temperature=0.9)
        )
        found = gradients(packed, (w * logprobs + w.flip(0) * entropy).sum())
        return logprobs, entropy, {name: gradient.clone() for name, gradient in found.items()}

    logprobs, entropy, whole = run()
    monkeypatch.setattr(head, "LOGITS_PER_CHUNK", rows * VOCABULARY)
    chunked = run()
    torch.testing.assert_close(chunked[0], logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(chunked[1], entropy, rtol=0, atol=1e-5)
    assert_equal_gradients(chunked[2], whole)


def test_only_one_loss_needs_only_one_gradient():
    """The other output of the function gets no gradient at all, not a zero tensor."""
    reference = qwen3()
    packed = prepared(reference)
    given = sequences([5, 8])
    batch = pack_tokens(given)
    for output in (0, 1):
        found = token_scores(packed, batch, select=everything(batch))[output]
        theirs = gradients(reference, dense(reference, given, 1.0)[output].sum())
        assert_equal_gradients(gradients(packed, found.sum()), theirs)


class Shapes(TorchDispatchMode):
    """The shapes of all tensors of ``columns`` columns that any operation made."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (self.columns,):
                self.made.append(tuple(tensor.shape))
        return out


@pytest.mark.parametrize("truncation", [None, Truncation(7, 0.9, 0.0)])
def test_full_logits_are_never_materialised_nor_saved(truncation, monkeypatch):
    vocabulary = 211  # no other dimension of the model has this size
    monkeypatch.setattr(head, "LOGITS_PER_CHUNK", 4 * vocabulary)
    packed = prepared(qwen3(vocabulary=vocabulary))
    batch = pack_tokens(sequences([30, 45, 8]))
    saved: list[torch.Size] = []

    def remember(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor

    with Shapes(vocabulary) as watch, torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        logprobs, entropy, *_ = token_scores(
            packed, batch, select=everything(batch), options=ForwardOptions(truncation=truncation)
        )
        (logprobs + entropy).sum().backward()
    logits = [shape for shape in watch.made if shape != (32, vocabulary)]  # that is the LM head, transposed
    assert len(logits) > 2 * math.ceil(80 / 4)  # forward and backward both ran in chunks
    assert {math.prod(shape) for shape in logits} == {4 * vocabulary}
    assert saved
    assert not any(shape[-1:] == (vocabulary,) for shape in saved)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_on_the_host_change_no_number(checkpointing, monkeypatch):
    packed = prepared(qwen3(tied=False))
    if checkpointing:
        packed.train()
        packed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = pack_tokens(sequences([6, 15, 2]))
    w = weights_for(23)
    moved: list[tuple[int, ...]] = []
    to_host = forward._to_host

    def spy(saved: Tensor) -> object:
        kept = to_host(saved)
        if not isinstance(kept, Tensor):
            moved.append(tuple(kept[0].shape))
        return kept

    monkeypatch.setattr(forward, "_to_host", spy)
    runs = []
    for offload in (False, True):
        logprobs, *_ = token_scores(
            packed, batch, select=everything(batch), options=ForwardOptions(activation_offload=offload)
        )
        found = gradients(packed, (w * logprobs).sum())
        runs.append((logprobs.detach(), {name: gradient.clone() for name, gradient in found.items()}))
        assert bool(moved) == offload
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])
    weights = {tuple(p.shape) for p in packed.parameters()} | {
        tuple(p.mT.shape) for p in packed.parameters() if p.ndim == 2
    }
    assert not weights & set(moved)
    assert (1, 23, 32) in moved  # the layers' inputs
    assert ((1, 23, 48) in moved) != checkpointing  # inside of the MLP


# ----------------------------------------------------------------------------------------------------------- truncation

TRUNCATIONS = {
    "top_k": dict(top_k=25),
    "top_p": dict(top_p=0.7),
    "min_p": dict(min_p=0.05),
    "all": dict(top_k=40, top_p=0.9, min_p=0.01),
}


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_truncated_logprobs_are_renormalised_over_the_kept_tokens(name):
    """The kept set of each position is that of float64 loops; the token itself is kept whatever the rule says."""
    reference = llama()
    packed = prepared(reference)
    given = sequences([6, 15, 2])
    batch = pack_tokens(given)
    sampling = Sampling(**TRUNCATIONS[name])
    truncation = Truncation(sampling.top_k, sampling.top_p, sampling.min_p)
    outside = 0

    def kept(logits: Tensor, targets: Tensor) -> Tensor:
        nonlocal outside
        rows = [reference_distribution(row, sampling, [], []) > 0 for row in logits.detach().numpy()]
        keep = torch.from_numpy(np.array(rows)).reshape(logits.shape)
        outside += int((~keep.gather(1, targets[:, None])).sum())
        return keep.scatter(1, targets[:, None], True)

    wanted, wanted_entropy = dense(reference, given, 2.5, kept=kept)
    logprobs, entropy, *_ = token_scores(
        packed, batch, select=everything(batch), options=ForwardOptions(temperature=2.5, truncation=truncation)
    )
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=5e-5)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=0, atol=5e-5)
    assert 0 < outside < 20
    full, *_ = token_scores(packed, batch, select=everything(batch), options=ForwardOptions(temperature=2.5))
    scored = batch.positions > 0
    assert (logprobs >= full - 1e-6)[scored].all()
    w = weights_for(23)
    theirs = gradients(reference, (w * wanted + w.flip(0) * wanted_entropy).sum())
    assert_equal_gradients(gradients(packed, (w * logprobs + w.flip(0) * entropy).sum()), theirs)


# -------------------------------------------------------------------------------------------------------- low precision


def test_bfloat16_weights_and_autocast_run():
    reference = qwen3(tied=False)
    given = sequences([12, 5, 9])
    batch = pack_tokens(given)
    wanted, _ = dense(reference, given, 1.0)
    wanted = wanted.detach()

    low = prepare(copy.deepcopy(reference).to(torch.bfloat16))
    found, entropy, *_ = token_scores(low, batch, select=everything(batch))
    mixed = prepared(reference)
    under_autocast, *_ = token_scores(
        mixed, batch, select=everything(batch), options=ForwardOptions(autocast=torch.bfloat16)
    )
    for logprobs in (found, under_autocast):
        assert logprobs.dtype == torch.float32
        difference = (logprobs.detach() - wanted).abs()
        assert 0 < difference.mean() < 0.1
    theirs = gradients(reference, dense(reference, given, 1.0)[0].sum())
    for packed, logprobs, dtype in ((low, found + 0 * entropy, torch.bfloat16), (mixed, under_autocast, torch.float32)):
        for name, gradient in gradients(packed, logprobs.sum()).items():
            assert gradient.dtype == dtype
            cosine = torch.cosine_similarity(gradient.float().flatten(), theirs[name].flatten(), dim=0)
            assert cosine > 0.97, name
