"""The state of a trained module in safetensors files, a file from each process that has a part of it.

A tensor's name is `masters/PARAMETER`, `averages/PARAMETER` or `moments/PARAMETER/KEY`; the metadata have the other
numbers of the state and, by parameter, the place of the file's rows among those of the whole. Whoever reads them takes
the rows it wants, whatever processes wrote them. Nothing is unpickled.
Does not own: which files are whole (`adapters/checkpoints/states.py`).
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from rollgrad.adapters.system.permissions import share_weights
from rollgrad.adapters.system.unwritable import remedy
from rollgrad.domain.errors import CheckpointError
from rollgrad.domain.ports.checkpoint_store import STORED_IN

SECTIONS = ("masters", "averages", "moments")

FILE_BYTES = 4 * 10**9
"""Bytes of the tensors that are in memory at a time when one process writes a state that others have parts of."""


@frozen(eq=False)
class StoredTensor:
    """A tensor in files: `parts` are the open file, the tensor's name there and the first of its rows, in order."""

    parts: list[tuple[Any, str, int]] = field(factory=list)

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        shapes = [file.get_slice(name).get_shape() for file, name, _ in self.parts]
        return torch.Size([sum(shape[0] for shape in shapes), *shapes[0][1:]] if shapes[0] else [])

    def numel(self) -> int:
        """Returns the number of its elements."""
        return math.prod(self.shape)

    def rows(self, first: int, last: int) -> Tensor:
        """Returns the rows from `first` until `last`, which are read now."""
        found: list[Tensor] = []
        for file, name, start in self.parts:
            part = file.get_slice(name)
            begin, end = max(first - start, 0), min(last - start, part.get_shape()[0])
            if begin < end or not found:
                found.append(part[begin : max(begin, end)])
        return torch.cat(found)

    def whole(self) -> Tensor:
        """Reads and returns the whole state."""
        if len(self.parts) == 1:
            [(file, name, _)] = self.parts
            tensor: Tensor = file.get_tensor(name)
            return tensor
        return self.rows(0, self.shape[0])


def whole_tensor(value: Tensor | StoredTensor) -> Tensor:
    """Returns a tensor of a state, read if it is stored."""
    return value.whole() if isinstance(value, StoredTensor) else value


def write_state(state: Mapping[str, Any], file: Path, rows: Mapping[str, tuple[int, int]] | None = None) -> None:
    """Writes a `TrainedModule.state_dict`, or a process's rows of it, to a file.

    Args:
        state: its tensors may be on any device.
        file: path in a directory that exists.
        rows: for each parameter that is not whole, the index of the first row in `state`, and the number of all rows.

    Raises:
        CheckpointError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous().cpu() for name, tensor in _named(state) if tensor.ndim == 0 or len(tensor)}
    numbers = {key: value for key, value in state.items() if key not in SECTIONS}
    try:
        if not file.parent.is_dir():
            raise OSError("it is not on a file system that all machines share")
        save_file(tensors, file, metadata={"state": json.dumps(numbers), "rows": json.dumps(rows or {})})
        share_weights(file.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The training state cannot be written to {file.parent} ({error}): {remedy(error)}, "
            "choose another --ckpt.state_dir, or save none (--ckpt.state_minutes None)."
        ) from error


def write_parts(numbers: Mapping[str, Any], parts: Iterable[Mapping[str, Any]], directory: Path) -> None:
    """Writes a state in several files, of which one at a time is in memory.

    Args:
        numbers: what the state has beside tensors.
        parts: sections of the state with some of its parameters, which are all gone through, whatever fails.
        directory: an existing directory.

    Raises:
        CheckpointError: it cannot be written.
    """
    failure: CheckpointError | None = None
    for number, part in enumerate(_joined(parts)):
        if failure is None:
            try:
                write_state({"moments": {}, **numbers, **part}, directory / f"{number:05}.safetensors")
            except CheckpointError as error:
                failure = error
    if failure is not None:
        raise failure


def _joined(parts: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yields parts of a state together that one file has."""
    joined: dict[str, dict[str, Any]] = {}
    filled = 0
    for part in parts:
        size = sum(tensor.nbytes for _, tensor in _named({"moments": {}, **part}))
        if joined and filled + size > FILE_BYTES:
            yield joined
            joined, filled = {}, 0
        for section, tensors in part.items():
            joined.setdefault(section, {}).update(tensors)
        filled += size
    if joined:
        yield joined


def opened(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a state whose tensors are read when they are asked for, if it is in files; any other as it is.

    Raises:
        CheckpointError: the files do not make up a state.
    """
    if STORED_IN not in state:
        return state
    from safetensors import SafetensorError, safe_open

    directory = Path(state[STORED_IN])
    result: dict[str, Any] = {"masters": {}, "moments": {}}
    tensors: dict[str, StoredTensor] = {}
    expected: dict[str, int] = {}
    try:
        for path in sorted(directory.iterdir()):
            file: Any = safe_open(path, framework="pt")
            metadata = file.metadata()
            rows = json.loads(metadata["rows"])
            result |= json.loads(metadata["state"])
            for name in file.keys():  # noqa: SIM118 (no mapping)
                own = file.get_slice(name).get_shape()
                first, count = rows.get(_parameter(name), (0, own[0])) if own else (0, 1)
                tensors.setdefault(name, StoredTensor()).parts.append((file, name, first))
                expected[name] = count
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"The training state in {directory} cannot be read ({type(error).__name__}: {error}): bring back a copy of "
            "it, on a file system that all machines share."
        ) from error
    for name, tensor in tensors.items():
        tensor.parts.sort(key=lambda part: part[2])
        count = tensor.shape[0] if tensor.shape else len(tensor.parts)
        if count != expected[name]:
            raise CheckpointError(
                f"The training state in {directory} has {count} of {expected[name]} rows of {name}: bring back the "
                "files of all processes."
            )
        _place(result, name, tensor)
    return result


def _named(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for section in ("masters", "averages"):
        for parameter, tensor in state.get(section, {}).items():
            yield f"{section}/{parameter}", tensor
    for parameter, moments in state["moments"].items():
        for key, tensor in moments.items():
            yield f"moments/{parameter}/{key}", tensor


def _place(state: dict[str, Any], name: str, tensor: StoredTensor) -> None:
    """Puts a tensor into a state, the inverse of `_named`."""
    section, _, rest = name.partition("/")
    if section == "moments":
        parameter, _, key = rest.rpartition("/")
        state["moments"].setdefault(parameter, {})[key] = tensor
    else:
        state.setdefault(section, {})[rest] = tensor


def _parameter(name: str) -> str:
    """Returns the parameter that a tensor belongs to."""
    section, _, rest = name.partition("/")
    return rest.rpartition("/")[0] if section == "moments" else rest
