"""How much memory this process's tensors take."""

import gc
from contextlib import suppress

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from rollgrad.adapters.models.torch.loading.weight_shards import is_sharded


def tensor_bytes() -> int:
    """Bytes of all tensors that Python knows of, and of their gradients; memory that several share counts once."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and _has_memory(thing)]
    gradients = [gradient for tensor in tensors if (gradient := _gradient(tensor)) is not None]
    # Of a DTensor the memory is that of its local part, a tensor of its own.
    storages = [tensor.untyped_storage() for tensor in tensors + gradients if not is_sharded(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _has_memory(tensor: Tensor) -> bool:
    """Returns whether a tensor has numbers in the CPU's memory; those by which a compiler has traced a model do not."""
    return tensor.device.type == "cpu" and not is_fake(tensor)


def _gradient(tensor: Tensor) -> Tensor | None:
    """The gradient that a tensor keeps; a view whose base was changed in place cannot be asked, and keeps none."""
    with suppress(RuntimeError):
        if tensor.is_leaf:
            return tensor.grad
    return None
