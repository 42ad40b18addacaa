"""Waits are logged: their beginning, their end, and when."""

import re
import threading
import time

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.system.waiting import waiting_for


def events(logs: list[dict[str, str]]) -> list[str]:
    return [line["event"] for line in logs]


def until_told(logs: list[dict[str, str]], count: int) -> None:
    """Waits for so many events, which another thread tells."""
    deadline = time.monotonic() + 60
    while len(logs) < count:
        assert time.monotonic() < deadline, events(logs)
        time.sleep(0.01)


def test_a_long_wait_is_told_when_it_begins_goes_on_and_ends() -> None:
    with capture_logs() as logs, waiting_for("2 engines to start", deadline=600, after=0.05, every=0.1):
        until_told(logs, 3)
    first, *between, last = events(logs)
    assert first == "waiting for 2 engines to start (at most 600 s)"
    assert between
    assert all(re.fullmatch(r"still waiting for 2 engines to start \(\d+ s of 600 s\)", line) for line in between)
    assert re.fullmatch(r"done waiting for 2 engines to start \(\d+ s\)", last)


def test_a_short_wait_says_nothing_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with capture_logs() as logs, waiting_for("Ray", deadline=60):
        pass
    assert logs == []
    assert set(threading.enumerate()) <= before  # others, of tests before, may end


def test_a_wait_without_a_deadline_says_so() -> None:
    with capture_logs() as logs, waiting_for("vLLM to start", after=0.01, every=0.1):
        until_told(logs, 2)
    assert events(logs)[0] == "waiting for vLLM to start (no deadline)"
    assert re.fullmatch(r"still waiting for vLLM to start \(\d+ s\)", events(logs)[1])


def test_an_error_has_the_last_word() -> None:
    @waiting_for("a", deadline=1, after=0.01, every=9)
    def fail() -> None:
        until_told(logs, 1)
        raise TimeoutError

    with capture_logs() as logs, pytest.raises(TimeoutError):
        fail()
    assert events(logs) == ["waiting for a (at most 1 s)"]
