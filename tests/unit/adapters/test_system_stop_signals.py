"""A signal ends a coroutine, also where a user's function blocks the event loop, and says what it waits for."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollgrad.adapters.system import stop_signals
from rollgrad.adapters.system.stop_signals import deaf, heeding_signals
from rollgrad.application.foreign import foreign_code
from rollgrad.application.interruption import urgent
from rollgrad.domain.errors import ForeignError

LONG = 60.0
"""Seconds that nothing lasts unless it is broken: a busy machine may take several for what is broken off at once."""

BLOCKING = """
import time

async def step(began):
    began.set(), time.sleep({seconds})
"""


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    for name in ("ASK_SECONDS", "SAY_SECONDS", "BLOCKED_SECONDS"):
        monkeypatch.setattr(stop_signals, name, 0.05)
    # A suite in the background ignores SIGINT, and one under nohup SIGHUP.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    with capture_logs() as caught:
        yield caught
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def users(tmp_path: Path) -> Callable[[str], Callable[..., Any]]:
    def load(source: str) -> Callable[..., Any]:
        namespace: dict[str, Any] = {}
        exec(compile(source, str(tmp_path / "environment.py"), "exec"), namespace)
        return namespace["step"]  # type: ignore[no-any-return]

    return load


def send(number: int, began: threading.Event) -> None:
    def wait_and_send() -> None:
        assert began.wait(LONG)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait_and_send, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("own_task", [True, False])
def test_what_blocks_the_loop_is_named_and_broken_off(
    users: Callable[[str], Any], logs: list[Any], number: int, own_task: bool
) -> None:
    step, began, cancelled = users(BLOCKING.format(seconds=LONG)), threading.Event(), []

    async def work() -> None:
        try:
            with foreign_code(ForeignError):
                await (asyncio.create_task(step(began)) if own_task else step(began))
        except asyncio.CancelledError:
            cancelled.append(time.monotonic() - started)
            raise

    send(number, began)
    started = time.monotonic()
    with pytest.raises((asyncio.CancelledError, KeyboardInterrupt)):
        asyncio.run(heeding_signals(work()))
    assert len(cancelled) == 1
    assert cancelled[0] < LONG
    events = [log["event"] for log in logs]
    assert events[0].startswith(f"{signal.Signals(number).name}: the run ends")
    assert [log["where"] for log in logs[1:3]] == ["environment.py, line 5"] * 2
    assert "breaking off" in events[2]


def test_what_ends_soon_is_not_broken_off(
    users: Callable[[str], Any], logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_signals, "BLOCKED_SECONDS", LONG)
    step, began, finished = users(BLOCKING.format(seconds=0.5)), threading.Event(), []

    async def work() -> None:
        await step(began)
        finished.append(True)
        await asyncio.sleep(LONG)

    send(signal.SIGTERM, began)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(heeding_signals(work()))
    assert finished
    assert not any("breaking off" in log["event"] for log in logs)


def test_handlers_are_what_they_were_and_a_free_loop_ends_at_once(logs: list[Any]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    began = threading.Event()

    async def work() -> str:
        began.set()
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            os.kill(os.getpid(), signal.SIGTERM)  # a second one does not interrupt saving
            await asyncio.sleep(0.2)
        return "saved"

    send(signal.SIGTERM, began)
    assert asyncio.run(heeding_signals(work(), "sampling ends")) == ("saved", signal.SIGTERM)
    assert [log["event"] for log in logs] == ["SIGTERM: sampling ends"]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_a_program_s_own_handler_of_a_warning_stays(logs: list[Any]) -> None:
    heard: list[int] = []

    async def work() -> str:
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGUSR2)  # for which it has none: it would kill the program
        try:
            await asyncio.sleep(LONG)
        except asyncio.CancelledError:
            return "saved"
        return "not told"

    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        assert asyncio.run(heeding_signals(work())) == ("saved", signal.SIGUSR2)
        with deaf():
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                os.kill(os.getpid(), number)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1, signal.SIGUSR1]


@pytest.mark.parametrize(
    ("numbers", "kills_soon"),
    [
        ((signal.SIGINT,), True),
        ((signal.SIGTERM,), True),
        ((signal.SIGUSR1,), False),
        ((signal.SIGUSR1, signal.SIGTERM), True),
    ],
)
def test_an_update_may_take_its_time_until_a_signal_after_which_the_run_may_be_killed(
    logs: list[Any], numbers: tuple[int, ...], kills_soon: bool
) -> None:
    found = []

    async def work() -> None:
        assert not urgent.is_set()
        for number in numbers:
            os.kill(os.getpid(), number)
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(LONG if number == numbers[0] else 0.2)
        found.append(urgent.is_set())
        raise asyncio.CancelledError

    with pytest.raises((asyncio.CancelledError, KeyboardInterrupt)):
        asyncio.run(heeding_signals(work()))
    assert found == [kills_soon]
    assert not urgent.is_set(), "of the next run"
