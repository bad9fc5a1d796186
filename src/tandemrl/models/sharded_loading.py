"""Loads a sharded model in parts: no process ever holds more than its own share and one layer, and the embeddings while
the model is probed.

A model is made without weights (``meta_model``), split (``sharding.shard``), given memory for the parts of this process
(``allocate``), and filled from safetensors files, of which each process reads the slices that it keeps (``fill``). The
weights are, to the last bit, those of ``loading.load_model`` and ``critic.load_critic``.
"""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from tandemrl.config import LoraConfig
from tandemrl.models.critic import load_critic, packed_values, value_head, without_dropout
from tandemrl.models.forward import packed_logprobs
from tandemrl.models.loading import (
    is_converted,
    load_configuration,
    load_model,
    misfits,
    no_progress_bars,
    opened,
    prepare,
    refusal,
    resolve_device,
    stored_names,
    tied_names,
)
from tandemrl.models.lora import attach, attach_without_memory, base_name
from tandemrl.models.sharding import shard
from tandemrl.processes.world import World


class Adapters(NamedTuple):
    """The adapters that ``lora.attach`` puts into a policy before the policy is sharded."""

    config: LoraConfig
    seed: int


def load_sharded(
    path: str | Path,
    world: World,
    *,
    compute: torch.dtype,
    dtype: str = "float32",
    device: str = "cpu",
    adapters: Adapters | None = None,
    critic: bool = False,
    frozen: bool = False,
    offload: bool = False,
) -> PreTrainedModel:
    """Load the model that ``shard`` would make of ``load_model(path)``, or of ``load_critic(path)``. All processes of
    the world must call this. In a world of one it is the whole model.

    If it cannot be read in parts (see ``why_not_sliceable``), every process loads it whole first, with a warning.

    Args:
        compute: the dtype in which forwards compute.
        dtype: the dtype of the parameters. That of a critic is float32.
        adapters: adapters to attach before the model is sharded.
        critic: whether it is loaded as a critic.
        frozen: whether no parameter is trained.
        offload: as for ``shard``.

    Raises:
        ConfigError: as ``lora.attach``.
        ModelError: as ``load_model`` or ``load_critic``, and ``shard``.
    """
    what, home = "critic" if critic else "model", resolve_device(device)
    forward = packed_values if critic else packed_logprobs

    def whole() -> PreTrainedModel:
        found = load_critic(path, device=device) if critic else load_model(path, dtype=dtype, device=device)
        found.requires_grad_(not frozen)
        if adapters is not None:
            attach(found, *adapters)
        return shard(found, world, dtype=compute, forward=forward, offload=offload)

    if world.size == 1:
        return whole()
    kind: Any = AutoModelForTokenClassification if critic else AutoModelForCausalLM
    options: dict[str, Any] = {"num_labels": 1} if critic else {}
    configuration = load_configuration(path, what=what, **options)
    with no_progress_bars(), opened(path, download=True) as stored:
        model = meta_model(configuration, kind=kind, dtype=getattr(torch, dtype)).requires_grad_(not frozen)
        name, head = value_head(model) if critic else ("", None)
        keys = stored_names(model, stored)
        of_head = {key for key in keys if critic and key.startswith(f"{name}.")}
        if reason := why_not_sliceable(model, stored, without=name):
            if world.main:
                warnings.warn(
                    f"{path}: every process loads the whole model before it is split, since {reason}; save it again "
                    "with transformers (save_pretrained) to have it read in parts",
                    stacklevel=2,
                )
            return whole()
        if critic:
            without_dropout(model)
        else:
            try:
                model.generation_config = GenerationConfig.from_pretrained(path)
            except OSError:  # it has none
                model.generation_config = GenerationConfig.from_model_config(model.config)
        drawn = {} if adapters is None else attach_without_memory(model, *adapters)
        shard(model, world, dtype=compute, forward=forward, offload=offload)
        allocate(model, home, on_host=offload)
        parameters = dict(model.named_parameters())
        for key, parameter in parameters.items():
            if key in of_head:  # as in load_critic: a probe through a head of zeros would prove nothing
                fill(parameter, torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
            else:
                fill(parameter, drawn[key] if key in drawn else stored[keys[base_name(key)]])
        prepare(model, name=f"critic {str(path)!r}" if critic else str(path), head=head, device=home)
        there = all(keys[key] in stored for key in of_head)
        for key in of_head:
            fill(parameters[key], stored[keys[key]] if there else torch.zeros(parameters[key].shape))
    return model


# ------------------------------------------------------------------------------------------------------- without memory


def meta_model(
    configuration: PretrainedConfig, *, kind: Any = AutoModelForCausalLM, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model of a configuration with its parameters on the meta device, where they have shapes but no memory.

    Its buffers are computed, since no file has them. No random numbers are drawn.

    Args:
        kind: the auto class of transformers that makes the model.

    Raises:
        ModelError: transformers has no such model.
    """

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(on_meta)
    try:
        model: PreTrainedModel = kind.from_config(configuration, dtype=dtype, trust_remote_code=False)
    except (ValueError, KeyError, RuntimeError) as error:
        raise refusal("model", str(configuration.name_or_path), error) from None
    finally:
        hook.remove()
    return model.eval()


def allocate(model: nn.Module, device: torch.device, *, on_host: bool = False) -> None:
    """Give a sharded model memory for the parts of this process, in place. They hold no values yet.

    Args:
        on_host: put the parameters in host memory, for ``shard(offload=True)``. Buffers are on ``device`` all the same.
    """
    tied = tied_names(model)
    home = torch.device("cpu") if on_host else device
    # As nn.Module.to_empty, which would also empty the buffers.
    model._apply(lambda tensor: torch.empty_like(tensor, device=home) if tensor.is_meta else tensor.to(device))
    for first, *others in tied:
        for other in others:
            owner, _, leaf = other.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(first))


@torch.no_grad()
def fill(parameter: Tensor, value: Any) -> None:
    """Fill the part of ``parameter`` that this process holds from the whole ``value``, in the parameter's dtype. The
    value is a tensor in memory or in a file."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(value[(slice(None),) * parameter.ndim])
        return
    here = parameter.to_local()
    (chunk,) = parameter.__create_chunk_list__()
    if math.prod(chunk.sizes):
        here.copy_(value[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))])


def why_not_sliceable(model: PreTrainedModel, stored: Mapping[str, Any], *, without: str | None = None) -> str:
    """Why a model cannot be read from its files in parts, or an empty text if it can. All processes get the same.

    Args:
        stored: the tensors of the files by name.
        without: the name of a submodule whose parameters need not be in the files.
    """
    if not stored:
        return "it has no safetensors files"
    if is_converted(model):
        return "its files hold other tensors than its parameters"
    if model._keep_in_fp32_modules_strict and model.dtype != torch.float32:
        return "some of its parameters have a dtype of their own"
    shapes = {name: tuple(tensor.get_shape()) for name, tensor in stored.items()}
    if problems := misfits(model, shapes, without=without):
        return problems[0]
    if buffers := sorted(model.state_dict().keys() - {n for n, _ in model.named_parameters(remove_duplicate=False)}):
        return f"its files hold the buffer {buffers[0]}"
    for names in tied_names(model):
        if len(twice := [name for name in names if name in stored]) > 1:
            return f"{twice[1]} is tied to another parameter, and its files have both, which may differ"
    return ""
