"""Ends of this process by `os._exit` in code that is not rollgrad's: what called the process would take 0 for done.

Does not own: the end by C's `exit`, or by a signal, which nothing in the process can tell of. Imports little.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STATUS = 2
"""Exit status in the place of 0: that of an error which a sentence explains."""


@contextmanager
def telling_exits(tell: Callable[[str], object]) -> Iterator[None]:
    """Calls `tell` with a sentence before code inside the block ends this process by `os._exit`, with status 2 where
    it says 0. Processes that were forked from this one end as they will."""
    process, exits = os.getpid(), os._exit

    def told_exit(status: int) -> None:
        if os.getpid() == process:
            from rollgrad.adapters.system.blocked_loop import frames_in_loop
            from rollgrad.application.foreign import users_place

            place = users_place(frames_in_loop(sys._getframe(1)))
            try:
                tell(
                    f"os._exit{f' in {place}' if place else ''} has ended the process at once, and what was "
                    "not yet saved is lost: let the code return or raise instead."
                )
            finally:
                exits(status or STATUS)
        exits(status)

    os._exit = told_exit  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = exits
