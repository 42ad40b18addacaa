"""Tensors of any size through shared memory of a fixed size.

The memory has `BUCKETS` buckets. `fill` writes the bytes of one tensor after the other into a bucket until it is full,
and divides a tensor that does not fit: the rest is at the beginning of the next bucket. `Piece`s describe the contents
in plain values; `Assembler` copies pieces from a bucket and returns each tensor once it is complete. For example,
tensors of 10 and 12 MiB fill buckets of 16 MiB with (first, 0 to 10), (second, 0 to 6) and (second, 6 to 12). Several
processes that have parts of the tensors each write these to a part of every bucket. Does not own: when a bucket may be
written.
"""

import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import torch
from attrs import define, frozen
from torch import Tensor

from rollgrad.adapters.weights.gpu_buckets import dtype_name
from rollgrad.domain.errors import ConfigurationError

BUCKETS = 2
"""Number of buckets: one is written while the other is read."""

BUCKET_BYTES = 16 * 2**20
"""Both buckets together take half of the 64 MiB that containers have in /dev/shm by default."""

ALIGNMENT = 64
"""Alignment of tensors in bytes: a cache line, and a multiple of every number format's size."""

DIRECTORY = "/dev/shm"

PREFIX = "rollgrad-weights-"
"""Beginning of the names of files in it."""


class Piece(TypedDict):
    """A run of a tensor's bytes in a bucket."""

    name: str
    dtype: str
    shape: list[int]
    begin: int
    """First byte of the run in the tensor."""
    offset: int
    """First byte of the run in the bucket."""
    size: int
    """Length of the run in bytes."""


class SharedMemory:
    """Memory that several processes map: a new file in `directory`, or the existing one at `path`. Files whose makers
    were killed before they could remove the names are removed when a new one is made.

    Raises:
        ConfigurationError: the directory has too little room.
    """

    def __init__(
        self, path: str | None = None, *, bucket_bytes: int = BUCKET_BYTES, directory: str = DIRECTORY
    ) -> None:
        self.bucket_bytes = bucket_bytes
        if path is None:
            _remove_left(directory)
            file, self.path = _locked_file(directory)
            try:
                # Without this, writing to a full /dev/shm would kill the process.
                os.posix_fallocate(file, 0, BUCKETS * bucket_bytes)
            except OSError as error:
                os.close(file)
                self.unlink()
                raise ConfigurationError(
                    f"{directory} has no room for {BUCKETS * bucket_bytes / 2**20:.0f} MiB, through which weights go "
                    "to the engine: give it more (in a container: --shm-size=1g)."
                ) from error
        else:
            self.path = path
            file = os.open(path, os.O_RDWR)
        self._map = mmap.mmap(file, BUCKETS * bucket_bytes)
        os.close(file)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def bucket(self, index: int) -> Tensor:
        """Returns the bytes of a bucket, uint8."""
        return self._bytes[index * self.bucket_bytes : (index + 1) * self.bucket_bytes]

    def unlink(self) -> None:
        """Removes the file's name, once every process has mapped the memory. The memory is then freed with the last of
        them, however they end. Idempotent."""
        if os.path.exists(self.path):
            os.unlink(self.path)


def _locked_file(directory: str) -> tuple[int, str]:
    """Makes a file; returns its descriptor and its path. It is locked while this process has it open, or has mapped
    it."""
    while True:
        file, path = tempfile.mkstemp(prefix=PREFIX, dir=directory)
        with suppress(OSError):  # where there are no locks, nothing is removed
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file).st_nlink:
            return file, path
        os.close(file)  # another process has found it before it was locked


def _remove_left(directory: str) -> None:
    """Removes the files that no living process has locked: containers have little room there."""
    for path in Path(directory).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is locked, another user's, or gone
            file = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)


@frozen
class Run:
    """Consecutive elements of a flattened tensor of shape `shape`, from element `begin` on."""

    name: str
    shape: tuple[int, ...]
    begin: int
    elements: Tensor


