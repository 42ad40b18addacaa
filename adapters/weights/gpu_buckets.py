"""Tensors packed into buckets of one size, in the form that vLLM's NCCL and CUDA IPC backends unpack: bytes end to end,
with names, formats, shapes and sizes apart.

A bucket is closed if the next tensor does not fit, or would not be aligned for its number format. A tensor larger than
a bucket gets a bucket of its own size, of which vLLM's NCCL backend expects one broadcast.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from rollgrad.adapters.weights.transfer import Update
from rollgrad.application.settings.weight_backend import BUCKET_BYTES

GROWING = re.compile(r"expandable_segments\s*:\s*True")


@frozen
class Contents:
    """Contents of a bucket, in order, by vLLM's names."""

    names: list[str] = field(factory=list)
    dtype_names: list[str] = field(factory=list)
    shapes: list[list[int]] = field(factory=list)
    tensor_sizes: list[int] = field(factory=list)
    """Sizes in bytes."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor."""
        self.names.append(name)
        self.dtype_names.append(dtype_name(tensor.dtype))
        self.shapes.append(list(tensor.shape))
        self.tensor_sizes.append(tensor.nbytes)

    def update(self, **others: Any) -> Update:
        """Returns the update for engines."""
        info = {"names": self.names, "dtype_names": self.dtype_names, "shapes": self.shapes, **others}
        return Update(info, bytes=sum(self.tensor_sizes), dtypes=tuple({*self.dtype_names}))


@define
class Packer:
    """Fills buckets in memory of `device`, which is used again for every bucket that fits."""

    device: torch.device
    bucket_bytes: int = BUCKET_BYTES
    memory: Tensor = field(init=False)
    """Memory of the bucket, uint8; it is replaced for a tensor that does not fit."""

    def __attrs_post_init__(self) -> None:
        self.memory = self._empty(self.bucket_bytes)

    def buckets(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[Contents, Tensor]]:
        """Yields the contents of each bucket and its bytes, which the next bucket overwrites."""
        contents, used = Contents(), 0
        for name, tensor in weights:
            source = tensor.detach().contiguous().view(-1).view(torch.uint8)
            size = source.numel()
            if used and (used + size > self.bucket_bytes or used % tensor.element_size()):
                yield contents, self.memory[:used]
                contents, used = Contents(), 0
            if size > self.memory.numel():
                self.memory = self._empty(size)
            self.memory[used : used + size].copy_(source)
            contents.add(name, tensor)
            used += size
        if contents.names:
            yield contents, self.memory[:used]

    def _empty(self, size: int) -> Tensor:
        with in_fixed_segment():
            return torch.empty(size, dtype=torch.uint8, device=self.device)


@contextmanager
def in_fixed_segment() -> Iterator[None]:
    """Makes torch take a GPU's memory, inside the block, from segments that do not grow, whatever
    PYTORCH_CUDA_ALLOC_CONF says. To map a part of a growing segment, another process would need the right to trace this
    one, which containers do not give (pytorch#165685)."""
    options = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    fixed = GROWING.sub("expandable_segments:False", options)
    if fixed == options:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(fixed)  # torch forgets options that it is not told again
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(options)


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a number format in torch."""
    return str(dtype).removeprefix("torch.")
