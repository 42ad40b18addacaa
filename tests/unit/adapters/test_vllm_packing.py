from collections.abc import Iterator

import pytest
import torch

from rollgrad.adapters.weights.disk import shards
from rollgrad.adapters.weights.gpu_buckets import Packer

CPU = torch.device("cpu")


def tensors() -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of several formats, one of an odd size, one larger than small buckets, one not contiguous."""
    generator = torch.Generator().manual_seed(0)
    yield "norm", torch.randn(7, generator=generator).to(torch.bfloat16)
    yield "bias", torch.randn(5, generator=generator)
    yield "embedding", torch.randn(40, 33, generator=generator)
    yield "transposed", torch.randn(9, 11, generator=generator).T
    yield "flags", torch.arange(3, dtype=torch.uint8)
    yield "last", torch.randn(3, 2, generator=generator)


@pytest.mark.parametrize("bucket_bytes", [16, 1024, 2**20])
def test_buckets_hold_every_tensor_once_where_numbers_of_its_format_may_lie(bucket_bytes: int) -> None:
    arrived: dict[str, torch.Tensor] = {}
    buckets = 0
    for contents, memory in Packer(CPU, bucket_bytes).buckets(tensors()):
        buckets += 1
        assert memory.numel() == sum(contents.tensor_sizes)
        assert memory.numel() <= bucket_bytes or len(contents.names) == 1
        described = zip(contents.names, contents.dtype_names, contents.shapes, strict=True)
        for (name, dtype, shape), part in zip(described, memory.split(contents.tensor_sizes), strict=True):
            arrived[name] = part.view(getattr(torch, dtype)).view(shape).clone()
        memory.fill_(0xFF)
    assert arrived.keys() == dict(tensors()).keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors())
    assert buckets == {16: 6, 1024: 5, 2**20: 3}[bucket_bytes]


def test_one_memory_serves_all_buckets_that_fit() -> None:
    packer = Packer(CPU, 64)
    before = packer.memory
    for _ in packer.buckets(("w" + str(index), torch.zeros(16)) for index in range(5)):
        assert packer.memory is before
    list(packer.buckets(iter([("large", torch.zeros(17))])))
    assert packer.memory.numel() == 68


@pytest.mark.parametrize(("shard_bytes", "names"), [(1, 6), (2**20, 1)])
def test_shards_are_copies(shard_bytes: int, names: int) -> None:
    source = dict(tensors())
    written = list(shards(iter(source.items()), shard_bytes))
    assert len(written) == names
    for shard in written:
        for name, tensor in shard.items():
            assert torch.equal(tensor, source[name])
            assert tensor.is_contiguous()
            assert tensor.data_ptr() != source[name].data_ptr()
