"""Files that lines are appended to while their disk is full for a while."""

from pathlib import Path

import pytest
import structlog

from rollgrad.adapters.tracking import line_file
from rollgrad.adapters.tracking.line_file import LineFile
from tests.full_disk import room_for_files_of


def test_what_a_full_disk_refuses_is_written_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = LineFile(path)
    with structlog.testing.capture_logs() as events:
        file.append("one")
        with room_for_files_of(6):
            file.append("two", "three")
            assert path.read_text() == "one\n", "no part of a line"
            file.append("four")
        assert [event["event"] for event in events] == [
            "metrics.jsonl cannot be written: its lines wait in memory until it can be"
        ]
        file.append("five")
        file.append("six")
        file.close()
    assert path.read_text() == "one\ntwo\nthree\nfour\nfive\nsix\n"
    assert [(event["event"], event.get("waited"), event.get("lost")) for event in events[1:]] == [
        ("metrics.jsonl is written again", 3, 0)
    ]


def test_what_waits_is_written_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    file = LineFile(tmp_path / "metrics.jsonl")
    file.append("one")
    (tmp_path / "metrics.jsonl").unlink()
    file.close()
    assert (tmp_path / "metrics.jsonl").read_text() == "one\n"


def test_the_oldest_lines_are_lost_beyond_a_limit_and_all_that_is_lost_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_file, "MOST_WAITING", 9)
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    file = LineFile(path)
    with structlog.testing.capture_logs() as events:
        for line in ("aaa", "bbb", "ccc", "ddd"):
            file.append(line)
        path.unlink()
        file.append("eee")
        path.unlink()
        path.symlink_to("/dev/full")
        file.append("fff")
        file.close()
        file.close()
    assert [(event["event"].partition(":")[0], event.get("lost")) for event in events] == [
        ("metrics.jsonl cannot be written", None),
        ("too many lines wait for metrics.jsonl", None),
        ("metrics.jsonl is written again", 2),
        ("metrics.jsonl cannot be written", None),
        ("metrics.jsonl lacks the last lines of the run", 1),
    ]
