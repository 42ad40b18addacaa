"""Places of episodes in flight, of which there are as many as an `Admission` says."""

import asyncio
from collections import deque
from types import TracebackType

from rollgrad.domain.control.admission import Admission


class EpisodeSlots:
    """Lets episodes in, in the order in which they come: `async with slots` waits for a place, and gives it back."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if not self._waiting and self._running < self._admission.limit:
            self._enter()
            return
        self._admission.waited()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()

    def _enter(self) -> None:
        self._running += 1
        self._admission.began()

    def _leave(self) -> None:
        self._running -= 1
        self._admission.ended()
        while self._waiting and self._running < self._admission.limit:
            place = self._waiting.popleft()
            if not place.done():  # it was not cancelled
                self._enter()
                place.set_result(None)
