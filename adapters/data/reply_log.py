"""Files of replies that are written: appended row by row, and continued after whatever ended the process.

Invariants: every line but the last is whole, and an incomplete last one is removed. A file is continued only by a call
with the settings that began it: its description lies beside it, in a file of the same name with `.json` at the end. One
process at a time writes it.
"""

import errno
import json
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import structlog

from rollgrad.adapters.checkpoints.files import flush, replace_file, replace_lines
from rollgrad.adapters.checkpoints.lock import locked
from rollgrad.adapters.data.replies import Key, Row, has_failed, key_of, line_of, parsed, shown
from rollgrad.adapters.system.unwritable import remedy
from rollgrad.domain.errors import CheckpointError, DataError

log = structlog.get_logger(__name__)

CHUNK_ROWS = 256
CHUNK_SECONDS = 1.0
"""Rows and seconds after which a chunk is on the disk: one of them at most is sampled again after a kill."""
PIECE = 2**20
"""Bytes written at once, which every system takes whole while there is room."""


def description_path(path: Path) -> Path:
    """Returns the file with the description of a file of rows."""
    return path.with_name(f"{path.name}.json")


def read_description(path: Path) -> dict[str, Any] | None:
    """Returns the description of a file of rows; None where there is none.

    Raises:
        DataError: it cannot be read.
    """
    beside = description_path(path)
    try:
        description = json.loads(beside.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{beside} cannot be read ({error}): remove it together with {path.name}.") from error
    if not isinstance(description, dict):
        raise DataError(f"{beside} holds no description: remove it together with {path.name}.")
    return description


class RowLog:
    """A file of rows that is written; `done` has the keys of its rows, `failed` the number of those that failed."""

    def __init__(self, path: Path, done: set[Key], failed: int = 0) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size
        self._pending: list[bytes] = []
        self._written_at = time.monotonic()
        self.done = done
        self.failed = failed

    def add(self, row: Row) -> None:
        """Appends a row, which is on the disk soon.

        Raises:
            CheckpointError: it, or one before it, cannot be written.
        """
        self._pending.append(line_of(row))
        self.done.add((row["row"], row["sample"]))
        self.failed += has_failed(row)
        if len(self._pending) >= CHUNK_ROWS or time.monotonic() - self._written_at >= CHUNK_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Waits until all rows are on the disk.

        Raises:
            CheckpointError: they cannot be written.
        """
        text = b"".join(self._pending)
        self._pending.clear()
        try:
            for start in range(0, len(text), PIECE):
                piece = text[start : start + PIECE]
                if self._file.write(piece) != len(piece):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            flush(self._file)
        except OSError as error:
            with suppress(OSError):  # the next start removes an incomplete line, too
                self._file.truncate(self._size)
            raise CheckpointError(
                f"{self._path} cannot be written ({error.strerror or error}): {remedy(error)}, and start again."
            ) from error
        self._size += len(text)
        self._written_at = time.monotonic()

    def close(self) -> None:
        """Writes what is left, and closes the file."""
        try:
            self.flush()
        finally:
            self._file.close()


@contextmanager
def row_log(
    path: Path,
    description: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    retry_failed: bool = False,
    mendable: Collection[str] = (),
) -> Iterator[RowLog]:
    """Opens a file of rows for more of them.

    Args:
        path: the file.
        description: what the rows depend on.
        defaults: values of settings that a description may lack, because it was written before they existed.
        retry_failed: remove the rows that failed, and go on where the description differs in what is `mendable`: the
            other rows are kept as they are.
        mendable: parts of the description that may be what made rows fail.

    Raises:
        CheckpointError: the file holds rows of another description, or none of ours; another process writes it; or it
            cannot be written.
        DataError: one of its lines is broken.
    """
    with continued(path, description, defaults=defaults, retry_failed=retry_failed, mendable=mendable):
        with writing(path):
            done, failed = _repaired(path, retry_failed=retry_failed) if path.exists() else (set[Key](), 0)
            rows = RowLog(path, done, failed)
        try:
            yield rows
        finally:
            rows.close()


@contextmanager
def continued(
    path: Path,
    description: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    retry_failed: bool = False,
    mendable: Collection[str] = (),
) -> Iterator[None]:
    """Keeps other processes out of a file of rows, and describes it; arguments and errors are those of `row_log`."""
    if path.is_dir():
        raise CheckpointError(f"--output is {str(path)!r}, a directory: name a file in it.")
    if path.exists() and not path.is_file():  # a device, which would take all and keep nothing
        raise CheckpointError(f"--output is {str(path)!r}, which is no file: name one that may be written.")
    with locked(path.parent, "--output", file=f".{path.name}.lock"):
        with writing(path):
            if has_rows(path):
                _check_same(path, description, defaults, retry_failed=retry_failed, mendable=mendable)
            replace_file(description_path(path), (json.dumps(description, indent=2) + "\n").encode())
        yield


def has_rows(path: Path) -> bool:
    """Returns whether a file of rows is there, and not empty, as a start that failed leaves it."""
    return path.exists() and path.stat().st_size > 0


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns errors of the file system into errors that name the file.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        yield
    except CheckpointError:  # an OSError too
        raise
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written ({error.strerror or error}): choose another --output."
        ) from error


def _check_same(
    path: Path,
    description: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    retry_failed: bool,
    mendable: Collection[str],
) -> None:
    begun = read_description(path)
    if begun is None:
        raise CheckpointError(
            f"{path} is there already, and {description_path(path).name} beside it, which would say what wrote it, is "
            "not: choose another --output."
        )
    known = json.loads(json.dumps(defaults))
    begun, now = {**known, **begun}, {**known, **json.loads(json.dumps(description))}
    differ = [name for name in now if begun.get(name) != now[name]]
    differ += [name for name in begun if name not in now]
    if not differ:
        return
    values = ", ".join(f"{name} ({shown(begun.get(name))}, now {shown(now.get(name))})" for name in differ)
    if not set(differ) <= set(mendable):
        raise CheckpointError(
            f"{path} holds rows of other settings, which differ in {values}: set them back to continue it, remove it, "
            "or choose another --output."
        )
    if not retry_failed:
        raise CheckpointError(
            f"{path} holds rows of other settings, which differ in {values}: to keep its rows, and make those that "
            f"failed or are missing by the new one, add --retry_failed; to make all anew, choose another --output."
        )
    log.warning("rows that are there are kept, though they depend on what has changed", file=str(path), changed=differ)


def _repaired(path: Path, *, retry_failed: bool) -> tuple[set[Key], int]:
    """Removes an incomplete last line, and with `retry_failed` the rows that failed; returns the keys of all others,
    and how many of those failed."""
    done: set[Key] = set()
    failed: set[Key] = set()
    whole = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                log.warning("an incomplete last line is removed: its reply is made again", file=str(path), line=number)
                break
            where = f"Line {number} of {path}"
            row = parsed(line, where)
            done.add(key := key_of(row, where))
            if has_failed(row):
                failed.add(key)
            whole += len(line)
    os.truncate(path, whole)
    if not (retry_failed and failed):
        return done, len(failed)
    _remove_failed(path)
    return done - failed, 0


def _remove_failed(path: Path) -> None:
    """Removes the rows that failed; a process that is killed meanwhile leaves the file as it was."""
    with path.open("rb") as file:
        replace_lines(path, (line for line in file if not has_failed(json.loads(line))))
