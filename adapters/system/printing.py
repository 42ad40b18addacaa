"""Redirection of what the processes of libraries print."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STDOUT, STDERR = 1, 2
"""File descriptors, which other processes inherit."""


@contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Lets processes that are started inside the block print to this one's stderr: its stdout is for results alone."""
    if sys.stdout is not None:
        sys.stdout.flush()  # what was printed before is no library's
    try:
        own = os.dup(STDOUT)
    except OSError:  # this process has no stdout
        yield
        return
    try:
        os.dup2(STDERR, STDOUT)
        yield
    finally:
        os.dup2(own, STDOUT)
        os.close(own)
