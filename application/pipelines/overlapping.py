"""Asynchronous steps of reinforcement learning: groups are played continuously while a worker thread learns from ready
ones.

Invariants:

- At most `max_staleness` updates lie between the weights that a group began under and those that train on it
  (`domain.control.staleness`).
- Weights change only while the engine is paused.
- An update that has begun is finished and counted, also when the run is interrupted.
- Prompts submitted = trained + dropped by reason + in flight.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from rollgrad.application.pipelines.learner import RLLearner
from rollgrad.application.pipelines.step_source import StepReport, StepSource
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.rollouts.stream import GroupStream
from rollgrad.domain.ports.clock import Clock
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine


class Overlapping(StepSource[RolloutGroup]):
    """A `StepSource` whose rollouts go on while it learns.

    Args:
        learner: learns from groups.
        stream: plays the groups.
        engine: samples them; its weights must not be the trainer's own tensors.
        pause: treatment of requests in flight while the weights change.
        clock: measures.
    """

    def __init__(
        self, *, learner: RLLearner, stream: GroupStream, engine: RolloutEngine, pause: PauseMode, clock: Clock
    ) -> None:
        self._learner = learner
        self._stream = stream
        self._engine = engine
        self._pause = pause
        self._clock = clock

    async def start(self, done: int) -> None:
        """Sends the weights to the engine."""
        await self._learner.push(done)

    async def step(self, done: int) -> StepReport[RolloutGroup]:
        """Takes one update from ready groups, and sends the weights to the engine."""
        started, idle = self._clock.monotonic(), self._stream.idle_s
        groups, metrics = await self._stream.take()
        metrics["time/generate_s"] = self._clock.monotonic() - started
        report = await self._learner.step(groups, done, hand_over=self._hand_over, metrics=metrics, started=started)
        idle = self._stream.idle_s - idle
        self._stream.updated()
        times = {name: report.metrics[f"time/{name}_s"] for name in ("generate", "sync", "step")}
        if not times["step"]:
            return report
        shares = {
            "time/trainer_idle_share": (times["generate"] + times["sync"]) / times["step"],
            "time/generation_idle_share": min(1.0, idle / times["step"]),
        }
        return evolve(report, metrics={**report.metrics, **shares})

    async def _hand_over(self, version: int) -> dict[str, float]:
        try:
            await self._engine.pause(self._pause)
            return await self._learner.push(version)
        finally:
            await self._engine.resume()

    async def stop(self) -> None:
        """Ends all episodes."""
        await self._stream.stop()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the prompts, the groups in flight, and the state of the learner."""
        return {**self._stream.state_dict(), **self._learner.state_dict()}

    def kept_samples(self) -> list[dict[str, Any]]:
        """Returns the groups that were played and are not trained on yet."""
        return self._stream.kept_groups()

    def load_state_dict(self, state: Mapping[str, Any], kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """Continues from `state` and the `kept_samples` of the same moment."""
        self._learner.load_state_dict(state)
        self._stream.load_state_dict(state, kept)
