"""Trackers that are slow, or fail, beside a run that goes on; and the ids that they know a run by."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import structlog

from rollgrad.adapters.tracking import background
from rollgrad.adapters.tracking.background import BackgroundSink
from rollgrad.adapters.tracking.tracked_run import TrackedRun
from rollgrad.domain.ports.run_tracker import RunTracker
from rollgrad.testing.metric_sink import FakeRunTracker


def test_everything_arrives_in_order_before_close_returns() -> None:
    fake = FakeRunTracker()
    sink = BackgroundSink("fake", lambda: fake)
    for step in range(100):
        sink.log(step, {"a": float(step)})
    sink.close()
    sink.close()
    assert fake.records == [(step, {"a": float(step)}) for step in range(100)]
    assert fake.closed


def test_a_tracker_is_begun_by_the_first_metrics() -> None:
    begun: list[str] = []

    def make() -> RunTracker:
        begun.append("now")
        return FakeRunTracker()

    sink = BackgroundSink("fake", make)
    sink.close()  # as a run that was refused closes it
    assert begun == []


class WaitingSink(FakeRunTracker):
    """Waits for `answered` before it takes anything, as for a server."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = threading.Event()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.answered.wait()
        super().log(step, metrics)


def test_a_tracker_that_hangs_neither_stops_the_run_nor_its_end() -> None:
    waiting = WaitingSink()
    sink = BackgroundSink("hanging", lambda: waiting, close_seconds=0.01)
    with structlog.testing.capture_logs() as events:
        sink.log(1, {"a": 1.0})
        sink.log(2, {"a": 2.0})
        sink.close()
    assert [event["event"] for event in events] == [
        "hanging did not take all metrics in time; all are in metrics.jsonl"
    ]
    waiting.answered.set()


def test_what_waits_for_a_tracker_that_hangs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MOST_WAITING", 3)
    waiting = WaitingSink()
    sink = BackgroundSink("hanging", lambda: waiting)
    with structlog.testing.capture_logs() as events:
        for step in range(10):
            sink.log(step, {"a": 1.0})
    assert [event["event"] for event in events] == [
        "hanging takes no metrics and gets no more; all are in metrics.jsonl"
    ]
    waiting.answered.set()
    sink.close()
    assert 3 <= len(waiting.records) <= 4, "what was taken before, and the one that it held"


def test_samples_for_which_a_tracker_is_too_slow_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MOST_WAITING_WITH_SAMPLES", 4)
    waiting = WaitingSink()
    sink = BackgroundSink("slow", lambda: waiting)
    with structlog.testing.capture_logs() as events:
        for step in range(10):
            sink.log(step, {"a": 1.0})
            sink.samples(step, [{"prompt": "How?"}])
    assert [event["event"] for event in events] == [
        "slow is too slow for the samples of all steps; they are in samples.jsonl"
    ]
    waiting.answered.set()
    sink.close()
    assert [step for step, _ in waiting.records] == list(range(10))
    assert 1 <= len(waiting.sampled) <= 3


@pytest.mark.parametrize("failing", ["begin", "log"])
@pytest.mark.parametrize("error", [OSError("no route"), SystemExit(1)], ids=["error", "exit"])
def test_a_tracker_that_fails_is_named_once(failing: str, error: BaseException) -> None:
    class Failing(FakeRunTracker):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise error

    def make() -> RunTracker:
        if failing == "begin":
            raise error
        return Failing()

    sink = BackgroundSink("failing", make)
    with structlog.testing.capture_logs() as events:
        for step in range(3):
            sink.log(step, {"a": 1.0})
        sink.close()
    assert [event["event"] for event in events] == ["failing gets no more metrics; all are in metrics.jsonl"]
    assert events[0]["reason"] == repr(error)


def test_ids_are_made_once_for_each_run_and_tracker(tmp_path: Path) -> None:
    run = TrackedRun(project="p", name="n", directory=tmp_path, settings={})
    first, other = run.id_in("wandb"), run.id_in("mlflow", lambda: "made there")
    assert first == TrackedRun(project="p", name="n", directory=tmp_path, settings={}).id_in("wandb")
    assert other == "made there"
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": first, "mlflow": other}


def test_an_id_that_a_server_has_yet_to_give_keeps_no_other_tracker_waiting(tmp_path: Path) -> None:
    run = TrackedRun(project="p", name="n", directory=tmp_path, settings={})
    asked, answered = threading.Event(), threading.Event()

    def slow() -> str:
        asked.set()
        assert answered.wait(60)
        return "late"

    waiting = threading.Thread(target=run.id_in, args=("mlflow", slow))
    waiting.start()
    assert asked.wait(60)
    other: list[str] = []
    quick = threading.Thread(target=lambda: other.append(run.id_in("wandb")), daemon=True)
    quick.start()
    quick.join(60)
    answered.set()
    waiting.join()
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"wandb": other[0], "mlflow": "late"}
