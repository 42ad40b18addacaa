"""An event loop for users' coroutines, in a thread of its own: one that blocks holds up neither the server that it asks
nor signals and deadlines.

Invariant: all coroutines share the loop, so that what they keep between them (a client, a semaphore) belongs to one.
"""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from rollgrad.application.foreign import error_text

CLEANUP_SECONDS = 5.0
"""Longest wait for a cancelled coroutine to clean up: one that blocks never does."""
_lock = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []


async def in_own_loop(begin: Callable[[], Awaitable[Any]]) -> Any:
    """Awaits `begin()` in the users' event loop, with the caller's context variables; returns or raises what it does.

    If the caller is cancelled, so is the coroutine; its cleanup is waited for `CLEANUP_SECONDS` at most.

    Raises:
        RuntimeError: it raised what is neither an Exception nor SystemExit (KeyboardInterrupt, its own CancelledError).
    """
    here, there = asyncio.get_running_loop(), _users_loop()
    answer: asyncio.Future[tuple[Any, BaseException | None]] = here.create_future()
    running: list[asyncio.Task[None]] = []

    def settle(value: Any, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result((value, error))

    async def work() -> None:
        value, error = None, None
        try:
            value = await begin()
        except BaseException as raised:  # of any kind: the caller waits, and others share the loop
            error = raised
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody waits
            here.call_soon_threadsafe(settle, value, error)

    there.call_soon_threadsafe(lambda: running.append(there.create_task(work())), context=contextvars.copy_context())
    try:
        value, error = await asyncio.shield(answer)
    except asyncio.CancelledError:
        there.call_soon_threadsafe(lambda: running[0].cancel())
        await asyncio.wait([answer], timeout=CLEANUP_SECONDS)
        raise
    if error is None:
        return value
    if isinstance(error, Exception | SystemExit):
        raise error
    raise RuntimeError(error_text(error)) from error


def _users_loop() -> asyncio.AbstractEventLoop:
    with _lock:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[0].run_forever, name="agents", daemon=True).start()
        return _loops[0]
