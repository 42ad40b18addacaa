"""Metric sinks: what each adds to the contract."""

import contextlib
import fcntl
import io
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path

import pytest
import structlog
from rich.console import Console

from rollgrad.adapters.tracking.console import ConsoleSink
from rollgrad.adapters.tracking.jsonl import JsonlSink
from rollgrad.adapters.tracking.multi import MultiSink
from rollgrad.adapters.tracking.tensorboard import TensorBoardSink
from rollgrad.domain.errors import MissingExtraError
from rollgrad.domain.ports.metric_sink import MetricSink
from rollgrad.testing.metric_sink import FakeMetricSink, FakeRunTracker


def test_each_line_is_on_disk_at_once_and_a_continued_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    first.log(1, {"reward/mean": 0.5, "policy/entropy": math.nan})
    assert json.loads(path.read_text()) == {"step": 1, "reward/mean": 0.5, "policy/entropy": None}
    first.close()
    second = JsonlSink(path)
    second.log(2, {"reward/mean": 1})
    second.close()
    assert len(path.read_text().splitlines()) == 2


def test_a_missing_tensorboard_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install rollgrad\[tracking\]"):
        TensorBoardSink(tmp_path)


class BrokenSink(MetricSink):
    def __init__(self, error: BaseException) -> None:
        self.calls = 0
        self.error = error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls += 1
        raise self.error

    def close(self) -> None:
        self.calls += 1


@pytest.mark.parametrize("error", [OSError("disk full"), SystemExit("rich has no terminal any more")])
def test_a_broken_sink_is_reported_once_and_the_others_go_on(error: BaseException) -> None:
    broken, before, after = BrokenSink(error), FakeMetricSink(), FakeMetricSink()
    sink = MultiSink([before, broken, after])
    with structlog.testing.capture_logs() as events:
        sink.log(1, {"a": 1.0})
        sink.log(2, {"a": 2.0})
        sink.close()
    assert [(event["event"], event["sink"]) for event in events] == [("metric_sink_disabled", "BrokenSink")]
    assert str(error) in events[0]["error"]
    assert broken.calls == 1
    assert len(before.records) == len(after.records) == 2
    assert before.closed
    assert after.closed


def test_trackers_are_told_samples_and_failures_without_secrets() -> None:
    tracker = FakeRunTracker()
    sink = MultiSink([FakeMetricSink(), tracker], secrets=lambda text: [(4, 10)])
    sink.samples(1, [{"prompt": "How?"}])
    sink.fail("key secret at 10")
    assert (tracker.sampled, tracker.failure) == ([(1, [{"prompt": "How?"}])], "key *** at 10")


def test_reports_are_of_some_steps_and_all_evaluations() -> None:
    whole, tracker = FakeMetricSink(), FakeRunTracker()
    sink = MultiSink([whole], reports=[tracker], logging_steps=3)
    for step in range(1, 8):
        sink.log(step, {"reward/mean": float(step)})
        sink.samples(step, [])
    sink.log(7, {"eval/pass@1": 0.5})
    assert [step for step, _ in whole.records] == [1, 2, 3, 4, 5, 6, 7, 7]
    assert tracker.records == [(3, {"reward/mean": 3.0}), (6, {"reward/mean": 6.0}), (7, {"eval/pass@1": 0.5})]
    assert [step for step, _ in tracker.sampled] == [3, 6]


def test_away_from_a_terminal_a_run_leaves_some_lines_and_every_evaluation() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(1000, Console(file=stream))
    for step in range(1, 1001):
        sink.log(step, {"reward/mean": step / 1000, "time/step_s": 1.23, "other/metric": 5.0})
    sink.log(333, {"eval/pass@1": 0.25})
    sink.close()
    lines = stream.getvalue().splitlines()
    assert 15 <= len(lines) <= 30
    assert lines[0] == "step 1/1000  reward 0.001  s/step 1.2"
    assert lines[-2].startswith("step 1000/1000  reward 1.000")
    assert lines[-1] == "step 333/1000  eval 0.250", "a line has no figure of another step"


def test_a_number_that_is_rounded_to_0_has_no_minus() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(1000, Console(file=stream))
    sink.log(1, {"policy/approx_kl": -1e-9, "rollout/entropy": -0.0})
    sink.close()
    assert stream.getvalue() == "step 1/1000  kl 0.0000  entropy 0.000\n"


def test_the_mean_of_rewards_is_beside_the_share_that_passes_where_they_differ() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(1000, Console(file=stream))
    sink.log(0, {"eval/pass@1": 0.0, "eval/mean@1": -0.405, "eval/accuracy": 0.5})
    sink.log(500, {"eval/pass@1": 0.25, "eval/mean@1": 0.25})
    sink.close()
    assert stream.getvalue().splitlines() == [
        "step 0/1000  eval 0.000  eval mean -0.405  held-out accuracy 0.500",
        "step 500/1000  eval 0.250",
    ]


def test_on_a_terminal_the_bar_shows_step_and_metrics() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(10, Console(file=stream, force_terminal=True, width=120, color_system=None))
    sink.log(4, {"reward/mean": 0.75, "policy/approx_kl": 0.0123})
    sink.close()
    shown = stream.getvalue()
    assert "4/10" in shown
    assert "reward 0.750" in shown
    assert "kl 0.0123" in shown


def test_what_a_step_is_at_is_behind_the_bar_until_it_ends() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(10, Console(file=stream, force_terminal=True, width=120, color_system=None))
    sink.log(4, {"reward/mean": 0.75})
    MultiSink([FakeMetricSink(), sink]).progress("sampling", 3, 64)
    sink.close()
    assert "reward 0.750  sampling 3/64" in stream.getvalue()


def test_away_from_a_terminal_a_long_first_step_says_where_it_is() -> None:
    stream, now = io.StringIO(), 0.0
    sink = ConsoleSink(10, Console(file=stream), clock=lambda: now)
    for done in range(1, 9):
        now += 4
        sink.progress("sampling", done, 8)
    now += 20
    sink.progress("learning", 0, 0)
    sink.log(1, {"reward/mean": 0.75})
    now += 1000
    sink.progress("sampling", 1, 8)
    sink.close()
    assert stream.getvalue().splitlines() == ["sampling 3/8", "sampling 6/8", "learning", "step 1/10  reward 0.750"]


def test_the_default_is_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    sink = ConsoleSink(1)
    sink.log(1, {"reward/mean": 0.5})
    sink.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "reward 0.500" in captured.err


WARNING = """
import structlog
from rollgrad.adapters.tracking.console import ConsoleSink
from rollgrad.entrypoints.cli.logs import configure_logging

configure_logging()
sink = ConsoleSink(10)
sink.log(1, {"reward/mean": 0.5})
structlog.get_logger("test").warning("The reward was 0.")
sink.log(2, {"reward/mean": 0.5})
sink.close()
"""


def test_a_warning_has_a_line_of_its_own_above_the_progress_bar() -> None:
    """On a real terminal, where the bar is drawn again and again."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen([sys.executable, "-c", WARNING], stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # the terminal's end, once nobody writes to it
            while part := os.read(ours, 4096):
                seen += part
    os.close(ours)
    assert process.returncode == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    (line,) = (line.rstrip("\r").rpartition("\r")[2] for line in plain.split("\n") if "The reward was 0." in line)
    assert re.match(r"\d{4}-\d\d-\d\dT\S+ \[warning  \] The reward was 0\.", line)
    assert "step" not in line
