"""Common part of alternating and overlapping steps of reinforcement learning: an update from groups of rollouts, and
the way of the weights to the engines.

Does not own: where groups come from, and when engines take new weights (the step sources).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import structlog
import torch
from attrs import evolve

from rollgrad.application.foreign import harmless
from rollgrad.application.learning.experience import ExperienceService
from rollgrad.application.learning.teacher_prompts import TellsTeacher, told_by_rows
from rollgrad.application.learning.update import UpdateService
from rollgrad.application.pipelines.step_source import StepReport, uninterrupted
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.rollouts.metrics import rollout_metrics, sampled_entropy
from rollgrad.application.rollouts.progress import Progress
from rollgrad.application.rollouts.trajectory_log import TrajectoryLog
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.control.entropy_weight import EntropyController
from rollgrad.domain.control.kl_weight import KLController
from rollgrad.domain.ports.clock import Clock
from rollgrad.domain.ports.models import PolicyModel, PolicyObjective, ValueObjective
from rollgrad.domain.ports.weight_channel import WeightChannel

log = structlog.get_logger(__name__)


class ObjectiveFactory(Protocol):
    """Makes the policy's loss for the current weights of its terms and the version under training."""

    def __call__(self, *, kl_coef: float, entropy_coef: float, version: int) -> PolicyObjective[RolloutBatch]:
        """Returns the objective of one update."""
        ...


