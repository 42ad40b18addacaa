"""Keeps freed memory in the process, until `give_back_freed_memory`, and whole on a GPU.

Each training step allocates and frees the same gigabytes (gradients, activations, logits). On a GPU torch keeps what is
freed. On a Linux CPU glibc by default returns large blocks to the system at once and maps them again, page by page,
which costs about a tenth of a step.
"""

import ctypes
import os
import sys
from typing import Any

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Names of glibc's `mallopt` parameters."""
KEEP = 2**31 - 1
"""Bytes of free memory that are kept, and size from which blocks are mapped separately: the largest possible value."""


GROWING = "expandable_segments:True"
"""Option of torch's allocator."""


def let_segments_grow() -> None:
    """Has torch take a GPU's memory, from now on, in segments that grow and shrink, unless PYTORCH_ALLOC_CONF, or
    PYTORCH_CUDA_ALLOC_CONF, says how. Each pass of a run has a size of its own: in segments of fixed sizes, the memory
    that passes free is left in pieces, of which SkyRL found 20 GiB in its second step (NovaSky-AI/SkyRL#1768). vLLM's
    processes, which have an allocator of their own for sleep, must not inherit it."""
    if torch.cuda.is_available() and not any(map(os.environ.get, ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))):
        os.environ["PYTORCH_ALLOC_CONF"] = GROWING  # where `in_fixed_segment` looks; torch has read it before
        torch._C._accelerator_setAllocatorSettings(GROWING)


def keep_freed_memory() -> None:
    """Makes glibc reuse freed blocks of any size, in all threads; does nothing on other systems."""
    if (mallopt := _glibc_function("mallopt")) is not None:
        mallopt(M_ARENA_MAX, 1)  # others give back what has more than 64 MiB, and an update has a thread of its own
        mallopt(M_MMAP_THRESHOLD, KEEP)
        mallopt(M_TRIM_THRESHOLD, KEEP)


def give_back_freed_memory(*, of_gpu: bool = True) -> None:
    """Returns freed memory to the GPU, if `of_gpu`, and to the system, for other processes: an engine that wakes in a
    GPU's memory takes what was free when it started. Systems other than Linux get none back."""
    if of_gpu:
        FreedGPUMemory().sleep()
    if (malloc_trim := _glibc_function("malloc_trim")) is not None:
        malloc_trim(0)


class FreedGPUMemory:
    """Memory of a GPU that this process has freed, and that torch keeps for it."""

    def sleep(self) -> None:
        """Gives it to other processes; does nothing where no GPU was used."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # what engines had mapped, as weights came
            torch.cuda.empty_cache()


def _glibc_function(function: str) -> Any:
    """Returns a function of glibc; None on other systems and with other C libraries, such as musl."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform.startswith("linux") else None
