"""`run.json`: how a run goes on, and how it ended."""

import json
import os
import shutil
import signal
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from rollgrad.application.settings.sections.ckpt import CheckpointConfig
from rollgrad.domain.errors import CheckpointError, LostProcessError
from rollgrad.entrypoints import run_record
from rollgrad.entrypoints.run_directory import alone
from rollgrad.entrypoints.run_record import SILENT_SECONDS, RunRecord, RunStatus, read_run, starting_again
from tests.fakes import cluster


def status(directory: Path) -> tuple[RunStatus, str | None]:
    found = read_run(directory)
    assert found is not None
    return found["status"], found["reason"]


def test_a_run_is_running_then_finished(tmp_path: Path) -> None:
    with RunRecord(tmp_path, learning={"steps": 7}, continued_from=2):
        assert status(tmp_path) == (RunStatus.RUNNING, None)
    found = read_run(tmp_path)
    assert found is not None
    assert (found["status"], found["steps"], found["continued_from"]) == (RunStatus.FINISHED, 7, 2)
    assert found["ended"] >= found["started"]
    assert "torch" in found["versions"]


def test_the_newest_training_state_is_told_also_of_a_disk_that_is_gone(tmp_path: Path) -> None:
    states = tmp_path / "states"
    with RunRecord(tmp_path, learning={"steps": 7}, states=states):
        assert json.loads((tmp_path / "run.json").read_text())["training_state"] is None
        for step in (3, 12):
            (states / f"training_state_{step}").mkdir(parents=True)
    assert json.loads((tmp_path / "run.json").read_text())["training_state"] == 12
    with starting_again(tmp_path, "a rank is lost"):
        shutil.rmtree(states)
    assert json.loads((tmp_path / "run.json").read_text())["training_state"] == 12


def test_an_error_is_the_reason_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-12345678")
    with pytest.raises(ValueError, match="refused"), RunRecord(tmp_path, learning={"steps": 1}):
        raise ValueError("sk-12345678 was refused\nand more")
    assert status(tmp_path) == (RunStatus.FAILED, "*** was refused")


def test_a_signal_interrupts(tmp_path: Path) -> None:
    with RunRecord(tmp_path, learning={"steps": 1}) as record:
        record.interrupted("SIGTERM")
    assert status(tmp_path) == (RunStatus.INTERRUPTED, "SIGTERM")
    with pytest.raises(KeyboardInterrupt), RunRecord(tmp_path, learning={"steps": 1}):
        raise KeyboardInterrupt
    assert status(tmp_path) == (RunStatus.INTERRUPTED, "SIGINT")


