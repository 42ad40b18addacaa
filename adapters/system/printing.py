"""Redirection of what the processes of libraries print."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STDOUT, STDERR = 1, 2
"""File descriptors, which other processes inherit."""

_kept: set[int] = set()
"""Descriptors of this process's own stdout, while its number 1 is stderr."""


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Lets processes that are started inside the block print to this one's stderr: its stdout is for results alone, and
    who reads it need not wait for the end of those that outlive this one."""
    if sys.stdout is not None:
        sys.stdout.flush()  # what was printed before is no library's
    try:
        own = os.dup(STDOUT)
    except OSError:  # this process has no stdout
        yield
        return
    _kept.add(own)
    try:
        os.dup2(STDERR, STDOUT)
        yield
    finally:
        if own in _kept:  # else this is a fork of the process that came here
            _kept.remove(own)
            os.dup2(own, STDOUT)
            os.close(own)


def _close_kept() -> None:
    """Closes the stdout of the parent in a process that was forked, which may outlive it."""
    while _kept:
        os.close(_kept.pop())


os.register_at_fork(after_in_child=_close_kept)
