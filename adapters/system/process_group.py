"""Processes that are started with a group of their own (`start_new_session`), and end with all that is in it."""

import contextlib
import os
import signal


def kill_group(process: int) -> None:
    """Kills the group that a process of this number began, with children that it left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
