"""Coroutines that are gathered end together, whatever ends them."""

import asyncio
from typing import NoReturn

import pytest

from rollgrad.application.gathering import gathered


class Slow:
    """Waits for ever; counts those that have begun, were interrupted, and have ended, which takes a few turns of the
    event loop."""

    def __init__(self) -> None:
        self.begun = self.interrupted = self.ended = 0

    async def __call__(self) -> None:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.interrupted += 1
            for _ in range(5):
                await asyncio.sleep(0)
            self.ended += 1
            raise


async def test_results_are_in_order() -> None:
    async def after(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    assert await gathered(map(after, (3, 0, 2))) == [3, 0, 2]
    assert await gathered([]) == []


async def test_an_error_ends_the_others_before_it_is_raised() -> None:
    slow = Slow()

    async def broken() -> NoReturn:
        while slow.begun < 3:
            await asyncio.sleep(0)
        raise LookupError

    with pytest.raises(LookupError):
        await gathered([slow(), slow(), broken(), slow()])
    assert slow.ended == 3


async def test_a_cancellation_interrupts_each_once_and_waits_for_their_ends() -> None:
    slow = Slow()

    async def quick() -> None:
        while slow.begun < 2:
            await asyncio.sleep(0)
        await asyncio.Event().wait()

    task = asyncio.create_task(gathered([quick(), slow(), slow()]))
    while slow.begun < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (slow.interrupted, slow.ended) == (2, 2)
