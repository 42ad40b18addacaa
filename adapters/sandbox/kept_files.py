"""Files of a run as one value, which the program of the next run lays down again.

Both are done by the program that isolates the code, with the rights of the code and while none of it runs, so that the
files that a model leaves (links, odd modes) give it access to nothing. Every import takes time in each run. Does not
own: where the value is kept.
"""

from __future__ import annotations

import marshal
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

KEPT = b"+"
"""Begins the value in an answer of `code_child`; without it the files are too many or too large."""
KEPT_MB = 63
"""Most megabytes of files: those of a file system of 64 (`walls.DISK_MB`) then fit into the next run's."""
PLACE = 4096
"""Bytes that a file system gives out at once."""
MOST = 8192
"""Largest number of files, folders and links, for half of which a run has room (`walls.change_root`)."""


def pack(most_bytes: int) -> bytes | None:
    """Returns the files below the working directory, with their modes and times, its folders and its links; None if
    they are more than `MOST`, take more than `most_bytes`, or lie too deep. Sockets, pipes and devices are left out."""
    try:
        return _packed(most_bytes)
    except OSError:  # a path is too long for the kernel
        return None


def unpack(packed: bytes) -> None:
    """Lays the files of `pack` down in the working directory, which is empty."""
    entries = marshal.loads(packed) if packed else []
    folders = [(path, mode) for path, mode, _, content in entries if content is None]
    for path, _ in folders:  # a folder comes before what is in it
        os.mkdir(path, 0o700)
    for path, mode, changed, content in entries:
        if isinstance(content, bytes):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(file, "wb", buffering=0) as writing:
                rest = memoryview(content)
                while rest:
                    rest = rest[writing.write(rest) :]
                os.fchmod(file, mode)
            os.utime(path, ns=(changed, changed))
        elif content is not None:
            os.symlink(content, path)
    for path, mode in reversed(folders):
        os.chmod(path, mode)


def _packed(most_bytes: int) -> bytes | None:
    entries: list[tuple[str, int, int, bytes | str | None]] = []
    size = 0
    for path, status in _below("."):
        content: bytes | str | None = None  # a folder has none
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(status.st_mode):
            size += -(-status.st_size // PLACE) * PLACE  # a sparse file would be written out
            if size > most_bytes:
                return None
            content = _read(path)
        elif not stat.S_ISDIR(status.st_mode):
            continue
        entries.append((path, status.st_mode & 0o777, status.st_mtime_ns, content))
        if len(entries) > MOST:
            return None
    return marshal.dumps(entries) if entries else b""


def _below(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yields what is below a folder, each folder before what is in it; it follows no links."""
    folders = [folder]
    while folders:  # a model may nest more folders than functions can be
        folder = folders.pop()
        with os.scandir(folder) as found:
            paths = sorted(entry.path for entry in found)
        for path in paths:
            status = os.lstat(path)
            yield path, status
            if stat.S_ISDIR(status.st_mode):
                os.chmod(path, 0o700)  # the code may have closed it to itself
                folders.append(path)


def _read(path: str) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY)
    except PermissionError:  # the code may have closed it to itself
        os.chmod(path, 0o600)
        file = os.open(path, os.O_RDONLY)
    with open(file, "rb", buffering=0) as reading:
        return reading.readall()
