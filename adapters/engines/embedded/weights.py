"""Weight channels to the embedded engine, which reads the trainer's tensors, or has copies of its own."""

import time

from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.domain.ports.models import PolicyModel
from rollgrad.domain.ports.weight_channel import WeightChannel


class SharedWeights(WeightChannel):
    """A `WeightChannel` for an engine that reads the trainer's own module: nothing is copied."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def push(self, policy: PolicyModel, version: int) -> dict[str, float]:
        """Implements `WeightChannel.push`."""
        self._engine.set_version(version)
        return {"seconds": 0.0, "bytes": 0.0}


class CopiedWeights(WeightChannel):
    """A `WeightChannel` for an engine with a model of its own, which may sample while the trainer's is updated."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def push(self, policy: PolicyModel, version: int) -> dict[str, float]:
        """Implements `WeightChannel.push`."""
        started = time.perf_counter()
        copied = await self._engine.load_weights(policy.weights(), version)
        return {"seconds": time.perf_counter() - started, "bytes": float(copied)}
