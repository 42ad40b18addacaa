"""Port: keeps models and training states."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attrs import frozen

if TYPE_CHECKING:  # torch is not needed to find and read the descriptions of states
    from rollgrad.domain.ports.models import PolicyModel, ValueModel

CRITIC_DIRECTORY = "critic"
"""Directory of the critic, below the model that it was saved with."""


STORED_IN = "stored_in"
"""Key of a directory, in the place of a part of a training state that `PartInFiles` has written there."""


@runtime_checkable
class PartInFiles(Protocol):
    """A part of a training state that other processes hold, and write themselves: it never is whole in this one."""

    def write_files(self, directory: Path) -> None:
        """Writes it to files in a directory, which exists.

        Raises:
            CheckpointError: it cannot be written.
        """
        ...

    def copied(self) -> "PartInFiles":
        """Returns a copy of it, in the memory of those processes, that is written while the original changes."""
        ...


@frozen(kw_only=True)
class TrainingState:
    """Everything that a run needs to continue after `step`."""

    step: int
    state: Mapping[str, Any]
    """Nested mappings and lists of numbers, texts and tensors, which no later step changes. What is saved may have
    `PartInFiles` in it; what is loaded has `{STORED_IN: directory}` in their places."""
    description: Mapping[str, Any] | None
    """Identifies the run, JSON-serialisable; None in states of earlier versions."""


@runtime_checkable
class CheckpointStore(Protocol):
    """Keeps checkpoints. Promises: a checkpoint is complete or absent, even if the process dies while writing it."""

    def save_model(self, policy: "PolicyModel | ValueModel", name: str, critic: "ValueModel | None" = None) -> Path:
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
            CheckpointError: it cannot be written; the older ones are kept.
        """
        ...

    def load_training(self) -> TrainingState | None:
        """Returns the newest complete training state, None if nothing has been saved.

        Raises:
            CheckpointError: none can be read.
        """
        ...
