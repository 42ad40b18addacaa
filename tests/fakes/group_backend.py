"""Stands for a backend whose engines are one group, like NCCL's: what one of them misses, none of them gets."""

import time
from collections.abc import Generator, Sequence

from attrs import define, evolve, field

from rollgrad.adapters.weights.shared_memory import shared_memory
from rollgrad.adapters.weights.transfer import Life, Update, WeightStream
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.models import PolicyModel
from tests.fakes.weight_receiver import FakeWeightReceiver

POLL_SECONDS = 0.001


@define
class FakeGroupBackend:
    """Buckets go through shared memory. A send ends when every engine has taken it or died."""

    members: Sequence[FakeWeightReceiver]
    groups: list[list[Life]] = field(factory=list)
    """The engines of each transfer."""

    def __call__(self, policy: PolicyModel, engines: Sequence[Life], version: int) -> WeightStream:
        stream = shared_memory(policy, engines, version)
        self.groups.append(list(engines))

        def updates() -> Generator[Update]:
            members = [self.members[number] for number, _ in engines]
            lives = [member.restarts for member in members]

            def lost() -> bool:
                return any(m.dead or m.restarts != life for m, life in zip(members, lives, strict=True))

            for count, update in enumerate(stream.updates, 1):
                yield update
                while not lost() and any(member.takes < count for member in members):
                    time.sleep(POLL_SECONDS)
                if lost():
                    raise EngineError("The engines took more than 120 s to take a bucket.")

        return evolve(stream, updates=updates(), whole=True)
