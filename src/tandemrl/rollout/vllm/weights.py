"""How new weights get into the senior in vLLM, which may be in another process, and how they are read back.

``rollout.sync.sync_weights`` sends them through ``VllmEngine.load_weights`` and compares the checksums of both sides.
A LoRA senior sends its adapters alone. Workers in the trainer's process get weights as they are, others through a file
(``written_weights``). Each worker loads them, cast to its dtype, and reads them back from what the kernels compute
with; the checksum is of what was read. Keys and values of the old weights are dropped.

vLLM fuses weights, splits them over ranks, pads them and packs them for the CPU. This is undone by the sizes that the
layers themselves give. If that is not possible for an architecture or a quantisation, it is refused, and the error
names the layer. Under tensor parallelism everything that reads weights runs on every rank at the same time.

A senior that is low-rank adapters on the junior's weights is built on the meta device and takes over the junior's
processed parameters, as vLLM's loader for weights in another process does. An adapter replaces the ``quant_method`` of
a linear layer, by which vLLM computes it. A layer that vLLM fuses has an adapter for each of its parts. A layer that it
splits over ranks has adapters that are split in the same way, so that its own gathers and sums are right for them, too.
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
from torch.nn import functional as F
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.config.utils import replace
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
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, is_deferred_attention_layer
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import set_default_torch_dtype

from tandemrl.models.lora import AdapterPlan, adapter_names, name_with_adapters
from tandemrl.rollout.engine import EngineError, SentWeights
from tandemrl.rollout.sync import check_shapes

SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64

# It warns with every reload that no checkpoint holds rotary tables and tied heads.
logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
_PROBES = 128  # how many rows of the identity matrix a packed layer is read with at once
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
        for start, columns in _probed(head) if hasattr(head, "cpu_linear") else ():  # never as a whole: it is large
            table = head.weight[:, start : start + len(columns)].T
            if not torch.allclose(columns, table, rtol=0.0, atol=torch.finfo(dtype).tiny):
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
    return torch.cat([columns for _, columns in _probed(layer)]).T if hasattr(layer, "cpu_linear") else layer.weight


def _probed(layer: Any) -> Iterator[tuple[int, Tensor]]:
    """Columns of a packed weight as rows, `_PROBES` at a time, each time with the number of the first."""
    vocabulary = type(layer) in _VOCABULARY
    columns = layer.embedding_dim if vocabulary else getattr(layer, "input_size_per_partition", layer.input_size)
    for start in range(0, columns, _PROBES):
        identity = torch.zeros(min(_PROBES, columns - start), columns, dtype=layer.params_dtype)
        identity.diagonal(start).fill_(1)
        yield start, layer.quant_method.apply(layer, identity, None)


def tied_heads(model: nn.Module) -> list[tuple[str, Any]]:
    """The paths and layers of LM heads that share the embedding's table."""
    tables = {id(layer.weight) for layer in model.modules() if type(layer) is VocabParallelEmbedding}
    heads = ((path, layer) for path, layer in model.named_modules() if type(layer) is ParallelLMHead)
    return [(path, head) for path, head in heads if id(head.weight) in tables]


_FORMAT = "tandemrl_adapters"

# -------------------------------------------------------------------------------------------------------------- loading


def use_adapters(base: nn.Module, plan: AdapterPlan, runner: Any) -> None:
    """Let a model runner load a model that is adapters on another model.

    Args:
        base: the other model, which was loaded from the same folder.
        plan: the adapters.
        runner: the model runner.
    """
    config, extra = runner.vllm_config, {"base": base, "plan": plan}
    own = replace(config.load_config, load_format=_FORMAT, model_loader_extra_config=extra)
    config.load_config = runner.load_config = own


