"""Metrics for Trackio."""

from collections.abc import Mapping, Sequence
from typing import Any

import trackio

from rollgrad.adapters.tracking.tracked_run import TrackedRun
from rollgrad.domain.ports.run_tracker import RunTracker


class TrackioSink(RunTracker):
    """Logs to a run of Trackio: a local database, or the server or Space that its environment variables name."""

    def __init__(self, run: TrackedRun) -> None:
        # Trackio knows a run by its name, which another run may have: the id makes it one's own.
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id_in('trackio')}",
            group=run.group,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Logs traces: prompt and response as messages, the rest as their metadata."""
        for number, sample in enumerate(samples):
            messages = [
                {"role": "user", "content": sample["prompt"]},
                {"role": "assistant", "content": sample["response"]},
            ]
            metadata = {name: value for name, value in sample.items() if name not in ("prompt", "response")}
            self._run.log({f"sample_{number}": trackio.Trace(messages=messages, metadata=metadata)}, step=step)

    def fail(self, reason: str) -> None:
        """Raises an alert: Trackio has no other mark of a run that failed."""
        self._run.alert("The run failed", reason, level=trackio.AlertLevel.ERROR)

    def close(self) -> None:
        """Writes what is left."""
        self._run.finish()
