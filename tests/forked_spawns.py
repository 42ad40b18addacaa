"""Processes that `multiprocessing` would spawn, as forks of one that has made their imports, which take longer than the
work of most. They get the environment of who starts them, as spawned ones do, and none of its files but those that they
are passed.

The fork server of `multiprocessing` makes them. It is itself a fork: of a program of a `ScriptHost`, before that has
begun, or of the host for a process that none has forked.
"""

import itertools
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import context, forkserver, resource_tracker, util
from multiprocessing.util import spawnv_passfds
from typing import Any

Start = Callable[[str, Sequence[str], Sequence[int]], int]
"""As `multiprocessing.util.spawnv_passfds`: runs Python's words with files passed; returns the id of the process."""


class ForkedProcess(context.ForkServerProcess):
    """A process in the place of a spawned one."""

    _start_method = "spawn"

    def __reduce__(self) -> Any:
        return _in_environment, (dict(os.environ),), self.__dict__


class ForkedContext(context.ForkServerContext):
    """Makes such processes."""

    Process = ForkedProcess  # type: ignore[assignment]


def _in_environment(environment: dict[str, str]) -> ForkedProcess:
    """Runs in the fork before anything else of the process is unpickled."""
    os.environ.clear()
    os.environ.update(environment)
    fork_spawned()
    return ForkedProcess.__new__(ForkedProcess)


def fork_spawned(start: Start | None = None) -> None:
    """Makes what this process spawns from now on forks: of the server that `start` starts, else of this process as it
    is now, which must not have begun threads."""
    if start is not None:
        resource_tracker.ensure_running()
    server = forkserver._forkserver
    server._lock, server._forkserver_pid = threading.Lock(), None  # those of the process which forked this one
    forkserver.set_forkserver_preload([])
    util.spawnv_passfds = start or _forked
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = spawnv_passfds
    context._concrete_contexts["spawn"] = ForkedContext()  # type: ignore[attr-defined]


def _forked(path: str, words: Sequence[str], files: Sequence[int]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        kept = sorted({0, 1, 2, *files})
        for file, following in itertools.pairwise([*kept, os.sysconf("SC_OPEN_MAX")]):
            if file + 1 < following:  # of nothing, `closerange` closes all
                os.closerange(file + 1, following)
        exec(words[-1], {})
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


@contextmanager
def forked_by(python: Sequence[str]) -> Iterator[None]:
    """Makes what this process spawns in the block forks of a program that `python`, words for `subprocess`, runs;
    afterwards it spawns as before, be it in such a block."""

    def start(path: str, words: Sequence[str], files: Sequence[int]) -> int:
        os.environ["SCRIPT_FILES"] = " ".join(map(str, files))
        try:
            return spawnv_passfds(os.fsencode(python[0]), [*python, *words[-2:]], files)
        finally:
            del os.environ["SCRIPT_FILES"]

    before = context._concrete_contexts["spawn"]  # type: ignore[attr-defined]
    server = dict(vars(forkserver._forkserver))
    fork_spawned(start)
    try:
        yield
    finally:
        context._concrete_contexts["spawn"] = before  # type: ignore[attr-defined]
        alive = forkserver._forkserver._forkserver_alive_fd  # the block's server, which ends with this file
        vars(forkserver._forkserver).update(server)
        os.close(alive)
