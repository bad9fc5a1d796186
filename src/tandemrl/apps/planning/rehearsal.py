"""Finds what one process of a training run holds for a model: its training pass on tensors without contents.

The models are made, adapted and sharded by the functions that train (``training.build``, ``models.sharding``), over the
mesh of an ``imagined_world``. A forward and a backward then run on fake tensors, which have shapes and storages but
neither values nor memory. Decoder layers that are alike are not all run: the difference between a run of three layers
and one of four is what each further layer adds.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel

from tandemrl.config import Config
from tandemrl.models.attention import ATTENTION
from tandemrl.models.batching import pack
from tandemrl.models.critic import packed_values, without_dropout
from tandemrl.models.forward import channel_of, packed_logprobs, part_of, with_gathered_parameters
from tandemrl.models.head import ForwardOptions
from tandemrl.models.lora import attach, dropping
from tandemrl.models.sharding import layers_of, shard
from tandemrl.models.trainable import checkpoint_gradients, make_optimizer
from tandemrl.processes.world import World
from tandemrl.rollout.kv_cache import prefill
from tandemrl.types import Author, Batch, Rollout

FEW, MORE = 3, 4
"""The numbers of layers in the two runs from which any number is extrapolated. With three there is a middle layer,
during which FSDP holds the next layer gathered and reduces the gradients of the last one, as with many layers. A plan
of 28 layers then takes 5 seconds; it took 22, and said the same, when all of them were run."""


class Rehearsal(NamedTuple):
    """What one process holds for one model.

    Memory is given in bytes of storages. activations: everything else that is alive at the worst moment of a
    micro-batch, including the parameters that FSDP has gathered.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int


class Work(NamedTuple):
    """A micro-batch, by the number of tokens in each sequence, of which the first ``context`` are not trained on."""

    lengths: tuple[int, ...]
    context: int


class Role(NamedTuple):
    """What a model is there for: ``policy``, ``critic``, or ``frozen`` to score with, with weights of a dtype."""

    name: str
    dtype: str = "float32"


def rehearse(
    role: Role, configuration: PretrainedConfig, config: Config, world: World, work: Work, options: ForwardOptions
) -> Rehearsal:
    """The rehearsal of a model in a role."""
    run = partial(_run, role=role, config=config, world=world, work=work, options=options)
    return Rehearsal(*_extrapolated(run, configuration))


def rehearse_prefill(configuration: PretrainedConfig, dtype: torch.dtype, prompts: int, length: int) -> int:
    """The peak bytes of the torch engine's prefill of ``prompts`` prompts of ``length`` tokens."""

    def run(small: PretrainedConfig) -> tuple[int]:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        model = _untrained(small, dtype)
        give_storage(model, fake)
        with fake, Ledger() as ledger, torch.no_grad():
            ledger.disregard([*model.parameters(), *model.buffers()])
            prefill(model, [[0] * length] * prompts)
        return (ledger.peak,)

    [peak] = _extrapolated(run, configuration)
    return peak


# --------------------------------------------------------------------------------------------------------------- a pass


