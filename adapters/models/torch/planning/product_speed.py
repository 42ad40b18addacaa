"""The speed at which this machine multiplies matrices."""

import time

import torch

REPEATS = 3
"""Products of which the fastest counts, after one that warms up."""


def product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the floating-point operations a second of a product of two matrices that is large for a device."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(1 + REPEATS):
        begun = time.perf_counter()
        float((a @ b)[0, 0])  # waits for the GPU
        seconds.append(time.perf_counter() - begun)
    return 2 * size**3 / min(seconds[1:])
