"""Who is in the group, and what becomes of a wait; the wire itself is NCCL's."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from rollgrad.adapters.weights import nccl
from rollgrad.adapters.weights.gpu_buckets import Contents
from rollgrad.adapters.weights.nccl import NCCLBackend, Rendezvous, within
from rollgrad.adapters.weights.transfer import Send, WeightStream
from rollgrad.domain.errors import EngineError
from rollgrad.testing.models import FakePolicy


class DividedFake(FakePolicy):
    """Its first process is at a port of its own each time it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.port = 0
        self.rendezvous: Rendezvous | None = None

    def parts(self) -> int:
        return 0

    def sent_parts(self, send: Send, *arguments: Any) -> Iterator[list[Any]]:
        raise AssertionError("it has no parts")

    def address(self) -> tuple[str, int]:
        self.port += 1
        return "10.0.0.1", self.port

    def sent(
        self, send: Send, *arguments: Any, ranks: Sequence[int] = (0,), adapter: bool = False
    ) -> Iterator[list[Any]]:
        assert (send, ranks, adapter) == (nccl.broadcast, (0,), False)
        (self.rendezvous,) = arguments
        contents = Contents()
        contents.add("logits", torch.zeros(3, dtype=torch.bfloat16))
        yield [contents]


def test_a_group_is_kept_while_its_engines_stay_the_same_and_none_fails() -> None:
    policy, backend = DividedFake(), NCCLBackend(workers=2)

    def stream(*engines: tuple[int, int]) -> WeightStream:
        stream = backend(policy, engines, 1)
        assert stream.whole
        assert len(stream.infos) == len(engines)
        (update,) = stream.updates
        assert (update.bytes, update.dtypes) == (6, ("bfloat16",))
        return stream

    first = stream((0, 0), (1, 0), (2, 0))
    assert policy.rendezvous == Rendezvous("10.0.0.1", 1, 7)
    assert [info["rank_offset"] for info in first.infos if info] == [1, 3, 5]
    first.close(True)
    kept = stream((0, 0), (1, 0), (2, 0))
    assert policy.rendezvous is None
    assert list(kept.infos) == [None] * 3
    kept.close(False)  # an engine dropped out
    again = stream((0, 0), (1, 0), (2, 0))
    assert policy.rendezvous == Rendezvous("10.0.0.1", 2, 7)
    again.close(True)
    restarted = stream((0, 0), (1, 1), (2, 0))
    assert policy.rendezvous == Rendezvous("10.0.0.1", 3, 7)
    restarted.close(True)
    alone = stream((1, 2))
    assert policy.rendezvous == Rendezvous("10.0.0.1", 4, 3)
    alone.close(True)


def test_a_transfer_that_was_never_ended_leaves_no_group() -> None:
    policy, backend = DividedFake(), NCCLBackend()
    list(backend(policy, [(0, 0)], 1).updates)
    list(backend(policy, [(0, 0)], 2).updates)
    assert policy.rendezvous is not None


def test_a_wait_that_is_over_is_an_error_that_says_what_for() -> None:
    never = threading.Event()
    with pytest.raises(EngineError, match=r"took more than 0\.01 s to take a bucket"):
        within(0.01, never.wait, "take a bucket")
    never.set()
    assert within(60.0, lambda: 3, "count") == 3

    def fail() -> None:
        raise RuntimeError("remote process exited")

    with pytest.raises(EngineError, match="did not take a bucket: RuntimeError: remote process exited"):
        within(60.0, fail, "take a bucket")
