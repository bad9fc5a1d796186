"""Causal LMs from transformers, run without padding: loading, packed attention, and log-probs without [t, v] logits.

Both users of a model, the trainer (packed sequences) and the reference engine (one token per row over a KV cache), call
the same stock transformers module. What differs is the *layout* (``attention``), an object that travels through the
model's keyword arguments to the registered attention function and says how queries meet keys. Nothing of the model is
patched, unless the user asks for ``use_liger`` or ``compile_layers``.
"""

import importlib
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from tandemrl.attention import (
    ATTENTION,
    WHOLE,
    Layout,
    ModelError,
    PackedLayout,
    Shards,
    SharedSum,
    UlyssesLayout,
    share_contexts,
)
from tandemrl.head import LOGITS_PER_CHUNK as LOGITS_PER_CHUNK
from tandemrl.head import HeadSettings, linear_logprobs
from tandemrl.pretrained import check_folder, refusal
from tandemrl.rollout.sampling import Truncation
from tandemrl.types import Author, Batch
from tandemrl.watchdog import stamp

# ------------------------------------------------------------------------------------------------------------ loading


def resolve_device(device: str) -> torch.device:
    """``auto`` is cuda where there is one, else cpu; of several CUDA devices, the one of this process (torchrun's
    ``LOCAL_RANK``).

    Raises:
        ModelError: not a device, or not one of this machine.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(f"cuda:{rank}" if device == "cuda" and (rank := os.getenv("LOCAL_RANK")) else device)
    except RuntimeError:
        raise ModelError(f"model.device={device}: not a torch device; use auto, cpu or cuda") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"model.device={device}: torch {torch.__version__} sees no CUDA device; use model.device=cpu")
    return resolved


def load_model(path: str | Path, *, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """A causal LM in eval mode, on ``device``, wired to this library's attention.

    Raises:
        ModelError: not loadable, not a causal LM with standard attention, or its head does more than a linear map.
    """
    check_folder(path)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise refusal("model", path, error) from None
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    model.to(resolve_device(device))  # type: ignore[arg-type]  # transformers' annotation of `to` lacks its arguments
    stamp()
    return prepare(model, name=str(path))


def prepare(model: PreTrainedModel, *, name: str = "model", head: nn.Linear | None = None) -> PreTrainedModel:
    """Wire a loaded model to the library's attention, in place, and prove on a probe that it decodes as before.

    Args:
        head: the linear map from hidden states to ``model(...).logits``; None = the LM head.

    Raises:
        ModelError: the architecture ignores the attention interface, carries state other than attention from token to
            token, or transforms its logits after the LM head.
    """
    model.eval()
    if model.config._attn_implementation == ATTENTION:
        return model
    rope = (getattr(model.config.get_text_config(), "rope_parameters", None) or {}).get("rope_type")
    if rope in ("dynamic", "longrope"):
        raise ModelError(
            f"{name}: rope_type {rope} makes a text depend on its neighbours in a batch; it is unsupported"
        )
    head = model.get_output_embeddings() if head is None else head
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{name}: no linear LM head; only causal LMs are supported")
    # Two sequences: state other than attention (recurrences, convolutions) would leak from the first into the second.
    lengths, device = [4, 3], head.weight.device
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    probe = torch.arange(sum(lengths), device=device) % model.config.get_text_config().vocab_size
    with torch.no_grad():
        alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in probe.split(lengths)]
        wanted = torch.cat(alone).float()
        try:
            model.set_attn_implementation(ATTENTION)
            spans = [np.arange(4), np.arange(4, 7)]
            found = head(hidden_states(model, probe, positions, PackedLayout(spans, device))).float()
        except (ValueError, TypeError, AttributeError) as error:
            raise ModelError(f"{name}: {type(model).__name__} does not support custom attention: {error}") from None
    tolerance = 1e-3 if head.weight.dtype == torch.float32 else 0.1
    if not torch.allclose(wanted, found, atol=tolerance * max(1.0, wanted.abs().max().item())):
        raise ModelError(
            f"{name}: {type(model).__name__} gives other logits through the packed path (max difference "
            f"{(wanted - found).abs().max().item():.3g}): its attention or its LM head is not a standard one"
        )
    return model


LIGER_FAMILIES = ("llama", "qwen2", "qwen3")
LIGER_DEVICES = ("cuda",)


def use_liger(model: PreTrainedModel, *, name: str = "model") -> PreTrainedModel:
    """Run a prepared model's RMSNorm, SwiGLU and RoPE by Liger's kernels (arXiv 2410.10989), in place; CUDA only.

    Liger changes the family's module in transformers: models of it that are loaded later use the kernels too. A probe
    proves that the model computes as before.

    Raises:
        ModelError: not on CUDA, liger-kernel is not installed, no kernels for this family, or other hidden states.
    """
    family, device = model.config.model_type, model.get_input_embeddings().weight.device
    if device.type not in LIGER_DEVICES:
        raise ModelError(f"{name}: Liger kernels need a CUDA device, the model is on {device}; set model.liger=false")
    if family not in LIGER_FAMILIES:
        raise ModelError(
            f"{name}: no Liger kernels for {family}, only {', '.join(LIGER_FAMILIES)}; set model.liger=false"
        )
    try:
        liger = importlib.import_module("liger_kernel.transformers")
    except ImportError as error:
        raise ModelError(f"model.liger=true: {error}; install the extra: pip install 'tandemrl[liger]'") from None
    tokens = torch.arange(7, device=device)
    layout = PackedLayout([np.arange(4), np.arange(4, 7)], device)
    with torch.no_grad():
        wanted = hidden_states(model, tokens, torch.cat([tokens[:4], tokens[:3]]), layout).float()
        getattr(liger, f"apply_liger_kernel_to_{family}")(
            rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False, model=model
        )
        found = hidden_states(model, tokens, torch.cat([tokens[:4], tokens[:3]]), layout).float()
    worst, scale = (found - wanted).abs().max().item(), max(1.0, wanted.abs().max().item())
    if not worst <= (1e-3 if model.dtype == torch.float32 else 0.1) * scale:
        raise ModelError(f"{name}: Liger kernels give other hidden states (max difference {worst:.3g})")
    return model


_COMPILED = "layers_are_compiled"


def require_compiler(model: PreTrainedModel, key: str) -> None:
    """Make ready for ``torch.compile``. key: of the configuration, which asks for it.

    Raises:
        ModelError: on a CPU without a C++ compiler.
    """
    compiler = os.environ.get("CXX", "g++")
    if model.get_input_embeddings().weight.device.type == "cpu" and shutil.which(compiler) is None:
        raise ModelError(
            f"{key}=true needs a C++ compiler and {compiler} is not there; install it, name another one in the "
            f"environment variable CXX, or set {key}=false"
        )
    # A graph holds for a range of sizes, such as 1025 to 2048; past the limit nothing more would be compiled.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)


def compile_layers(model: PreTrainedModel, *, backend: str = "inductor") -> PreTrainedModel:
    """Compile every decoder layer of a prepared model with ``torch.compile``, in place, all but its attention.

    Shapes are dynamic, so packed batches of similar lengths share graphs; the first forward and backward take tens of
    seconds. Where one token per row is decoded, compiled layers would only be slower: see ``eagerly``.

    Args:
        backend: of ``torch.compile``.

    Raises:
        ModelError: on a CPU without a C++ compiler.
    """
    require_compiler(model, "model.compile")
    _leave_attention_out()
    for layer in model.get_decoder().layers:
        layer.compile(dynamic=True, backend=backend)
    setattr(model, _COMPILED, True)
    return model


@cache
def _leave_attention_out() -> None:
    """Compiled, each packing would be a case of its own."""
    for layout in (PackedLayout, UlyssesLayout):
        layout.attend = torch.compiler.disable(layout.attend)  # type: ignore[method-assign]  # in place, once


def eagerly(model: PreTrainedModel) -> AbstractContextManager[object]:
    """A context in which compiled layers run uncompiled, those of all models and on every thread."""
    return torch.compiler.set_stance("force_eager") if hasattr(model, _COMPILED) else nullcontext()


def load_tokenizer(path: str | Path, *, download: bool = True) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id.

    Args:
        download: from the hub, if it is not on this machine.

    Raises:
        ModelError: not loadable, or its files are not there.
    """
    check_folder(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=not download)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise refusal("tokenizer of", path, error) from None
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):  # what transformers makes out of no files
        raise ModelError(
            f"{path}: no tokenizer is there, only a model; copy its files (tokenizer.json, tokenizer_config.json and, "
            "if there is one, chat_template.jinja) from the model that it was made from"
        )
    return tokenizer


