"""The end of a run by a signal, as users' code that blocks the run sees it, and an update that may last longer than the
sender of the signal waits."""

import asyncio
import threading
from collections.abc import Coroutine
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

from rollgrad.domain.errors import RollgradError

Result = TypeVar("Result")


class Interrupted(asyncio.CancelledError):
    """Raised by a signal's handler in users' code that blocks the event loop: the run is being cancelled, of which the
    loop cannot tell its tasks before that code returns."""


class BrokenOffError(RollgradError, RuntimeError):
    """Raised by `heed_stop` in an update that is to stop, and has changed nothing."""


urgent = threading.Event()
"""Whether a signal has come by which the run is to end soon: whoever sent it may kill half a minute later."""


class Stop:
    """A request to stop, of an update in a thread of its own, and its answer.

    `asked`: whether it is to stop. `closed`: whether it has changed a model, and is finished whatever it is told.
    """

    def __init__(self) -> None:
        self.asked = False
        self.closed = False

    def begin(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """Returns a task of `work`, in which, and in whose threads, `heed_stop` is told what this one is."""
        context = copy_context()
        context.run(_stop.set, self)
        return asyncio.get_running_loop().create_task(work, context=context)


_stop: ContextVar[Stop | None] = ContextVar("stop", default=None)


def heed_stop() -> None:
    """Breaks off the update that calls it, if it is to stop; does nothing outside of one, or after `close_to_stops`.

    Raises:
        BrokenOffError: it is to stop.
    """
    stop = _stop.get()
    if stop is not None and stop.asked and not stop.closed:
        raise BrokenOffError("The run ends: the update is broken off before it has changed a model.")


def close_to_stops() -> None:
    """Says that the update which calls it has changed a model: it is finished from now on."""
    stop = _stop.get()
    if stop is not None:
        stop.closed = True