def fill(weights: Iterator[tuple[str, Tensor]], memory: SharedMemory) -> Iterator[tuple[int, list[Piece]]]:
    """Writes whole tensors bucket by bucket, like `fill_runs`."""
    whole = (Run(name, tuple(tensor.shape), 0, tensor.detach().contiguous().view(-1)) for name, tensor in weights)
    yield from fill_runs(whole, memory)


def fill_runs(
    runs: Iterable[Run], memory: SharedMemory, *, writer: int = 0, writers: int = 1
) -> Iterator[tuple[int, list[Piece]]]:
    """Writes `runs` bucket by bucket; yields the index and the pieces of each bucket when it is full, and of the last.

    The next bucket is written when the next item is requested; indices alternate. Each of `writers` processes has an
    equal part of every bucket, in which it writes runs of its own.
    """
    room = memory.bucket_bytes // writers // ALIGNMENT * ALIGNMENT
    index, used = 0, 0
    pieces: list[Piece] = []
    for run in runs:
        source = run.elements.view(torch.uint8)
        dtype = dtype_name(run.elements.dtype)
        first, begin = run.begin * run.elements.element_size(), 0
        while begin < source.numel():
            size = min(source.numel() - begin, room - used)
            offset = writer * room + used
            memory.bucket(index)[offset : offset + size].copy_(source[begin : begin + size])
            pieces.append(
                Piece(name=run.name, dtype=dtype, shape=list(run.shape), begin=first + begin, offset=offset, size=size)
            )
            begin += size
            used = -(-(used + size) // ALIGNMENT) * ALIGNMENT
            if used >= room:
                yield index, pieces
                index, used, pieces = (index + 1) % BUCKETS, 0, []
    if pieces:
        yield index, pieces


def fill_at(weights: Iterator[tuple[str, Tensor]], path: str, bucket_bytes: int) -> Iterator[tuple[int, list[Piece]]]:
    """Runs `fill` on memory that another process made."""
    yield from fill(weights, SharedMemory(path, bucket_bytes=bucket_bytes))


def fill_part_at(
    runs: Iterable[Run], writer: int, writers: int, path: str, bucket_bytes: int
) -> Iterator[tuple[int, list[Piece]]]:
    """Runs `fill_runs` on memory that another process made."""
    yield from fill_runs(runs, SharedMemory(path, bucket_bytes=bucket_bytes), writer=writer, writers=writers)


@define
class _Incomplete:
    """A tensor of which `missing` bytes have not come."""

    tensor: Tensor
    missing: int


class Assembler:
    """Joins the pieces of tensors, in memory of their own on `device`. Pieces of a tensor come in any order, because
    several processes may write them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._incomplete: dict[str, _Incomplete] = {}

    def whole(self) -> bool:
        """Returns whether no tensor is incomplete."""
        return not self._incomplete

    def take(self, bucket: Tensor, pieces: list[Piece]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that these pieces complete.

        Raises:
            ValueError: a piece has bytes that its tensor has not.
        """
        for piece in pieces:
            name = piece["name"]
            if name not in self._incomplete:
                tensor = torch.empty(piece["shape"], dtype=getattr(torch, piece["dtype"]), device=self._device)
                self._incomplete[name] = _Incomplete(tensor, tensor.nbytes)
            found = self._incomplete[name]
            end = piece["begin"] + piece["size"]
            if end > found.tensor.nbytes or piece["size"] > found.missing:
                raise ValueError(f"A piece of {name} came up to byte {end}, where {found.missing} bytes of it lack.")
            target = found.tensor.view(-1).view(torch.uint8)
            target[piece["begin"] : end].copy_(bucket[piece["offset"] : piece["offset"] + piece["size"]])
            found.missing -= piece["size"]
            if not found.missing:
                yield name, self._incomplete.pop(name).tensor
