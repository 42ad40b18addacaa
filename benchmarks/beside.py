"""Packages beside the environment, because they pin other versions than it has."""

import sys
from pathlib import Path


def beside(name: str) -> Path:
    """Returns the folder with the packages of `tests/NAME.txt`.

    Raises:
        FileNotFoundError: it is not there.
    """
    folder = Path(sys.prefix) / name
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not there: run scripts/setup.sh test, which installs tests/{name}.txt.")
    return folder
