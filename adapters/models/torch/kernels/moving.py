"""Tensors of the CPU on their way to a GPU."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device. Unlike with `Tensor.to`, the CPU does not wait until the GPU has computed what
    comes before the copy. So it can already tell the GPU what comes next.

    What is copied is a copy in pinned memory of torch's, which gives it to others only when the copies that it was told
    of have ended (`CachingHostAllocator.h`): the tensor itself may change at once.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
