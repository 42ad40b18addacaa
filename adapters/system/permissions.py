"""Permissions of files whose writer gives them to their owner alone."""

from contextlib import suppress
from pathlib import Path

READ_AND_WRITE = 0o666
"""Permissions of a file that nobody executes."""


def share_weights(directory: Path) -> None:
    """Allows who may enter a directory to read the safetensors in it.

    safetensors 0.8 allows it to the owner alone, whatever the umask says, so that a server of another user finds a
    model without weights (https://github.com/safetensors/safetensors/issues/782).
    """
    mode = directory.stat().st_mode & READ_AND_WRITE  # the umask has shaped it, which cannot be read but by setting it
    for file in directory.glob("*.safetensors"):
        with suppress(OSError):  # some mounted stores know no permissions
            file.chmod(mode)
