"""An exponential moving average of master weights: average <- beta x average + (1 - beta) x weight, after each step or
each so many.

Invariants: it starts at the weights that training starts from; it is float32, in the CPU's memory, and divided as the
masters are, so that keeping it sends nothing. Does not own: the masters, nor the weights that a model computes with.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class MovingAverage:
    """Moving average of `masters`, float32 tensors on any device that stay the same objects; `beta` is its decay, which
    is applied after every so many steps."""

    def __init__(self, masters: Sequence[Tensor], beta: float, every: int = 1) -> None:
        self._masters = masters
        self._beta, self._every = beta, every
        self._averages = [master.detach().to("cpu", copy=True) for master in masters]

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Updates the average after an optimizer step, whose number is counted from 1."""
        if step % self._every:
            return
        for average, master in zip(self._averages, self._masters, strict=True):
            average.lerp_(master.to("cpu"), 1 - self._beta)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the averages into the masters inside the block, where they may be written."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @contextmanager
    def published(self, publish: Callable[[], None]) -> Iterator[None]:
        """Publishes the averages instead of the masters inside the block."""
        try:
            with self.in_place():
                publish()
                yield
        finally:
            publish()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, master in zip(self._averages, self._masters, strict=True):
            weight = master.to("cpu", copy=True)
            master.copy_(average)
            average.copy_(weight)
