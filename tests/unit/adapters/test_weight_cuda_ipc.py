"""A bucket that engines map is free again when the next transfer begins, whatever became of them. Torch's part is
modelled after `torch/csrc/CudaIPCTypes.h`."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgrad.adapters.weights import cuda_ipc
from rollgrad.adapters.weights.cuda_ipc import exported
from rollgrad.adapters.weights.gpu_buckets import Packer
from rollgrad.application.settings.weight_backend import BUCKET_BYTES

CPU = torch.device("cpu")


class SharedBuckets:
    """Memory that a process shares, and that torch frees where the count of those that map it, without a sign, is 0."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.left: set[int] = set()
        """Those that are not free."""

    def reduce(self, tensor: Tensor) -> tuple[Any, tuple[Any, ...]]:
        self.left.add(len(self.counts))
        self.counts.append(1)
        return None, (*range(6), 0, *range(7, 11), b"counters", len(self.counts) - 1, b"event", True)

    def give_back(self, name: bytes, index: int, device: int = 0) -> None:
        assert (name, device) == (b"counters", 0)
        self.counts[index] = (self.counts[index] - 1) % 2**64

    def collect(self) -> None:
        self.left = {index for index in self.left if self.counts[index] > 0}


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> SharedBuckets:
    buckets = SharedBuckets()
    monkeypatch.setattr(cuda_ipc, "_handles", [])
    monkeypatch.setattr(cuda_ipc, "Packer", lambda device: Packer(CPU, bucket_bytes=64))
    monkeypatch.setattr(torch.multiprocessing.reductions, "reduce_tensor", buckets.reduce)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter", buckets.give_back)
    monkeypatch.setattr(torch.cuda, "ipc_collect", buckets.collect)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-0"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    return buckets


def weights() -> Iterator[tuple[str, Tensor]]:
    for name, size in (("small", 4), ("other", 14), ("large", 40)):
        yield name, torch.ones(size)


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("reads", [1, 3], ids=["broken off", "to its end"])
def test_a_bucket_is_free_after_its_transfer_also_if_its_engine_died(
    buckets: SharedBuckets, dies: bool, reads: int
) -> None:
    for _ in range(4):
        sent = exported(weights())
        mapped = set()
        for _ in range(reads):
            _, handles = next(sent)
            mapped.add(handles["GPU-0"][11:13])
        assert len(buckets.left) == len(mapped), "what is left of the last transfer"
        sent.close()  # type: ignore[attr-defined]
        for counter in () if dies else mapped:
            buckets.give_back(*counter)


@pytest.mark.gpu
def test_torch_frees_what_nobody_gives_back() -> None:
    """A handle that nobody has opened counts like that of a process which died with it."""
    cuda_ipc._free_last()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        sent = exported((name, tensor.cuda()) for name, tensor in weights())
        next(sent)
        sent.close()  # type: ignore[attr-defined]
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        assert before < torch.cuda.memory_allocated() < before + 2 * BUCKET_BYTES, "torch waits for it"
    cuda_ipc._free_last()
    assert torch.cuda.memory_allocated() == before
