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


def error_number(error: BaseException) -> int | None:
    """Returns the number, among those of `REMEDIES`, of the system's error that an error is or tells: safetensors and
    other processes tell it as text alone.

    >>> error_number(RuntimeError("I/O error: Read-only file system (os error 30)")) == errno.EROFS
    True
    >>> error_number(OSError("it broke"))
    """
    number, text = getattr(error, "errno", None), str(error)
    return next((code for code in REMEDIES if code == number or os.strerror(code) in text), None)


def remedy(error: BaseException) -> str:
    """Returns what to do so that a file can be written, as words that may be followed by a comma.

    >>> remedy(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    'make room there'
    >>> remedy(OSError("it broke"))
    'make room there and let it be written'
    """
    number = error_number(error)
    return "make room there and let it be written" if number is None else REMEDIES[number]
