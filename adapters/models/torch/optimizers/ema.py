"""An exponential moving average of master weights: average <- beta x average + (1 - beta) x weight, after each step or
every few steps.

Invariants: it starts at the weights that training starts from; it is float32, in the CPU's memory, and divided as the
masters are, so that keeping it sends nothing. Does not own: the masters, nor the weights that a model computes with.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

STAGED = 2**24
"""Numbers of a GPU that are brought to the CPU at a time, through memory that no one may page out: 64 MiB."""


class MovingAverage:
    """Moving average of `masters`, float32 tensors on any device that stay the same objects; `beta` is its decay, which
    is applied after each `every` steps."""

    def __init__(self, masters: Sequence[Tensor], beta: float, every: int) -> None:
        self._masters = masters
        self._beta, self._every = beta, every
        self._staging: Tensor | None = None
        self._averages = [master.detach().to("cpu", copy=True) for master in masters]

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Updates the average after an optimizer step, whose number is counted from 1."""
        if step % self._every:
            return
        share = 1 - self._beta
        for average, master in zip(self._averages, self._masters, strict=True):
            if master.device == average.device or not master.is_contiguous():
                average.lerp_(master.to("cpu"), share)
                continue
            if self._staging is None:
                self._staging = torch.empty(STAGED, pin_memory=True)
            own_N, master_N = average.view(-1), master.view(-1)
            for first in range(0, len(own_N), STAGED):
                part_N = master_N[first : first + STAGED]
                own_N[first : first + STAGED].lerp_(self._staging[: len(part_N)].copy_(part_N), share)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the averages into the masters inside the block, where they may be written."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @contextmanager
    def lent(self, parameters: Sequence[Tensor], publish: Callable[[], None]) -> Iterator[None]:
        """Has `parameters`, one for each master, hold the averages inside the block. No master is copied but those that
        are parameters themselves, in another memory than the averages; `publish` gives the others back after it."""
        triples = list(zip(parameters, self._averages, self._masters, strict=True))
        own = [(average, master) for parameter, average, master in triples if parameter is master]
        try:
            with torch.no_grad():
                for parameter, average, master in triples:
                    if parameter is not master:
                        parameter.copy_(average)
            _change_places(own)
            try:
                yield
            finally:
                _change_places(own)
        finally:
            publish()

    @contextmanager
    def published(self, publish: Callable[[], None]) -> Iterator[None]:
        """Publishes the averages instead of the masters inside the block."""
        try:
            with self.in_place():
                publish()
                yield
        finally:
            publish()

    def _exchange(self) -> None:
        for average, master in zip(self._averages, self._masters, strict=True):
            _exchange(average, master)


def _change_places(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Exchanges what two tensors each hold; in one memory, nothing is copied."""
    for average, master in pairs:
        if average.device == master.device:
            average.data, master.data = master.data, average.data
        else:
            _exchange(average, master)


@torch.no_grad()
def _exchange(average: Tensor, master: Tensor) -> None:
    """Exchanges the numbers of two tensors, each of which keeps its memory, of which others may know."""
    weight = master.to("cpu", copy=True)
    master.copy_(average)
    average.copy_(weight)
