"""Gradients of micro-batches, summed, and the optimizer step that follows."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from rollgrad.adapters.models.torch.trained_module import TrainedModule
from rollgrad.domain.batches.metrics import Total, joined
from rollgrad.domain.batches.packed import Batch
from rollgrad.domain.errors import NonFiniteUpdateError
from rollgrad.domain.ports.models import LossOutput


def accumulate_gradients(
    micro_batches: Iterable[Batch], loss_of: Callable[[Batch], LossOutput], trained: TrainedModule
) -> dict[str, float]:
    """Adds the micro-batches' gradients to that of the step; returns their combined metrics and `loss`.

    Raises:
        NonFiniteUpdateError: a loss is not finite; all gradients are dropped.
    """
    parts: list[Mapping[str, Tensor | float]] = []
    total = 0.0
    for batch in micro_batches:
        output = loss_of(batch)
        loss = float(output.loss.detach())
        trained.backward(output.loss)
        parts.append(joined([{"loss": Total(loss)}, output.metrics]))
        total += loss
    if not trained.agree(math.isfinite(total)):  # once a step: each waits for the slowest process
        trained.clear()
        raise NonFiniteUpdateError(f"The loss is {total}; the optimizer step was not applied.")
    return joined(parts)


def optimizer_step(
    micro_batches: Sequence[Batch], loss_of: Callable[[Batch], LossOutput], trained: TrainedModule
) -> dict[str, float]:
    """Accumulates the micro-batches' gradients and steps once."""
    return accumulate_gradients(micro_batches, loss_of, trained) | trained.step()
