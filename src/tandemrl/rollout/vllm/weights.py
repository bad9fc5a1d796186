"""How new weights get into the senior in vLLM, which may be in another process, and how they are read back.

``rollout.sync.sync_weights`` sends them through ``VllmEngine.load_weights`` and compares the checksums of both sides.
A LoRA senior sends its adapters alone. Workers in the trainer's process get weights as they are, others through a file
(``written_weights``). Each worker loads them, cast to its dtype, and reads them back from what the kernels compute
with; the checksum is of what was read. Keys and values of the old weights are dropped.

vLLM fuses weights, splits them over ranks, pads them and packs them for the CPU. This is undone by the sizes that the
layers themselves give. If that is not possible for an architecture or a quantisation, it is refused, and the error
names the layer. Under tensor parallelism everything that reads weights runs on every rank at the same time.
"""

import logging
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from tandemrl.rollout.engine import EngineError, SentWeights
from tandemrl.rollout.sync import check_shapes

SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64

# It warns with every reload that no checkpoint holds rotary tables and tied heads.
logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
_PROBES = 512  # how many rows of the identity matrix a packed layer is read with at once
LINEAR = (ReplicatedLinear, ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear)
_VOCABULARY = (VocabParallelEmbedding, ParallelLMHead)


@torch.no_grad()
def load_checkpoint_weights(runner: Any, weights: SentWeights) -> None:
    """Replace the weights of a model in place by a trainer's, cast to the engine's dtype.

    KV computed with the old weights is not dropped. The caller must reset the prefix cache.

    Args:
        runner: the model runner of the model.
        weights: the trainer's weights, with the names and the whole shapes of ``PreTrainedModel.named_parameters``, on
            any device. They are taken one by one: in the model's order, no more is held than the pieces of a layer.

    Raises:
        EngineError: a name or shape does not match, or a layer is quantised or of an unknown kind. No weight has
            changed.
    """
    model, config = runner.get_model(), runner.vllm_config
    check_shapes(weights.shapes, shapes_of(part for _, _, parts in parameters_of(model) for part in parts))
    # Detached, because the loader annotates tensors.
    stream = ((name, tensor.detach().to(config.model_config.dtype)) for name, tensor in weights)
    with set_current_vllm_config(config):
        runner.reload_weights(weights_iterator=stream)
        for _, head in tied_heads(model):
            # The reload renews the embedding's table, but not what a tied head has packed of it.
            head.quant_method.process_weights_after_loading(head)


@contextmanager
def written_weights(weights: SentWeights, dtype: torch.dtype) -> Iterator[str]:
    """A context with a file of weights, for ``read_weights`` in other processes of this machine and user.

    The file has no name in any folder, so that nothing of it is left if this process is killed. It is in shared memory
    if there is room, else in the temporary directory. Weights are taken and written one by one, and cast to ``dtype``.

    Yields:
        A path by which it can be opened within the context. What was opened survives it.
    """
    head = pickle.dumps((dtype, dict(weights.shapes)))
    head += bytes(-len(head) % ALIGNMENT)
    size = len(head) + sum(map(prod, weights.shapes.values())) * dtype.itemsize
    with ExitStack() as stack:
        try:
            file = stack.enter_context(TemporaryFile(dir=SHARED_MEMORY))
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            file = stack.enter_context(TemporaryFile())
        file.write(head)
        for _, tensor in weights:
            value = tensor.detach().to("cpu", dtype).contiguous()
            file.write(value.flatten().view(torch.uint8).numpy().data)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def read_weights(path: str) -> SentWeights:
    """The weights of a file, mapped into memory. They are read when used, and survive the end of the context."""
    with open(path, "rb") as file:
        dtype, shapes = pickle.load(file)
        start = file.tell() + -file.tell() % ALIGNMENT
    content = torch.from_file(path, size=os.path.getsize(path), dtype=torch.uint8)[start:].view(dtype)
    pieces = content.split([prod(shape) for shape in shapes.values()])
    return SentWeights(shapes, ((n, piece.view(shapes[n])) for n, piece in zip(shapes, pieces, strict=True)))


# ---------------------------------------------------------------------------------------------------- reading them back