@register_model_loader(_FORMAT)
class _AdaptersLoader(BaseModelLoader):
    """The model loader of vLLM that uses the base and the plan given to ``use_adapters``."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing, since the base is already loaded."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        raise EngineError("a senior that is adapters gets them from the trainer")

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        extra: Any = self.load_config.model_loader_extra_config
        base, device = extra["base"], next(extra["base"].parameters()).device
        assert isinstance(model_config.dtype, torch.dtype)  # a name only until vLLM has resolved it
        with set_default_torch_dtype(model_config.dtype):
            with torch.device("meta"):
                model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
            _take_over(model, base)
            for layer in filter(is_deferred_attention_layer, model.modules()):  # only the weights are processed already
                layer.process_weights_after_loading(model_config.dtype)
        _adapt(model, extra["plan"], device)
        return model.eval()


def _take_over(model: nn.Module, base: nn.Module) -> None:
    """Let ``model`` share the parameters and buffers of ``base``, and on a CPU its kernels with packed weights."""
    for path, layer in model.named_modules():
        theirs = base.get_submodule(path)
        layer._parameters.update(theirs._parameters)
        layer._buffers.update(theirs._buffers)
        if hasattr(theirs, "cpu_linear"):
            layer.cpu_linear = theirs.cpu_linear


# ------------------------------------------------------------------------------------------------------------- adapting


class LowRank(nn.Module):
    """The adapters of one layer, which add scaling · B A x for each part of it that has one. They start as zero.

    Args:
        layer: vLLM's linear layer.
        parts: the parts of the layer's weight.
        plan: the adapters.
        device: the device of the adapters' tensors.
    """

    def __init__(self, layer: Any, parts: Sequence[Part], plan: AdapterPlan, device: torch.device) -> None:
        super().__init__()
        self.scaling = plan.scaling
        self.pieces: list[tuple[Part, Tensor]] = []
        """The Hugging Face tensors of the adapters, or parts of one, with this rank's of each."""
        self._products: list[tuple[Tensor, Tensor, slice]] = []
        """A and B, with the features of the output that they are added to."""
        like: dict[str, Any] = dict(dtype=layer.params_dtype, device=device)
        columns, downs, begin = getattr(layer, "input_size_per_partition", layer.input_size), dict[str, Tensor](), 0
        for part in parts:
            owner = part.name.rpartition(".")[0]
            if owner in plan.layers:
                a, b = adapter_names(owner)
                if owner not in downs:
                    downs[owner] = torch.zeros(plan.rank, columns, **like)
                    split = 1 if part.split == 1 else None
                    self.pieces.append((Part(a, (plan.rank, part.shape[1]), plan.rank, split, 1), downs[owner]))
                up, split = torch.zeros(part.rows, plan.rank, **like), 0 if part.split == 0 else None
                self.pieces.append((part._replace(name=b, shape=(part.shape[0], plan.rank), split=split), up))
                self._products.append((downs[owner], up, slice(begin, begin + part.rows)))
            begin += part.rows

    def forward(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Add what the adapters compute to the output of the base.

        Args:
            inputs: the inputs of the layer (..., in).
            output: the output of the base (..., out), which is changed in place.

        Returns:
            ``output``.
        """
        for down, up, here in self._products:
            output[..., here].add_(F.linear(self.scaling * F.linear(inputs, down), up))
        return output


class _AdaptedLinear(UnquantizedLinearMethod):
    """The ``quant_method`` of a layer with adapters: it computes the layer's product and adds that of the adapters."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return layer.adapters(x, super().apply(layer, x, bias))


def _adapt(model: nn.Module, plan: AdapterPlan, device: torch.device) -> None:
    """Put the adapters of the plan on the linear layers of a model.

    Args:
        model: the model.
        plan: the adapters, with the trainer's names of the layers.
        device: the device of the adapters' tensors.

    Raises:
        EngineError: the model has no linear layer for one of the names in the plan.
    """
    missing = set(plan.layers)
    layer: Any
    for layer, leaf, parts in list(parameters_of(model)):
        owners = {part.name.rpartition(".")[0] for part in parts} & set(plan.layers)
        if owners and leaf == "weight" and type(layer) in LINEAR:
            layer.adapters = LowRank(layer, parts, plan, device)
            layer.quant_method = _AdaptedLinear()
            missing -= owners
    if missing:
        raise EngineError(f"the engine's model has no linear layer {min(missing)} to adapt")


# ----------------------------------------------------------------------------------------------------------- in and out


@torch.no_grad()
def load_adapters(model: nn.Module, weights: SentWeights) -> None:
    """Replace the adapters of a model in place by a trainer's.

    Args:
        model: the model with adapters.
        weights: the trainer's adapters, whole and under its names.

    Raises:
        EngineError: a name or shape does not match. No adapter has changed.
    """
    pieces = list(_pieces(model))
    check_shapes(weights.shapes, shapes_of(part for part, _ in pieces))
    new = dict(weights)
    for name, group in groupby(pieces, key=lambda piece: piece[0].name):
        begin = 0
        for part, tensor in group:
            mine = new[name].narrow(0, begin, part.shape[0])
            if part.split is not None:
                size = tensor.shape[part.split]
                mine = mine.narrow(part.split, get_tensor_model_parallel_rank() // part.replicas * size, size)
            tensor.copy_(mine)
            begin += part.shape[0]


@torch.no_grad()
def adapted_parameters(senior: Any, junior: Any) -> Iterator[tuple[str, Tensor]]:
    """Every parameter that a senior with adapters computes with, whole, under the trainer's names.

    First come the adapters as they are. Then comes the base, as the junior's kernels compute with it, after a check
    that the senior uses the same tensors and kernels. Under tensor parallelism all ranks must iterate together.

    Args:
        senior: the senior's model runner.
        junior: the junior's model runner.

    Raises:
        EngineError: the two models do not share a tensor or a kernel, or for a reason that ``hf_parameters`` gives.
    """
    model, base = senior.get_model(), junior.get_model()
    adapted = set[str]()
    for name, group in groupby(_pieces(model), key=lambda piece: piece[0].name):
        adapted.add(name.partition(".lora_")[0])
        yield name, torch.cat([whole(part, tensor) for part, tensor in group])
    for path, layer in base.named_modules():
        own = model.get_submodule(path)
        for leaf, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            same = getattr(own, leaf)
            if tensor is not None and (same.data_ptr(), same.shape) != (tensor.data_ptr(), tensor.shape):
                raise EngineError(f"{path}.{leaf} of the senior is no longer the junior's")
        if getattr(own, "cpu_linear", None) is not getattr(layer, "cpu_linear", None):
            raise EngineError(f"{path} of the senior computes with another kernel than the junior's")
    for name, tensor in hf_parameters(junior):
        yield name_with_adapters(name, adapted), tensor


def _pieces(model: nn.Module) -> Iterator[tuple[Part, Tensor]]:
    """Each piece of the adapters with this rank's tensor of it. Those of a Hugging Face tensor follow each other."""
    for module in model.modules():
        yield from module.pieces if isinstance(module, LowRank) else ()
