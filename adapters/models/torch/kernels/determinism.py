"""Kernels that give the same bits from the same numbers, for runs that are to be repeated exactly."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def compute_deterministically() -> None:
    """Makes torch choose deterministic kernels in this process from now on, before anything is computed on a GPU; it
    warns of an operation that has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as torch requires of cuBLAS, which reads it once
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def are_deterministic() -> bool:
    """Returns whether kernels are to be deterministic."""
    return torch.are_deterministic_algorithms_enabled()


@contextmanager
def strictly() -> Iterator[None]:
    """Has the kernels of attention's backward pass be deterministic inside the block, if kernels are to be: they have
    another form that is, which torch does not take while it only warns of operations that have none."""
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        yield
        return
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(True, warn_only=True)
