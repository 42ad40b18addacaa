"""Requests that are caught before their end, though engines in other processes go on while this one is kept from
working."""

import asyncio
from collections.abc import Awaitable, Callable

from attrs import evolve

from rollgrad.domain.episodes.generation import Generation, GenerationRequest, StopReason
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine

Tasks = list[asyncio.Task[Generation]]


async def caught(
    ask: Callable[[], Awaitable[Tasks]], stop: Callable[[], Awaitable[None]], go_on: Callable[[], Awaitable[None]]
) -> Tasks:
    """Asks until `stop` comes before the end of all requests, so that those that have ended were aborted by it."""
    while True:
        tasks = await ask()
        await stop()
        for _ in range(10):  # replies that were on their way arrive
            await asyncio.sleep(0.01)
        if all(task.result().stop_reason is StopReason.ABORTED for task in tasks if task.done()):
            return tasks
        await go_on()
        await asyncio.gather(*tasks)


async def begun(engine: RolloutEngine, *requests: GenerationRequest, tokens: int = 2) -> Tasks:
    """Requests of which each has about `tokens` tokens: a later one of so many has been answered."""
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0)  # they are asked first
    await engine.generate(evolve(requests[0], params=evolve(requests[0].params, max_new_tokens=tokens)))
    return tasks


async def paused(engine: RolloutEngine, mode: PauseMode, *requests: GenerationRequest, tokens: int = 2) -> Tasks:
    """Requests that a pause has frozen or aborted after about `tokens` of their tokens, and before their last."""
    return await caught(
        lambda: begun(engine, *requests, tokens=tokens), lambda: engine.pause(mode), lambda: engine.resume()
    )
