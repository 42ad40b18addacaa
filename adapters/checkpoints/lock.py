"""A directory that one run at a time writes.

Invariant: a lock ends with the process that took it, however that ends, so none is ever left over. It is the file
system's own (flock): NFS passes it on to other machines from version 3 on, unless it is mounted with nolock or
local_lock, and a file system without locks is written after a warning. Importable without torch.
"""

import errno
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollgrad.adapters.checkpoints.files import make_writable
from rollgrad.domain.errors import CheckpointError

LOCK_FILE = ".lock"
"""It stays when the run ends: whoever removed it could remove that of another run."""

TAKEN = (errno.EAGAIN, errno.EACCES)
"""Numbers of the errors by which a file is locked already."""

_held: dict[int, Path] = {}
"""Files that this process has locked, by descriptor."""

_locking = threading.Lock()
"""Lock of threads that lock a directory again."""


@contextmanager
def locked(directory: Path, flag: str, *, file: str = LOCK_FILE) -> Iterator[None]:
    """Keeps other runs out of a directory, which is made if it is not there; `flag` is the one that names it. `file`:
    its file that is locked, in place of the one for the whole directory.

    Raises:
        CheckpointError: another run is writing there, or it cannot be written.
    """
    make_writable(directory, flag)
    try:
        descriptor = os.open(directory / file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise CheckpointError(
            f"{flag} is {str(directory)!r}, whose file {file} cannot be opened ({error.strerror}): remove it, or "
            f"choose another {flag}."
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in TAKEN:
                owner = os.read(descriptor, 200).decode(errors="replace").strip()
                raise CheckpointError(
                    f"{flag} is {str(directory)!r}, where another run is writing ({owner or 'it has just begun'}): "
                    f"wait for its end, or choose another {flag}."
                ) from error
            import structlog

            structlog.get_logger(__name__).warning(
                "no lock: make sure that no other run writes there", directory=str(directory), reason=str(error)
            )
        else:
            _tell_owner(descriptor)
        _held[descriptor] = (directory / file).absolute()
        yield
    finally:
        _held.pop(descriptor, None)
        with suppress(OSError):  # where there are no locks, there is none to give up
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def keep_locked(directory: Path) -> None:
    """Locks a directory again that was removed, and the lock with it, since this process has locked it; does nothing in
    any other.

    Raises:
        CheckpointError: another run has begun to write there meanwhile.
    """
    path = (directory / LOCK_FILE).absolute()
    descriptors = [descriptor for descriptor, held in [*_held.items()] if held == path]
    if not descriptors:  # nor in a child, where the lock of threads may be one that nobody gives back
        return
    with _locking:
        with suppress(FileNotFoundError):
            there = path.stat()
            if any(os.path.samestat(there, os.fstat(descriptor)) for descriptor in descriptors):
                return
        _lock_again(directory, path, descriptors[0])


def _lock_again(directory: Path, path: Path, descriptor: int) -> None:
    """Makes `descriptor` one of the new file `path`, which it locks."""
    directory.mkdir(parents=True, exist_ok=True)
    fresh = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in TAKEN:
            os.close(fresh)
            raise CheckpointError(
                f"{directory} was removed while the run went on, and another run writes there now: nothing more of "
                "this one is saved there, for it would overwrite what that one saves."
            ) from error
    os.dup2(fresh, descriptor, inheritable=False)  # in place of the lock of the removed file
    os.close(fresh)
    _tell_owner(descriptor)
    import structlog

    structlog.get_logger(__name__).warning(
        "the directory was removed while the run goes on: what was there is lost, and what comes is written anew",
        directory=str(directory),
    )


def _tell_owner(descriptor: int) -> None:
    with suppress(OSError):  # on a full disk, who is refused is not told by whom
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())


def _close_inherited_locks() -> None:
    """Closes the locks of the parent in a process that was forked, which may outlive it."""
    while _held:
        os.close(_held.popitem()[0])


os.register_at_fork(after_in_child=_close_inherited_locks)
