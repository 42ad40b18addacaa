"""A fake engine that takes weights out of shared memory, and can be killed at any step of a transfer."""

from collections.abc import Mapping
from typing import Any

import torch

from rollgrad.adapters.weights.delta import POSITIONS, VALUES, positions_of
from rollgrad.adapters.weights.receiver_port import EngineModel, Probe, WeightReceiver, WeightsDifferError
from rollgrad.adapters.weights.shared_buckets import Assembler, SharedMemory
from rollgrad.domain.errors import EngineError
from rollgrad.testing.models import VOCABULARY
from tests.fakes.fleet_member import FakeFleetMember

MODEL = EngineModel(torch.float32, VOCABULARY)


class FakeWeightReceiver(FakeFleetMember, WeightReceiver):
    """Holds the table of a `FakePolicy`. `die_at`: begin, take, finish, prove or abandon; it is killed there, once."""

    transferring = 0
    """Transfers that any fake has begun and not ended."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, torch.Tensor] = {}
        self.die_at: str | None = None
        self.broken: str | None = None
        self.takes = 0
        """Updates of this transfer."""
        self.bases: list[str | None] = []
        """Keys of the transfers that others built on; None of one of all weights."""
        self._has: str | None = None
        self._taking = False

    async def _step(self, name: str) -> None:
        if self.die_at == name:
            self.die_at = None
            self.kill()
        if self._dead.is_set():
            self._end()
        await self.ping()

    def _end(self) -> None:
        FakeWeightReceiver.transferring -= self._taking
        self._taking = False

    async def begin_weights(self, info: Mapping[str, Any] | None) -> EngineModel:
        await self._step("begin")
        self.set_version(self.version)  # refuses while requests run
        if info is not None:
            self._memory = SharedMemory(**info)
        self._assembler = Assembler(torch.device("cpu"))
        self._coming: dict[str, torch.Tensor] = {}
        self.takes = 0
        self._taking = True
        FakeWeightReceiver.transferring += 1
        return MODEL

    async def take_weights(self, update: Mapping[str, Any]) -> None:
        await self._step("take")
        base, self._comes = update.get("base"), update.get("key")
        if not self.takes:
            self.bases.append(base)
            if base is not None:
                if base != self._has:
                    raise EngineError(f"changes of {base} came, where {self._has} is")
                self._coming = {name: tensor.clone() for name, tensor in self.weights.items()}
            self._has = None
        for name, tensor in self._assembler.take(self._memory.bucket(update["bucket"]), update["pieces"]):
            if name.startswith(POSITIONS):
                self._positions = positions_of(tensor)
            elif name.startswith(VALUES):
                self._coming[name.removeprefix(VALUES)].view(-1)[self._positions] = tensor
            else:
                self._coming[name] = tensor
        self.takes += 1

    async def finish_weights(self, version: int) -> None:
        await self._step("finish")
        self.weights, self.broken, self._has = self._coming, None, self._comes
        self.set_version(version)

    async def prove_weights(self, probe: Probe) -> None:
        await self._step("prove")
        self._end()
        table = self.weights["logits"].log_softmax(0)
        self.broken = probe.difference([float(table[token]) for token in probe.tokens[1:]], MODEL)
        if self.broken is not None:
            raise WeightsDifferError(self.broken)

    async def abandon_weights(self, reason: str) -> None:
        await self._step("abandon")
        if self._taking:
            self.broken = reason
        self._end()

    async def restart(self) -> None:
        self._end()
        await super().restart()
        self.weights, self.broken, self._has = {}, None, None
