"""A `CheckpointStore` that keeps plain files and the order of what was saved."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollgrad.domain.errors import CheckpointError
from rollgrad.domain.ports.checkpoint_store import CRITIC_DIRECTORY, CheckpointStore, TrainingState
from rollgrad.domain.ports.models import PolicyModel, ValueModel


class FakeCheckpointStore(CheckpointStore):
    """Writes under `root`; `models` and `states` hold the names in the order in which they were saved."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.models: list[str] = []
        self.states: dict[str, dict[str, Any]] = {}
        self.saved: TrainingState | None = None

    def save_model(self, policy: PolicyModel | ValueModel, name: str, critic: ValueModel | None = None) -> Path:
        """Has the policy save itself to `root/name`, and the critic below that.

        Raises:
            CheckpointError: they cannot be written.
        """
        path = self._root / name
        try:
            policy.save(path)
            if critic is not None:
                critic.save(path / CRITIC_DIRECTORY)
        except OSError as error:
            raise CheckpointError(f"The model {name!r} cannot be written: {error}") from error
        self.models.append(name)
        return path

    def save_state(self, state: Mapping[str, Any], name: str) -> Path:
        """Writes `root/name.state.json`, and keeps the state in `states`."""
        path = self._root / f"{name}.state.json"
        path.write_text(json.dumps(dict(state)))
        self.states[name] = dict(state)
        return path

    def save_training(self, saved: TrainingState) -> Path:
        """Keeps the training state in `saved`."""
        self.saved = saved
        return self._root / "training"

    def load_training(self) -> TrainingState | None:
        """Returns the training state that was saved last, None without any."""
        return self.saved

    @property
    def training(self) -> dict[str, Any] | None:
        """Parts of the last training state."""
        return None if self.saved is None else dict(self.saved.state)
