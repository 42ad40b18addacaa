"""Coroutines that wait for a state machine to change."""

import asyncio
from collections.abc import Callable


class Changes:
    """Wakes all who wait whenever something has changed; they look again whether it is what they wait for."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        """Something has changed."""
        self._next.set()
        self._next = asyncio.Event()

    async def next(self, *, at: float | None = None) -> bool:
        """Waits for the next change; returns False if the event loop's time `at` comes before."""
        try:
            async with asyncio.timeout_at(at):
                await self._next.wait()
        except TimeoutError:
            return False
        return True

    async def until(self, condition: Callable[[], bool], *, at: float | None = None) -> None:
        """Waits until `condition` holds, or the event loop's time `at` has come."""
        while not condition():
            if not await self.next(at=at):
                return