def _untrained(shape: PretrainedConfig, dtype: torch.dtype, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    with torch.device("meta"):
        model = kind.from_config(shape, dtype=dtype)
    model.eval().set_attn_implementation(ATTENTION)
    return model


def _made(role: Role, small: PretrainedConfig, config: Config, world: World) -> PreTrainedModel:
    """A model as training makes it, sharded."""
    if critic := role.name == "critic":
        small.num_labels = 1
        model = _untrained(small, torch.float32, AutoModelForTokenClassification)
        without_dropout(model)
    else:
        model = _untrained(small, getattr(torch, role.dtype))
    if role.name == "frozen":
        model.requires_grad_(False)
    elif config.model.gradient_checkpointing:
        checkpoint_gradients(model)
    if role.name == "policy" and config.model.lora.rank:
        attach(model, config.model.lora, config.train.seed)
    forward = packed_values if critic else packed_logprobs
    return shard(model, world, dtype=getattr(torch, config.model.dtype), forward=forward)


def _run(
    configuration: PretrainedConfig, *, role: Role, config: Config, world: World, work: Work, options: ForwardOptions
) -> Rehearsal:
    """Run a micro-batch, and of a model that is trained a second one and an optimiser step: gradients exist from then
    on."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    trained = role.name != "frozen"
    model = _made(role, configuration, config, world)
    give_storage(model, fake)
    optimizer = make_optimizer(model, config.train, config.train.lr) if trained else None
    batch = batch_of(work, int(configuration.get_text_config().vocab_size))
    entropy = config.loss.entropy_coef != 0
    once = partial(one_pass, model, batch, options, world, fake, critic=role.name == "critic", entropy=entropy)
    with fake, Ledger() as ledger:
        ledger.disregard([*model.parameters(), *model.buffers()])
        weights = storage_bytes(model.parameters())
        if optimizer is None:
            with torch.no_grad():
                once()
            return Rehearsal(weights, 0, 0, ledger.peak)
        once().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        ledger.disregard(gradients)
        ledger.begin()
        with dropping(model, (0,), torch.device("cpu")):
            once().backward()
        activations = ledger.peak
        optimizer.step()
        state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
        return Rehearsal(weights, storage_bytes(gradients), storage_bytes(state), activations)


def give_storage(model: nn.Module, fake: FakeTensorMode) -> None:
    """Turn parameters and buffers of a model on the meta device into fake tensors, in place.

    Sharding fake tensors instead would take a thousand times longer, since each part of each parameter would be one.
    """
    made: dict[int, Tensor] = {}  # tied ones are one tensor

    def faked(tensor: Tensor) -> Tensor:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        with fake:
            local = torch.empty(local.shape, dtype=local.dtype, device="cpu")
        whole = DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local
        return nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = made.setdefault(id(tensor), faked(tensor))  # type: ignore[assignment]  # of two kinds


def one_pass(
    model: PreTrainedModel,
    batch: Batch,
    options: ForwardOptions,
    world: World,
    fake: FakeTensorMode,
    *,
    critic: bool = False,
    entropy: bool = False,
) -> Tensor:
    """Do what ``forward.token_scores`` and ``critic.token_values`` do, on tensors without contents.

    The batch itself is real, and what depends on it is computed outside of the fake mode.
    """
    shards = world.shards
    with _disable_current_modes():
        index = ((batch.author >= 0) & (batch.positions > 0)).nonzero().squeeze(1)
        part = part_of(batch, index, shards.sequence)
        targets = batch.tokens.index_select(0, part.slots)
        given = (targets, part.tokens, part.positions, part.prefixes)
        targets, tokens, positions, prefixes = map(fake.from_tensor, given)
        part = part._replace(tokens=tokens, positions=positions, prefixes=prefixes)
    options = options._replace(activation_offload=False)
    if critic:
        channels = [with_gathered_parameters(packed_values, model)(part, options)]
    else:
        logprobs = with_gathered_parameters(packed_logprobs, model)
        channels = list(logprobs(part, targets, options, shards.tensor))
    whole = [channel_of(channel, part, batch.tokens.shape[0], shards.sequence) for channel in channels]
    return sum((channel.sum() for channel in whole[1:] if entropy), whole[0].sum())


def batch_of(work: Work, vocabulary: int) -> Batch:
    """A batch of sequences no two of which share a prompt."""

    def rollout(number: int, length: int) -> Rollout:
        author = np.full(length, Author.SENIOR)
        author[: min(work.context, length - 1)] = Author.CONTEXT
        return Rollout(
            str(number), number, 0, 0, np.full(length, number % vocabulary), author, np.zeros(length), reward=0.0
        )

    return pack([rollout(number, length) for number, length in enumerate(work.lengths)])


# -------------------------------------------------------------------------------------------------------------- memory


class Ledger(TorchDispatchMode):
    """A context that looks at every dispatched operation.

    peak: the greatest number of bytes in storages that were made inside, without those of ``disregard``. Memory that a
    kernel allocates and frees by itself, such as its workspace, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, ref[torch.UntypedStorage]] = {}
        self._disregarded: set[int] = set()

    def disregard(self, tensors: Iterable[Tensor]) -> None:
        """Stop counting the storages of ``tensors``, which are counted elsewhere."""
        self._disregarded |= {id(storage) for storage in storages(tensors)}

    def begin(self) -> None:
        """Start counting anew. Storages that are alive stay known."""
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):  # distributed: their parts come by themselves
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        more = False
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if id(storage) not in self._live:
                    more = True
                    self._live[id(storage)] = ref(storage, partial(self._forget, id(storage)))
        if more:  # summed up anew: storages are resized without any operation, as FSDP frees what it has gathered
            held = (storage() for key, storage in self._live.items() if key not in self._disregarded)
            self.peak = max(self.peak, sum(storage.nbytes() for storage in held if storage is not None))
        return result

    def _forget(self, key: int, _: Any) -> None:
        self._live.pop(key, None)
        self._disregarded.discard(key)


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind tensors, each once. For distributed tensors they are those of the local parts."""
    locals_ = (t._local_tensor if isinstance(t, DTensor) else t for t in tensors)
    return list({id(storage): storage for storage in (local.untyped_storage() for local in locals_)}.values())


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The number of bytes in the storages behind tensors."""
    return sum(storage.nbytes() for storage in storages(tensors))


# ---------------------------------------------------------------------------------------------------- layer after layer


def _extrapolated(run: Callable[[PretrainedConfig], Sequence[int]], configuration: PretrainedConfig) -> list[int]:
    """The numbers that ``run`` gives for the whole model, extrapolated from runs with few layers if all are alike."""
    layers = int(configuration.get_text_config().num_hidden_layers)
    if layers <= MORE or not _alike(configuration):
        return [*run(copy.deepcopy(configuration))]
    few, more = (run(_with_layers(configuration, count)) for count in (FEW, MORE))
    return [one + (layers - FEW) * (other - one) for one, other in zip(few, more, strict=True)]


def _alike(configuration: PretrainedConfig) -> bool:
    """Whether all decoder layers have the same parameters and attend over the same range."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration)
    shapes = [[(name, p.shape) for name, p in layer.named_parameters()] for layer in layers_of(model)]
    return (
        all(each == shapes[0] for each in shapes) and len(set(getattr(configuration, "layer_types", None) or [0])) == 1
    )


def _with_layers(configuration: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The same model with its first ``layers`` decoder layers."""
    values = configuration.to_dict()
    values["num_hidden_layers"] = layers
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:layers]
    return type(configuration).from_dict(values)
