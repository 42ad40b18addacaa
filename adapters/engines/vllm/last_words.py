"""The error for which vLLM's processes ended, out of what they have printed: they tell it nobody else."""

import os
import re
import stat
from pathlib import Path

from rollgrad.adapters.system.printing import STDERR

READ_BYTES = 2**20
"""Bytes at the end of a log in which the error is looked for."""
LONGEST = 500
"""Characters of an error that are told."""

_ERROR = re.compile(
    r"^\((?!MainProcess)\S+ pid=\d+\) ERROR \S+ \S+ \[[^\]]+\] (?P<error>(?:\w+\.)*\w*(?:Error|Exception)\b.*)$",
    re.MULTILINE,
)
"""The last line of a traceback that vLLM logs in a process of its own, such as
`(EngineCore pid=71) ERROR 11-29 20:10:08 [core.py:1512] RuntimeError: no memory`."""
_ELSEWHERE = re.compile(r"root cause|stack trace|EngineDeadError")


def last_words() -> str:
    """Returns half a sentence that says why vLLM's processes ended: the last error that they printed to this process's
    stderr, and the file that has it. Where stderr is a terminal or a pipe, the error is there."""
    log = _log()
    if log is None:
        return "what vLLM has printed says why"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - READ_BYTES))
        printed = file.read().decode(errors="replace")
    error = last_error(printed)
    if error is None:
        return f"vLLM printed no error, as if it was killed, perhaps because memory was full ({log})"
    return f"the last error that vLLM printed is {error!r} ({log})"


def last_error(printed: str) -> str | None:
    """Returns the last error in the log of vLLM's processes that is a cause itself; None if there is none.

    Args:
        printed: what the processes have printed.
    """
    errors = [match["error"].strip() for match in _ERROR.finditer(printed)]
    causes = [error for error in errors if not is_elsewhere(error)]
    return causes[-1][:LONGEST] if causes else None


def is_elsewhere(error: str) -> bool:
    """Returns whether an error of vLLM's only says that another of its processes has failed."""
    return _ELSEWHERE.search(error) is not None


def _log() -> Path | None:
    """Returns the file that stderr goes to, as that of Ray's processes does; None if it is no file."""
    try:
        if not stat.S_ISREG(os.fstat(STDERR).st_mode):
            return None
        log = Path(f"/proc/self/fd/{STDERR}").readlink()
    except OSError:  # this process has no stderr, or its system no such directory
        return None
    return log if log.is_file() else None
