"""Several sinks as one, none of which can stop the run."""

from collections.abc import Callable, Mapping, Sequence

import structlog

from rollgrad.domain.ports.metric_sink import MetricSink

_log = structlog.get_logger()


class MultiSink(MetricSink):
    """Passes everything to each of `sinks`; one that raises is reported once and from then on left out."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = list(sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the metrics on."""
        self._each(lambda sink: sink.log(step, metrics))

    def close(self) -> None:
        """Closes every sink that still works; idempotent."""
        self._each(lambda sink: sink.close())

    def _each(self, act: Callable[[MetricSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                act(sink)
            except Exception as error:  # of any kind: the run goes on without this backend
                self._sinks.remove(sink)
                _log.warning("metric_sink_disabled", sink=type(sink).__name__, error=repr(error))
