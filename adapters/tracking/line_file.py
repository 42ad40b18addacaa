"""A file that lines are appended to while a run goes on, also when its disk is full for a while."""

import os
from contextlib import suppress
from pathlib import Path

import structlog

from rollgrad.adapters.checkpoints.lock import keep_locked

_log = structlog.get_logger(__name__)

MOST_WAITING = 64 * 2**20
"""Bytes of lines that wait at most for a file that cannot be written: metrics of some ten thousand steps."""


class LineFile:
    """Appends lines to `path` whole or not at all. Lines that cannot be written, because the disk is full or another
    run has taken the directory, wait in memory, up to `MOST_WAITING` bytes, and are written before the next ones. The
    first line that waits, and the first that is lost, are reported. The file is opened for each write, so that one
    which was replaced or removed meanwhile is written to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[bytes] = []
        self._lost = 0

    def append(self, *lines: str) -> None:
        """Writes lines, which have no ends yet. UTF-8 has no lone halves of surrogate pairs, which become JSON's
        escapes."""
        waited = len(self._waiting)
        self._waiting += [f"{line}\n".encode(errors="backslashreplace") for line in lines]
        try:
            self._write(b"".join(self._waiting))
        except OSError as error:
            if not waited:
                _log.warning(
                    f"{self._path.name} cannot be written: its lines wait in memory until it can be",
                    path=str(self._path),
                    reason=str(error),
                )
            self._forget()
            return
        if waited:
            _log.warning(f"{self._path.name} is written again", waited=waited, lost=self._lost)
        self._waiting, self._lost = [], 0

    def close(self) -> None:
        """Writes what waits; what cannot be written is lost, and that is said. Idempotent."""
        if not self._waiting:
            return
        self.append()
        if self._waiting:
            lost = self._lost + len(self._waiting)
            _log.warning(f"{self._path.name} lacks the last lines of the run", path=str(self._path), lost=lost)
        self._waiting, self._lost = [], 0

    def _write(self, text: bytes) -> None:
        keep_locked(self._path.parent)
        with self._path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                while text:  # a disk takes what there is room for before it says that it is full
                    text = text[file.write(text) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(file.fileno(), size)
                raise

    def _forget(self) -> None:
        """Gives up the oldest lines that wait beyond the limit."""
        size = sum(map(len, self._waiting))
        while size > MOST_WAITING:
            if not self._lost:
                _log.warning(f"too many lines wait for {self._path.name}: the oldest are lost", path=str(self._path))
            size -= len(self._waiting.pop(0))
            self._lost += 1
