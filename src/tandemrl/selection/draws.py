"""Counter-based random numbers: a draw is a pure function of (key, counter), so no generator has to be carried,
saved or restored, and neither batch size, batch order, device nor engine can change it.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) used
by index: draw number i of key k is ``finalise(k + (i + 1)·γ)``. Arithmetic is modulo 2⁶⁴ and stored as int64.
"""

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

SELECTION = 1
"""The stream of random numbers that authors are drawn from."""
SAMPLING = 2
"""The stream that tokens are sampled from. It is separate, so that prob_senior cannot change what a model samples."""
HANDOVER = 3
"""The stream for a token that replaces a dropped one: the numbers that drew the dropped one have told something."""
JUNIOR_SAMPLING, JUNIOR_HANDOVER = 4, 5
"""The same two streams for a junior with a vocabulary of its own. It counts its tokens by itself, so in the senior's
streams a token of each could come from one number, and the gradient would not be exact."""
POOL = 6
"""The stream that a rollout's junior is drawn from, if there are several."""

_MASK = (1 << 64) - 1


def _signed(word: int) -> int:
    return ((word & _MASK) ^ (1 << 63)) - (1 << 63)


_GAMMA = _signed(0x9E3779B97F4A7C15)
_UNSIGNED_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def mix64(*words: int) -> int:
    """Hash integers (each taken modulo 2⁶⁴) into one int64; the order and the number of words matter.

    Examples:
        >>> mix64(0, 1) == mix64(1, 0)
        False
    """
    z = 0
    for word in words:
        z = (z + word + _GAMMA) & _MASK
        z = ((z ^ (z >> 30)) * _MULTIPLIER_1) & _MASK
        z = ((z ^ (z >> 27)) * _MULTIPLIER_2) & _MASK
        z = z ^ (z >> 31)
    return _signed(z)


def request_key(seed: int, step: int, example: int, sample: int) -> int:
    """The key of one completion, which all of its random draws follow from.

    Args:
        seed: seed of the run.
        step: training step.
        example: number of the example in its dataset.
        sample: number of the completion among those of this example in this step.
    """
    return mix64(seed, step, example, sample)


SAMPLE_BITS = 16
"""The low bits of the keys of a group that shares its author draws. They number its completions."""


def completion_keys(seed: int, step: int, example: int, first: int, size: int, *, shared: bool) -> tuple[int, ...]:
    """The keys of ``size`` completions of an example.

    Args:
        first: number of the first one among the completions of this example in this step.
        shared: whether they have the same author draws (``Strategy.shared_draws``): `group_of` maps them to one key.

    Raises:
        ValueError: ``size`` is above 65,536, and they are to share their draws.
    """
    if not shared:
        return tuple(request_key(seed, step, example, first + sample) for sample in range(size))
    if size > 1 << SAMPLE_BITS:
        raise ValueError(f"a group of {size} completions: at most {1 << SAMPLE_BITS} can share their author draws")
    group = request_key(seed, step, example, first) >> SAMPLE_BITS << SAMPLE_BITS
    return tuple(group + sample for sample in range(size))


def group_of(keys: Int64[Tensor, "*b"]) -> Int64[Tensor, "*b"]:
    """The key of the group of each completion."""
    return keys >> SAMPLE_BITS << SAMPLE_BITS


def _finalise(z: Int64[Tensor, "*b"]) -> Int64[Tensor, "*b"]:
    # In place, on temporaries made here. `>>` copies the sign bit, hence the masks.
    z = (z >> 30).bitwise_and_((1 << 34) - 1).bitwise_xor_(z).mul_(_MULTIPLIER_1)
    z = (z >> 27).bitwise_and_((1 << 37) - 1).bitwise_xor_(z).mul_(_MULTIPLIER_2)
    return (z >> 31).bitwise_and_((1 << 33) - 1).bitwise_xor_(z)


def _finalise_unsigned(z: np.ndarray) -> np.ndarray:
    # The same in NumPy: for a few rows torch takes three times as long to start its operations.
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MULTIPLIER_1 & _MASK)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MULTIPLIER_2 & _MASK)
    z ^= z >> np.uint64(31)
    return z


def mix(keys: Int64[Tensor, " b"], *words: int) -> Int64[Tensor, " b"]:
    """``mix64(key, *words)`` for every key of a tensor."""
    if keys.device.type == "cpu":
        unsigned = _finalise_unsigned(keys.numpy().view(np.uint64) + _UNSIGNED_GAMMA)
        for word in words:
            unsigned = _finalise_unsigned(unsigned + np.uint64((word + _GAMMA) & _MASK))
        return torch.from_numpy(unsigned.view(np.int64))
    z = _finalise(keys + _GAMMA)
    for word in words:
        z = _finalise(z + _signed(word + _GAMMA))
    return z


def stream(keys: Int64[Tensor, " b"], which: int) -> Int64[Tensor, " b"]:
    """The keys of one stream of the same requests: ``mix64(key, which)``, where ``which`` is SELECTION,
    SAMPLING, ..."""
    return mix(keys, which)


def _fold_in_unsigned(keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    return _finalise_unsigned((counters.view(np.uint64) + np.uint64(1)) * _UNSIGNED_GAMMA + keys.view(np.uint64))


def fold_in(keys: Int64[Tensor, "*#b"], counters: Int64[Tensor, "*#b"]) -> Int64[Tensor, "*b"]:
    """Output number ``counters[i]`` of stream ``keys[i]``: 64 random bits, which can be the key of another stream.

    The name follows ``jax.random.fold_in``. Shapes broadcast.
    """
    if keys.device.type == "cpu":
        return torch.from_numpy(_fold_in_unsigned(keys.numpy(), counters.numpy()).view(np.int64))
    return _finalise(torch.add(keys + _GAMMA, counters, alpha=_GAMMA))


def uniforms(keys: Int64[Tensor, "*#b"], counters: Int64[Tensor, "*#b"]) -> Float64[Tensor, "*b"]:
    """Draw number ``counters[i]`` of stream ``keys[i]``: uniform in [0, 1), made of the top 53 bits of ``fold_in``.

    Shapes broadcast.
    """
    if keys.device.type == "cpu":
        return torch.from_numpy((_fold_in_unsigned(keys.numpy(), counters.numpy()) >> np.uint64(11)) * 2.0**-53)
    return (fold_in(keys, counters) >> 11).bitwise_and_((1 << 53) - 1).to(torch.float64).mul_(2.0**-53)
