"""The memory of accelerators, by their data sheets."""

from typing import NamedTuple

from tandemrl.config import ConfigError

GIB = 2**30


class Accelerator(NamedTuple):
    """One device. memory: the bytes that a process can use; None means that memory is not checked."""

    name: str
    memory: float | None


ACCELERATORS = {
    each.name: each
    for each in (
        Accelerator("a100-40", 39.4 * GIB),
        Accelerator("a100", 79.2 * GIB),
        Accelerator("h100", 79.2 * GIB),
        Accelerator("h200", 139.8 * GIB),
        Accelerator("b200", 178.0 * GIB),
        Accelerator("l40s", 44.4 * GIB),
        Accelerator("rtx4090", 23.6 * GIB),
        Accelerator("cpu", None),  # its memory is the machine's and shared
    )
}

RESERVE = 0.06
"""The fraction of a device's memory that a plan leaves free for CUDA's context, NCCL's buffers and gaps between
allocations."""


def accelerator(name: str) -> Accelerator:
    """The accelerator of this name.

    Raises:
        ConfigError: it is not in the table.
    """
    if name not in ACCELERATORS:
        raise ConfigError(f"--device {name}: expected one of {', '.join(ACCELERATORS)}")
    return ACCELERATORS[name]
