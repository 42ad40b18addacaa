"""A `MetricSink` that remembers."""

from collections.abc import Mapping

from rollgrad.domain.ports.metric_sink import MetricSink


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
