"""The synchronous pipeline: roll out, learn, hand over the weights, repeat.

Invariant: every rollout is sampled from the weights of the update before it.
"""

from typing import Any

from rollgrad.application.pipelines.base import Pipeline
from rollgrad.application.rollouts.sampler import GroupSampler
from rollgrad.domain.ports.rollout_engine import RolloutEngine


class SyncPipeline(Pipeline):
    """See `Pipeline`.

    Args:
        sampler: plays the groups of each step.
        sleeper: the engine, if it is to sleep while models train (hybrid engine), or None.
        services: as for `Pipeline`.
    """

    def __init__(self, *, sampler: GroupSampler, sleeper: RolloutEngine | None = None, **services: Any) -> None:
        super().__init__(source=sampler, **services)
        self._sampler = sampler
        self._sleeper = sleeper

    async def _step(self) -> None:
        """One rollout and the update it feeds."""
        clock = self._clock
        started = clock.monotonic()
        position, kept = self._sampler.state_dict(), self._sampler.kept_groups()
        groups, sampling_metrics = await self._sampler.take(self._schedule.steps - self._done)
        generated = clock.monotonic()
        if self._sleeper is not None:
            await self._sleeper.sleep()
        try:
            metrics = self._learn(groups) | sampling_metrics
        except BaseException:  # nobody has learned from these groups: who resumes plays them again, but for those kept
            self._sampler.load_state_dict(position, kept)
            raise
        self._done += 1
        updated = clock.monotonic()
        try:
            if self._sleeper is not None:
                await self._sleeper.wake()
            metrics |= await self._push()
        finally:  # the step is done, also if the run is interrupted here
            ended = clock.monotonic()
            metrics |= {
                "time/generate_s": generated - started,
                "time/sync_s": ended - updated,
                "time/step_s": ended - started,
            }
            self._report(groups, metrics)

    async def _stop(self) -> None:
        """Between two steps nothing is in flight."""
