"""The asynchronous pipeline: groups are played without end while a worker thread learns from those that are ready.

Invariants: at most `max_staleness` updates lie between the weights that a group began under and those that train on it
(`domain.staleness`); weights change only while the engine is paused; an update that has begun is finished and counted,
also when the run is interrupted.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from rollgrad.application.pipelines.base import Pipeline
from rollgrad.application.rollouts.stream import GroupStream
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine

Result = TypeVar("Result")


class AsyncPipeline(Pipeline):
    """See `Pipeline`.

    Args:
        stream: plays the groups.
        engine: what samples them; its weights must not be the trainer's own tensors.
        pause: what becomes of requests in flight while the weights change.
        services: as for `Pipeline`.
    """

    def __init__(self, *, stream: GroupStream, engine: RolloutEngine, pause: PauseMode, **services: Any) -> None:
        super().__init__(source=stream, **services)
        self._stream = stream
        self._engine = engine
        self._pause = pause

    async def _step(self) -> None:
        """One update from the groups that are ready, and the weights to the engine."""
        clock = self._clock
        started, idle = clock.monotonic(), self._stream.idle_s
        groups, sampling_metrics = await self._stream.take()
        generated = clock.monotonic()
        metrics, cancelled = await uninterrupted(asyncio.to_thread(self._learn, groups))
        metrics |= sampling_metrics
        self._done += 1
        updated = clock.monotonic()
        try:
            if cancelled:
                raise asyncio.CancelledError
            metrics |= await self._hand_over()
        finally:
            idle = self._stream.idle_s - idle
            self._stream.updated()
            ended = clock.monotonic()
            metrics |= {
                "time/generate_s": generated - started,
                "time/sync_s": ended - updated,
                "time/step_s": ended - started,
            }
            if ended > started:
                metrics["time/trainer_idle_share"] = 1 - (updated - generated) / (ended - started)
                metrics["time/generation_idle_share"] = min(1.0, idle / (ended - started))
            self._report(groups, metrics)

    async def _hand_over(self) -> dict[str, float]:
        try:
            await self._engine.pause(self._pause)
            return await self._push()
        finally:
            await self._engine.resume()

    async def _stop(self) -> None:
        await self._stream.stop()


async def uninterrupted(work: Coroutine[Any, Any, Result]) -> tuple[Result, bool]:
    """(what `work` returns, whether the caller was cancelled meanwhile, which it has to heed afterwards)."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])  # unlike awaiting the task, this never cancels it
        except asyncio.CancelledError:
            cancelled = True
    return task.result(), cancelled
