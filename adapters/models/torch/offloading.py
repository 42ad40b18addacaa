"""Keeps the inputs of checkpointed layers in the machine's memory between forward and backward pass.

In the forward pass a stream of its own copies each input to pinned memory; the GPU's memory is free again when the next
layer begins. In the backward pass the same stream brings an input back while the layer after it is computed. The input
of the last layer is needed first, and stays.
Invariants: the stream that computes waits for a copy before it reads what was copied, and before memory that the copy
reads or writes is freed, even if something fails. At most two inputs are on the GPU for the sake of their copies.
torch's `save_on_cpu` copies in the stream that computes, and so between the layers.
Does not own: which activations are computed again (`recomputation.py`).
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Transfers(Protocol):
    """Copies tensors between a device and the machine's memory."""

    def room(self, tensor: Tensor) -> Tensor:
        """Returns memory of the machine for the numbers of a tensor."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Begins a copy, after all that was told the device before; returns what `wait` takes."""
        ...

    def wait(self, copied: Any) -> None:
        """Has all that the device is told from now on wait for the end of a copy."""
        ...


class StreamTransfers:
    """Copies in a stream of a GPU, beside what it computes.

    Both tensors of a copy must be there until it was waited for: torch gives their memory to what comes next in the
    stream that they were made in. Pinned memory is torch's: it is reused, for other tensors only when the copies that
    it was told of (`Tensor.copy_`) have ended (`CachingHostAllocator.h`).
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)

    def room(self, tensor: Tensor) -> Tensor:
        """Implements `Transfers.room`."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> Any:
        """Implements `Transfers.copy`."""
        # The source was computed, and the target's memory last used, in the stream that computes.
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """Implements `Transfers.wait`; on a thread of autograd the current stream is that of the forward pass."""
        self._cuda.current_stream(self._device).wait_event(copied)


class PlainTransfers:
    """Copies at once, on devices without streams."""

    def room(self, tensor: Tensor) -> Tensor:
        """Implements `Transfers.room`."""
        return torch.empty_like(tensor)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Implements `Transfers.copy`."""
        target.copy_(source)

    def wait(self, copied: None) -> None:
        """Implements `Transfers.wait`."""


def transfers_of(device: torch.device) -> Transfers:
    """Returns the transfers of a device."""
    return StreamTransfers(device) if device.type == "cuda" else PlainTransfers()


class _Saved:
    """An input in the machine's memory, and on its device while it is copied."""

    def __init__(self, kept: Tensor, here: Tensor, copied: Any, before: "weakref.ref[_Saved] | None") -> None:
        self.kept, self.device = kept, here.device
        self.here: Tensor | None = here
        self.copied = copied
        self.before = before
        """The input that was saved before it, which the backward pass needs next."""


class OffloadedInputs:
    """The inputs of a model's layers, which autograd saves where `around` is at work.

    Args:
        transfers: returns those of a device.
    """

    def __init__(self, transfers: Callable[[torch.device], Transfers] = transfers_of) -> None:
        self._make = transfers
        self._transfers: Transfers | None = None
        self._latest: weakref.ref[_Saved] | None = None
        self._here: list[_Saved] = []
        """Inputs that are on their device, whose copies nothing has waited for."""

    def around(self, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that checkpoints a layer as `checkpoint` does, with its inputs in the machine's memory."""

        def checkpointed(*arguments: Any, **settings: Any) -> Any:
            # What the layer itself saves goes to the hooks of the checkpoint, which are inside of these.
            with saved_tensors_hooks(self._pack, self._unpack):
                return checkpoint(*arguments, **settings)

        return checkpointed

    def clear(self) -> None:
        """Waits for all copies, and leaves no input on the device for their sake."""
        self._let_go()
        self._latest = None

    def _pack(self, tensor: Tensor) -> "Tensor | _Saved":
        # Layers are also given what needs no gradient, such as positions, which is the same for all of them; and torch
        # 2.11 saves an empty tensor of its own beside their inputs.
        if not tensor.requires_grad or not tensor.numel() or isinstance(tensor, nn.Parameter):
            return tensor.detach()
        here = tensor.detach()
        if self._transfers is None:
            self._transfers = self._make(here.device)
        self._let_go()
        kept = self._transfers.room(here)
        saved = _Saved(kept, here, self._transfers.copy(kept, here), self._latest)
        self._latest = weakref.ref(saved)
        self._here.append(saved)
        return saved

    def _unpack(self, saved: "Tensor | _Saved") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._bring(saved)
        self._wait(saved)
        found, saved.here = saved.here, None
        self._here.remove(saved)
        before = None if saved.before is None else saved.before()
        if before is not None:
            self._bring(before)
        assert found is not None
        return found

    def _bring(self, saved: _Saved) -> None:
        """Begins to copy an input to its device, if it is not there."""
        if saved.here is None:
            assert self._transfers is not None
            # Made in the stream that computes, which may use its memory again as soon as it has read it.
            saved.here = torch.empty_like(saved.kept, device=saved.device)
            saved.copied = self._transfers.copy(saved.here, saved.kept)
            self._here.append(saved)

    def _wait(self, saved: _Saved) -> None:
        assert self._transfers is not None
        self._transfers.wait(saved.copied)

    def _let_go(self) -> None:
        """Gives the device's memory of inputs to others, after their copies."""
        for saved in self._here:
            self._wait(saved)
            saved.here = saved.copied = None
        self._here.clear()
