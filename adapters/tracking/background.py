"""A sink that may wait for a server, on a thread of its own."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from rollgrad.domain.ports.run_tracker import RunTracker

_log = structlog.get_logger(__name__)

CLOSE_SECONDS = 60.0
"""Longest time that the end of a run waits for a tracker to take what is left."""

MOST_WAITING = 10_000
"""Metrics that wait at most for a tracker that takes none: tens of megabytes."""
MOST_WAITING_WITH_SAMPLES = 100
"""Metrics and samples that wait at most where samples are added, whose texts may have megabytes."""

Act = Callable[[RunTracker], None]


class BackgroundSink(RunTracker):
    """Makes a tracker when the first metrics come and passes everything to it, on a thread of its own: the run neither
    waits for it nor ends by it. The first error is reported, and nothing is passed on any more.

    Args:
        name: name of the tracker, for messages.
        make: makes the tracker.
        close_seconds: longest time that `close` waits for what is not sent yet.
    """

    def __init__(self, name: str, make: Callable[[], RunTracker], close_seconds: float = CLOSE_SECONDS) -> None:
        self._name = name
        self._make = make
        self._close_seconds = close_seconds
        self._acts: queue.SimpleQueue[Act | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failed = False
        self._closed = False
        self._lags = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the metrics on and returns at once."""
        self._pass_on(lambda sink: sink.log(step, metrics))

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Passes the samples on and returns at once; leaves them out while much waits."""
        if self._acts.qsize() < MOST_WAITING_WITH_SAMPLES:
            self._pass_on(lambda sink: sink.samples(step, samples))
        elif not self._lags:
            self._lags = True
            _log.warning(f"{self._name} is too slow for the samples of all steps; they are in samples.jsonl")

    def fail(self, reason: str) -> None:
        """Tells the tracker, if it has begun with this run."""
        if self._thread is not None:
            self._pass_on(lambda sink: sink.fail(reason))

    def close(self) -> None:
        """Waits until the tracker has everything, `close_seconds` at most; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            return
        self._acts.put(None)
        self._thread.join(self._close_seconds)
        if self._thread.is_alive():
            _log.warning(
                f"{self._name} did not take all metrics in time; all are in metrics.jsonl",
                seconds=self._close_seconds,
            )

    def _pass_on(self, act: Act) -> None:
        if self._failed or self._closed:
            return
        if self._acts.qsize() >= MOST_WAITING:
            self._failed = True
            _log.warning(f"{self._name} takes no metrics and gets no more; all are in metrics.jsonl")
            return
        self._acts.put(act)
        if self._thread is None:
            # A daemon: a tracker that hangs does not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name=f"tracker {self._name}", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        try:
            sink = self._make()
            for act in iter(self._acts.get, None):
                act(sink)
            sink.close()
        except BaseException as error:  # also SystemExit, which some trackers raise
            self._failed = True
            _log.warning(f"{self._name} gets no more metrics; all are in metrics.jsonl", reason=repr(error))
