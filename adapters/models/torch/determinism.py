"""Kernels that give the same bits from the same numbers, for runs that are to be repeated exactly."""

import os

import torch


def compute_deterministically() -> None:
    """Makes torch choose deterministic kernels in this process from now on, before anything is computed on a GPU; it
    warns of an operation that has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as torch requires of cuBLAS, which reads it once
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
