"""Runs coroutines for synchronous code, in one event loop in a thread of its own.

The loop lives as long as the process, so a client that a tool keeps open stays usable from call to call. Nothing that
blocks may run in it. A caller may itself be inside another event loop; it waits.
"""

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="openrlhf-agent", daemon=True).start()
    return loop


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs `coroutine`; returns or raises what it does."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


def iterate(source: AsyncIterator[T]) -> Iterator[T]:
    """Yields the items of `source`, each awaited when the caller requests it."""
    end = object()

    async def following() -> Any:
        return await anext(source, end)

    async def close() -> None:
        aclose = getattr(source, "aclose", None)
        if aclose is not None:
            await aclose()

    try:
        while (item := run_sync(following())) is not end:
            yield item
    finally:
        run_sync(close())
