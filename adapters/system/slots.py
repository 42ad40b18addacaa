"""Bound on how many calls run at once."""

import asyncio
from weakref import WeakKeyDictionary


class Slots:
    """A semaphore of `count` for each event loop; its owner may be used in several (training, then an evaluation)."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def here(self) -> asyncio.Semaphore:
        """Returns the semaphore of the running loop."""
        return self._semaphores.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._count))
