"""The memory and speed of accelerators, by their data sheets. Nothing here was measured by this project."""

from typing import NamedTuple

from tandemrl.config import ConfigError

GIB = 2**30


class Accelerator(NamedTuple):
    """One device.

    memory: the bytes that a process can use; None means that memory is not checked. bfloat16, float32: FLOP/s of dense
    matrix products. bandwidth, link, network: bytes/s in one direction, to the device's memory, to other devices of the
    machine and to other machines.
    """

    name: str
    memory: float | None
    bfloat16: float
    float32: float
    bandwidth: float
    link: float
    network: float

    def peak(self, dtype: str) -> float:
        return self.bfloat16 if dtype == "bfloat16" else self.float32


PER_MACHINE = 8
"""How many devices of a machine are linked to each other."""

ACCELERATORS = {
    each.name: each
    for each in (
        # name, memory, bfloat16, float32, memory bandwidth, link, network: SXM parts, 400 (A100: 200) Gbit/s each
        Accelerator("a100-40", 39.4 * GIB, 312e12, 19.5e12, 1.56e12, 300e9, 25e9),
        Accelerator("a100", 79.2 * GIB, 312e12, 19.5e12, 2.04e12, 300e9, 25e9),
        Accelerator("h100", 79.2 * GIB, 989e12, 67e12, 3.35e12, 450e9, 50e9),
        Accelerator("h200", 139.8 * GIB, 989e12, 67e12, 4.8e12, 450e9, 50e9),
        Accelerator("b200", 178.0 * GIB, 2250e12, 80e12, 8.0e12, 900e9, 50e9),
        Accelerator("l40s", 44.4 * GIB, 362e12, 91e12, 0.864e12, 32e9, 25e9),
        Accelerator("rtx4090", 23.6 * GIB, 165e12, 82e12, 1.008e12, 32e9, 12e9),
        # A core or two of a server; its memory is the machine's and shared, so that it is not checked.
        Accelerator("cpu", None, 0.1e12, 0.1e12, 0.02e12, 5e9, 1e9),
    )
}

RESERVE = 0.06
"""The share of a device's memory that a plan leaves free for CUDA's context, NCCL's buffers and gaps between
allocations."""


def accelerator(name: str) -> Accelerator:
    """The accelerator of this name.

    Raises:
        ConfigError: it is not in the table.
    """
    if name not in ACCELERATORS:
        raise ConfigError(f"--device {name}: expected one of {', '.join(ACCELERATORS)}")
    return ACCELERATORS[name]
