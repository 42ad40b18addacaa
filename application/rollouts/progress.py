"""Progress of a rollout, as people are told of it."""

from rollgrad.domain.ports.metric_sink import MetricSink
from rollgrad.domain.ports.progress import ShowsProgress


class Progress(ShowsProgress):
    """Passes on how far something is, to the sink of the run, once it has one and if it shows progress."""

    def __init__(self) -> None:
        self._shown_by: ShowsProgress | None = None

    def to(self, sink: MetricSink) -> MetricSink:
        """Tells `sink` from then on; returns it."""
        self._shown_by = sink if isinstance(sink, ShowsProgress) else None
        return sink

    def progress(self, doing: str, done: int, of: int) -> None:
        """Tells the sink."""
        if self._shown_by is not None:
            self._shown_by.progress(doing, done, of)
