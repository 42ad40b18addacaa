"""Port: brings weights from the trainer to the engines."""

from typing import Protocol, runtime_checkable

from rollgrad.domain.ports.models import PolicyModel


@runtime_checkable
class WeightChannel(Protocol):
    """Brings weights to engines. Promises: after `push` returns, every token sampled comes from the pushed weights and
    carries `version`; versions only grow."""

    async def push(self, policy: PolicyModel, version: int) -> dict[str, float]:
        """Brings the engines to the policy's weights; returns `seconds` and `bytes` moved, if it knows them.

        Raises:
            EngineError: an engine did not take the weights.
        """
        ...
