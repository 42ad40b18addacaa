"""Follows the tokens of a model's passes within an optimizer step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from rollgrad.domain.batches.packed import PackedBatch


class StepTokens:
    """Divides a column [M, ...] over the passes in which a batch is computed: one, or, padded, several in turn. The
    column depends on the batch and the optimizer step, and is found once a batch."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._batch: PackedBatch | None = None
        self._column_M: Tensor | None = None
        self._begun = 0
        """Tokens of the batch whose passes have begun."""

    def follow(self, module: nn.Module) -> None:
        """Follows the batches of `module`, which computes a model; its first argument is the batch."""
        module.register_forward_pre_hook(self._remember)

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Gives rows of the column of this optimizer step inside the block."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def following(self, tokens: int, find: Callable[[PackedBatch, int], Tensor]) -> Tensor | None:
        """Returns the rows of the next pass, which has `tokens` tokens; None outside of a step.

        Args:
            tokens: number of tokens of the pass, padding included.
            find: returns the column of a batch in a step.
        """
        if self._step is None or self._batch is None:
            return None
        if self._column_M is None:
            self._column_M = find(self._batch, self._step)
        begun, self._begun = self._begun, self._begun + tokens
        return self._column_M[begun : self._begun]

    def _remember(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._batch, self._column_M, self._begun = inputs[0], None, 0
