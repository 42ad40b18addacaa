"""Port: where models and training state are kept."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rollgrad.domain.ports.models import PolicyModel, ValueModel

CRITIC_DIRECTORY = "critic"
"""Where a saved model has its critic."""


@runtime_checkable
class CheckpointStore(Protocol):
    """Promises: a checkpoint is complete or absent, also when the process dies while writing it."""

    def save_model(self, policy: PolicyModel, name: str, critic: ValueModel | None = None) -> Path:
        """Writes a Hugging Face model under `name`, and its critic in the directory `critic` below it; returns the
        model's directory.

        Raises:
            CheckpointError: it cannot be written.
        """
        ...

    def save_state(self, state: Mapping[str, Any], name: str) -> Path:
        """Writes JSON-serialisable run state beside the model called `name`."""
        ...

    def save_training(self, state: Mapping[str, Any]) -> Path:
        """Writes all that a run needs to continue (nested mappings and lists of numbers, texts and tensors), in place
        of an older one; returns the file.

        Raises:
            CheckpointError: it cannot be written; an older one is then still there.
        """
        ...

    def load_training(self) -> Mapping[str, Any] | None:
        """What `save_training` wrote last, None if nothing has been.

        Raises:
            CheckpointError: it cannot be read.
        """
        ...
