"""Gradients of micro-batches, summed, and the optimizer step that follows."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from attrs import astuple
from torch import Tensor

from rollgrad.adapters.models.torch.optimizers.trained_module import TrainedModule
from rollgrad.application.foreign import error_place, error_text
from rollgrad.application.interruption import BrokenOffError
from rollgrad.domain.batches.metrics import Total, joined
from rollgrad.domain.batches.packed import Batch
from rollgrad.domain.errors import ForeignError, NonFiniteUpdateError, RollgradError
from rollgrad.domain.ports.models import LossOutput

Scored = TypeVar("Scored")
"""Result of a module for a micro-batch, which an objective reads."""


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Has torch use no other thread of the CPU inside the block, in a process that computes on a GPU.

    Losses are computed on the CPU while the GPU waits for them. They are of some thousand numbers, for which one thread
    needs microseconds. From 2,048 or 3,000 on torch shares `exp`, indexing and others among all its threads (the grain
    sizes in `aten/src/ATen/native/cpu`) and waits for the last one. That takes milliseconds where cores are busy, or
    where there are fewer cores than threads, as in a container that may use only a part of its machine.
    """
    threads = torch.get_num_threads()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def accumulate_gradients(
    micro_batches: Iterable[Batch],
    scored: Callable[[Batch], Scored],
    objective: Callable[[Scored, Batch], LossOutput],
    trained: TrainedModule,
) -> dict[str, float]:
    """Adds the micro-batches' gradients to that of the step; returns their combined metrics and `loss`.

    Of a divided module, the process whose objective fails makes the passes that the others wait for, and all of them
    then raise an error.

    Raises:
        NonFiniteUpdateError: a loss is not finite; all gradients are dropped.
        ForeignError: the objective failed, of a divided module; all gradients are dropped.
        DistError: the same, or a loss that is not finite, in another process.
    """
    parts: list[Mapping[str, Tensor | float]] = []
    total = 0.0
    failure: Exception | None = None
    for batch in micro_batches:
        scores = scored(batch)
        try:
            with on_one_thread():
                output = objective(scores, batch) if failure is None else LossOutput(loss=_nothing(scores))
            loss = float(output.loss.detach())
        except Exception as error:  # of any kind: losses may be a user's own
            if not trained.divided:
                raise
            failure, output = error, LossOutput(loss=_nothing(scores))
        loss = loss if failure is None else math.nan
        trained.backward(output.loss)
        parts.append(joined([{"loss": Total(loss)}, output.metrics]))
        total += loss
    if not trained.agree(math.isfinite(total)):  # once a step: each waits for the slowest process
        trained.clear()
        if isinstance(failure, RollgradError):
            raise failure
        if failure is not None:
            raise ForeignError(f"The loss failed: {error_text(failure)}{error_place(failure)}") from failure
        if math.isfinite(total):
            raise torch.distributed.DistError("The loss of another process is not finite, or failed.")
        raise NonFiniteUpdateError(f"The loss is {total}; the optimizer step was not applied.")
    return joined(parts)


def _nothing(scores: Any) -> Tensor:
    """Returns a loss without a gradient, whose backward pass goes through all that `scores` were computed by."""
    if isinstance(scores, Tensor):
        scores = [scores]
    found = scores if isinstance(scores, Sequence) else astuple(scores, recurse=False)
    trained = (each for each in found if isinstance(each, Tensor) and each.requires_grad)
    return sum((0.0 * each.sum().cpu() for each in trained), torch.zeros(()))


def optimizer_step(
    micro_batches: Sequence[Batch],
    scored: Callable[[Batch], Scored],
    objective: Callable[[Scored, Batch], LossOutput],
    trained: TrainedModule,
) -> dict[str, float]:
    """Accumulates the micro-batches' gradients and steps once."""
    try:
        metrics = accumulate_gradients(micro_batches, scored, objective, trained)
    except BrokenOffError:  # saving may need the memory of the gradients
        trained.clear()
        raise
    return metrics | trained.step()
