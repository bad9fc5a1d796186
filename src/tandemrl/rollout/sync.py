"""Copies the trainer's weights to the engine with a version number, and reads them back to check that they arrived.

An engine with stale weights would look like training that does not work.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from tandemrl.models.lora import adapted_layers, base_name, is_adapter, merged_parameters
from tandemrl.models.sharding import full_parameters
from tandemrl.rollout.engine import Engine, EngineError, SentWeights
from tandemrl.selection.draws import mix64

_PART = 2**18  # elements hashed at once: a CPU keeps them in its cache
_PART_ON_DEVICE = 2**24  # likewise on an accelerator, where many small kernels would cost more
_FLUSHED = {  # the largest subnormal numbers
    dtype: torch.finfo(dtype).tiny * (1 - torch.finfo(dtype).eps) for dtype in (torch.float32, torch.bfloat16)
}


def fingerprint(parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> int:
    """A checksum of named tensors: equal if and only if (up to chance) every tensor has the same bits.

    Each tensor contributes the wrap-around sum of its bits, in words of 64 bits, weighted by position, mixed with its
    name. Before that, the high half of each word is added to the word: the sum drops what overflows, so changes of high
    bits alone could cancel out.

    In float32 and bfloat16, -0.0 and subnormal numbers count as 0.0: matrix units flush them, and an engine whose
    weights are packed for one cannot read them back.
    """
    total = 0
    for name, tensor in parameters:
        values, sums, first = tensor.detach().flatten(), 0, 0
        for part in values.split(_PART if values.device.type == "cpu" else _PART_ON_DEVICE):
            part = part if dtype is None else part.to(dtype)
            if part.dtype in _FLUSHED:
                part = F.hardshrink(part, _FLUSHED[part.dtype])  # in one pass; NaN stays
            words = F.pad(part.view(torch.uint8), (0, -part.nbytes % 8)).view(torch.int64)
            words += words.bitwise_right_shift(32).bitwise_and_(2**32 - 1)  # the shift repeats the sign
            odd = torch.arange(2 * first + 1, 2 * (first + len(words)), 2, device=words.device)
            sums, first = sums + int(words.mul_(odd).sum()), first + len(words)
        total ^= mix64(sums, *name.encode())
    return total


def check_shapes(sent: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check the names and shapes of sent weights.

    Raises:
        EngineError: they are not those of ``shapes``.
    """
    if different := sorted(sent.keys() ^ shapes.keys()):
        first = different[0]
        fault = "the engine's model has no such weight" if first in sent else "it was not sent"
        raise EngineError(
            f"weights do not match the engine's model; {len(different)} names differ, e.g. {first}: {fault}"
        )
    for name, shape in shapes.items():
        if sent[name] != shape:
            raise EngineError(f"weight {name}: shape {sent[name]}, expected {shape}")


def sync_weights(model: PreTrainedModel, engine: Engine, version: int) -> int:
    """Send the trainer's parameters to the engine's senior, and verify by fingerprint that they arrived.

    An engine that holds the base of the trainer's adapters gets the adapters alone, and the fingerprint also verifies
    that its base is the trainer's. Any other engine gets merged weights.

    Returns:
        the fingerprint that both sides agree on.

    Raises:
        EngineError: the engine's weights or version are not what was sent.
    """
    checksum, dtype = 0, getattr(torch, engine.info.dtype)
    layers = adapted_layers(model)

    def weights() -> Iterator[tuple[str, Tensor]]:
        nonlocal checksum
        for name, tensor in full_parameters(model) if engine.info.adapters else merged_parameters(model):
            checksum ^= fingerprint([(name, tensor)], dtype)  # the whole one is the xor of its parts
            if not engine.info.adapters or is_adapter(name, layers):
                yield name, tensor

    engine.load_weights(SentWeights(_shapes(model, adapters=engine.info.adapters), weights()), version)
    arrived = engine.fingerprint("senior")
    if checksum != arrived or engine.policy_version != version:
        raise EngineError(
            f"weights did not reach the engine: version {engine.policy_version} (sent {version}), checksum "
            f"{arrived:#x} (sent {checksum:#x}). The rollouts would come from a stale policy."
        )
    return checksum


def _shapes(model: PreTrainedModel, *, adapters: bool) -> dict[str, tuple[int, ...]]:
    """The names and whole shapes of what is sent: of a model's adapters alone, or of all with the adapters merged."""
    layers = adapted_layers(model)
    return {
        name if adapters else base_name(name): tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if is_adapter(name, layers) == adapters
    }
