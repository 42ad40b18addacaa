import os
from pathlib import Path

import pytest
import torch

from rollgrad.adapters.weights import shared_buckets as buckets
from rollgrad.adapters.weights.shared_buckets import ALIGNMENT, BUCKETS, Assembler, Piece, SharedMemory, fill
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


@pytest.mark.parametrize(("name", "begin"), [("b", 8), ("a", 0), ("a", 4), ("a", 12)])
def test_a_piece_that_does_not_come_next_is_refused(name: str, begin: int) -> None:
    piece = Piece(name="a", dtype="float32", shape=[4], begin=0, offset=0, size=8)
    assembler = Assembler(CPU)
    assert list(assembler.take(torch.zeros(64, dtype=torch.uint8), [piece])) == []
    assert not assembler.whole()
    wrong = Piece(name=name, dtype="float32", shape=[4], begin=begin, offset=0, size=4)
    with pytest.raises(ValueError, match=f"A piece of {name}"):
        list(assembler.take(torch.zeros(64, dtype=torch.uint8), [wrong]))


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
