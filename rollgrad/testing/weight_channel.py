"""A `WeightChannel` that tells a fake engine its version."""

from rollgrad.domain.ports.models import PolicyModel
from rollgrad.domain.ports.weight_channel import WeightChannel
from rollgrad.testing.rollout_engine import FakeRolloutEngine


class FakeWeightChannel(WeightChannel):
    """Keeps the versions pushed, and hands them to `engine` where there is one."""

    def __init__(self, engine: FakeRolloutEngine | None = None) -> None:
        self._engine = engine
        self.versions: list[int] = []

    async def push(self, policy: PolicyModel, version: int) -> dict[str, float]:
        """Keeps the version, tells the engine, and returns 0 seconds and the size of the weights."""
        if self._engine is not None:
            self._engine.set_version(version)
        self.versions.append(version)
        return {"seconds": 0.0, "bytes": float(sum(tensor.nbytes for _, tensor in policy.weights()))}
