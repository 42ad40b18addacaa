"""Keeps freed memory in the process on Linux CPUs, until it is asked for.

Each training step allocates and frees the same gigabytes (gradients, activations, logits). glibc would give large
blocks back to the system at once and take them anew, page by page, which costs about a tenth of a step.
"""

import ctypes
import sys
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's `mallopt` parameters."""
KEEP = 2**31 - 1
"""Bytes of free memory kept, and size from which blocks are mapped apart: as much as the call takes."""


def keep_freed_memory() -> None:
    """Tells glibc to reuse freed blocks of any size; does nothing on other systems."""
    if (mallopt := _glibc_function("mallopt")) is not None:
        mallopt(M_MMAP_THRESHOLD, KEEP)
        mallopt(M_TRIM_THRESHOLD, KEEP)


def give_back_freed_memory() -> None:
    """Gives all of it to the system, for other processes on the machine; does nothing on other systems."""
    if (malloc_trim := _glibc_function("malloc_trim")) is not None:
        malloc_trim(0)


def _glibc_function(function: str) -> Any:
    """None on other systems, and in other C libraries, as musl."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform.startswith("linux") else None
