"""Weights from GPU to GPU by NCCL, for engines on other GPUs than the trainer's: vLLM's own backend `nccl`.

The policy's first process broadcasts each bucket to the workers of all engines, in a group that is made for the engines
of a transfer and kept while these stay the same. If one of them does not take part in a broadcast, it hangs in all:
at its deadline the trainer leaves the group, and the engines of that transfer are given up.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor

from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.adapters.weights.gpu_buckets import Contents, Packer
from rollgrad.adapters.weights.transfer import DividedPolicy, Life, Update, WeightStream, sent
from rollgrad.application.settings.weight_backend import BUCKET_BYTES, RECEIVED_BUCKETS
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.models import PolicyModel

T = TypeVar("T")

JOIN_SECONDS = 240.0
"""Longest time of trainer and engines to make a group, which is less than engines have to begin."""

BROADCAST_SECONDS = 120.0
"""Longest time of a bucket, whose transfer and loading take less than a second each."""


@frozen
class Rendezvous:
    """Meeting point of a group: the trainer's host, a free port there, and the number of processes."""

    host: str
    port: int
    size: int


@define
class NCCLBackend:
    """Implements `Backend` by NCCL.

    Args:
        workers: number of processes of an engine, one for each GPU that shares its model.
    """

    workers: int = 1
    _members: tuple[Life, ...] = field(default=(), init=False)
    """Engines of the group; empty if there is no group."""

    def __call__(self, policy: PolicyModel, engines: Sequence[Life], version: int) -> WeightStream:
        """Returns the way of one transfer; the policy must be a `DividedPolicy`."""
        rendezvous, infos = None, [None] * len(engines)
        if self._members != tuple(engines):
            assert isinstance(policy, DividedPolicy)
            rendezvous = Rendezvous(*policy.address(), size=1 + len(engines) * self.workers)
            infos = init_infos(rendezvous, self.workers)
        self._members = ()

        def updates() -> Generator[Update]:
            for [contents] in sent(policy, broadcast, rendezvous):
                yield contents.update()

        def close(well: bool) -> None:
            self._members = tuple(engines) if well else ()

        return WeightStream(infos=infos, updates=updates(), whole=True, close=close)


def init_infos(rendezvous: Rendezvous, workers: int) -> list[Any]:
    """Returns vLLM's description of the group for each engine; the trainer is rank 0, the engines' ranks follow."""
    return [
        {
            "master_address": rendezvous.host,
            "master_port": rendezvous.port,
            "rank_offset": first,
            "world_size": rendezvous.size,
            "packed": True,
            "packed_buffer_size_bytes": BUCKET_BYTES,
            "packed_num_buffers": RECEIVED_BUCKETS,
        }
        for first in range(1, rendezvous.size, workers)
    ]


def broadcast(weights: Iterator[tuple[str, Tensor]], rendezvous: Rendezvous | None) -> Iterator[Contents]:
    """Yields the contents of each bucket. The bucket is sent when the next one is requested; engines must know its
    contents by then. Without `rendezvous` the last group is used.

    Raises:
        EngineError: the engines did not join, or did not take a bucket, in time.
    """
    if rendezvous is not None:
        _group.join(rendezvous)
    assert _group.device is not None
    for contents, memory in Packer(_group.device).buckets(weights):
        yield contents
        _group.send(memory)


@define
class Group:
    """The group of this process, in which it is rank 0."""

    device: torch.device | None = None
    """This process's GPU, once it has joined."""
    _communicator: Any = None

    def join(self, rendezvous: Rendezvous) -> None:
        """Leaves the last group and makes a new one."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        self.leave()
        self.device = torch.device("cuda", torch.cuda.current_device())
        where = {
            "master_address": rendezvous.host,
            "master_port": rendezvous.port,
            "world_size": rendezvous.size,
        }
        doing = f"make a group of {rendezvous.size} for weights at {rendezvous.host}:{rendezvous.port}"
        with waiting_for(f"engines to {doing}", deadline=JOIN_SECONDS):
            self._communicator = within(JOIN_SECONDS, self._on_device(lambda: trainer_init(where)), doing)

    def send(self, memory: Tensor) -> None:
        """Broadcasts a bucket; its memory may be overwritten afterwards."""
        torch.cuda.current_stream(self.device).synchronize()  # the bucket was written in this stream

        def work() -> None:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._communicator.broadcast(memory, src=0, stream=stream)
            stream.synchronize()

        try:
            within(BROADCAST_SECONDS, self._on_device(work), "take a bucket of weights by NCCL")
        except EngineError:
            self.leave()
            raise

    def leave(self) -> None:
        """Leaves the group, ending a broadcast in progress."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()

    def _on_device(self, work: Callable[[], T]) -> Callable[[], T]:
        def run() -> T:
            with torch.cuda.device(self.device):
                return work()

        return run


WITHOUT_NCCL = "If it happens again, --vllm.sync_backend shared_memory moves weights without NCCL."

_group = Group()
"""Group of this process, kept from one transfer to the next."""


def within(seconds: float, work: Callable[[], T], doing: str) -> T:
    """Runs `work` in a thread, which is abandoned after `seconds`; returns its result.

    Raises:
        EngineError: it takes longer, or fails.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # an error of NCCL, or of the store at which processes meet
            errors.append(error)

    thread = threading.Thread(target=run, name=f"to {doing}", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise EngineError(
            f"The engines did not {doing}: {type(errors[0]).__name__}: {errors[0]}. {WITHOUT_NCCL}"
        ) from errors[0]
    if not results:
        raise EngineError(f"The engines took more than {seconds:g} s to {doing}. {WITHOUT_NCCL}")
    return results[0]
