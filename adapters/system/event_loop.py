"""Runs a coroutine to its end from synchronous code, even inside a running event loop."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_to_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Returns what `work` returns, also from inside a running event loop (a notebook), beside which it runs in a thread
    of its own; Ctrl-C cancels it."""
    try:
        asyncio.get_running_loop()
        inside = True
    except RuntimeError:
        inside = False
    if not inside:  # behind the handler: what the work raises would be told as if the missing loop had caused it
        return asyncio.run(work)
    box: list[Result] = []
    errors: list[BaseException] = []
    cancel: list[Callable[[], object]] = []

    async def cancellable() -> Result:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
        return await work

    def target() -> None:
        try:
            box.append(asyncio.run(cancellable()))
        except BaseException as error:  # of any kind: the calling thread raises it
            errors.append(error)
        finally:
            done.set()

    done = threading.Event()  # an interrupted Thread.join cannot be repeated: Python 3.11 then takes it for ended
    threading.Thread(target=target).start()
    try:
        done.wait()
    except KeyboardInterrupt:  # only the main thread gets it, so the work must be cancelled
        for stop in cancel:
            stop()
        done.wait()
    if errors:
        raise errors[0]
    return box[0]
