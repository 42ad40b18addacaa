"""Port: a metric sink that knows runs, not only their metrics."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from rollgrad.domain.ports.metric_sink import MetricSink


@runtime_checkable
class RunTracker(MetricSink, Protocol):
    """Records the metrics of a run, texts that it sampled, and whether it failed. Promises what a `MetricSink` does."""

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Records samples of a step: `step`, `prompt`, `response`, `label`, `reward` and `stop_reason` of each, without
        secrets."""
        ...

    def fail(self, reason: str) -> None:
        """Marks the run as failed; it is closed next."""
        ...
