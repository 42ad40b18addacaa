"""Whether the files of a model's weights are whole, told by their sizes alone; importable without torch.

Does not own: what is in them (`adapters/models/torch/loading`).
"""

import json
import struct
from pathlib import Path

LENGTH_BYTES = 8
"""Bytes of a safetensors file that say how long its header is."""

POINTER = b"version https://git-lfs"
"""Beginning of the text that Git keeps in a file's place until Git LFS brings the file."""


def weights_problem(directory: Path) -> str | None:
    """Returns what is wrong with the safetensors files of a model, as the end of a sentence with its remedy; None where
    they are whole, and of models in other formats."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():  # which transformers then reads, whatever the index says
        return _file_problem(whole)
    if not index.is_file():
        return None
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return f"whose {index.name} is broken: copy it anew"
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        return f"which lacks {_some(missing)} of the {len(names)} files that {index.name} names: copy them there"
    return next((problem for name in names if (problem := _file_problem(directory / name))), None)


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _file_problem(file: Path) -> str | None:
    """Returns what is wrong with a safetensors file, whose header says where the numbers of each tensor lie."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(len(POINTER))
        if first == POINTER:
            return f"whose {file.name} is a pointer of Git LFS in place of the weights: run git lfs pull there"
        length = struct.unpack("<Q", first[:LENGTH_BYTES])[0] if len(first) >= LENGTH_BYTES else size
        if LENGTH_BYTES + length > size:
            return _cut(file)
        opened.seek(LENGTH_BYTES)
        header = opened.read(length)
    try:
        tensors = [value for name, value in json.loads(header).items() if name != "__metadata__"]
        end = max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"whose {file.name} is no safetensors file: copy it anew"
    return _cut(file) if LENGTH_BYTES + length + end > size else None


def _cut(file: Path) -> str:
    return f"whose {file.name} is cut off, as by a copy that was not finished: copy it anew"
