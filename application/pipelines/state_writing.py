"""Writing of training states, while the run waits or in the background.

Invariants: at most one state is being written; the run learns what became of it before it asks for the next one, and
before it ends. Does not own: when states are saved (`run.py`), nor that the newest whole one stays until the next is
there (`CheckpointStore`).
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import structlog
from attrs import evolve

from rollgrad.domain.errors import CheckpointError
from rollgrad.domain.ports.checkpoint_store import CheckpointStore, PartInFiles, TrainingState

log = structlog.get_logger(__name__)


class StateWriter:
    """Writes training states to `checkpoints`. A state that cannot be written is an error if they are `required`, else
    a warning. `written` is the step of the newest that was."""

    def __init__(self, checkpoints: CheckpointStore, *, required: bool) -> None:
        self._checkpoints = checkpoints
        self._required = required
        self._writing: tuple[int, Future[Any]] | None = None
        self.written: int | None = None

    def save(self, state: TrainingState) -> None:
        """Writes a state, and returns when it is written.

        Raises:
            CheckpointError: it, or the one before, is required and cannot be written.
        """
        self.finish()
        self._told(state.step, lambda: self._checkpoints.save_training(state))

    def begin(self, state: TrainingState) -> None:
        """Begins to write a state, whose tensors nothing else changes, while training goes on.

        Raises:
            CheckpointError: the one before is required and could not be written.
        """
        self.finish()
        copied = evolve(state, state=_copied(state.state), description=_copied(state.description))
        thread = ThreadPoolExecutor(1, thread_name_prefix="training-state")
        self._writing = state.step, thread.submit(self._checkpoints.save_training, copied)
        thread.shutdown(wait=False)  # the thread ends with its work; the process waits for it at its end

    def look(self) -> None:
        """Tells what became of the state that was being written, if it no longer is.

        Raises:
            CheckpointError: it is required and could not be written.
        """
        if self._writing is not None and self._writing[1].done():
            self.finish()

    def finish(self) -> None:
        """Waits for the state that is being written, if there is one.

        Raises:
            CheckpointError: it is required and could not be written.
        """
        if self._writing is not None:
            (step, writing), self._writing = self._writing, None
            self._told(step, writing.result)

    def tell_lost(self, *, done: int, began: int, saved: bool) -> None:
        """Tells from which state a run that ends by an error after `done` steps continues, and how many of these are
        lost. `began`: the step from which it continued, 0 of one that did not; `saved`: whether its last model is."""
        lost = done - (newest := self.written or began)  # 0: there is none
        less = {"lose_fewer_by": "a lower --ckpt.state_minutes, or --ckpt.state_steps"} if lost else {}
        if newest:
            says = "--ckpt.resume continues the run from its newest training state"
            log.warning(says, step=newest, lost_steps=lost, **less)
        elif lost and not saved:
            log.warning("there is no training state from which the run could continue", lost_steps=lost, **less)

    def _told(self, step: int, write: Callable[[], Any]) -> None:
        try:
            write()
            self.written = step
        except CheckpointError as error:
            if self._required:
                raise
            log.warning("no training state was saved", step=step, reason=str(error))


def _copied(value: Any) -> Any:
    """Returns a part of a state with containers of its own, and with what other processes hold as it is now."""
    if isinstance(value, PartInFiles):
        return value.copied()
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value
