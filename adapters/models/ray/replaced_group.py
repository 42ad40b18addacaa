"""Processes of a model that is not trained, all of which are replaced when one is lost.

Such a model computes the same after a new start, so that a call that was under way is made again and nothing is lost.
Invariant: every call ends with its results, with an error of the model's own, or, once replacements are used up, with
the error that names the process.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import structlog

from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.domain.control.engine_health import FleetBounds
from rollgrad.domain.errors import START_AGAIN, LostProcessError

log = structlog.get_logger(__name__)

Answer = TypeVar("Answer")


class ReplacedGroup:
    """A group of processes whose model is never updated, with the calls of `WorkerGroup` that such a model needs.

    Args:
        start: starts the processes, and makes the model in them; is called again for each replacement.
        bounds: `max_restarts` replacements at most without having lived for `healed_after` seconds in between.
    """

    def __init__(self, start: Callable[[], WorkerGroup], *, bounds: FleetBounds | None = None) -> None:
        self._start = start
        self._bounds = bounds or FleetBounds()
        self._replacing = threading.Lock()
        self._spent = 0
        """Replacements that count."""
        self._closed = False
        self._group = start()
        self._started = time.monotonic()

    @property
    def name(self) -> str:
        """Name of the role."""
        return self._group.name

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._group.size

    def each(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a method of the model as `WorkerGroup.each` does."""
        return self._until_answered(lambda group: group.each(method, arguments))

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of the model as `WorkerGroup.all` does."""
        return self._until_answered(lambda group: group.all(method, *arguments))

    def some(self, method: str, ranks: Sequence[int], *arguments: Any) -> list[Any]:
        """Calls a method in the processes `ranks`, and returns their results; calls of other threads go on beside."""
        return self._until_answered(lambda group: group.begin(method, ranks, *arguments)())

    def put(self, argument: Any) -> Any:
        """Runs `WorkerGroup.put`."""
        return self._group.put(argument)

    def begin_profile(self) -> None:
        """Runs `WorkerGroup.begin_profile`."""
        self._group.begin_profile()

    def end_profile(self) -> dict[str, bytes]:
        """Runs `WorkerGroup.end_profile`."""
        return self._group.end_profile()

    def close(self) -> None:
        """Ends the processes; may be called again."""
        self._closed = True
        self._group.close()

    def _until_answered(self, call: Callable[[WorkerGroup], Answer]) -> Answer:
        while True:
            group = self._group
            try:
                return call(group)
            except LostProcessError as error:
                self._replace(group, error)

    def _replace(self, lost: WorkerGroup, error: LostProcessError) -> None:
        """Starts new processes in place of `lost`, unless another thread has; raises `error` if none may be."""
        with self._replacing:
            if self._group is not lost:
                return
            if time.monotonic() - self._started >= self._bounds.healed_after:
                self._spent = 0
            while True:
                if self._closed or self._spent >= self._bounds.max_restarts:
                    raise error
                self._spent += 1
                reason = str(error).removesuffix(START_AGAIN)  # nobody has to
                log.warning("processes are replaced", role=lost.name, replacement=self._spent, reason=reason)
                try:
                    self._group = self._start()
                    break
                except LostProcessError as again:
                    error = again
            self._started = time.monotonic()
            if self._closed:  # meanwhile
                self._group.close()
