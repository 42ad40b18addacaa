"""Promises of every metric sink."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from rollgrad.adapters.tracking.console import ConsoleSink
from rollgrad.adapters.tracking.jsonl import JsonlSink
from rollgrad.adapters.tracking.multi import MultiSink
from rollgrad.adapters.tracking.tensorboard import TensorBoardSink
from rollgrad.domain.ports.metric_sink import MetricSink
from rollgrad.testing.metric_sink import FakeMetricSink

Numbers = list[tuple[int, float]]


def read_jsonl(path: Path) -> Numbers:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["step"], row["reward/mean"]) for row in rows]


def read_tensorboard(directory: Path) -> Numbers:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("reward/mean")]


def read_console(stream: io.StringIO) -> Numbers:
    words = [line.split() for line in stream.getvalue().splitlines()]
    return [(int(line[1].partition("/")[0]), float(line[3])) for line in words]


@pytest.fixture(params=["fake", "jsonl", "tensorboard", "console", "multi"])
def sink_and_read(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[MetricSink, Callable[[], Numbers]]:
    """A sink, and what it was told about reward/mean."""
    if request.param == "jsonl":
        return JsonlSink(tmp_path / "deep" / "metrics.jsonl"), lambda: read_jsonl(tmp_path / "deep" / "metrics.jsonl")
    if request.param == "tensorboard":
        return TensorBoardSink(tmp_path), lambda: read_tensorboard(tmp_path)
    if request.param == "console":
        stream = io.StringIO()
        return ConsoleSink(2, Console(file=stream)), lambda: read_console(stream)
    fake = FakeMetricSink()
    sink = MultiSink([fake]) if request.param == "multi" else fake
    return sink, lambda: [(step, metrics["reward/mean"]) for step, metrics in fake.records]


def test_what_is_logged_is_kept_in_order(sink_and_read: tuple[MetricSink, Callable[[], Numbers]]) -> None:
    sink, read = sink_and_read
    assert isinstance(sink, MetricSink)
    sink.log(1, {"reward/mean": 0.25})
    sink.log(2, {"reward/mean": 0.5})
    sink.close()
    assert read() == [(1, 0.25), (2, 0.5)]


def test_close_is_idempotent(sink_and_read: tuple[MetricSink, Callable[[], Numbers]]) -> None:
    sink, _ = sink_and_read
    sink.close()
    sink.close()
