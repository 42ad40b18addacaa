"""Port: records the metrics of a run."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class MetricSink(Protocol):
    """Records metrics. Promises: a sink that fails logs an event and does not stop the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of step `step`; keys are `group/name`."""
        ...

    def close(self) -> None:
        """Writes everything that is still buffered; idempotent."""
        ...
