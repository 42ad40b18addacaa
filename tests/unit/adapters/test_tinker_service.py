"""The Tinker server's training runs: the order in which requests are worked on, and fail."""

import asyncio
import threading
from typing import Any

from rollgrad.adapters.servers.tinker.results import CANCELLED
from rollgrad.adapters.servers.tinker.service import Run, TinkerService


async def test_a_cancelled_request_fails_in_its_turn() -> None:
    """The requests before it are worked on first, though they have not begun when it is cancelled."""
    unused: Any = None
    service, told, free = TinkerService(unused, unused), list[str](), threading.Event()
    service._runs["run"] = Run(unused, unused)

    def work(name: str, *, waits: bool = False) -> str:
        def told_so() -> None:
            if waits:
                free.wait(60)
            told.append(name)

        return service._in_turn(
            "run", next(numbers), told_so, lambda _: {}, failed=lambda: told.append(f"{name} failed")
        )

    numbers = iter(range(1, 10))
    gradient, step, cancelled, after = work("gradient", waits=True), work("step"), work("cancelled"), work("after")
    await asyncio.sleep(0.01)
    service.results.cancel(cancelled)
    await asyncio.sleep(0.01)
    assert told == []
    free.set()
    for request_id in (gradient, step, after):
        assert await service.results.wait(request_id, 60) == {}
    assert told == ["gradient", "step", "cancelled failed", "after"]
    assert await service.results.wait(cancelled, 60) == CANCELLED
    service.close()
