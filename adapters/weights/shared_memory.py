"""Weights through the CPU's memory: the trainer writes two buckets that the engines' workers read
(`shared_buckets`). Processes of the trainer that have parts of the weights each write their own, and workers read what
their share of the model needs."""

from collections.abc import Generator, Iterator, Sequence

from rollgrad.adapters.weights.shared_buckets import Piece, SharedMemory, fill_at, fill_part_at
from rollgrad.adapters.weights.transfer import DividedPolicy, Life, Update, WeightStream, sent
from rollgrad.domain.ports.models import PolicyModel


def shared_memory(policy: PolicyModel, engines: Sequence[Life], version: int) -> WeightStream:
    """Implements `Backend`. The policy's first process and the engines, or their stand-ins, are on this machine.

    Raises:
        ConfigurationError: /dev/shm is too small.
    """
    return _transfer(policy, engines, adapter=False)


def shared_memory_adapter(policy: PolicyModel, engines: Sequence[Life], version: int) -> WeightStream:
    """Implements `Backend` for adapters alone, to engines that take nothing else (`VLLMEngine`'s `lora`)."""
    return _transfer(policy, engines, adapter=True)


def _transfer(policy: PolicyModel, engines: Sequence[Life], *, adapter: bool) -> WeightStream:
    memory = SharedMemory()

    def updates() -> Generator[Update]:
        for bucket, pieces in _buckets(policy, memory, adapter=adapter):
            yield Update(
                {"bucket": bucket, "pieces": pieces},
                bytes=sum(piece["size"] for piece in pieces),
                dtypes=tuple({piece["dtype"] for piece in pieces}),
            )
        yield Update({"bucket": 0, "pieces": [], "last": True})

    return WeightStream(
        infos=[{"path": memory.path, "bucket_bytes": memory.bucket_bytes}] * len(engines),
        updates=updates(),
        begun=memory.unlink,  # every process has mapped it, so it is freed with the last of them
        close=lambda well: memory.unlink(),
    )


def _buckets(policy: PolicyModel, memory: SharedMemory, *, adapter: bool) -> Iterator[tuple[int, list[Piece]]]:
    """Yields the index and the pieces of each bucket that the policy's processes have written."""
    where = (memory.path, memory.bucket_bytes)
    if adapter or not isinstance(policy, DividedPolicy) or not policy.parts():
        for [written] in sent(policy, fill_at, *where, adapter=adapter):
            yield written
        return
    for messages in policy.sent_parts(fill_part_at, *where):
        written = [message for message in messages if message is not None]
        yield written[0][0], [piece for _, pieces in written for piece in pieces]
