"""Loads a sharded model in parts: no process ever holds more than its own share and one layer, and the embeddings while
the model is probed.

A model is made without weights (``meta_model``), split (``sharding.shard``), given memory for the parts of this process
(``allocate``), and filled from safetensors files, of which each process reads the slices that it keeps (``fill``). The
weights are, to the last bit, those of ``loading.load_model`` and ``critic.load_critic``.
"""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from tandemrl.config import LoraConfig
from tandemrl.models.critic import load_critic, packed_values, value_head, without_dropout
from tandemrl.models.loading import check_folder, load_model, no_progress_bars, prepare, refusal, resolve_device
from tandemrl.models.lora import attach, attach_without_memory, base_name
from tandemrl.models.sharding import shard
from tandemrl.models.weight_files import is_converted, stored_names
from tandemrl.processes.watchdog import stamp
from tandemrl.processes.world import World


class Adapters(NamedTuple):
    """The adapters that ``lora.attach`` puts into a policy before the policy is sharded."""

    config: LoraConfig
    seed: int


@runtime_checkable
class Slices(Protocol):
    """A tensor in memory or in a file that can be read in parts."""

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor: ...


def load_sharded(
    path: str | Path,
    world: World,
    *,
    compute: torch.dtype,
    dtype: str = "float32",
    device: str = "cpu",
    adapters: Adapters | None = None,
    frozen: bool = False,
    offload: bool = False,
) -> PreTrainedModel:
    """Load the model that ``shard`` would make of ``load_model(path)``. All processes of the world must call this.

    If it cannot be read in parts (see ``why_not_sliceable``), every process loads it whole first, with a warning.

    Args:
        compute: the dtype in which forwards compute.
        dtype: the dtype of the parameters.
        adapters: adapters to attach before the model is sharded.
        frozen: whether no parameter is trained.
        offload: as for ``shard``.

    Raises:
        ConfigError: as ``lora.attach``.
        ModelError: as ``load_model`` and ``shard``.
    """
    check_folder(path)
    with _opened("model", path) as stored:
        model = meta_model(_configuration("model", path), dtype=getattr(torch, dtype))
        keys = stored_names(model, stored)
        if reason := why_not_sliceable(model, stored, keys, world):
            _warn(path, reason, world)
            model = load_model(path, dtype=dtype, device=device)
            if adapters is not None:
                attach(model, *adapters)
            return shard(_trained(model, frozen), world, dtype=compute, offload=offload)
        model.generation_config = _generation(path, model)
        drawn = {} if adapters is None else attach_without_memory(model, *adapters)
        shard(_trained(model, frozen), world, dtype=compute, offload=offload)
        allocate(model, resolve_device(device), on_host=offload)
        for name, parameter in model.named_parameters():
            fill(parameter, drawn[name] if name in drawn else stored[keys[base_name(name)]])
            stamp()
    return prepare(model, name=str(path), device=resolve_device(device))


def load_sharded_critic(
    path: str | Path, world: World, *, compute: torch.dtype, device: str = "cpu", offload: bool = False
) -> PreTrainedModel:
    """Load the critic that ``shard`` would make of ``load_critic(path)``. Otherwise this is like ``load_sharded``.

    Raises:
        ModelError: as ``load_critic`` and ``shard``.
    """
    check_folder(path)
    what = f"critic {str(path)!r}"
    with _opened("critic", path) as stored:
        configuration = _configuration("critic", path, num_labels=1)
        model = meta_model(configuration, kind=AutoModelForTokenClassification)
        name, head = value_head(model)
        keys = stored_names(model, stored)
        of_head = {key for key in keys if key.startswith(f"{name}.")}
        if reason := why_not_sliceable(model, stored, keys, world, without=of_head):
            _warn(path, reason, world)
            critic = load_critic(path, device=device)
            return shard(critic, world, dtype=compute, forward=packed_values, offload=offload)
        without_dropout(model)
        shard(model, world, dtype=compute, forward=packed_values, offload=offload)
        allocate(model, resolve_device(device), on_host=offload)
        there = of_head <= keys.keys() and all(keys[key] in stored for key in of_head)
        of_probe: dict[str, Tensor] = {}
        for key, parameter in model.named_parameters():
            if key in of_head:  # as in load_critic: a probe through a head of zeros would prove nothing
                count = parameter.numel()
                of_probe[key] = torch.linspace(-1, 1, count).view(parameter.shape)
            fill(parameter, of_probe[key] if key in of_head else stored[keys[key]])
            stamp()
        prepare(model, name=what, head=head, device=resolve_device(device))
        for key, parameter in model.named_parameters():
            if key in of_head:
                fill(parameter, stored[keys[key]] if there else torch.zeros(parameter.shape))
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
    tied: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    home = torch.device("cpu") if on_host else device
    # As nn.Module.to_empty, which would also empty the buffers.
    model._apply(lambda tensor: torch.empty_like(tensor, device=home) if tensor.is_meta else tensor.to(device))
    for first, *others in tied.values():
        for other in others:
            owner, _, leaf = other.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(first))


