"""Synchronous steps of reinforcement learning: roll out, learn, hand over the weights, repeat.

Invariants: every rollout is sampled from the weights of the update before it; an update that has begun is finished and
counted, also when the run is interrupted; prompts submitted = trained + dropped by reason.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollgrad.application.pipelines.learner import RLLearner
from rollgrad.application.pipelines.step_source import StepReport, StepSource
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.rollouts.sampler import GroupSampler
from rollgrad.domain.ports.clock import Clock
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine


class Resting(Protocol):
    """Memory that engines can have between updates, such as that of a trained model's optimizer."""

    def sleep(self) -> None:
        """Leaves the memory to others, until the next update."""
        ...


class Alternating(StepSource[RolloutGroup]):
    """A `StepSource` whose rollouts and updates take turns.

    Args:
        learner: learns from groups.
        sampler: plays the groups of each step.
        sleeper: the engine, if it is to sleep while models train (one on their GPUs, or one whose weights are the
            trainer's own tensors), or None.
        resting: memory that is left to the engine while it samples.
        steps: number of steps of the whole run; no prompts are played for later ones.
        clock: measures.
    """

    def __init__(
        self,
        *,
        learner: RLLearner,
        sampler: GroupSampler,
        sleeper: RolloutEngine | None,
        steps: int,
        clock: Clock,
        resting: Sequence[Resting] = (),
    ) -> None:
        self._learner = learner
        self._sampler = sampler
        self._sleeper = sleeper
        self._resting = resting
        self._total = steps
        self._clock = clock

    async def start(self, done: int) -> None:
        """Sends the weights to the engine."""
        await self._learner.push(done)

    async def step(self, done: int) -> StepReport[RolloutGroup]:
        """Takes one rollout and the update that it feeds."""
        started = self._clock.monotonic()
        position, kept = self._sampler.state_dict(), self._sampler.kept_groups()
        groups, metrics = await self._sampler.take(self._total - done)
        metrics["time/generate_s"] = self._clock.monotonic() - started
        try:
            if self._sleeper is not None:
                await self._sleeper.sleep()
            return await self._learner.step(groups, done, hand_over=self._hand_over, metrics=metrics, started=started)
        except BaseException:  # these groups were not trained on: a resumed run plays them again, except kept ones
            self._sampler.load_state_dict(position, kept)
            raise

    async def _hand_over(self, version: int) -> dict[str, float]:
        for memory in self._resting:
            await asyncio.to_thread(memory.sleep)
        if self._sleeper is None:
            return await self._learner.push(version)
        try:
            await self._sleeper.pause(PauseMode.KEEP)  # requests that came while it slept wait for the weights
            await self._sleeper.wake()
            return await self._learner.push(version)
        finally:
            await self._sleeper.resume()

    async def stop(self) -> None:
        """Does nothing: between two steps nothing is in flight."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the prompts and the state of the learner."""
        return {**self._sampler.state_dict(), **self._learner.state_dict()}

    def kept_samples(self) -> list[dict[str, Any]]:
        """Returns the groups that were played and are not trained on yet."""
        return self._sampler.kept_groups()

    def load_state_dict(self, state: Mapping[str, Any], kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """Continues from `state` and the `kept_samples` of the same moment."""
        self._learner.load_state_dict(state)
        self._sampler.load_state_dict(state, kept)
