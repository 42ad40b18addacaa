"""Metrics as one JSON object a line, which reports and other tools read."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from rollgrad.adapters.tracking.line_file import LineFile
from rollgrad.domain.ports.metric_sink import MetricSink


class JsonlSink(MetricSink):
    """Appends `{"step": ..., **metrics}` to `path` at each call; numbers that are not finite become null. While the
    disk is full the lines wait in memory (`LineFile`)."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LineFile(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one line."""
        numbers = {key: float(value) if math.isfinite(value) else None for key, value in metrics.items()}
        self._file.append(json.dumps({"step": step, **numbers}))

    def close(self) -> None:
        """Writes the lines that wait; no file stays open."""
        self._file.close()
