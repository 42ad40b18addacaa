import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from rollgrad.adapters.weights import shared_buckets as buckets
from rollgrad.adapters.weights.shared_buckets import (
    ALIGNMENT,
    BUCKETS,
    Assembler,
    Piece,
    Run,
    SharedMemory,
    fill,
    fill_part_at,
)
from rollgrad.domain.errors import ConfigurationError

CPU = torch.device("cpu")


def tensors() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ("embedding", torch.randn(40, 33, generator=generator)),
        ("scalar", torch.tensor(3.0)),
        ("empty", torch.empty(0, 4)),
        ("half", torch.randn(7, 5, generator=generator).to(torch.bfloat16)),
        ("transposed", torch.randn(9, 11, generator=generator).T),
        ("integers", torch.arange(100)),
    ]


@pytest.mark.parametrize("bucket_bytes", [ALIGNMENT, 1024, 2**20])
def test_tensors_arrive_as_they_were_whatever_the_bucket_holds(bucket_bytes: int) -> None:
    memory = SharedMemory(bucket_bytes=bucket_bytes)
    other_end = SharedMemory(memory.path, bucket_bytes=bucket_bytes)
    memory.unlink()
    assembler = Assembler(CPU)
    arrived = {}
    for index, pieces in fill(iter(tensors()), memory):
        assert sum(piece["size"] for piece in pieces) <= bucket_bytes
        arrived.update(dict(assembler.take(other_end.bucket(index), pieces)))
        other_end.bucket(index).fill_(0xFF)  # what has arrived does not lie in the bucket
    assert assembler.whole()
    sent = {name: tensor for name, tensor in tensors() if tensor.numel()}
    assert arrived.keys() == sent.keys()
    for name, tensor in sent.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)


def test_the_bucket_that_is_being_read_is_not_written() -> None:
    memory = SharedMemory(bucket_bytes=ALIGNMENT)
    memory.unlink()
    filled = fill(iter([("a", torch.zeros(16)), ("b", torch.ones(16)), ("c", torch.full((16,), 2.0))]), memory)
    (first, _), (second, _) = next(filled), next(filled)
    assert (first, second) == (0, 1)
    assert memory.bucket(first).view(torch.float32).tolist() == [0.0] * 16
    assert next(filled)[0] == first


@pytest.mark.parametrize(("begin", "size"), [(12, 8), (16, 4), (0, 12)])
def test_a_piece_that_its_tensor_lacks_no_bytes_for_is_refused(begin: int, size: int) -> None:
    piece = Piece(name="a", dtype="float32", shape=[4], begin=0, offset=0, size=8)
    assembler = Assembler(CPU)
    assert list(assembler.take(torch.zeros(64, dtype=torch.uint8), [piece])) == []
    assert not assembler.whole()
    wrong = Piece(name="a", dtype="float32", shape=[4], begin=begin, offset=0, size=size)
    with pytest.raises(ValueError, match="A piece of a"):
        list(assembler.take(torch.zeros(64, dtype=torch.uint8), [wrong]))


def parts(writer: int, writers: int) -> Iterator[Run]:
    """Shares that one of several processes has of each tensor, the last ones smaller or empty."""
    for name, tensor in tensors():
        flat = tensor.contiguous().view(-1)
        most = -(-len(flat) // writers)
        yield Run(name, tuple(tensor.shape), min(writer * most, len(flat)), flat[writer * most : (writer + 1) * most])


@pytest.mark.parametrize("writers", [1, 2, 3, 5])
@pytest.mark.parametrize("bucket_bytes", [5 * ALIGNMENT, 2**20])
def test_processes_that_write_their_parts_write_all_tensors(writers: int, bucket_bytes: int) -> None:
    memory = SharedMemory(bucket_bytes=bucket_bytes)
    ways = [fill_part_at(parts(w, writers), w, writers, memory.path, bucket_bytes) for w in range(writers)]
    assembler = Assembler(CPU)
    arrived = {}
    while written := [message for message in [next(way, None) for way in ways] if message is not None]:
        (index,) = {index for index, _ in written}
        pieces = [piece for _, pieces in written for piece in pieces]
        runs = sorted((piece["offset"], piece["offset"] + piece["size"]) for piece in pieces)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(runs)), "no process writes where another does"
        assert runs[-1][1] <= bucket_bytes
        arrived.update(dict(assembler.take(memory.bucket(index), pieces)))
    memory.unlink()
    assert assembler.whole()
    sent = {name: tensor for name, tensor in tensors() if tensor.numel()}
    assert arrived.keys() == sent.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in sent.items())


def test_memory_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(buckets, "DIRECTORY", tmp_path)
    with pytest.raises(ConfigurationError, match="--shm-size"):
        SharedMemory(bucket_bytes=2**50)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_in_the_file_system() -> None:
    memory = SharedMemory(bucket_bytes=4096)
    assert os.path.getsize(memory.path) == BUCKETS * 4096
    memory.unlink()
    memory.unlink()
    assert not os.path.exists(memory.path)


def test_what_a_killed_process_has_left_is_removed_and_no_memory_in_use(tmp_path: Path) -> None:
    """A container has room for two of them."""
    read, write = os.pipe()
    maker = os.fork()
    if not maker:
        memory = SharedMemory(bucket_bytes=4096, directory=str(tmp_path))
        os.write(write, memory.path.encode())
        signal.pause()
    try:
        assert os.read(read, 1000) == os.fsencode(next(tmp_path.iterdir()))
        in_use = SharedMemory(bucket_bytes=4096, directory=str(tmp_path))
        assert len(list(tmp_path.iterdir())) == 2
    finally:
        os.kill(maker, signal.SIGKILL)
        os.waitpid(maker, 0)
    new = SharedMemory(bucket_bytes=4096, directory=str(tmp_path))
    assert {str(path) for path in tmp_path.iterdir()} == {in_use.path, new.path}