@torch.no_grad()
def hf_parameters(runner: Any) -> Iterator[tuple[str, Tensor]]:
    """Every parameter that the model's kernels compute with, whole, under its Hugging Face name, in the engine's dtype.

    Under tensor parallelism all ranks must iterate together. Each rank gathers the shards of the others, and yields its
    own copy of what is replicated. So the model is right if the tensors are right on every rank.

    A layer that the CPU backend has packed is read by sending the identity matrix through its kernel. That is exact for
    finite weights, except for the sign of zero and for subnormal bfloat16 numbers, which come out as 0.0.

    Args:
        runner: the model runner of the model.

    Raises:
        EngineError: a layer is quantised or of an unknown kind (before anything is yielded), or a tied LM head computes
            with other weights than its embedding (after everything is yielded).
    """
    model, dtype = runner.get_model(), runner.vllm_config.model_config.dtype
    for layer, leaf, parts in list(parameters_of(model)):
        stored = leaf != "weight" or type(layer) is VocabParallelEmbedding
        shards = (getattr(layer, leaf) if stored else _multiplied(layer)).split([part.rows for part in parts])
        for name, group in groupby(zip(parts, shards, strict=True), key=lambda pair: pair[0].name):
            pieces = [whole(part, shard) for part, shard in group]
            yield name, (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(dtype)
    for path, head in tied_heads(model):
        if not torch.allclose(_multiplied(head), head.weight, rtol=0.0, atol=torch.finfo(dtype).tiny):
            raise EngineError(f"{path} is tied to the embedding, but computes with another copy of it")


class Part(NamedTuple):
    """A Hugging Face parameter inside a tensor of this rank, or a piece of one that Hugging Face fuses, too."""

    name: str
    shape: tuple[int, ...]  # the whole shape, over all ranks
    rows: int  # how many rows it has in this rank's tensor
    split: int | None  # the dimension that is split over the ranks; None: every rank has all of it
    replicas: int  # how many neighbouring ranks have the same rows; above 1 for key and value heads on more ranks


_Tensor = tuple[Any, str, list[Part]]
"""A layer on this rank, the name of a parameter there, and its parts, which are stacked along the rows."""


def parameters_of(model: nn.Module) -> Iterator[_Tensor]:
    """The model's parameters on this rank, without tied LM heads.

    Raises:
        EngineError: a layer is quantised or of an unknown kind.
    """
    tied = {path for path, _ in tied_heads(model)}
    fused = getattr(model, "packed_modules_mapping", {})
    for path, layer in model.named_modules():
        for leaf, parameter in layer.named_parameters(recurse=False):
            if path in tied:
                continue
            if type(layer) in (*LINEAR, *_VOCABULARY):
                if not isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
                    kind = type(layer.quant_method).__name__
                    raise EngineError(f"{path} is quantised ({kind}): its weights cannot be replaced or read back")
                yield layer, leaf, _parts(path, layer, leaf, fused)
            elif getattr(parameter, "weight_loader", default_weight_loader) is default_weight_loader and parameter.ndim:
                shape = tuple(parameter.shape)
                yield layer, leaf, [Part(f"{path}.{leaf}", shape, shape[0], None, 1)]
            else:
                raise EngineError(
                    f"{path}.{leaf} is of a kind ({type(layer).__name__}) whose weights cannot be replaced or read back"
                )


def _parts(path: str, layer: Any, leaf: str, fused: Mapping[str, Sequence[str]]) -> list[Part]:
    """The parts of a parameter of a linear layer, an embedding or an LM head.

    Args:
        path: the path of the layer in the model.
        layer: the layer.
        leaf: the name of the parameter in the layer.
        fused: vLLM's mapping from names of fused layers to the Hugging Face names of their parts.
    """
    if type(layer) is ReplicatedLinear or layer.tp_size == 1:
        split = None
    elif type(layer) is RowParallelLinear:
        split = 1 if leaf == "weight" else None
    else:
        split = 0

    if type(layer) in _VOCABULARY:
        sizes = [(layer.num_embeddings_per_partition, 1)]
    elif type(layer) is QKVParallelLinear:
        query, key, value = layer.output_partition_sizes
        sizes = [(query, 1), (key, layer.num_kv_head_replicas), (value, layer.num_kv_head_replicas)]
    else:
        sizes = [(rows, 1) for rows in layer.output_partition_sizes]

    parent, dot, own = path.rpartition(".")
    names = fused.get(own, [own])
    names = list(names) * len(sizes) if len(names) == 1 else names
    columns = (layer.embedding_dim if type(layer) in _VOCABULARY else layer.input_size,) if leaf == "weight" else ()
    ranks = layer.tp_size if split == 0 else 1
    return [
        Part(
            f"{parent}{dot}{name}.{leaf}",
            (layer.org_vocab_size if type(layer) in _VOCABULARY else rows * ranks // replicas, *columns),
            rows,
            split,
            replicas,
        )
        for name, (rows, replicas) in zip(names, sizes, strict=True)
    ]


def shapes_of(parts: Iterable[Part]) -> dict[str, tuple[int, ...]]:
    """The whole shape of each Hugging Face parameter by its name, in the order of their first parts."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        above = shapes[part.name][0] if part.name in shapes else 0
        shapes[part.name] = (above + part.shape[0], *part.shape[1:])
    return shapes


def whole(part: Part, shard: Tensor) -> Tensor:
    """The whole part, joined from the shards of all ranks. This is a collective call if the part is split.

    Args:
        part: the part.
        shard: this rank's shard of it.
    """
    joined = shard if part.split is None else tensor_model_parallel_all_gather(shard.contiguous(), part.split)
    if part.replicas > 1:
        own = get_tensor_model_parallel_rank() % part.replicas
        joined = joined.unflatten(0, (-1, part.replicas, part.rows))[:, own].flatten(0, 1)
    return joined[: part.shape[0]]  # without the vocabulary's padding


def _multiplied(layer: Any) -> Tensor:
    """This rank's weight as the layer's matrix product uses it."""
    if not hasattr(layer, "cpu_linear"):
        return layer.weight
    vocabulary, rows = type(layer) in _VOCABULARY, list[Tensor]()
    columns = layer.embedding_dim if vocabulary else getattr(layer, "input_size_per_partition", layer.input_size)
    for start in range(0, columns, _PROBES):
        identity = torch.zeros(min(_PROBES, columns - start), columns, dtype=layer.params_dtype)
        identity.diagonal(start).fill_(1)
        rows.append(layer.quant_method.apply(layer, identity, None))
    return torch.cat(rows).T


def tied_heads(model: nn.Module) -> list[tuple[str, Any]]:
    """The paths and layers of LM heads that share the embedding's table."""
    tables = {id(layer.weight) for layer in model.modules() if type(layer) is VocabParallelEmbedding}
    heads = ((path, layer) for path, layer in model.named_modules() if type(layer) is ParallelLMHead)
    return [(path, head) for path, head in heads if id(head.weight) in tables]
