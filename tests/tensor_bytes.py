"""How much memory this process's tensors take."""

import gc

from torch import Tensor


def tensor_bytes() -> int:
    """Bytes of all tensors that Python knows of, and of their gradients; memory that several share counts once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and thing.device.type == "cpu"]
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    storages = [tensor.untyped_storage() for tensor in tensors + gradients]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
