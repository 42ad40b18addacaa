"""Keeps the rollouts of a run, token by token, for people and other tools."""

from collections.abc import Sequence
from typing import Protocol

from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.domain.batches.packed import RolloutBatch


class TrajectoryLog(Protocol):
    """Keeps trajectories. Promises: it changes none of its arguments, and one that fails logs an event and does not
    stop the run."""

    def update(self, step: int, groups: Sequence[RolloutGroup], batch: RolloutBatch) -> None:
        """Keeps the rollouts of update `step`. `batch` has a sequence for each of their trajectories, in the same
        order, with advantages and loss weights."""
        ...

    def evaluation(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """Keeps the rollouts of the evaluation after `step` updates."""
        ...

    def flush(self) -> None:
        """Waits until all that was given is kept."""
        ...
