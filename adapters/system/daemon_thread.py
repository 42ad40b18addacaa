"""Blocking calls of users' functions, in threads that nothing waits for when the process ends."""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any

from rollgrad.application.foreign import told


async def in_daemon_thread(call: Callable[[], Any], name: str, slots: asyncio.Semaphore | None = None) -> Any:
    """What `call` returns or raises, in a thread of its own that sees the caller's context variables.

    The thread is a daemon, unlike those of concurrent.futures: a function that hangs must not hang the end of the
    program. Who is cancelled leaves the thread running.

    Args:
        call: may block.
        name: of the thread.
        slots: one of them is taken until `call` has ended, whether or not somebody still waits (default: no bound).

    Raises:
        RuntimeError: `call` raised what means something else to its caller (KeyboardInterrupt, CancelledError,
            StopIteration, any other that is neither an Exception nor SystemExit), or no thread can be started.
    """
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore() if slots is None else slots
    answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        slots.release()
        if not answer.done():  # somebody still waits
            answer.set_result((value, error))

    def run() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as raised:  # whatever it is, the caller waits for it
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
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
        raise RuntimeError(told(error)) from error
    raise error