class RLLearner:
    """Learns from groups of rollouts, and steers the weights of KL and entropy.

    Args:
        experience: makes batches with advantages from trajectories.
        update: takes the optimizer steps.
        policy: the policy whose weights engines get.
        channel: brings the weights to the engines.
        objective: the policy's loss.
        value_objective: the critic's loss, None without one.
        kl: controls the weight of the KL term.
        entropy: controls the weight of the entropy term.
        clock: measures.
        freezing_steps: updates at the beginning that train the critic alone.
        pass_threshold: score from which a sample passes.
        trajectories: keeps the rollouts of each update; None keeps none.
        progress: is told when learning begins.
        tells_teacher: says what the reference reads in the place of prompts.
    """

    def __init__(
        self,
        *,
        experience: ExperienceService,
        update: UpdateService,
        policy: PolicyModel,
        channel: WeightChannel,
        objective: ObjectiveFactory,
        value_objective: ValueObjective[RolloutBatch] | None,
        kl: KLController,
        entropy: EntropyController,
        clock: Clock,
        freezing_steps: int = 0,
        pass_threshold: float = 1.0,
        trajectories: TrajectoryLog | None = None,
        progress: Progress | None = None,
        tells_teacher: TellsTeacher = told_by_rows,
    ) -> None:
        self._experience = experience
        self._update = update
        self._policy = policy
        self._channel = channel
        self._objective = objective
        self._value_objective = value_objective
        self._kl = kl
        self._entropy = entropy
        self._clock = clock
        self._freezing_steps = freezing_steps
        self._pass_threshold = pass_threshold
        self._trajectories = trajectories
        self._progress = progress or Progress()
        self._tells_teacher = tells_teacher
        self._default_dtype = torch.get_default_dtype()

    async def step(
        self,
        groups: Sequence[RolloutGroup],
        done: int,
        *,
        hand_over: Callable[[int], Awaitable[Mapping[str, float]]],
        metrics: Mapping[str, float],
        started: float,
    ) -> StepReport[RolloutGroup]:
        """Learns as `learn` does, in a worker thread, so that the event loop serves programs, signals and progress
        meanwhile; then engines get the weights, unless the caller was cancelled.

        Args:
            groups: feed the update.
            done: number of updates before.
            hand_over: brings the weights of a version to the engines, and returns metrics.
            metrics: metrics of sampling.
            started: the clock's time when the step began.
        """
        learned, cancelled = await uninterrupted(asyncio.to_thread(self._learned, groups, done))
        updated = self._clock.monotonic()
        ended_by: BaseException | None = asyncio.CancelledError() if cancelled else None
        moved: Mapping[str, float] = {}
        if ended_by is None:
            try:
                moved = await hand_over(done + 1)
            except BaseException as error:  # the step is done, also if the run is interrupted here
                ended_by = error
        ended = self._clock.monotonic()
        times = {"time/sync_s": ended - updated, "time/step_s": ended - started}
        return StepReport(metrics={**learned, **metrics, **moved, **times}, samples=groups, ended_by=ended_by)

    def _learned(self, groups: Sequence[RolloutGroup], done: int) -> dict[str, float]:
        try:
            return self.learn(groups, done)
        except BaseException as error:  # who waits for the thread would wait for ever where no future takes it
            raise harmless(error) from error.__cause__

    def learn(self, groups: Sequence[RolloutGroup], done: int) -> dict[str, float]:
        """Takes the update after `done` ones, which `groups` feed; returns its metrics and theirs. An update
        that fails before its first optimizer step changes nothing."""
        self._set_back()
        entropy, experience = self._entropy, self._experience.state_dict()
        try:
            return self._learn(groups, done)
        except BaseException:
            self._entropy = entropy
            self._experience.load_state_dict(experience)
            raise

    def _set_back(self) -> None:
        """Undoes what a reward or an environment may have done to all of the process, as by loading a model: rewards
        and advantages would be computed in another number format."""
        changed = torch.get_default_dtype()
        if changed is not self._default_dtype:
            torch.set_default_dtype(self._default_dtype)
            log.warning(
                "a reward, an environment or other code has called torch.set_default_dtype: it is set back",
                changed_to=str(changed),
            )

    def _learn(self, groups: Sequence[RolloutGroup], done: int) -> dict[str, float]:
        clock = self._clock
        started = clock.monotonic()
        trajectories = [t for group in groups for t in group.trajectories]
        self._progress.progress("learning", 0, 0)
        baselines = {g.group_id: g.baseline for g in groups if g.baseline is not None}
        experience = self._experience.make(
            trajectories,
            self._kl.coef,
            baselines,
            self._tells_teacher(groups),
            {group.group_id: group.prompt.datasource for group in groups},
        )
        prepared = clock.monotonic()
        metrics = rollout_metrics(groups, self._pass_threshold) | experience.metrics
        self._entropy = self._entropy.observe(sampled_entropy(trajectories))
        objective = self._objective(kl_coef=self._kl.coef, entropy_coef=self._entropy.weight, version=done + 1)
        update = self._update.run(
            experience.batch,
            objective,
            self._value_objective,
            train_policy=done >= self._freezing_steps,
        )
        metrics |= update.metrics
        if self._entropy.target is not None:
            metrics["policy/entropy_coef"] = self._entropy.weight
        reference_kl = experience.reference_kl if update.reference_kl is None else update.reference_kl
        if reference_kl is not None:
            metrics["policy/kl_coef"] = self._kl.coef
            self._kl = self._kl.update(reference_kl, experience.batch.rollouts)
        if self._trajectories is not None:
            batch = evolve(
                experience.batch,
                loss_weights_N=update.loss_weights_N,
                # Those before the update chose what was learned from.
                entropies_N=update.entropies_N
                if experience.batch.entropies_N is None
                else experience.batch.entropies_N,
                clipped_N=update.clipped_N,
            )
            if batch.old_logprobs_N is None:  # the update needed none, but its forward pass found them
                batch = evolve(batch, old_logprobs_N=update.logprobs_N)
            self._trajectories.update(done + 1, groups, batch)
        ended = clock.monotonic()
        return metrics | {"time/experience_s": prepared - started, "time/update_s": ended - prepared}

    async def push(self, version: int) -> dict[str, float]:
        """Sends the weights of `version` to the engines; returns metrics of the transfer."""
        moved = await self._channel.push(self._policy, version)
        size, seconds = moved.get("bytes", 0.0), moved.get("seconds", 0.0)
        return {"sync/bytes": size, "sync/gb_per_s": size / 1e9 / max(seconds, 1e-9)} if size else {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the weights of the terms and the running moments of rewards, JSON-serialisable; the rollouts of all
        updates before this state are kept by then."""
        if self._trajectories is not None:
            self._trajectories.flush()
        return {
            "kl": self._kl.state_dict(),
            "entropy": self._entropy.state_dict(),
            "experience": self._experience.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        self._kl = self._kl.load_state_dict(state["kl"])
        self._entropy = self._entropy.load_state_dict(state["entropy"])
        self._experience.load_state_dict(state["experience"])
