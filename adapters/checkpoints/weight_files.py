"""Whether the files of a model's weights are whole, told by their sizes alone, and the shapes of what is in them;
importable without torch.

Does not own: what is in them (`adapters/models/torch/loading`).
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

LENGTH_BYTES = 8
"""Bytes of a safetensors file that say how long its header is."""

INDEX, METADATA = "model.safetensors.index.json", "__metadata__"
"""File that says which weights are in which of several files, and what a header holds besides tensors."""

POINTER = b"version https://git-lfs"
"""Beginning of the text that Git keeps in a file's place until Git LFS brings the file."""


def weights_problem(directory: Path) -> str | None:
    """Returns what is wrong with the safetensors files of a model, as the end of a sentence with its remedy; None where
    they are whole, and of models in other formats."""
    try:
        files = _files(directory)
    except ValueError:
        return f"whose {INDEX} is broken: copy it anew"
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        return f"which lacks {_some(missing)} of the {len(files)} files that {INDEX} names: copy them there"
    return next((problem for file in files if (problem := _file_problem(file))), None)


def has_weights(directory: Path) -> bool:
    """Returns whether a directory has files of weights of a kind that transformers loads."""
    return any(path.suffix in (".safetensors", ".bin") for path in directory.iterdir())


def tensor_shapes(directory: Path) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of a model's weights by their names, as the headers of its safetensors files give them; none
    of a model in another format, or where `weights_problem` finds one."""
    if not directory.is_dir() or weights_problem(directory) is not None:
        return {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(directory):
        with file.open("rb") as opened:
            tensors = json.loads(opened.read(_header_bytes(opened)))
        shapes |= {name: tuple(value["shape"]) for name, value in tensors.items() if name != METADATA}
    return shapes


def _files(directory: Path) -> list[Path]:
    """Returns the safetensors files that transformers would read; none of a model in another format.

    Raises:
        ValueError: the index of several is broken.
    """
    whole, index = directory / "model.safetensors", directory / INDEX
    if whole.is_file():  # which transformers then reads, whatever the index says
        return [whole]
    if not index.is_file():
        return []
    try:
        names: Any = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [directory / name for name in sorted(names)]
    except (OSError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _file_problem(file: Path) -> str | None:
    """Returns what is wrong with a safetensors file, whose header says where the numbers of each tensor lie."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        if opened.read(len(POINTER)) == POINTER:
            return f"whose {file.name} is a pointer of Git LFS in place of the weights: run git lfs pull there"
        length = _header_bytes(opened) if size >= LENGTH_BYTES else size
        if LENGTH_BYTES + length > size:
            return _cut(file)
        header = opened.read(length)
    try:
        tensors = [value for name, value in json.loads(header).items() if name != METADATA]
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"whose {file.name} is no safetensors file: copy it anew"
    return _cut(file) if LENGTH_BYTES + length + end > size else None


def _header_bytes(opened: BinaryIO) -> int:
    """Returns the length of a safetensors file's header, and moves to its beginning."""
    opened.seek(0)
    length: int = struct.unpack("<Q", opened.read(LENGTH_BYTES))[0]
    return length


def _cut(file: Path) -> str:
    return f"whose {file.name} is cut off, as by a copy that was not finished: copy it anew"
