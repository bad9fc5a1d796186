"""A senior that is low-rank adapters on the junior's own weights: how it is built, gets its adapters and is read back.

The senior is built on the meta device and takes over the junior's processed parameters, as vLLM's loader for weights in
another process does. An adapter replaces the ``quant_method`` of a linear layer, by which vLLM computes it. A layer
that vLLM fuses has an adapter for each of its parts. A layer that vLLM splits over ranks has adapters that are split in
the same way, so that vLLM's own gathers and sums are right for them, too.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import ModelConfig, VllmConfig
from vllm.config.utils import replace
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, is_deferred_attention_layer
from vllm.utils.torch_utils import set_default_torch_dtype

from tandemrl.models.lora import AdapterPlan, adapter_names, name_with_adapters
from tandemrl.rollout.engine import EngineError, SentWeights
from tandemrl.rollout.sync import check_shapes
from tandemrl.rollout.vllm.weights import LINEAR, Part, hf_parameters, parameters_of, shapes_of, whole

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
