"""Tensors of any size through shared memory of a fixed size.

The memory has `BUCKETS` buckets. `fill` writes the bytes of one tensor after the other into a bucket until it is full,
and divides a tensor that does not fit: the rest is at the beginning of the next bucket. `Piece`s describe the contents
in plain values; `Assembler` copies pieces from a bucket and returns each tensor once it is complete. For example,
tensors of 10 and 12 MiB fill buckets of 16 MiB with (first, 0 to 10), (second, 0 to 6) and (second, 6 to 12). Does not
own: when a bucket may be written.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import TypedDict

import torch
from torch import Tensor

from rollgrad.domain.errors import ConfigurationError

BUCKETS = 2
"""Number of buckets: one is written while the other is read."""

BUCKET_BYTES = 16 * 2**20
"""Both buckets together take half of the 64 MiB that containers have in /dev/shm by default."""

ALIGNMENT = 64
"""Alignment of tensors in bytes: a cache line, and a multiple of every number format's size."""

DIRECTORY = "/dev/shm"


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
    """Memory that several processes map: a new file in /dev/shm, or the existing one at `path`.

    Raises:
        ConfigurationError: /dev/shm has too little room.
    """

    def __init__(self, path: str | None = None, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        if path is None:
            file, self.path = tempfile.mkstemp(prefix="rollgrad-weights-", dir=DIRECTORY)
            try:
                # Without this, writing to a full /dev/shm would kill the process.
                os.posix_fallocate(file, 0, BUCKETS * bucket_bytes)
            except OSError as error:
                os.close(file)
                self.unlink()
                raise ConfigurationError(
                    f"{DIRECTORY} has no room for {BUCKETS * bucket_bytes / 2**20:.0f} MiB, through which weights go "
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


def fill(weights: Iterator[tuple[str, Tensor]], memory: SharedMemory) -> Iterator[tuple[int, list[Piece]]]:
    """Writes `weights` bucket by bucket; yields the index and the pieces of each bucket when it is full, and of the
    last.

    The next bucket is written when the next item is requested; indices alternate.
    """
    index, used = 0, 0
    pieces: list[Piece] = []
    for name, tensor in weights:
        source = tensor.detach().contiguous().view(-1).view(torch.uint8)
        begin = 0
        while begin < source.numel():
            size = min(source.numel() - begin, memory.bucket_bytes - used)
            memory.bucket(index)[used : used + size].copy_(source[begin : begin + size])
            dtype = str(tensor.dtype).removeprefix("torch.")
            pieces.append(Piece(name=name, dtype=dtype, shape=list(tensor.shape), begin=begin, offset=used, size=size))
            begin += size
            used = -(-(used + size) // ALIGNMENT) * ALIGNMENT
            if used >= memory.bucket_bytes:
                yield index, pieces
                index, used, pieces = (index + 1) % BUCKETS, 0, []
    if pieces:
        yield index, pieces


def fill_at(weights: Iterator[tuple[str, Tensor]], path: str, bucket_bytes: int) -> Iterator[tuple[int, list[Piece]]]:
    """Runs `fill` on memory that another process made."""
    yield from fill(weights, SharedMemory(path, bucket_bytes=bucket_bytes))


class Assembler:
    """Joins the pieces of tensors, in memory of their own on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._name = ""
        self._tensor = torch.empty(0)
        self._missing = 0

    def whole(self) -> bool:
        """Returns whether no tensor is incomplete."""
        return not self._missing

    def take(self, bucket: Tensor, pieces: list[Piece]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors that these pieces complete.

        Raises:
            ValueError: a piece does not continue the incomplete tensor.
        """
        for piece in pieces:
            if not self._missing:
                self._begin(piece)
            target = self._tensor.view(-1).view(torch.uint8)
            if piece["name"] != self._name or piece["begin"] != target.numel() - self._missing:
                raise ValueError(f"A piece of {piece['name']} came where {self._missing} bytes of {self._name} lack.")
            run = bucket[piece["offset"] : piece["offset"] + piece["size"]]
            target[piece["begin"] : piece["begin"] + piece["size"]].copy_(run)
            self._missing -= piece["size"]
            if not self._missing:
                yield self._name, self._tensor

    def _begin(self, piece: Piece) -> None:
        self._name = piece["name"]
        self._tensor = torch.empty(piece["shape"], dtype=getattr(torch, piece["dtype"]), device=self._device)
        self._missing = self._tensor.nbytes