@torch.no_grad()
def fill(parameter: Tensor, value: Slices) -> None:
    """Fill the part of ``parameter`` that this process holds from the whole ``value``, in the parameter's dtype."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(value[(slice(None),) * parameter.ndim])
        return
    here = parameter.to_local()
    (chunk,) = parameter.__create_chunk_list__()
    if math.prod(chunk.sizes):
        here.copy_(value[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))])


# ---------------------------------------------------------------------------------------------------------------- files


@contextmanager
def _opened(what: str, path: str | Path) -> Iterator[Mapping[str, Any]]:
    """A context with every tensor of a model's safetensors files by name, to be read later; {} without such files."""
    with ExitStack() as files:
        slices: dict[str, Any] = {}
        try:
            with no_progress_bars():
                names = _files(path)
            for name in names:
                file = files.enter_context(safe_open(name, framework="pt"))
                slices |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, ValueError, SafetensorError) as error:
            raise refusal(what, path, error) from None
        yield slices


def _files(path: str | Path) -> list[str]:
    """The safetensors files of a model, downloaded from the hub if need be."""
    optional: dict[str, Any] = dict(_raise_exceptions_for_missing_entries=False)
    if whole := cached_file(path, SAFE_WEIGHTS_NAME, **optional):
        return [whole]
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **optional)
    return [] if index is None else list(get_checkpoint_shard_files(path, index)[0])


def why_not_sliceable(
    model: PreTrainedModel,
    stored: Mapping[str, Any],
    keys: Mapping[str, str],
    world: World,
    *,
    without: frozenset[str] | set[str] = frozenset(),
) -> str:
    """Why a model cannot be read from its files in parts, or an empty text if it can. All processes get the same.

    Args:
        stored: the tensors of the files by name.
        keys: the result of ``stored_names``.
        without: names of parameters that need not be in the files.
    """
    if not stored:
        return "it has no safetensors files"
    if is_converted(model):
        return "its files hold other tensors than its parameters"
    if model._keep_in_fp32_modules_strict and model.dtype != torch.float32:
        return "some of its parameters have a dtype of their own"
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, key in keys.items():
        if key not in stored:
            if name in without:
                continue
            return f"{name} is not in its files"
        if tuple(stored[key].get_shape()) != shapes[name]:
            return f"{key} has another shape in its files"
    if buffers := sorted(model.state_dict().keys() - {n for n, _ in model.named_parameters(remove_duplicate=False)}):
        return f"its files hold the buffer {buffers[0]}"
    if different := next(iter(_untied(model, stored, world)), ""):
        return f"{different} is tied to another parameter, and differs from it in its files"
    return ""


def _untied(model: nn.Module, stored: Mapping[str, Any], world: World) -> Iterator[str]:
    """Yield the names of tied parameters that the files store twice with different values.

    Each process compares a part of the values.
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    for names in groups.values():
        first, *others = [name for name in names if name in stored] or [""]
        for other in others:
            rows = stored[first].get_shape()[0]
            part = slice(world.rank * rows // world.size, (world.rank + 1) * rows // world.size)
            if not all(world.gather(torch.equal(stored[first][part], stored[other][part]))):
                yield other


# --------------------------------------------------------------------------------------------------------------- parts


def _configuration(what: str, path: str | Path, **options: Any) -> PretrainedConfig:
    try:
        configuration: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise refusal(what, path, error) from None
    return configuration


def _generation(path: str | Path, model: PreTrainedModel) -> GenerationConfig:
    """The generation config that ``from_pretrained`` would give the model."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return GenerationConfig.from_model_config(model.config)


def _trained(model: PreTrainedModel, frozen: bool) -> PreTrainedModel:
    return model.requires_grad_(False) if frozen else model


def _warn(path: str | Path, reason: str, world: World) -> None:
    if world.main:
        warnings.warn(
            f"{path}: every process loads the whole model before it is split, since {reason}; save it again with "
            "transformers (save_pretrained) to have it read in parts",
            stacklevel=3,
        )