def vocabulary_check(
    senior: PreTrainedTokenizerBase, junior: PreTrainedTokenizerBase, *, other: str = "junior"
) -> None:
    """Two models can share a text only if they share every token id. ``other``: what the second one is, if no junior.

    Raises:
        ModelError: names how many ids differ and the first of them.
    """
    a, b = senior.get_vocab(), junior.get_vocab()
    if a != b:
        differing = sorted(set(a.items()) ^ set(b.items()), key=lambda item: item[1])
        token, index = differing[0]
        raise ModelError(
            f"senior and {other} have different vocabularies: {len(differing)} entries differ, the first is {token!r} "
            f"(id {index}). They read the same tokens; choose a {other} of the same tokenizer family."
        )


def eos_token_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a completion: those of the model's generation config and the tokenizer's own."""
    configured = generation.eos_token_id if generation is not None else None
    ids = set(configured if isinstance(configured, list) else [configured]) | {tokenizer.eos_token_id}
    return tuple(sorted(i for i in ids if i is not None))


# ------------------------------------------------------------------------------------------------------------ scoring


def hidden_states(
    model: PreTrainedModel, tokens: Int64[Tensor, "..."], positions: Int64[Tensor, "..."], layout: Layout
) -> Float[Tensor, "... h"]:
    """Last hidden states of packed [t] or row-wise [b, q] tokens (after the final norm, before the LM head)."""
    rows = tokens if tokens.ndim == 2 else tokens[None]
    out = model.get_decoder()(
        input_ids=rows, position_ids=positions.reshape(rows.shape), use_cache=False, layout=layout
    ).last_hidden_state
    return out if tokens.ndim == 2 else out[0]


def token_logprobs(
    model: PreTrainedModel,
    batch: Batch,
    *,
    select: Bool[Tensor, " t"],
    temperature: float = 1.0,
    truncation: Truncation | None = None,
    vocabulary: int | None = None,
    autocast: torch.dtype | None = None,
    shards: Shards = WHOLE,
    activation_offload: bool = False,
) -> tuple[Float[Tensor, " t"], Float[Tensor, " t"]]:
    """Log-prob of every selected token given its prefix, and the entropy of the distribution it was drawn from.

    The distribution is ``softmax(logits / temperature)``, restricted to the kept tokens when ``truncation`` is given
    (the token itself is always kept). Entries that are not selected are 0.0. Logits live in chunks only and are
    recomputed in backward: [t, v] is never materialised.

    Args:
        vocabulary: number of logits, where the model has more than the engine that sampled; None = all.
        autocast: compute dtype of the matrix products; None = the model's, or what ``parallel.shard`` was given.
        shards: the processes that compute this together; all of them pass the same batch and get the same result.
        activation_offload: keep what backward needs of the layers in host memory.

    Returns:
        logprobs and entropy, nats, float32; entry i describes token i.
    """
    select = select & (batch.positions > 0)  # the first token of a sequence has no prefix
    index = select.nonzero().squeeze(1)
    device = batch.tokens.device
    empty = torch.zeros(batch.tokens.shape[0], dtype=torch.float32, device=device)
    part = part_of(batch, index, shards.sequence)
    # A sharded model has it as a method, around which its parameters are gathered and freed.
    packed = getattr(model, "packed_logprobs", None) or partial(packed_logprobs, model)
    found = packed(
        part.tokens,
        part.positions,
        part.layout,
        part.prefixes,
        batch.tokens.index_select(0, part.predicted),
        temperature=temperature,
        truncation=truncation,
        vocabulary=vocabulary,
        autocast=autocast,
        group=shards.tensor,
        activation_offload=activation_offload,
    )
    spread = [empty.index_copy(0, part.predicted, values) for values in found]
    if shards.sequence is not None:
        spread = [SharedSum.apply(values, shards.sequence) for values in spread]
    return spread[0], spread[1]


class Part(NamedTuple):
    """What one process computes of a batch: its tokens, and which log-probs come of them. predicted: those tokens
    in the batch; prefixes: for each of them, the token before it, among ``tokens``."""

    tokens: Int64[Tensor, " k"]
    positions: Int64[Tensor, " k"]
    layout: Layout
    predicted: Int64[Tensor, " i"]
    prefixes: Int64[Tensor, " i"]


def part_of(batch: Batch, index: Tensor, group: dist.ProcessGroup | None) -> Part:
    """All of the batch, or the share of this process in a sequence-parallel group."""
    device = batch.tokens.device
    spans, kept, where = share_contexts(batch)
    kept_on, where_on = torch.from_numpy(kept).to(device), torch.from_numpy(where).to(device)
    tokens, positions = batch.tokens[kept_on], batch.positions[kept_on]
    prefixes = where_on[index - 1]  # the shift: the logits at i - 1 predict token i
    if group is None:
        return Part(tokens, positions, PackedLayout(spans, device), index, prefixes)
    if padding := -len(kept) % group.size():
        spans = [*spans, np.arange(len(kept), len(kept) + padding)]
        tokens, positions = F.pad(tokens, (0, padding)), F.pad(positions, (0, padding))
    size = len(tokens) // group.size()
    first = size * group.rank()
    mine = (prefixes >= first) & (prefixes < first + size)
    layout = UlyssesLayout(PackedLayout(spans, device), group)
    here = slice(first, first + size)
    return Part(tokens[here], positions[here], layout, index[mine], prefixes[mine] - first)


def packed_logprobs(
    model: PreTrainedModel,
    tokens: Int64[Tensor, " k"],
    positions: Int64[Tensor, " k"],
    layout: Layout,
    prefixes: Int64[Tensor, " i"],
    targets: Int64[Tensor, " i"],
    *,
    temperature: float,
    truncation: Truncation | None,
    vocabulary: int | None,
    autocast: torch.dtype | None,
    group: dist.ProcessGroup | None = None,
    activation_offload: bool = False,
) -> tuple[Float[Tensor, " i"], Float[Tensor, " i"]]:
    """Log-prob of ``targets[i]`` after token ``prefixes[i]``, and the entropy there: all that a scoring pass does with
    the model's parameters. ``group``: processes that have other ids of the vocabulary."""
    offload = activations_on_host() if activation_offload else nullcontext()
    with offload, torch.autocast(tokens.device.type, dtype=autocast, enabled=autocast is not None):
        hidden = hidden_states(model, tokens, positions, layout)
    head = model.get_output_embeddings()
    weight, bias = (x.to_local() if isinstance(x, DTensor) else x for x in (head.weight, head.bias))
    rows = head.out_features
    settings = HeadSettings(rows, vocabulary or rows, temperature, truncation, autocast, group)
    return linear_logprobs(hidden.index_select(0, prefixes), weight, bias, targets, settings)


