"""Several sinks as one, none of which can stop the run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from rollgrad.adapters.tracking.trajectory_table import Spans, without_secrets
from rollgrad.domain.ports.metric_sink import MetricSink
from rollgrad.domain.ports.progress import ShowsProgress
from rollgrad.domain.ports.run_tracker import RunTracker

_log = structlog.get_logger()


class MultiSink(RunTracker, ShowsProgress):
    """Passes everything to each of `sinks` that takes it; one that raises is reported once and from then on left out.

    `secrets` returns the parts (start, stop) of a text that no sink is told. `reports` are told of every
    `logging_steps`-th step alone, and of every evaluation.
    """

    def __init__(
        self,
        sinks: Sequence[MetricSink],
        secrets: Spans = lambda text: (),
        *,
        reports: Sequence[MetricSink] = (),
        logging_steps: int = 1,
    ) -> None:
        self._sinks = [*sinks, *reports]
        self._reports = {id(sink) for sink in reports}
        self._every = logging_steps
        self._secrets = secrets

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the metrics on."""
        evaluates = any(name.startswith("eval/") for name in metrics)
        self._each(lambda sink: sink.log(step, metrics) if evaluates or self._due(sink, step) else None)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Passes samples to the trackers."""
        self._each(
            lambda sink: sink.samples(step, samples) if isinstance(sink, RunTracker) and self._due(sink, step) else None
        )

    def progress(self, doing: str, done: int, of: int) -> None:
        """Passes on how far the step is."""
        self._each(lambda sink: sink.progress(doing, done, of) if isinstance(sink, ShowsProgress) else None)

    def _due(self, sink: MetricSink, step: int) -> bool:
        return step % self._every == 0 or id(sink) not in self._reports

    def fail(self, reason: str) -> None:
        """Tells the trackers that the run has failed."""
        told = without_secrets(reason, self._secrets)
        self._each(lambda sink: sink.fail(told) if isinstance(sink, RunTracker) else None)

    def close(self) -> None:
        """Closes every sink that still works; idempotent."""
        self._each(lambda sink: sink.close())

    def _each(self, act: Callable[[MetricSink], None]) -> None:
        for sink in list(self._sinks):
            try:
                act(sink)
            except (Exception, SystemExit) as error:  # of any kind (rich exits): the run goes on without this backend
                self._sinks.remove(sink)
                _log.warning("metric_sink_disabled", sink=type(sink).__name__, error=repr(error))
