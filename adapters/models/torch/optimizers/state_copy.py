"""A copy of a trained model's state, written while the model is trained.

Does not own: what the state is (`trained_module.py`).
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from rollgrad.adapters.models.torch.optimizers.trained_module import TrainedModule


class CopiesState:
    """Part of a model with a trained module that copies its state, or this process's part of it, and writes the
    copy."""

    _trained: TrainedModule
    _write_copy: Callable[[Path], None] | None = None
    _writing: Future[None] | None = None

    def copy_state(self) -> None:
        """Copies the state to the CPU's memory, in place of an earlier copy."""
        if self._writing is not None:
            wait([self._writing])  # for one that was given up: there is memory for one copy
        self._write_copy = self._writing = None
        self._write_copy = self._trained.state_copy()

    def write_copy(self, directory: Path) -> None:
        """Begins to write the copy to files in `directory`, after which it is gone."""
        if self._write_copy is None:
            raise RuntimeError("no state was copied")
        thread = ThreadPoolExecutor(1, thread_name_prefix="training-state")
        self._writing = thread.submit(self._write_copy, directory)
        self._write_copy = None
        thread.shutdown(wait=False)  # it ends with its work

    def has_written(self) -> bool:
        """Returns whether the copy is written.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self._writing is None or not self._writing.done():
            return False
        self._writing.result()
        return True
