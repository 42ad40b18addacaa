"""The state of a model whose parts are in the processes of a group.

Invariant: it is the state of the moment at which it was asked for, or nothing: a model that has been trained since has
no older one.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rollgrad.adapters.models.ray.worker_group import WorkerGroup


class GroupState(Mapping[str, Any]):
    """A model's state. Its processes write it to files themselves (`PartInFiles`); read as a mapping, it is fetched
    from them whole.

    Args:
        group: the processes.
        updates: returns how many updates the model has made.
    """

    def __init__(self, group: WorkerGroup, updates: Callable[[], int]) -> None:
        self._group = group
        self._updates = updates
        self._made_at = updates()
        self._whole: Mapping[str, Any] | None = None

    def write_files(self, directory: Path) -> None:
        """Implements `PartInFiles.write_files`."""
        self._require_current()
        self._group.all("write_state", directory.absolute())  # processes have working directories of their own

    def whole(self) -> Mapping[str, Any]:
        """Returns the whole state, in this process's memory."""
        if self._whole is None:
            self._require_current()
            self._whole = self._group.all("state_dict")[0]
        return self._whole

    def __getitem__(self, key: str) -> Any:
        """Returns a part of the whole state."""
        return self.whole()[key]

    def __iter__(self) -> Iterator[str]:
        """Iterates over the keys of the whole state."""
        return iter(self.whole())

    def __len__(self) -> int:
        """Returns the number of keys of the whole state."""
        return len(self.whole())

    def _require_current(self) -> None:
        if self._updates() != self._made_at:
            raise RuntimeError("the model has been trained since its state was asked for")