def test_a_process_that_ends_at_once_leaves_why(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            with RunRecord(tmp_path, learning={"steps": 1}):
                os._exit(0)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    found, reason = status(tmp_path)
    assert found is RunStatus.FAILED
    assert "os._exit in test_run_record.py" in str(reason)


def test_a_run_that_ends_before_its_schedule_says_why(tmp_path: Path) -> None:
    with RunRecord(tmp_path, learning={"steps": 9}) as record:
        record.finished("eval/loss was no better")
    assert status(tmp_path) == (RunStatus.FINISHED, "eval/loss was no better")


def test_a_run_whose_heart_stopped_has_died(tmp_path: Path) -> None:
    with RunRecord(tmp_path, learning={"steps": 1}):
        pass
    facts = json.loads((tmp_path / "run.json").read_text())
    facts["boot"] = None
    late = datetime.now(UTC) - timedelta(seconds=2 * SILENT_SECONDS)
    (tmp_path / "run.json").write_text(json.dumps(facts | {"status": "running", "heartbeat": late.isoformat()}))
    assert status(tmp_path)[0] is RunStatus.DIED
    (tmp_path / "run.json").write_text(json.dumps(facts | {"heartbeat": late.isoformat()}))
    assert status(tmp_path)[0] is RunStatus.FINISHED


def test_a_clock_that_was_set_ahead_kills_no_run(tmp_path: Path) -> None:
    with RunRecord(tmp_path, learning={"steps": 1}):
        pass
    facts = json.loads((tmp_path / "run.json").read_text())
    yesterday = (datetime.now(UTC) - timedelta(days=1)).isoformat()
    (tmp_path / "run.json").write_text(json.dumps(facts | {"status": "running", "heartbeat": yesterday}))
    assert status(tmp_path)[0] is RunStatus.RUNNING


def test_a_clock_that_was_set_back_hides_no_death(tmp_path: Path) -> None:
    with RunRecord(tmp_path, learning={"steps": 1}):
        pass
    facts = json.loads((tmp_path / "run.json").read_text())
    ahead = {"status": "running", "heartbeat": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}
    boot = facts["boot"]
    for then, expected in (
        (boot, RunStatus.RUNNING),
        (boot | {"seconds": boot["seconds"] - 2 * SILENT_SECONDS}, RunStatus.DIED),
        (boot | {"id": "another machine's", "seconds": 0.0}, RunStatus.RUNNING),
        (None, RunStatus.RUNNING),
    ):
        (tmp_path / "run.json").write_text(json.dumps(facts | ahead | {"boot": then}))
        assert status(tmp_path)[0] is expected


class Elsewhere:
    """A run on another machine, whose clock is so many seconds `ahead`, and this machine's time, which passes only
    while it waits."""

    def __init__(self, directory: Path, ahead: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.ahead, self.now, self.lives = directory / "run.json", ahead, 0.0, True
        monkeypatch.setattr(run_record, "_heard", {})
        monkeypatch.setattr(run_record, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.passes))
        monkeypatch.setattr(run_record, "_boot", lambda: None)
        monkeypatch.setattr(
            run_record, "datetime", SimpleNamespace(now=self.clock, fromisoformat=datetime.fromisoformat)
        )
        self.passes(0.0)

    def clock(self, zone: tzinfo) -> datetime:
        return datetime(2026, 1, 1, tzinfo=zone) + timedelta(seconds=self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        if self.lives and self.now % 10 == 0:
            heartbeat = (self.clock(UTC) + timedelta(seconds=self.ahead)).isoformat()
            self.path.write_text(
                json.dumps({"status": "running", "reason": None, "host": "other", "heartbeat": heartbeat})
            )


@pytest.mark.parametrize("ahead", [-7200.0, -100.0, 100.0, 7200.0])
def test_another_machines_clock_neither_kills_a_run_nor_hides_its_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    other = Elsewhere(tmp_path, ahead, monkeypatch)
    facts, told = read_run(tmp_path), list[str]()
    assert facts is not None
    assert (facts["status"], facts["uncertain"]) == (RunStatus.RUNNING, True)
    run_record.await_heartbeat(tmp_path, told.append)
    assert told == ["other has another time, or its run has died: waiting for a heartbeat, at most 90 s"]
    assert other.now == 10
    other.lives = False
    other.passes(run_record.SILENT_ELSEWHERE)
    facts = read_run(tmp_path)
    assert facts is not None
    assert (facts["status"], facts["uncertain"], facts["heartbeat_age"]) == (RunStatus.RUNNING, False, 90.0)
    other.passes(1.0)
    assert read_run(tmp_path) == facts | {
        "status": RunStatus.DIED,
        "reason": "no heartbeat for 91 seconds",
        "heartbeat_age": 91.0,
    }


@pytest.mark.parametrize(("ahead", "seconds"), [(-7200.0, 91), (0.0, 0), (-100_000.0, 0)])
def test_a_death_on_another_machine_is_waited_for_where_its_clock_leaves_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float, seconds: float
) -> None:
    other = Elsewhere(tmp_path, ahead, monkeypatch)
    other.lives = False
    run_record.await_heartbeat(tmp_path, lambda line: None)
    assert other.now == seconds
    assert status(tmp_path)[0] is (RunStatus.RUNNING if ahead == 0 else RunStatus.DIED)


def test_a_run_that_starts_again_is_running_until_its_own_record_says_so(tmp_path: Path) -> None:
    with pytest.raises(LostProcessError), RunRecord(tmp_path, learning={"steps": 5}, continued_from=2):
        raise LostProcessError("rank 1 died")
    assert status(tmp_path) == (RunStatus.FAILED, "rank 1 died")
    with starting_again(tmp_path, "starts again: rank 1 died"):
        assert status(tmp_path) == (RunStatus.RUNNING, "starts again: rank 1 died")
        with RunRecord(tmp_path, learning={"steps": 6}, continued_from=3):
            assert status(tmp_path) == (RunStatus.RUNNING, None)
    found = read_run(tmp_path)
    assert found is not None
    assert (found["status"], found["steps"], found["continued_from"]) == (RunStatus.FINISHED, 6, 3)
    with pytest.raises(ValueError, match="no model"), starting_again(tmp_path, "starts again: rank 1 died"):
        raise ValueError("no model")
    assert status(tmp_path) == (RunStatus.FAILED, "no model")


def test_a_run_that_was_lost_before_it_began_has_no_record(tmp_path: Path) -> None:
    with starting_again(tmp_path, "starts again: rank 1 died"):
        assert read_run(tmp_path) is None


def test_the_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "HEARTBEAT_SECONDS", 0.001)
    with RunRecord(tmp_path, learning={"steps": 1}):
        before = (tmp_path / "run.json").stat().st_ino
        while (tmp_path / "run.json").stat().st_ino == before:  # a heartbeat replaces the file
            pass


@pytest.mark.parametrize("content", ["", "[]", '{"status": "asleep"}', '{"status": "running"}', "\x00"])
def test_a_broken_file_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    assert read_run(tmp_path) is None
    assert read_run(tmp_path / "elsewhere") is None


def test_a_disk_without_room_is_named_once(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as events, RunRecord(tmp_path / "missing", learning={"steps": 1}):
        pass
    assert len(events) == 1
    assert events[0]["path"].endswith("run.json")


def test_a_heartbeat_locks_a_directory_again_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before another run may begin there, also where the run saves nothing for long."""
    monkeypatch.setattr(run_record, "HEARTBEAT_SECONDS", 0.01)
    ckpt = CheckpointConfig(output_dir=str(tmp_path / "out"))
    with alone(ckpt), RunRecord(tmp_path / "out", learning={"steps": 1}):
        (tmp_path / "out").rename(tmp_path / "gone")
        cluster.wait_for(lambda: read_run(tmp_path / "out"), "the next heartbeat", 60)
        with pytest.raises(CheckpointError, match="another run is writing"), alone(ckpt):
            pytest.fail("two runs in one directory")
