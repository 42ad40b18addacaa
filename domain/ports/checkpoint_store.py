"""Port: where models and training state are kept."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import frozen

if TYPE_CHECKING:  # torch is not needed to find and read the descriptions of states
    from rollgrad.domain.ports.models import PolicyModel, ValueModel

CRITIC_DIRECTORY = "critic"
"""Where a saved model has its critic."""


@frozen(kw_only=True)
class TrainingState:
    """All that a run needs to continue after `step`: nested mappings and lists of numbers, texts and tensors in
    `state`. `description` is JSON-serialisable and says which run it is of; None where an earlier version saved it."""

    step: int
    state: Mapping[str, Any]
    description: Mapping[str, Any] | None


@runtime_checkable
class CheckpointStore(Protocol):
    """Promises: a checkpoint is complete or absent, also when the process dies while writing it."""

    def save_model(self, policy: "PolicyModel", name: str, critic: "ValueModel | None" = None) -> Path:
        """Writes a Hugging Face model under `name`, and its critic in the directory `critic` below it; returns the
        model's directory.

        Raises:
            CheckpointError: it cannot be written.
        """
        ...

    def save_state(self, state: Mapping[str, Any], name: str) -> Path:
        """Writes JSON-serialisable run state beside the model called `name`."""
        ...

    def save_training(self, saved: TrainingState) -> Path:
        """Writes a training state; returns its path. The newest ones are kept.

        Raises:
            CheckpointError: it cannot be written; the older ones are then still there.
        """
        ...

    def load_training(self) -> TrainingState | None:
        """Returns the newest training state that is whole, None if nothing has been saved.

        Raises:
            CheckpointError: none can be read.
        """
        ...
