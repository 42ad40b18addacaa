"""Tensors of the CPU on their way to a GPU."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device. The CPU does not wait for what a GPU computes before the copy, as `Tensor.to` has
    it do, so that it is ahead with telling it what comes next.

    What is copied is a copy in pinned memory of torch's, which gives it to others only when the copies that it was told
    of have ended (`CachingHostAllocator.h`): the tensor itself may change at once.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
