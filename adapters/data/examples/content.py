"""Hashes of what files and folders of rows hold, by which prepared data are found again.

Does not own: the rows of JSON lines, whose hash is made where they are read (`sources`).
"""

import hashlib
import os
from pathlib import Path

from rollgrad.adapters.data.datasets.files import data_files, split_configuration
from rollgrad.domain.splits import parse_split


def local_hash(name: str, split: str) -> str | None:
    """Returns a hash of the content of files, or of all files of a folder; None for a name on the hub.

    `datasets` tells files by their paths and dates, so that a copied or a touched one would be another.
    """
    path, configuration = Path(name), None
    files = data_files(name)
    if files is not None:
        hashes = [_file_hash(file) for file in files]
        if parse_split(split).sliced:
            hashes.append(split)
        return hashes[0] if len(hashes) == 1 else hashlib.sha256(" ".join(hashes).encode()).hexdigest()
    if not path.is_dir():
        place, configuration = split_configuration(name)
        path = Path(place)
    return _folder_hash(path, f"{split} {configuration}\n") if path.is_dir() else None


def _folder_hash(folder: Path, chosen: str) -> str | None:
    """Hash of `chosen` and all files below a folder that `datasets` may read; None where a file cannot be reached."""
    content = hashlib.sha256(chosen.encode())
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        if any(Path(place, each).is_symlink() for each in folders):
            return None  # os.walk does not go there
        for file in (Path(place, each) for each in sorted(files)):
            if file.name.startswith(".") or not file.is_file():
                continue
            try:
                content.update(f"{file.relative_to(folder)} {_file_hash(file)}\n".encode(errors="replace"))
            except OSError:
                return None
    return content.hexdigest()


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
