"""Blocking calls of users' functions, in threads that do not delay the end of the process."""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

from rollgrad.application.foreign import error_text


async def in_daemon_thread(call: Callable[[], Any], name: str, slots: asyncio.Semaphore | None = None) -> Any:
    """Runs `call` in a thread of its own that sees the caller's context variables; returns or raises what it does.

    The thread is a daemon, unlike those of concurrent.futures, so that a function that hangs does not delay the end of
    the program. If the caller is cancelled, the thread goes on.

    Args:
        call: a function that may block.
        name: name of the thread.
        slots: one of them is held until `call` has ended, even if the caller is cancelled (default: no bound).

    Raises:
        RuntimeError: `call` raised an exception with a special meaning (KeyboardInterrupt, CancelledError,
            StopIteration, any other that is neither an Exception nor SystemExit), or no thread can be started.
    """
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore() if slots is None else slots
    answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        slots.release()
        if not answer.done():  # the caller still waits
            answer.set_result((value, error))

    def run() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as raised:  # of any kind: the caller waits for an outcome
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
            loop.call_soon_threadsafe(settle, value, error)

    await slots.acquire()
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        slots.release()
        raise
    value, error = await answer
    if error is None:
        return value
    if isinstance(error, StopIteration) or not isinstance(error, Exception | SystemExit):
        raise RuntimeError(error_text(error)) from error
    raise error
