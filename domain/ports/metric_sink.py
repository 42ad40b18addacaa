"""Port: where numbers about a run go."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class MetricSink(Protocol):
    """Promises: a sink that fails logs an event and lets the run go on."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records metrics of optimizer-visible step `step`; keys are `group/name`."""
        ...

    def close(self) -> None:
        """Flushes; idempotent."""
        ...
