"""Memory that optimizers leave to engines while these sample: what they keep moves to the CPU's memory after an update,
and back before the next backward pass.

Invariant: a tensor that sleeps is the same object with the same numbers, so that states are saved and loaded as ever.
Does not own: when models sleep, nor which tensors an optimizer has.
"""

from collections.abc import Callable, Iterable, MutableMapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

SLAB = 2**30
"""Bytes that are locked in the CPU's memory at once, if as many are needed."""

STEP = 64
"""Parts of a slab begin at multiples of this: a cache line, and a multiple of every number format's size."""


class SleepingTensors:
    """Moves tensors to the CPU's memory and back.

    Args:
        tensors: returns those that sleep, each the only view of its memory.
        device: where they are while they are awake.
        moved: called after they have moved, for what else has views of their memory.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        device: torch.device,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._tensors = tensors
        self._device = device
        self._moved = moved
        self._beds: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        """The CPU's memory for each tensor, which is kept: to lock it there takes longer than to copy."""
        self.asleep = False
        """Whether they are in the CPU's memory."""

    def place(self, tensor: Tensor) -> torch.device:
        """Returns where a tensor belongs now; a single number, such as that of an optimizer's steps, never sleeps."""
        return torch.device("cpu") if self.asleep and tensor.ndim else self._device

    @torch.no_grad()
    def sleep(self) -> None:
        """Moves them to the CPU's memory, if they are not there."""
        if self.asleep:
            return
        tensors = [*self._tensors()]
        self._make_beds([tensor for tensor in tensors if tensor not in self._beds])
        for tensor in tensors:
            bed = self._beds[tensor]
            bed.copy_(tensor)
            tensor.data = bed
        self.asleep = True
        self._moved()

    def _make_beds(self, tensors: Sequence[Tensor]) -> None:
        if self._device.type != "cuda":
            self._beds.update((tensor, torch.empty_like(tensor, device="cpu")) for tensor in tensors)
            return
        sizes, places = packed([tensor.nbytes for tensor in tensors])
        slabs = [torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy() for size in sizes]
        for tensor, (slab, first) in zip(tensors, places, strict=True):
            part = torch.from_numpy(slabs[slab][first : first + tensor.nbytes])  # a storage of its own
            self._beds[tensor] = part.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    @torch.no_grad()
    def wake(self) -> None:
        """Moves them back, if they sleep."""
        if not self.asleep:
            return
        for tensor in self._tensors():
            tensor.data = tensor.to(self._device, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.asleep = False
        self._moved()


def packed(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the sizes of slabs of memory, and for each of the `sizes` its slab and its first byte there. torch pins
    memory in powers of two, up to twice what a tensor needs; tensors that share slabs need little more than their
    sum."""
    slabs: list[int] = []
    used: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    taken = [-(-size // STEP) * STEP for size in sizes]
    left = sum(taken)
    for index in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        size = taken[index]
        slab = next((slab for slab, whole in enumerate(slabs) if whole - used[slab] >= size), len(slabs))
        if slab == len(slabs):
            slabs.append(1 << (max(size, min(left, SLAB), 1) - 1).bit_length())
            used.append(0)
        places[index] = slab, used[slab]
        used[slab] += size
        left -= size
    return slabs, [places[index] for index in range(len(sizes))]
