"""Weights from GPU to GPU by NCCL, for engines on other GPUs than the trainer's: vLLM's own backend `nccl`.

The policy's first process broadcasts each bucket to the workers of all engines, in a group that is made for the engines
of a transfer and kept while they stay the same. A broadcast that one of them does not take part in hangs in all of
them: when its deadline is over the trainer leaves the group, and the engines of that transfer are given up.
"""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor

from rollgrad.adapters.system.waiting import waiting_for
from rollgrad.adapters.weights.gpu_buckets import BUCKET_BYTES, Contents, Packer
from rollgrad.adapters.weights.transfer import DividedPolicy, Life, Passage, Update, sent
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.models import PolicyModel

T = TypeVar("T")

JOIN_SECONDS = 240.0
"""Longest that trainer and engines may take to make a group: less than engines are given to begin."""

BROADCAST_SECONDS = 120.0
"""Longest that a bucket may take: it is there in less than a second, and loading it takes the engines no more."""

BUFFERS = 2
"""That vLLM receives in."""


@frozen
class Rendezvous:
    """Where a group is made: the trainer's host and a free port there, and how many processes it has."""

    host: str
    port: int
    size: int


@define
class NCCLBackend:
    """See `Backend`.

    Args:
        workers: processes of an engine: the GPUs that share its model.
    """

    workers: int = 1
    _members: tuple[Life, ...] = field(default=(), init=False)
    """Engines of the group; none where there is no group."""

    def __call__(self, policy: PolicyModel, engines: Sequence[Life], version: int) -> Passage:
        """The policy is a `DividedPolicy`."""
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

        return Passage(infos=infos, updates=updates(), whole=True, close=close)


def init_infos(rendezvous: Rendezvous, workers: int) -> list[Any]:
    """What vLLM has to know of the group, for each engine: the trainer's is rank 0, the engines' follow."""
    return [
        {
            "master_address": rendezvous.host,
            "master_port": rendezvous.port,
            "rank_offset": first,
            "world_size": rendezvous.size,
            "packed": True,
            "packed_buffer_size_bytes": BUCKET_BYTES,
            "packed_num_buffers": BUFFERS,
        }
        for first in range(1, rendezvous.size, workers)
    ]


def broadcast(weights: Iterator[tuple[str, Tensor]], rendezvous: Rendezvous | None) -> Iterator[Contents]:
    """What is in each bucket, which is sent when the next is asked for: the engines have to know by then. Without
    `rendezvous` the group is the last one.

    Raises:
        EngineError: the engines did not come, or did not take a bucket, in time.
    """
    if rendezvous is not None:
        _group.join(rendezvous)
    assert _group.device is not None
    for contents, memory in Packer(_group.device).buckets(weights):
        yield contents
        _group.send(memory)


@define
class Group:
    """This process's place in the one group that it is in, as rank 0."""

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
        """Broadcasts; the memory may be overwritten afterwards."""
        torch.cuda.current_stream(self.device).synchronize()  # it was written there

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
        """Ends what is under way."""
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
"""Kept from one transfer to the next."""


def within(seconds: float, work: Callable[[], T], doing: str) -> T:
    """Returns the result of `work`, in a thread that is left to itself if it takes longer.

    Raises:
        EngineError: it does, or fails.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # of NCCL, or of the store where the processes meet
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
