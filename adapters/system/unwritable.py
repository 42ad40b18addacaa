"""Remedies for a file that cannot be written, by the error of the system."""

import errno
import os

REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "your quota there is used up, so remove files of yours there, or have it raised",
    errno.EROFS: "it is mounted for reading only, as a system does where a disk fails, so have it mounted for writing",
    errno.EIO: "the disk, or the way to it, fails, of which the system's log (dmesg) tells, so have it mended",
    errno.EACCES: "let it be written",
    errno.EPERM: "let it be written",
}
"""Remedies by the number of the error, each the beginning of a sentence's last part."""


def remedy(error: BaseException) -> str:
    """Returns what to do so that a file can be written, as words that may be followed by a comma.

    safetensors and other processes tell an error of the system as text alone.

    >>> remedy(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    'make room there'
    >>> remedy(RuntimeError("I/O error: Read-only file system (os error 30)")).split(",")[0]
    'it is mounted for reading only'
    >>> remedy(OSError("it broke"))
    'make room there and let it be written'
    """
    number = getattr(error, "errno", None)
    found = [remedy for code, remedy in REMEDIES.items() if code == number or os.strerror(code) in str(error)]
    return found[0] if found else "make room there and let it be written"
