"""Metrics as one JSON object a line, which reports and other tools read."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from rollgrad.domain.ports.metric_sink import MetricSink


class JsonlSink(MetricSink):
    """Appends `{"step": ..., **metrics}` to `path` at each call; numbers that are not finite become null. The file is
    opened for each line, so that one which was replaced or removed meanwhile is written to."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one line."""
        numbers = {key: float(value) if math.isfinite(value) else None for key, value in metrics.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")

    def close(self) -> None:
        """Does nothing, because no file stays open."""
