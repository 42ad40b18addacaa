"""Work that is done at the same time, and ends together."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def gathered(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Does all `work` at the same time; returns the results in its order.

    If one coroutine fails, or the caller is cancelled, the others are cancelled; all have ended when this does, which
    `asyncio.gather` does not promise.

    Raises:
        Exception: what the first one that failed raised.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            if not task.cancelling():  # a second time would interrupt its end
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
