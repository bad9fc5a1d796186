"""Host memory of a training process: what a step frees, the next one uses again."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT, _LARGEST = 2**31 - 1, 2**30  # bytes


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory for later allocations, blocks of up to 1 GiB too.

    By default it returns large blocks to the kernel at once. Then the logits and activations of every pass come in
    fresh pages, which the kernel fills with zeros first: about a tenth of an update on a CPU. No number changes; the
    process keeps the memory of its largest step.

    Returns:
        whether the C library can do so; glibc can.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all(
        mallopt(option, size) for option, size in ((_M_TRIM_THRESHOLD, _KEPT), (_M_MMAP_THRESHOLD, _LARGEST))
    )
