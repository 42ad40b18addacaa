"""Forward passes of a frozen model whose weights several processes divide, each of which has texts of its own.

Invariant: all processes make as many passes as the one with most, because they put each layer together in all of them.
Does not own: how a model is divided (`adapters/models/deepspeed`, `adapters/models/fsdp`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn

Divide = Callable[[nn.Module], Callable[..., Any]]
"""Function that divides a frozen module over the processes of a group, and returns its forward pass."""


class PassesTogether:
    """The forward pass of `module`, which `divide` divides; None leaves it whole, and each process by itself."""

    def __init__(self, module: nn.Module, divide: Divide | None) -> None:
        self._device = next(module.parameters()).device
        self._divided = divide is not None
        self._forward = module if divide is None else divide(module)
        self._broken = False
        """Whether a pass has raised an error, in the midst of which the other processes wait."""

    def __call__(self, *inputs: Any) -> Any:
        """Returns the module's output."""
        if not self._divided:
            return self._forward(*inputs)
        self._any_has(True)
        self._broken = True
        output = self._forward(*inputs)
        self._broken = False
        return output

    @contextmanager
    def made_by_all(self, *inputs: Any) -> Iterator[None]:
        """Makes passes with `inputs` when the block is left, until no process has one of its own left, also where the
        block raises an error, if no pass did."""
        try:
            yield
        finally:
            while self._divided and not self._broken and self._any_has(False):
                self._forward(*inputs)

    def _any_has(self, mine: bool) -> bool:
        """Returns whether any process has a pass of its own to make now."""
        flag = torch.tensor([float(mine)], device=self._device)
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
        return bool(flag)