def activations_on_host() -> saved_tensors_hooks:
    """A context in which tensors that autograd saves for backward are kept in host memory, but for parameters.

    With gradient checkpointing that is the input of each layer. Unlike ``torch.autograd.graph.save_on_cpu`` it copies
    neither weights nor the shards of distributed tensors into one.
    """
    return saved_tensors_hooks(_to_host, _from_host)


def _to_host(saved: Tensor) -> Any:
    origin = saved if saved._base is None else saved._base
    if isinstance(origin, nn.Parameter) or not saved.is_floating_point():
        return saved
    local = saved.to_local() if isinstance(saved, DTensor) else saved
    # Copies of pinned memory wait for the kernels before them on the stream, and those behind wait for the copies.
    host = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda).copy_(local, non_blocking=True)
    return host, local.device, saved._spec if isinstance(saved, DTensor) else None


def _from_host(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    host, device, spec = kept
    local = host.to(device, non_blocking=True)
    return local if spec is None else DTensor(local, spec, requires_grad=False)


@torch.no_grad()
def sequence_logprobs(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    *,
    tokens_per_micro_batch: int = 8192,
    temperature: float = 1.0,
) -> list[np.ndarray]:
    """Log-prob of every token of plain sequences given its prefix; nats, float32, entry 0 is 0.0."""
    from tandemrl.batching import micro_batches, pack_tokens

    device = model.get_output_embeddings().weight.device
    budget = max(tokens_per_micro_batch, max(map(len, sequences), default=1))
    out: list[np.ndarray] = [np.zeros(0, np.float32)] * len(sequences)
    for rows in micro_batches([len(s) for s in sequences], budget):
        batch = pack_tokens([sequences[i] for i in rows], device=device)
        logprobs, _ = token_logprobs(model, batch, select=batch.author >= int(Author.CONTEXT), temperature=temperature)
        for i, values in zip(rows, logprobs.cpu().split(batch.lengths.tolist()), strict=True):
            out[i] = values.numpy()
    return out
