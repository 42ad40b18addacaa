"""The state of a model whose parts are in the processes of a group.

Invariant: it is the state of the moment at which it was asked for, or nothing: a model that has been trained since has
no older one.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.domain.errors import CheckpointError
from rollgrad.domain.ports.checkpoint_store import PartInFiles

POLL_SECONDS = 0.2
"""Seconds between questions whether a copied state is written, which takes seconds to minutes."""


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

    def copied(self) -> "CopiedState":
        """Implements `PartInFiles.copied`; there is one copy at a time."""
        self._require_current()
        self._group.all("copy_state")
        return CopiedState(self._group)

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


@frozen
class CopiedState(PartInFiles):
    """The copy of a model's state in the processes of a group."""

    group: WorkerGroup

    def write_files(self, directory: Path) -> None:
        """Implements `PartInFiles.write_files`, while another thread trains the model: the processes write in the
        background, and are asked between its calls."""
        ranks = range(self.group.size)
        self.group.begin("write_copy", ranks, directory.absolute())()  # which waits for what they compute now
        until = time.monotonic() + self.group.timeout
        while not all(self.group.begin("has_written", ranks)()):
            if time.monotonic() > until:
                raise CheckpointError(
                    f"The training state of {self.group.name} was not written to {directory} within "
                    f"{self.group.timeout:g} s: raise --cluster.timeout, or choose another --ckpt.state_dir."
                )
            time.sleep(POLL_SECONDS)

    def copied(self) -> "CopiedState":
        """Implements `PartInFiles.copied`: nothing changes it."""
        return self
