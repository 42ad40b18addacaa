"""Calls in threads that nobody joins; the functions of agents, rewards and tools have tests of their own."""

import asyncio
import threading

import pytest

from rollgrad.adapters.system.daemon_thread import in_daemon_thread


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, StopIteration, GeneratorExit])
async def test_what_would_stop_more_than_the_call_is_an_error_of_the_call(error: type[BaseException]) -> None:
    def call() -> None:
        raise error("no more")

    with pytest.raises(RuntimeError) as caught:
        await in_daemon_thread(call, "test")
    assert isinstance(caught.value.__cause__, error)


async def test_the_thread_is_a_named_daemon() -> None:
    thread = await in_daemon_thread(threading.current_thread, "test")
    assert (thread.name, thread.daemon) == ("test", True)


async def test_a_thread_that_cannot_start_takes_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    slots = asyncio.Semaphore(1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            await in_daemon_thread(lambda: 1, "test", slots)
    async with asyncio.timeout(60):
        assert await in_daemon_thread(lambda: 2, "test", slots) == 2
