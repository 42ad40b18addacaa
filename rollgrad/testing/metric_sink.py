"""A `MetricSink` and a `RunTracker` that remember."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollgrad.domain.ports.metric_sink import MetricSink
from rollgrad.domain.ports.run_tracker import RunTracker


class FakeMetricSink(MetricSink):
    """Keeps (step, metrics) in `records`."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps the metrics."""
        self.records.append((step, dict(metrics)))

    def close(self) -> None:
        """Sets `closed`."""
        self.closed = True


class FakeRunTracker(FakeMetricSink, RunTracker):
    """Also keeps (step, samples) in `sampled`, and the reason of a failure in `failure`."""

    def __init__(self) -> None:
        super().__init__()
        self.sampled: list[tuple[int, list[dict[str, Any]]]] = []
        self.failure: str | None = None

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Keeps the samples."""
        self.sampled.append((step, [dict(sample) for sample in samples]))

    def fail(self, reason: str) -> None:
        """Keeps the reason."""
        self.failure = reason
