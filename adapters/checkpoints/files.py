"""Files and directories that are replaced whole, and are on the disk afterwards.

Invariant: whenever this process or this machine stops, a name stands for the older content or for the newer one, but
between the two renames of a directory, which `tidy` completes. Importable without torch.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp
from typing import IO

from rollgrad.adapters.system.unwritable import error_number
from rollgrad.domain.errors import CheckpointError

PROBE = "probe-"
"""Beginning of the names of directories by which `check_renaming` finds out, for `tidy`."""

_told = False
"""Whether this process was told of a file system that does not flush files."""

ROOM_SHARE, ROOM_BYTES = 0.01, 2**20
"""Room beside the bytes of files: what blocks, directories and a longer log of metrics take."""


def replace_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Puts a fresh directory, into which `fill` writes, in the place of `target`. After an error the older one is
    there, and what was written of the newer one is removed.

    Raises:
        Whatever `fill` raises, or OSError.
    """
    fresh, old = _temporary(target, "new"), _temporary(target, "old")
    try:
        for left_over in (fresh, old):
            shutil.rmtree(left_over, ignore_errors=True)
        fill(fresh)
        _flush(fresh)
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        _flush_directory(target.parent)
    except Exception:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(fresh, ignore_errors=True)  # on a full disk it takes the room of the next attempt
        raise
    shutil.rmtree(old, ignore_errors=True)


def remove_directory(target: Path) -> None:
    """Removes a directory as far as this process may. If it is stopped meanwhile, nothing half removed has the name:
    `tidy` removes the rest."""
    gone = _temporary(target, "new")
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(OSError):
        target.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def replace_file(target: Path, content: bytes) -> None:
    """Puts `content` in the place of the file `target`; after an error the older file is there.

    Raises:
        OSError: it cannot be written.
    """
    replace_lines(target, [content])


def replace_lines(target: Path, lines: Iterable[bytes]) -> None:
    """Puts `lines`, which may be read from `target`, in its place, like `replace_file`."""
    fresh = _temporary(target, "new")
    try:
        with fresh.open("wb") as file:
            file.writelines(lines)
            file.flush()
            flush(file)
        os.replace(fresh, target)
        _flush_directory(target.parent)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def tidy(directory: Path, names: Iterable[str]) -> None:
    """Completes what a killed process was replacing in a directory: puts an older one back whose place is empty, and
    removes what else is left. `names` are patterns of the replaced files and directories.

    Raises:
        CheckpointError: something cannot be put back.
    """
    for name in names:
        for old in directory.glob(f".{name}.old"):
            target = directory / old.name.removeprefix(".").removesuffix(".old")
            try:
                if not target.exists():
                    old.rename(target)
            except OSError as error:
                raise CheckpointError(
                    f"{target} was being replaced by a run that was killed, and cannot be put back ({error.strerror}): "
                    f"rename {old} to {target.name} by hand."
                ) from error
        for left_over in (*directory.glob(f".{name}.old"), *directory.glob(f".{name}.new")):
            if left_over.is_dir():
                shutil.rmtree(left_over, ignore_errors=True)
            else:
                left_over.unlink(missing_ok=True)


def make_writable(directory: Path, flag: str) -> None:
    """Makes a directory; `flag` is the one that names it.

    Raises:
        CheckpointError: it cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CheckpointError(
            f"{flag} is {str(directory)!r}, where nothing can be written ({error.strerror}): choose a directory you "
            "may write."
        ) from error


def check_renaming(directory: Path, flag: str) -> None:
    """Checks that directories can be renamed in a directory, as each checkpoint is: where a store of objects is mounted
    they often cannot, which would show when the first is saved. `flag` is the one that names it.

    Raises:
        CheckpointError: they cannot.
    """
    try:
        probe = Path(mkdtemp(dir=directory, prefix=f".{PROBE}", suffix=".new"))
    except OSError:  # a full disk, on which a run may go on that makes room there
        return
    try:
        with suppress(OSError):
            (probe / "file").touch()  # some rename directories without files
        probe = probe.rename(_temporary(probe, "new"))
    except OSError as error:
        raise CheckpointError(
            f"{flag} is {str(directory)!r}, where directories cannot be renamed ({error.strerror}), as each checkpoint "
            "is when it is whole: choose one on another file system, and copy the run from there when it has ended."
        ) from error
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def is_full(error: BaseException) -> bool:
    """Returns whether an error says that there is no room left on the disk, or in its user's quota."""
    return error_number(error) in (errno.ENOSPC, errno.EDQUOT)


def lack_of(size: int | None, directory: Path) -> int | None:
    """Returns how many bytes too few a directory's disk has for `size` bytes; None where that is not known: the size is
    not, or the disk seems to have room, as it does where its user has a quota."""
    if size is None:
        return None
    disk = os.statvfs(directory)
    blocks = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail  # some are kept for root
    lack = int(size * (1 + ROOM_SHARE)) + ROOM_BYTES - blocks * disk.f_frsize
    return lack if lack > 0 else None


def size_of(path: Path) -> int:
    """Returns the bytes of a file, or of all in a directory, without those that are removed meanwhile."""
    paths = [path]
    if path.is_dir():
        paths = [Path(parent, name) for parent, _, names in os.walk(path) for name in names]
    total = 0
    for found in paths:
        with suppress(FileNotFoundError):
            total += found.lstat().st_size
    return total


def flush(file: IO[bytes]) -> None:
    """Waits until a file is on the disk. Where its file system cannot say so, as some that are mounted by a program, a
    warning says once what that means: a run that lost its checkpoints for it would lose more.

    Raises:
        OSError: it cannot be written.
    """
    global _told
    if _can_flush(file.fileno()) or _told:
        return
    _told = True
    import structlog

    structlog.get_logger(__name__).warning(
        "the file system does not say when files are on the disk: what was saved last may be lost when the machine, or "
        "what the directory is mounted from, fails; not when the run is killed",
        file=file.name,
    )


def _temporary(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{suffix}")


def _flush(directory: Path) -> None:
    """Waits until all that is in a directory is on the disk."""
    for parent, _, names in os.walk(directory):
        for name in names:
            with Path(parent, name).open("rb") as file:
                flush(file)
        _flush_directory(Path(parent))


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _can_flush(descriptor)  # some file systems flush files only
    finally:
        os.close(descriptor)


def _can_flush(descriptor: int) -> bool:
    """Waits until a file or directory is on the disk; returns False where its file system has no way to wait."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
        return False
    return True
