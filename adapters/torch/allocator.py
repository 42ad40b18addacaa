"""Keeps freed memory in the process on Linux CPUs.

Each training step allocates and frees the same gigabytes (gradients, activations, logits). glibc would give large
blocks back to the system at once and take them anew, page by page, which costs about a tenth of a step.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's `mallopt` parameters."""
KEEP = 2**31 - 1
"""Bytes of free memory kept, and size from which blocks are mapped apart: as much as the call takes."""


def keep_freed_memory() -> None:
    """Tells glibc to reuse freed blocks of any size; does nothing on other systems."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent from musl
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEEP)
        mallopt(M_TRIM_THRESHOLD, KEEP)
