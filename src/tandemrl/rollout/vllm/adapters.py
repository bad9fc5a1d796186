"""A senior that is low-rank adapters on the junior's own weights: how it is built, gets its adapters and is read back.

The senior is built on the meta device and takes over the junior's processed parameters, as vLLM's loader for weights in
another process does. An adapter replaces the ``quant_method`` of a linear layer, by which vLLM computes it. A layer
that vLLM fuses has an adapter for each of its parts. A layer that vLLM splits over ranks has adapters that are split in
the same way, so that vLLM's own gathers and sums are right for them, too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import ModelConfig, VllmConfig
from vllm.config.utils import replace
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from tandemrl.models.lora import AdapterPlan, adapter_names, name_with_adapters
from tandemrl.rollout.engine import EngineError, SentWeights
from tandemrl.rollout.sync import check_shapes
from tandemrl.rollout.vllm.parameters import LINEAR, Part, hf_parameters, parameters_of, shapes_of, whole

_FORMAT = "tandemrl_adapters"

# -------------------------------------------------------------------------------------------------------------- loading


@contextmanager
def adapters_on(base: nn.Module, plan: AdapterPlan, runner: Any) -> Iterator[None]:
    """A context in which a model runner loads a model that is adapters on another model.

    Args:
        base: the other model, which was loaded from the same folder.
        plan: the adapters.
        runner: the model runner.
    """
    config = runner.vllm_config
    stock = config.load_config
    own = replace(stock, load_format=_FORMAT, model_loader_extra_config={"base": base, "plan": plan})
    config.load_config = runner.load_config = own
    try:
        yield
    finally:
        config.load_config = runner.load_config = stock


@register_model_loader(_FORMAT)
class _AdaptersLoader(BaseModelLoader):
    """The model loader of vLLM that uses the base and the plan given to ``adapters_on``."""

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
            with _weights_as_they_are(model):
                process_weights_after_loading(model, model_config, device)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta:
                raise EngineError(f"{name} cannot be shared: the junior's model has no such tensor")
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


@contextmanager
def _weights_as_they_are(model: Any) -> Iterator[None]:
    """A context in which no layer packs or converts its weights. Those of the base are packed and converted already."""
    methods = [(layer, layer.quant_method) for layer in model.modules() if hasattr(layer, "quant_method")]
    for layer, _ in methods:
        layer.quant_method = None
    try:
        yield
    finally:
        for layer, method in methods:
            layer.quant_method = method


# ------------------------------------------------------------------------------------------------------------- adapting


class _Piece(NamedTuple):
    """A Hugging Face tensor of an adapter, or a part of one, inside the stacked tensors of this rank."""

    part: Part
    stack: str  # "down" or "up"
    begin: int  # its first row in that stack


class _Place(NamedTuple):
    """The features of a layer's output that an adapter adds to."""

    adapter: int  # its number in the layer
    begin: int  # the first feature
    up: int  # the first row of ``up`` for them
    rows: int  # how many features


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
        self.rank, self.scaling = plan.rank, plan.scaling
        self.pieces: list[_Piece] = []
        self.places: list[_Place] = []
        names, up, begin = list[str](), 0, 0
        for part in parts:
            owner = part.name.rpartition(".")[0]
            if owner in plan.layers:
                a, b = adapter_names(owner)
                if owner not in names:
                    columns = Part(a, (plan.rank, part.shape[1]), plan.rank, 1 if part.split == 1 else None, 1)
                    self.pieces.append(_Piece(columns, "down", len(names) * plan.rank))
                    names.append(owner)
                rows = part._replace(name=b, shape=(part.shape[0], plan.rank), split=0 if part.split == 0 else None)
                self.pieces.append(_Piece(rows, "up", up))
                self.places.append(_Place(names.index(owner), begin, up, part.rows))
                up += part.rows
            begin += part.rows
        columns_here = getattr(layer, "input_size_per_partition", layer.input_size)
        like: dict[str, Any] = dict(dtype=layer.params_dtype, device=device)
        self.down = nn.Parameter(torch.zeros(len(names) * plan.rank, columns_here, **like), requires_grad=False)
        self.up = nn.Parameter(torch.zeros(up, plan.rank, **like), requires_grad=False)

    def forward(self, inputs: Tensor, output: Tensor) -> Tensor:
        """Add what the adapters compute to the output of the base.

        Args:
            inputs: the inputs of the layer (..., in).
            output: the output of the base (..., out), which is changed in place.

        Returns:
            ``output``.
        """
        hidden = self.scaling * F.linear(inputs, self.down)
        for adapter, begin, up, rows in self.places:
            mine = hidden[..., adapter * self.rank : (adapter + 1) * self.rank]
            output[..., begin : begin + rows].add_(F.linear(mine, self.up[up : up + rows]))
        return output

    def named(self) -> Iterator[tuple[Part, Tensor]]:
        """Each piece with this rank's tensor of it. Pieces of the same Hugging Face tensor follow each other."""
        for part, stack, begin in self.pieces:
            yield part, getattr(self, stack)[begin : begin + part.rows]


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
    for module in model.modules():
        if isinstance(module, LowRank):
            yield from module.named()
