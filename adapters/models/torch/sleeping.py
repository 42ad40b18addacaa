"""Memory that optimizers leave to engines while these sample: what they keep moves to the CPU's memory after an update,
and back before the next backward pass.

Invariant: a tensor that sleeps is the same object with the same numbers, so that states are saved and loaded as ever.
Does not own: when models sleep, nor which tensors an optimizer has.
"""

from collections.abc import Callable, Iterable, MutableMapping

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


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
        for tensor in self._tensors():
            bed = self._beds.get(tensor)
            if bed is None:
                bed = torch.empty_like(tensor, device="cpu", pin_memory=self._device.type == "cuda")
                self._beds[tensor] = bed
            bed.copy_(tensor)
            tensor.data = bed
        self.asleep = True
        self._moved()

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
